"""Loss curves of k = 1 and k = 16 laid over each other, by base rate and warmup of k = 16.

    python experiments/loss_curve_overlay/measure.py [--folder DIR]

A folder that holds the sweeps already is gone on with.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import combinations, groupby
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scalejax.config.run import load_config
from scalejax.report.sources import LossGap, loss_gap
from scalejax.training.record import RunRecord, TrainMeasurement

Curves = Mapping[str, Sequence[Sequence[float | None]]]
"""Loss of each epoch of each seed of an arm."""
Results = Mapping[str, Mapping[str, Sequence[float | None]]]
"""Figures of each arm by seed."""
HERE = Path(__file__).parent
SMALL, LARGE = 32, 512
"""Batches of k = 1 and k = 16 workers of 32 images."""
WARMUPS = ("none", "constant", "gradual")
BASE_RATES = (0.0125, 0.1)
"""Of k = 1: 0.1 kn / 256 as in the paper (section 5.1), and eight times that."""
BASELINE = "k = 1"
WARMUP_EPOCHS = 5
"""As in the paper (section 2.2)."""
SWEEP = (
    *("-V", f"batch.global_batch={json.dumps([SMALL, LARGE])}"),
    *("-V", "seed=[0,1,2]"),
    "-E",
    json.dumps(
        {
            "condition": {"batch.global_batch": LARGE},
            "cases": [
                {},
                *(
                    {"schedule": {"warmup": warmup, "warmup_epochs": WARMUP_EPOCHS}}
                    for warmup in WARMUPS[1:]
                ),
            ],
        }
    ),
)


def sweep(folder: Path, base_rate: float) -> float | None:
    """Seconds that the sweep took, from the command to its tables; None if it was resumed."""
    begin, is_resumed = time.perf_counter(), (folder / "sweep.json").exists()
    command = [sys.executable, "-m", "scalejax", "sweep", str(HERE / "run.toml")]
    command += [*SWEEP, "-P", f"schedule.base_learning_rate={base_rate}"]
    command += ["--folder", str(folder), *(["--resume"] if is_resumed else [])]
    subprocess.run(command, check=True)
    return None if is_resumed else time.perf_counter() - begin


def arms(folder: Path) -> dict[str, dict[int, RunRecord]]:
    """The records of the runs by arm and seed."""
    found: dict[str, dict[int, RunRecord]] = {}
    for path in sorted((folder / "runs").iterdir()):
        config = load_config(path / "run.toml")
        warmup = getattr(config.schedule, "warmup", None)
        name = BASELINE if config.batch.global_batch == SMALL else f"k = 16, {warmup} warmup"
        found.setdefault(name, {})[config.seed] = RunRecord.load(path)
    return found


def gaps(found: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, list[LossGap | None]]:
    """Of each arm to k = 1 with the same seed, and as a yardstick of k = 1 between its seeds.

    All begin at one epoch, also those of the arm without warmup.
    """

    def gap(one: RunRecord, other: RunRecord) -> LossGap | None:
        return loss_gap(one.training, other.training, after_epoch=WARMUP_EPOCHS)

    small = found[BASELINE]
    pairs = {BASELINE: [gap(small[one], small[two]) for one, two in combinations(small, 2)]}
    large = {name: runs for name, runs in found.items() if name != BASELINE}
    return pairs | {
        name: [gap(small[seed], run) for seed, run in runs.items()] for name, runs in large.items()
    }


def epoch_losses(lines: Sequence[TrainMeasurement]) -> list[float | None]:
    """Mean training loss of each epoch; None of one with a loss that is not finite."""
    # The update that ends an epoch is one of it.
    epochs = groupby(lines, key=lambda line: -int(-(line.epoch - 1e-9) // 1))
    means: list[float | None] = []
    for _, group in epochs:
        losses = [line.loss for line in group]
        kept = [loss for loss in losses if loss is not None]
        means.append(mean(kept) if len(kept) == len(losses) else None)
    return means


def accuracy(run: RunRecord) -> float | None:
    """After the last epoch; None of a run that was given up."""
    return run.evaluations[-1].test_accuracy if run.status == "completed" else None


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean and standard deviation in words."""
    kept = [value for value in values if value is not None]
    lost = (
        f" ({len(values) - len(kept)} of {len(values)} failed)" if len(kept) < len(values) else ""
    )
    if len(kept) < 2:
        return f"n/a{lost}"
    return f"{mean(kept):{form}} ± {stdev(kept):{form}}{lost}"


