"""Predicted memory beside the memory that a run of the same step takes, case by case.

    python experiments/memory_against_run/measure.py [CASE[:DEVICES]...]

Predicted is the peak of the program that `scalejax predict` costs, compiled by the CPU's
compiler; measured is what `run_step.py` prints, in a fresh process for each case.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from run_step import CASES, run_of

from scalejax.hardware import load_cluster
from scalejax.xla import profile

HERE = Path(__file__).parent
MIB = 2**20
SETTINGS = {"JAX_PLATFORMS": "cpu", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Of the process that runs a step; see there."""
MORE = ("mlp:4", "gpt:2")
"""Cases on several devices: the same process holds them all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    case: str
    """Name in cases.json, and "xN" for N devices of this machine."""
    predicted_bytes: int
    """Peak of the compiled program, over all its devices."""
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
    environment = {**os.environ, **SETTINGS}
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    return Row(
        case=case if device_count == 1 else f"{case} x{device_count}",
        predicted_bytes=program.memory.peak_bytes * device_count,
        measured_bytes=int(output),
    )


def save(rows: list[Row]) -> None:
    """Keep the figures, with what they were measured on."""
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    machine = {"python": platform.python_version(), "processor": platform.machine()}
    figures = [{**asdict(row), "error": round(row.error, 4)} for row in rows]
    document = {"machine": machine, "versions": versions, "rows": figures}
    (HERE / "results.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Measure all cases, print the table, and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    cases = parser.parse_args().cases or [*json.loads(CASES.read_text()), *MORE]
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
    if len(rows) > 1:
        save(rows)


if __name__ == "__main__":
    main()
