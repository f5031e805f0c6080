"""Accuracy against batch, with and without warmup, 3 seeds each: one sweep, and what it shows.

    python experiments/warmup_by_batch/measure.py [--folder DIR] [--compare]

With --compare the same 48 runs are trained a second time, one at a time, each in a program of
its own, in one process that stays: the sweep's gain is over that, not over 48 starts of Python.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import pyarrow.parquet

HERE = Path(__file__).parent
BATCHES = [32, 128, 256, 512, 768, 1024, 1536, 2048]
FAILED = 0.2
"""Below this accuracy a run has failed: it is at chance (0.1), or not far from it."""
SWEEP = (
    *("-V", f"batch.global_batch={json.dumps(BATCHES)}"),
    *("-V", "seed=[0,1,2]"),
    "-E",
    json.dumps(
        {
            "condition": {"batch.global_batch": BATCHES[1:]},
            "cases": [{}, {"schedule": {"warmup": "gradual", "warmup_epochs": 2}}],
        }
    ),
    "-E",
    json.dumps(
        {
            "condition": {"batch.global_batch": 1024, "schedule.warmup": "gradual"},
            "cases": [{}, {"schedule.scaling": "sqrt"}],
        }
    ),
    *("--target", "test_accuracy=0.87"),
)


def sweep(folder: Path, *flags: str) -> float | None:
    """Seconds that the sweep took, from the command to its tables; None if it was resumed."""
    begin, is_resumed = time.perf_counter(), (folder / "sweep.json").exists()
    flags = (*flags, "--resume") if is_resumed else flags
    command = [sys.executable, "-m", "scalejax", "sweep", str(HERE / "run.toml")]
    subprocess.run([*command, *SWEEP, "--folder", str(folder), *flags], check=True)
    return None if is_resumed else time.perf_counter() - begin


def arms(folder: Path) -> dict[str, list[float | None]]:
    """Accuracies after the last epoch by arm, in order of the seeds; None of runs given up."""
    found: dict[str, list[float | None]] = {}
    for row in pyarrow.parquet.read_table(folder / "results.parquet").to_pylist():
        name = f"{row['batch.global_batch']} {row['schedule.scaling']} {row['schedule.warmup']}"
        found.setdefault(name, []).append(row["final_test_accuracy"])
    return found


def claims(found: dict[str, list[float | None]]) -> dict[str, bool]:
    """What the experiment is to show, and whether it does."""
    # A run that was given up has failed: it is as good as no network.
    reached = {arm: [a or 0.0 for a in accuracies] for arm, accuracies in found.items()}
    baseline = mean(reached["32 linear none"])
    return {
        "at 512 no warmup fails in 3 of 3 seeds": all(
            a < FAILED for a in reached["512 linear none"]
        ),
        "at 512 gradual warmup is within 1.5 points of the baseline, each seed": all(
            abs(a - baseline) <= 0.015 for a in reached["512 linear gradual"]
        ),
        "beyond the breaking batch (2048) both fail in 3 of 3 seeds": all(
            a < FAILED for arm in ("none", "gradual") for a in reached[f"2048 linear {arm}"]
        ),
        "sqrt scaling survives at 1024 in 3 of 3 seeds": all(
            a > 0.8 for a in reached["1024 sqrt gradual"]
        ),
    }


def main() -> int:
    """Train, print, write `results.json`; 1 if something is not shown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp()) / "sweep"
    load_before = os.getloadavg()[0]
    seconds = sweep(folder)
    alone = (
        sweep(folder.with_name("alone"), "--processes", "1", "--one-by-one")
        if (options.compare)
        else None
    )
    found = arms(folder)
    shown = claims(found)
    for name, accuracies in found.items():
        print(f"{name:24}", *("diverged" if a is None else f"{a:.4f}" for a in accuracies))
    for claim, holds in shown.items():
        print(f"{'yes' if holds else 'NO':4}{claim}")
    if seconds is not None:
        print(f"sweep: {seconds:.0f} s")
    if alone is not None and seconds is not None:
        print(f"one run at a time: {alone:.0f} s, {alone / seconds:.2f} times as long")
    result = {
        "accuracies": found,
        "claims": shown,
        "seconds": seconds,
        "one_at_a_time_seconds": alone,
        "one_at_a_time_accuracies": arms(folder.with_name("alone")) if alone else None,
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(shown.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
