"""What a bench leaves behind: the files of its folder.

Knows names of files; not what is in them.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFolder:
    """Where the files of a bench are."""

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
        """How many benchmarks there are, and what became of them, JSON."""
        return self.path / "progress.json"

    @property
    def lock(self) -> Path:
        """Held by the process that measures here."""
        return self.path / "bench.lock"

    @property
    def results(self) -> Path:
        """A row for each benchmark, JSON."""
        return self.path / "results.json"

    def benchmark(self, name: str) -> Path:
        """The folder of a benchmark."""
        return self.path / "runs" / name

    def job(self, name: str) -> Path:
        """What its processes are told, a `Job` in JSON."""
        return self.benchmark(name) / "job.json"

    def program(self, name: str) -> Path:
        """Its compiled step, a `Program` in JSON."""
        return self.benchmark(name) / "program.json"

    def result(self, name: str, repeat: int) -> Path:
        """What was measured in one of its rounds, a `BenchResult` in JSON."""
        return self.benchmark(name) / f"result-{repeat}.json"

    def logs(self, name: str) -> Path:
        """What its processes said."""
        return self.benchmark(name) / "logs"
