"""File layout of a sweep folder.

Knows file names, not their content.
"""

from dataclasses import dataclass
from pathlib import Path

from scalejax.training.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFolder:
    """Paths of the files of a sweep."""

    path: Path
    """The folder itself."""

    @property
    def run_file(self) -> Path:
        """The run.toml that the runs start from."""
        return self.path / "run.toml"

    @property
    def plan(self) -> Path:
        """The plan as written, JSON."""
        return self.path / "sweep.json"

    @property
    def lock(self) -> Path:
        """Lock file, held by the process that trains the sweep, and by its workers."""
        return self.path / "sweep.lock"

    @property
    def results(self) -> Path:
        """Results, a row for each run, Parquet."""
        return self.path / "results.parquet"

    @property
    def evaluations(self) -> Path:
        """Evaluations, a row for each evaluation of each run, Parquet."""
        return self.path / "evaluations.parquet"

    @property
    def timings(self) -> Path:
        """Timings, a row for each run, Parquet."""
        return self.path / "timings.parquet"

    def run(self, index: int) -> RunFolder:
        """The folder of a run."""
        return RunFolder(path=self.path / "runs" / f"{index:04d}")

    def shared_checkpoints(self, index: int) -> Path:
        """Checkpoints of the runs that train in one program, the first of which is `index`."""
        return self.path / "together" / f"{index:04d}"

    def log(self, worker: int) -> Path:
        """Standard error of a worker."""
        return self.path / "logs" / f"worker-{worker}.txt"
