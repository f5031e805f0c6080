"""File layout of a sweep folder.

Knows file names, not contents.
"""

from dataclasses import dataclass
from pathlib import Path

from scalejax.core.folder import FileIn
from scalejax.training.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFolder:
    """Paths of the files of a sweep."""

    path: Path
    """The folder itself."""

    run_file = FileIn("run.toml")
    """The run.toml that the runs start from."""
    plan = FileIn("sweep.json")
    """The plan as written, JSON."""
    lock = FileIn("sweep.lock")
    """Lock file, held by the process that trains the sweep, and by its workers."""
    results = FileIn("results.parquet")
    """Results, a row for each run, Parquet."""
    evaluations = FileIn("evaluations.parquet")
    """Evaluations, a row for each evaluation of each run, Parquet."""
    arms = FileIn("arms.parquet")
    """Means and intervals over seeds, a row for each setting, Parquet."""
    arms_json = FileIn("arms.json")
    """The same as JSON."""
    timings = FileIn("timings.parquet")
    """Timings, a row for each run, Parquet."""

    def run(self, index: int) -> RunFolder:
        """The folder of a run."""
        return RunFolder(path=self.path / "runs" / f"{index:04d}")

    def shared_checkpoints(self, index: int) -> Path:
        """Checkpoints of the runs that train in one program, the first of which is `index`."""
        return self.path / "together" / f"{index:04d}"

    def log(self, worker: int) -> Path:
        """Standard error of a worker."""
        return self.path / "logs" / f"worker-{worker}.txt"
