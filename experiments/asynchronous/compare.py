"""Which way of training is soonest, and which is cheapest? Arms of one question, 3 seeds each.

    python experiments/asynchronous/compare.py dean2012              # writes results and a plot
    python experiments/asynchronous/compare.py dean2012 --rates      # how each arm's rate was found

Real gradients of a real network on real data, in virtual time. Of each arm: its last accuracy,
when it reached TARGET first, and what it took.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from arms import QUESTIONS, RATES, SEEDS

from scalejax.config.run import load_config
from scalejax.emulation.run_folder import emulate
from scalejax.training.record import RunRecord
from scalejax.training.reporter import Silent

HERE = Path(__file__).parent
TARGET = 0.8
"""Accuracy whose first evaluation is told."""
SEARCHED = 100
"""The seed with which rates are found."""


def emulated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The curve of one run, and what it took."""
    config = load_config(HERE / "run.toml", fields)
    with tempfile.TemporaryDirectory() as folder:
        found = emulate(config, Path(folder) / "run", reporter=Silent())
        record = RunRecord.load(Path(folder) / "run")
    return {
        "virtual_seconds": round(found.virtual_seconds, 3),
        "device_seconds": round(found.device_seconds, 1),
        "mean_staleness": found.mean_staleness,
        "wall_seconds": round(found.wall_seconds, 1),
        "curve": [
            [round(each.elapsed_seconds, 3), round(each.test_accuracy, 4)]
            for each in record.evaluations
        ],
    }


def search(name: str) -> None:
    """Print the last accuracy of each arm at each rate."""
    for arm, fields in QUESTIONS[name].items():
        if "schedule.base_learning_rate" not in fields:
            continue
        row = []
        for rate in RATES:
            run = emulated(fields | {"schedule.base_learning_rate": rate, "seed": SEARCHED})
            row.append(f"{rate:g}: {run['curve'][-1][1]:.1%}")
        print(f"{arm:32} {'  '.join(row)}", flush=True)


def compare(name: str) -> dict[str, Any]:
    """Every arm with every seed, written while they are made."""
    path = HERE / f"{name}.json"
    results: dict[str, Any] = {}
    for arm, fields in QUESTIONS[name].items():
        results[arm] = {str(seed): emulated(fields | {"seed": seed}) for seed in SEEDS}
        print(line(arm, results[arm]), flush=True)
        path.write_text(json.dumps(results, indent=None).replace('}}, "', '}},\n"') + "\n")
    return results


def line(arm: str, runs: Mapping[str, Any]) -> str:
    """Mean and deviation of the last accuracy of an arm, and what it took."""
    last = [run["curve"][-1][1] for run in runs.values()]
    reached = [
        next((seconds for seconds, accuracy in run["curve"] if accuracy >= TARGET), None)
        for run in runs.values()
    ]
    soonest = "never" if None in reached else f"{fmean(filter(None, reached)):,.1f}"
    seconds = fmean(run["virtual_seconds"] for run in runs.values())
    devices = fmean(run["device_seconds"] for run in runs.values())
    return (
        f"| {arm} | {fmean(last):.1%} ± {stdev(last):.1%} | {soonest} | {seconds:,.1f} | "
        f"{devices:,.0f} | "
        f"{fmean(run['wall_seconds'] for run in runs.values()):.0f} |"
    )


def draw(name: str, results: Mapping[str, Any]) -> None:
    """Accuracy over virtual seconds and over device seconds, means of the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for number, (arm, runs) in enumerate(results.items()):
        curves = [run["curve"] for run in runs.values()]
        workers = [run["device_seconds"] / run["virtual_seconds"] for run in runs.values()]
        for axis, factor in zip(axes, (1.0, fmean(workers)), strict=True):
            points = list(zip(*curves, strict=True))
            axis.plot(
                [factor * fmean(x for x, _ in point) for point in points],
                [fmean(y for _, y in point) for point in points],
                marker="o",
                markersize=3,
                linestyle=("solid", "dashed", "dotted")[number // 10 % 3],
                label=arm,
            )
    for axis, title in zip(axes, ("virtual seconds", "device seconds"), strict=True):
        axis.set(xscale="log", xlabel=title)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="test accuracy")
    axes[1].legend(fontsize=8)
    figure.savefig(HERE / f"{name}.png", dpi=110)


def main() -> int:
    """Search rates, or compare and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--rates", action="store_true")
    arguments = parser.parse_args()
    if arguments.rates:
        search(arguments.question)
        return 0
    print(f"| arm | test accuracy | s to {TARGET:.0%} | virtual s | device s | emulated in, s |")
    print("|---|---|---|---|---|---|")
    draw(arguments.question, compare(arguments.question))
    return 0


if __name__ == "__main__":
    sys.exit(main())
