"""What a sweep leaves behind: the files of its folder.

Knows names of files; not what is in them.
"""

from dataclasses import dataclass
from pathlib import Path

from scalejax.training.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFolder:
    """Where the files of a sweep are."""

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
        """Held by the process that works here, and by its workers."""
        return self.path / "sweep.lock"

    @property
    def results(self) -> Path:
        """A row for each run, Parquet: what was reached."""
        return self.path / "results.parquet"

    @property
    def evaluations(self) -> Path:
        """A row for each evaluation of each run, Parquet."""
        return self.path / "evaluations.parquet"

    @property
    def timings(self) -> Path:
        """A row for each run, Parquet: how long it took."""
        return self.path / "timings.parquet"

    def run(self, index: int) -> RunFolder:
        """The folder of a run."""
        return RunFolder(path=self.path / "runs" / f"{index:04d}")

    def shared_checkpoints(self, index: int) -> Path:
        """States of the runs that train together with the one of `index`, their first."""
        return self.path / "together" / f"{index:04d}"

    def log(self, worker: int) -> Path:
        """What a worker says on standard error."""
        return self.path / "logs" / f"worker-{worker}.txt"