def print_table(results: Results) -> None:
    """One Markdown row for each arm."""
    print("\n| arm | test accuracy | last training loss | mean gap | largest gap |")
    print("|---|---|---|---|---|")
    for name, of in results.items():
        cells = [spread(of["accuracy"], ".4f"), spread(of["last_epoch_loss"], ".3f")]
        cells += [spread(of["mean_gap"], ".3f"), spread(of["max_gap"], ".3f")]
        print(f"| {name} | {' | '.join(cells)} |")


def results_of(found: Mapping[str, Mapping[int, RunRecord]], curves: Curves) -> Results:
    """Accuracies, last losses and gaps of each arm, by seed."""
    return {
        name: {
            "accuracy": [accuracy(run) for run in found[name].values()],
            "last_epoch_loss": [losses[-1] for losses in curves[name]],
            "mean_gap": [each and each.mean_gap for each in of_arm],
            "max_gap": [each and each.max_gap for each in of_arm],
        }
        for name, of_arm in gaps(found).items()
    }


def draw(curves_by_rate: Mapping[float, Curves], path: Path) -> None:
    """A row for each base rate, a panel for each warmup, with k = 1 in all; a line is a seed."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    rows = figure.subplots(len(curves_by_rate), len(WARMUPS), sharex=True, sharey="row")
    for row, (rate, curves) in zip(rows, curves_by_rate.items(), strict=True):
        large = [name for name in curves if name != BASELINE]
        for axes, name in zip(row, large, strict=True):
            draw_panel(axes, {BASELINE: curves[BASELINE], name: curves[name]})
        row[0].set_ylabel(f"training loss, base rate {rate}")
    for axes in rows[-1]:
        axes.set_xlabel("epoch")
    figure.savefig(path, dpi=100)


def draw_panel(axes: Axes, curves: Curves) -> None:
    """One arm over k = 1."""
    for color, (name, seeds) in zip(("C0", "C1"), curves.items(), strict=True):
        for number, losses in enumerate(seeds):
            ys = [float("nan") if loss is None else loss for loss in losses]
            label = name.split(",")[0] if number == 0 else None
            epochs = [0.5 + epoch for epoch in range(len(ys))]
            axes.plot(epochs, ys, color=color, linewidth=1, label=label)
    axes.axvline(WARMUP_EPOCHS, color="black", linewidth=0.8, linestyle="dotted")
    axes.set_yscale("log")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_title(list(curves)[1].split(", ")[1].replace("none", "no"), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def main() -> None:
    """Train, print, draw, and keep the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    load_before = os.getloadavg()[0]
    seconds: dict[str, float | None] = {}
    results: dict[str, Results] = {}
    curves: dict[float, Curves] = {}
    for rate in BASE_RATES:
        seconds[f"{rate}"] = sweep(folder / f"{rate}", rate)
        found = arms(folder / f"{rate}")
        curves[rate] = {
            name: [epoch_losses(run.training) for run in runs.values()]
            for name, runs in found.items()
        }
        results[f"{rate}"] = results_of(found, curves[rate])
        print(f"\nbase rate {rate}", end="")
        print_table(results[f"{rate}"])
    draw(curves, HERE / "curves.png")
    rounded = {
        f"{rate}": {
            name: [[loss and round(loss, 4) for loss in losses] for losses in runs]
            for name, runs in of_rate.items()
        }
        for rate, of_rate in curves.items()
    }
    document = {
        "results": results,
        "epoch_losses": rounded,
        "seconds": seconds,
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
