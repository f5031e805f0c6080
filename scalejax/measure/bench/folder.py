"""File layout of a bench folder.

Knows file names, not their content.
"""

from dataclasses import dataclass
from pathlib import Path

from scalejax.core.folder import FileIn


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFolder:
    """Paths of the files of a bench."""

    path: Path
    """The folder itself."""

    run_file = FileIn("run.toml")
    """The run.toml that the benchmarks start from."""
    plan = FileIn("bench.json")
    """The plan as written, JSON."""
    progress = FileIn("progress.json")
    """Number of benchmarks and their status, JSON."""
    lock = FileIn("bench.lock")
    """Lock file, held by the process that measures here."""
    results = FileIn("results.json")
    """A row for each benchmark, JSON."""

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
