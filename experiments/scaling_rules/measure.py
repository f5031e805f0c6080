"""Accuracy against batch by the rule for the learning rate, and up to which batch each works.

    python experiments/scaling_rules/measure.py [--folder DIR]

One sweep for each base rate; a folder that holds them already is gone on with.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import pyarrow.parquet
from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "convergence_fit"))

from limits import BatchLimit, Trial, batch_limit  # noqa: E402  it is of another experiment

BASE_RATES = (0.02, 0.005)
"""At batch 32: that of `experiments/warmup_by_batch`, and a quarter of it."""
BATCHES = (32, 128, 256, 512, 1024, 2048, 4096)
RULES = ("linear", "sqrt", "none")
TOLERANCE = 0.015
"""Accuracy below that of batch 32 that still counts as trained."""
FAILED = 0.2
"""Below this accuracy a run has failed: it is at chance (0.1), or not far from it."""
SWEEP = (
    *("-V", f"batch.global_batch={json.dumps(BATCHES)}"),
    *("-V", "seed=[0,1,2]"),
    "-E",
    json.dumps(
        {
            # At 32 all rules are one.
            "condition": {"batch.global_batch": BATCHES[1:]},
            "cases": [
                {},
                {"schedule.scaling": "sqrt"},
                # A warmup from the base rate to the base rate is none.
                {"schedule": {"scaling": "none", "warmup": "none", "warmup_epochs": 0}},
            ],
        }
    ),
)

Accuracies = Mapping[str, Mapping[int, Sequence[float | None]]]
"""After the last epoch, by rule and batch, in order of the seeds; None of runs given up."""


def sweep(folder: Path, base_rate: float) -> float | None:
    """Seconds that the sweep took, from the command to its tables; None if it was resumed."""
    begin, is_resumed = time.perf_counter(), (folder / "sweep.json").exists()
    command = [sys.executable, "-m", "scalejax", "sweep", str(HERE / "run.toml")]
    command += ["-P", f"schedule.base_learning_rate={base_rate}", *SWEEP, "--folder", str(folder)]
    subprocess.run([*command, *(["--resume"] if is_resumed else [])], check=True)
    return None if is_resumed else time.perf_counter() - begin


def accuracies(folder: Path) -> dict[str, dict[int, list[float | None]]]:
    """What the runs of a sweep reached; those of the smallest batch belong to every rule."""
    found: dict[str, dict[int, list[float | None]]] = {rule: {} for rule in RULES}
    for row in pyarrow.parquet.read_table(folder / "results.parquet").to_pylist():
        batch = row["batch.global_batch"]
        for rule in RULES if batch == BATCHES[0] else (row["schedule.scaling"],):
            found[rule].setdefault(batch, []).append(row["final_test_accuracy"])
    return found


def has_failed(accuracy: float | None) -> bool:
    """Whether a run has: given up, or at chance."""
    return accuracy is None or accuracy < FAILED


def trial(batch: int, reached: Sequence[float | None]) -> Trial:
    """The seeds of one batch as one trial; it has failed if one of them has."""
    if any(map(has_failed, reached)):
        return Trial(global_batch=batch, error=math.inf)
    errors = [1 - accuracy for accuracy in reached if accuracy is not None]
    deviation = stdev(errors) if len(errors) > 1 else 0.0
    return Trial(
        global_batch=batch,
        error=mean(errors),
        standard_error=deviation / len(errors) ** 0.5,
    )


def limits(found: Accuracies) -> dict[str, BatchLimit]:
    """Up to which batch each rule stays within the tolerance of the smallest batch."""
    trials = {rule: [trial(*each) for each in found[rule].items()] for rule in RULES}
    target = min(trials[RULES[0]], key=lambda each: each.global_batch).error + TOLERANCE
    return {rule: batch_limit(each, target_error=target) for rule, each in trials.items()}


def cell(reached: Sequence[float | None]) -> str:
    """The seeds of one batch as a cell of a Markdown table."""
    failed = sum(map(has_failed, reached))
    if failed:
        return f"fails {failed} of {len(reached)}"
    kept = [accuracy for accuracy in reached if accuracy is not None]
    return f"{mean(kept):.4f} ± {stdev(kept):.4f}"


def print_tables(base_rate: float, found: Accuracies) -> None:
    """One table of accuracies, one of limits."""
    print(f"\nbase rate {base_rate}\n\n| batch | {' | '.join(RULES)} |")
    print("|---|" + "---|" * len(RULES))
    for batch in BATCHES:
        print(f"| {batch} | {' | '.join(cell(found[rule][batch]) for rule in RULES)} |")
    print("\n| rule | reached | failed | breaks at (one standard deviation) |\n|---|---|---|---|")
    for rule, limit in limits(found).items():
        breaking = "n/a"
        if limit.breaking_batch is not None and limit.breaking_factor is not None:
            low, high = (limit.breaking_batch * limit.breaking_factor**sign for sign in (-1, 1))
            breaking = f"{limit.breaking_batch:.0f} ({low:.0f} to {high:.0f})"
        print(f"| {rule} | {limit.reached or 'n/a'} | {limit.failed or 'n/a'} | {breaking} |")


def draw(by_rate: Mapping[float, Accuracies], path: Path) -> None:
    """Accuracy over batch, a panel for each base rate; a cross stands for a run that failed."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    panels = figure.subplots(1, len(by_rate), sharey=True, squeeze=False)[0]
    for axes, (base_rate, found) in zip(panels, by_rate.items(), strict=True):
        for number, rule in enumerate(RULES):
            color, kept = f"C{number}", {}
            for batch, reached in found[rule].items():
                kept[batch] = [a for a in reached if a is not None and not has_failed(a)]
                lost = len(reached) - len(kept[batch])
                # Beside each other, where several rules fail with one batch.
                xs = [batch * 1.12 ** (number - 1)] * lost
                heights = [0.03 + 0.04 * place for place in range(lost)]
                axes.scatter(
                    xs,
                    heights,
                    color=color,
                    marker="x",
                    s=25,
                    transform=axes.get_xaxis_transform(),
                )
                axes.scatter([batch] * len(kept[batch]), kept[batch], color=color, s=9, alpha=0.5)
            drawn = [batch for batch in BATCHES if kept[batch]]
            means = [mean(kept[batch]) for batch in drawn]
            axes.plot(drawn, means, color=color, label={"none": "not scaled"}.get(rule, rule))
        baseline = 1 - trial(BATCHES[0], found[RULES[0]][BATCHES[0]]).error
        axes.axhline(baseline - TOLERANCE, color="black", linewidth=0.8, linestyle="dotted")
        axes.set_xscale("log", base=2)
        axes.margins(y=0.2)  # room for the crosses
        axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axes.minorticks_off()
        axes.set_xlabel("batch")
        axes.set_title(f"base rate {base_rate} at batch {BATCHES[0]}", fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy after the last epoch")
    panels[0].scatter([], [], color="black", marker="x", s=25, label="run that failed")
    label = f"{100 * TOLERANCE:g} points below batch {BATCHES[0]}"
    panels[0].plot([], [], color="black", linewidth=0.8, linestyle="dotted", label=label)
    panels[0].legend(fontsize="small", loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, print, draw, and keep the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    load_before = os.getloadavg()[0]
    seconds = {rate: sweep(folder / str(rate), rate) for rate in BASE_RATES}
    found = {rate: accuracies(folder / str(rate)) for rate in BASE_RATES}
    for rate, of_rate in found.items():
        print_tables(rate, of_rate)
    draw(found, HERE / "accuracy.png")
    result = {
        "accuracies": found,
        "seconds": seconds,
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
