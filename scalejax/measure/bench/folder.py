"""File layout of a bench folder.

Knows file names, not their content.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFolder:
    """Paths of the files of a bench."""

    path: Path
    """The folder itself."""

    @property
    def run_file(self) -> Path:
        """The run.toml that the benchmarks start from."""
        return self.path / "run.toml"

    @property
    def plan(self) -> Path:
        """The plan as written, JSON."""
        return self.path / "bench.json"

    @property
    def progress(self) -> Path:
        """Number of benchmarks and their status, JSON."""
        return self.path / "progress.json"

    @property
    def lock(self) -> Path:
        """Lock file, held by the process that measures here."""
        return self.path / "bench.lock"

    @property
    def results(self) -> Path:
        """A row for each benchmark, JSON."""
        return self.path / "results.json"

    def benchmark(self, name: str) -> Path:
        """The folder of a benchmark."""
        return self.path / "runs" / name

    def job(self, name: str) -> Path:
        """The `Job` of its processes, JSON."""
        return self.benchmark(name) / "job.json"

    def program(self, name: str) -> Path:
        """Its compiled step, a `Program`, JSON."""
        return self.benchmark(name) / "program.json"

    def result(self, name: str, repeat: int) -> Path:
        """Measurements of one of its rounds, a `BenchResult`, JSON."""
        return self.benchmark(name) / f"result-{repeat}.json"

    def logs(self, name: str) -> Path:
        """Logs of its processes."""
        return self.benchmark(name) / "logs"
