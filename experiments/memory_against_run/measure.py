"""Predicted memory beside the memory that a run of the same step takes, case by case.

    python experiments/memory_against_run/measure.py [CASE...]

Predicted is the peak of the program that `scalejax predict` costs, compiled by the CPU's
compiler; measured is what `run_step.py` prints, in a fresh process for each case.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from run_step import CASES, run_of

from scalejax.hardware import load_cluster
from scalejax.profile import profile

HERE = Path(__file__).parent
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    case: str
    """Name in cases.json, and "xN" for N devices of this machine."""
    predicted_bytes: int
    """Peak of the compiled program, over all its devices."""
    compiler_bytes: int | None
    """The compiler's own claim for the peak, over all devices."""
    measured_bytes: int
    """Growth of the process that ran it."""

    @property
    def error(self) -> float:
        """Signed, relative to what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1


def measure(case: str, device_count: int = 1) -> Row:
    """Predict a case and run it."""
    program = profile(
        run_of(case, device_count), load_cluster("dgx-h100"), cache=None, backend="cpu"
    )
    command = [sys.executable, str(HERE / "run_step.py"), case, "--devices", str(device_count)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Row(
        case=case if device_count == 1 else f"{case} x{device_count}",
        predicted_bytes=program.memory.peak_bytes * device_count,
        compiler_bytes=None,
        measured_bytes=int(output),
    )


def main() -> None:
    """Measure all cases, print the table, and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    cases = parser.parse_args().cases or list(json.loads(CASES.read_text()))
    rows = []
    print(f"{'case':<14}{'predicted MiB':>14}{'measured MiB':>14}{'error':>9}")
    for name in cases:
        case, _, count = name.partition(":")
        row = measure(case, int(count or 1))
        rows.append(row)
        print(
            f"{row.case:<14}{row.predicted_bytes / MIB:>14.1f}{row.measured_bytes / MIB:>14.1f}"
            f"{100 * row.error:>8.1f}%",
            flush=True,
        )


if __name__ == "__main__":
    main()
