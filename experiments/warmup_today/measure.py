"""Does warmup still matter for today's optimizers at 16 and 64 times the batch?

    python experiments/warmup_today/measure.py [--folder DIR] [--only images|decoder]

Two studies: Muon, schedule-free and LAMB on Fashion-MNIST, SGD at the rate of its file among them,
162 runs; AdamW and Muon on text with a decoder, 48 runs. Prints the verdicts, writes
`results.json`. With the folder of studies that were stopped it goes on with them.
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
RESULTS = HERE / "results.json"
RUN = Path(scalejax.__file__).parent / "config" / "examples" / "fashion_small_batch.toml"
STUDIES = {
    "images": (
        str(RUN),
        *("--optimizers", "muon,schedule_free,lamb,sgd:0.02"),
        *("--rates", "0.0001,0.0003,0.001,0.003,0.01,0.03"),
        *("--batches", "512,2048"),
    ),
    "decoder": (
        str(HERE / "decoder.toml"),
        *("--optimizers", "adamw,muon"),
        *("--rates", "0.0003,0.001,0.003,0.01,0.03,0.1"),
        *("--batches", "4,64"),
        *("--warmup", "none,gradual:10%"),
        *("--measure", "loss"),
    ),
}
"""What `scalejax study warmup` is given."""


def verdict(cell: dict, is_at_edge: bool, measure: str = "accuracy") -> str:
    """What is concluded of a warmup against none: nothing if the rate is at an edge of those tried;
    else with how many seeds only one of the two trains, or whether the interval of paired
    differences leaves zero out."""
    if is_at_edge:
        return "cannot be said: the rate is at an edge of those tried"
    seeds, won, lost = cell["runs"], cell["trained_only"], cell["diverged_only"]
    if won or lost:
        return f"only with warmup {won} of {seeds} seeds train, only without {lost}"
    ends = [cell[f"test_{measure}_difference_{end}"] for end in ("low", "high")]
    if None in ends:
        return "cannot be said: less than two pairs of runs did not diverge"
    low, high = ends if measure == "accuracy" else sorted(-end for end in ends)
    return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def kept(measure: str) -> tuple[str, ...]:
    """What of a cell is in `results.json`."""
    test = f"test_{measure}"
    return (
        *("optimizer", "scaling", "batch", "warmup", "base_learning_rate", "peak_learning_rate"),
        *("warmup_steps", "runs", "diverged", "trained_only", "diverged_only", "chosen"),
        *(f"validation_{measure}_mean", f"{test}_count", f"{test}_difference_count"),
        *(f"{test}_mean", f"{test}_low", f"{test}_high"),
        *(f"{test}_difference", f"{test}_difference_low", f"{test}_difference_high"),
    )


def judged(table: dict, measure: str) -> dict:
    """The rates, and each cell with its verdict, of what a study wrote."""
    at_edge = {line["optimizer"] for line in table["rates"] if line["at_edge"]}
    cells = [{name: cell[name] for name in kept(measure)} for cell in table["cells"]]
    for cell in cells:
        if cell["warmup"] != "none":
            cell["verdict"] = verdict(cell, cell["optimizer"] in at_edge, measure)
            place = f"{cell['optimizer']} {cell['scaling']} {cell['batch']} {cell['warmup']}"
            print(f"{place:40}{cell['diverged']} diverged  {cell['verdict']}")
    return {
        "rates": table["rates"],
        "cells": cells,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }


def main() -> None:
    """Train, print, write `results.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only", choices=STUDIES, default=None)
    given = parser.parse_args()
    folders = given.folder or Path(tempfile.mkdtemp())
    for name in [given.only] if given.only else STUDIES:
        folder, found = folders / name, folders / f"{name}.json"
        resumed = ("--resume",) if (folder / "run.toml").exists() else ()
        command = [sys.executable, "-m", "scalejax", "study", "warmup", *STUDIES[name]]
        subprocess.run([*command, "--folder", folder, "--json", found, *resumed], check=True)
        measure = "loss" if "loss" in STUDIES[name] else "accuracy"
        results = json.loads(RESULTS.read_text())
        results[name] = judged(json.loads(found.read_text()), measure)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
