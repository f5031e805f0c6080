"""Does warmup still matter for Muon, schedule-free and LAMB at 16 and 64 times the batch?

    python experiments/warmup_today/measure.py [--folder DIR]

One study of 162 runs, SGD at the rate of its file among them; prints the verdicts, writes
`results.json`. With the folder of a study that was stopped it goes on with it.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import scalejax

HERE = Path(__file__).parent
RUN = Path(scalejax.__file__).parent / "config" / "examples" / "fashion_small_batch.toml"
FLAGS = (
    *("--optimizers", "muon,schedule_free,lamb,sgd:0.02"),
    *("--rates", "0.0001,0.0003,0.001,0.003,0.01,0.03"),
    *("--batches", "512,2048"),
)
_KEPT = (
    *("optimizer", "scaling", "batch", "warmup", "base_learning_rate", "peak_learning_rate"),
    *("warmup_steps", "runs", "diverged", "trained_only", "diverged_only", "chosen"),
    *("validation_accuracy_mean", "test_accuracy_count", "test_accuracy_difference_count"),
    *("test_accuracy_mean", "test_accuracy_low", "test_accuracy_high"),
    *("test_accuracy_difference", "test_accuracy_difference_low", "test_accuracy_difference_high"),
)
"""What of a cell is in `results.json`."""


def verdict(cell: dict, is_at_edge: bool) -> str:
    """What is concluded of a warmup against none: nothing if the rate is at an edge of those tried;
    else with how many seeds only one of the two trains, or whether the interval of paired
    differences leaves zero out."""
    if is_at_edge:
        return "cannot be said: the rate is at an edge of those tried"
    seeds, won, lost = cell["runs"], cell["trained_only"], cell["diverged_only"]
    if won or lost:
        return f"only with warmup {won} of {seeds} seeds train, only without {lost}"
    low, high = cell["test_accuracy_difference_low"], cell["test_accuracy_difference_high"]
    if low is None or high is None:
        return "cannot be said: less than two pairs of runs did not diverge"
    return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def main() -> None:
    """Train, print, write `results.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp()) / "study"
    found = folder.parent / f"{folder.name}.json"
    resumed = ("--resume",) if (folder / "run.toml").exists() else ()
    command = [sys.executable, "-m", "scalejax", "study", "warmup", str(RUN), *FLAGS]
    subprocess.run([*command, "--folder", folder, "--json", found, *resumed], check=True)
    table = json.loads(found.read_text())
    at_edge = {line["optimizer"] for line in table["rates"] if line["at_edge"]}
    cells = [{name: cell[name] for name in _KEPT} for cell in table["cells"]]
    for cell in cells:
        if cell["warmup"] != "none":
            cell["verdict"] = verdict(cell, cell["optimizer"] in at_edge)
            place = f"{cell['optimizer']} {cell['scaling']} {cell['batch']} {cell['warmup']}"
            print(f"{place:40}{cell['diverged']} diverged  {cell['verdict']}")
    result = {
        "rates": table["rates"],
        "cells": cells,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
