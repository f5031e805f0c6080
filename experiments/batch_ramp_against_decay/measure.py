"""A batch that grows against a rate that falls, 3 seeds each: one sweep, and what it shows.

    python experiments/batch_ramp_against_decay/measure.py [--folder DIR]

A folder with the sweep in it, or a part of it, is gone on with, and read.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from scalejax.training.record import RunRecord, TrainMeasurement

HERE = Path(__file__).parent
MILESTONES, FACTOR = [9, 18, 24], 5
"""As in run.toml: at 30, 60 and 80 % of the epochs, as Smith et al. have it, by their factor."""
_LEVEL = {"decay": "constant", "decay_epochs": []}
ARMS = {
    "rate / 5 at each": {},
    "neither": {"schedule": _LEVEL},
    "batch x 5 at each": {
        "batch": {"ramp_epochs": MILESTONES, "ramp_factor": FACTOR},
        "schedule": _LEVEL,
    },
    "batch x 5, then rate / 5": {
        "batch": {"ramp_epochs": MILESTONES[:1], "ramp_factor": FACTOR},
        "schedule": {"decay_epochs": MILESTONES[1:]},
    },
}
SEEDS = 3


def sweep(folder: Path) -> float | None:
    """Seconds that the sweep took, from the command to its tables; None if it was resumed."""
    begin, is_resumed = time.perf_counter(), (folder / "sweep.json").exists()
    cases = json.dumps({"condition": {}, "cases": list(ARMS.values())})
    flags = ["-V", f"seed={list(range(SEEDS))}", "-E", cases, "--folder", str(folder)]
    command = [sys.executable, "-m", "scalejax", "sweep", str(HERE / "run.toml"), *flags]
    subprocess.run([*command, "--resume"] if is_resumed else command, check=True)
    return None if is_resumed else time.perf_counter() - begin


def records(folder: Path) -> dict[str, list[RunRecord]]:
    """The runs of each arm, in order of the seeds: the plan has all arms of a seed in a row."""
    found = [RunRecord.load(path) for path in sorted((folder / "runs").iterdir())]
    return {arm: found[index :: len(ARMS)] for index, arm in enumerate(ARMS)}


def losses(record: RunRecord) -> list[tuple[int, int, float]]:
    """(epochs, updates, mean training loss) after each epoch, the loss that of its minibatches.

    One line in twelve updates, so that the last batch has a single one of each epoch.
    """
    found = []
    for epoch, lines in groupby(record.training, key=_epoch):
        kept = list(lines)
        loss = mean(line.loss for line in kept if line.loss is not None)
        found.append((epoch, kept[-1].step, loss))
    return found


def _epoch(line: TrainMeasurement) -> int:
    """Epochs that are done when the epoch of `line` is."""
    return -int(-round(line.epoch, 6) // 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What the runs of an arm came to."""

    updates: int
    test_accuracy: list[float]
    """Of each seed, after the last epoch."""
    test_loss: float
    training_loss: float
    """Of the last epoch; both means over the seeds."""

    @property
    def accuracy(self) -> float:
        """Mean over the seeds."""
        return mean(self.test_accuracy)

    @property
    def deviation(self) -> float:
        """Standard deviation between seeds."""
        return stdev(self.test_accuracy)


def arm_of(runs: Sequence[RunRecord]) -> Arm:
    """What `runs` came to."""
    last = [run.evaluations[-1] for run in runs]
    return Arm(
        updates=last[0].step,
        test_accuracy=[each.test_accuracy for each in last],
        test_loss=mean(each.test_loss or 0.0 for each in last),
        training_loss=mean(losses(run)[-1][2] for run in runs),
    )


def claims(found: dict[str, Arm]) -> dict[str, bool]:
    """What the experiment is to show, and whether it does."""
    decay, neither, grown, hybrid = (found[arm] for arm in ARMS)
    lowest = min(a for arm in (decay, grown, hybrid) for a in arm.test_accuracy)
    return {
        "a growing batch is as accurate as a falling rate, within a deviation of seeds": abs(
            grown.accuracy - decay.accuracy
        )
        <= decay.deviation,
        "so is a batch that grows first and a rate that falls then": abs(
            hybrid.accuracy - decay.accuracy
        )
        <= decay.deviation,
        "with neither, every seed is worse than every one with either": max(neither.test_accuracy)
        < lowest,
        "the growing batch takes less than 0.4 of the updates": grown.updates < 0.4 * decay.updates,
    }


def draw(runs: dict[str, list[RunRecord]], path: Path) -> None:
    """Training loss by epochs, and by updates, and test accuracy by epochs."""
    figure, (by_samples, by_updates, accuracy) = plt.subplots(
        1, 3, figsize=(11, 3.6), layout="constrained"
    )
    # Arms lie on each other: wide and pale below, narrow above.
    styles = [
        {"lw": 5, "alpha": 0.35},
        {"lw": 1.5},
        {"lw": 2.2, "ls": "--"},
        {"lw": 1.2, "color": "black"},
    ]
    for (arm, of_arm), style in zip(runs.items(), styles, strict=True):
        curves = [losses(run) for run in of_arm]
        epochs, updates, means = zip(
            *((e, u, mean(c[i][2] for c in curves)) for i, (e, u, _) in enumerate(curves[0])),
            strict=True,
        )
        by_samples.plot(epochs, means, label=arm, **style)
        by_updates.plot(updates, means, **style)
        tested = [[line.test_accuracy for line in run.evaluations] for run in of_arm]
        at = [round(line.epoch) for line in of_arm[0].evaluations]
        accuracy.plot(at, [100 * mean(each) for each in zip(*tested, strict=True)], **style)
    _label(by_samples, "epochs: 60,000 samples each", "training loss, mean of 3 seeds")
    _label(by_updates, "updates", "")
    _label(accuracy, "epochs", "test accuracy, %")
    by_samples.set_ylim(0.1, 0.4)
    by_updates.set_ylim(0.1, 0.4)
    accuracy.set_ylim(85, 90)
    by_updates.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
    figure.legend(*by_samples.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=80)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def main() -> int:
    """Train, print, write `results.json` and the plot; 1 if something is not shown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp()) / "sweep"
    load_before = os.getloadavg()[0]
    seconds = sweep(folder)
    runs = records(folder)
    found = {arm: arm_of(of_arm) for arm, of_arm in runs.items()}
    shown = claims(found)
    for name, arm in found.items():
        print(
            f"{name:26} {arm.updates:>6} updates  {arm.accuracy:.4f} +- {arm.deviation:.4f}  ",
            end="",
        )
        print(f"test loss {arm.test_loss:.4f}  training loss {arm.training_loss:.4f}")
    for claim, holds in shown.items():
        print(f"{'yes' if holds else 'NO':4}{claim}")
    draw(runs, HERE / "curves.png")
    result = {
        "arms": {name: asdict(arm) for name, arm in found.items()},
        "claims": shown,
        "curves": {
            arm: [[e, u, round(loss, 5)] for e, u, loss in losses(of_arm[0])]
            for arm, of_arm in runs.items()
        },
        "seconds": seconds,
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(shown.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
