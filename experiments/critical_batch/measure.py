"""Steps to a target against batch for five optimizers, each rate tuned at each batch; and beside
the critical batch that it comes to, the gradient noise scale as measured in training.

    python experiments/critical_batch/measure.py [--folder DIR] [--optimizers sgd,adam]

Resumes where it stopped if it is given the same folder. `show.py` makes the tables and the plot.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pyarrow.parquet

HERE = Path(__file__).parent
TARGET = 0.42
"""Test loss that counts as reached: about 85 % right, after one or two passes over the data, so
that the noise of gradients and not the limit of the data sets how long it takes."""
BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
SEEDS = (0, 1)
EXAMPLES = 60_000
EVALUATIONS = 15
"""Before the target is reached, about; between two of them steps are interpolated."""
MOST_ROUNDS = 5
"""Of widening a grid of rates whose best is at its edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Its fields, and where its grid of rates begins: not what counts, as the grid is widened."""

    fields: dict[str, object]
    """Under `optimizer.` in the run.toml. None decays weights: all have one objective."""
    peak: float
    """Rate at a batch without end."""
    half: float
    """Batch at which the guess is half of that."""
    power: float
    """With which the guess rises with the batch far below: 1 of SGD (McCandlish et al. 2018,
    section 2.2), 1/2 of Adam."""
    least_steps: float = 190
    """About the steps at a batch without end, by which runs are made long enough and evaluated;
    that of SGD for those of which nothing was known."""
    doubling: float = 240
    """Batch with which about twice as many are needed."""

    def guess(self, batch: int) -> float:
        """The rate in the middle of the first grid: a power of 2."""
        rate = self.peak / (1 + (self.half / batch) ** self.power)
        return 2.0 ** round(math.log2(rate))

    def expected_steps(self, batch: int) -> float:
        """About the steps to target."""
        return self.least_steps * (1 + self.doubling / batch)

    def epochs(self, batch: int) -> int:
        """Length of a run."""
        return max(2, math.ceil(1.2 * self.expected_steps(batch) * batch / EXAMPLES))


OPTIMIZERS = {
    "sgd": Optimizer(fields={"name": "sgd", "momentum": 0.0}, peak=0.25, half=150, power=1),
    "nesterov": Optimizer(
        fields={"name": "sgd", "momentum": 0.9, "nesterov": True}, peak=0.08, half=500, power=1
    ),
    "adam": Optimizer(
        fields={"name": "adamw", "weight_decay": 0.0},
        peak=6e-3,
        half=1000,
        power=0.5,
        least_steps=80,
        doubling=700,
    ),
    "lars": Optimizer(
        # Biases, which have no trust ratio, are updated by the bare rate: the coefficient is such
        # that one rate suits both.
        fields={"name": "lars", "weight_decay": 0.0, "trust_coefficient": 0.1},
        peak=0.08,
        half=500,
        power=1,
        least_steps=80,
        doubling=700,
    ),
    "lamb": Optimizer(fields={"name": "lamb", "weight_decay": 0.0}, peak=0.02, half=500, power=0.5),
}


def sweep(
    folder: Path,
    optimizer: Optimizer,
    cases: dict[int, list[dict[str, object]]],
    more: dict[str, object] | None = None,
) -> None:
    """Train every case of each batch with every seed, or what is left of it."""
    if (folder / "results.parquet").exists():  # written when all are trained
        return
    shared = {f"optimizer.{field}": value for field, value in optimizer.fields.items()}
    words = [f"-P{name}={json.dumps(value)}" for name, value in (shared | (more or {})).items()]
    words += [f"-Vbatch.global_batch={json.dumps(list(cases))}", f"-Vseed={json.dumps(SEEDS)}"]
    for batch, of_batch in cases.items():
        length = {
            "train.epochs": optimizer.epochs(batch),
            "train.evaluate_every_steps": math.ceil(optimizer.expected_steps(batch) / EVALUATIONS),
        }
        condition = {"batch.global_batch": batch}
        extension = {"condition": condition, "parameters": length, "cases": of_batch}
        words += ["-E", json.dumps(extension)]
    command = [sys.executable, "-m", "scalejax", "sweep", str(HERE / "run.toml"), *words]
    resume = ["--resume"] if (folder / "sweep.json").exists() else []
    subprocess.run(
        [*command, "--target", f"test_loss={TARGET}", "--folder", str(folder), *resume],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def crossings(folder: Path) -> dict[tuple[int, float], list[float | None]]:
    """Steps to target of each seed, by batch and rate; None where it was not reached.

    Between two evaluations ln loss is taken to be straight in ln steps.
    """
    evaluations = defaultdict(list)
    for row in pyarrow.parquet.read_table(folder / "evaluations.parquet").to_pylist():
        evaluations[row["run"]].append((row["step"], row["test_loss"]))
    found = defaultdict(list)
    # The table has no column for a rate that all runs share.
    planned = json.loads((folder / "sweep.json").read_text())["runs"]
    for row in pyarrow.parquet.read_table(folder / "results.parquet").to_pylist():
        rate = planned[row["run"]]["schedule.base_learning_rate"]
        found[row["global_batch"], rate].append(crossing(evaluations[row["run"]]))
    return dict(found)


def crossing(curve: list[tuple[int, float | None]]) -> float | None:
    """Steps after which the loss first was at the target."""
    before: tuple[int, float] | None = None
    for step, loss in curve:
        if loss is None:
            return None
        if loss <= TARGET:
            if before is None:
                return float(step)
            part = math.log(before[1] / TARGET) / math.log(before[1] / loss)
            return before[0] * (step / before[0]) ** part
        before = step, loss
    return None


def tuned(
    name: str, folder: Path, batches: Sequence[int]
) -> dict[int, dict[float, list[float | None]]]:
    """Steps to target by batch and rate, of grids whose best rate is inside."""
    optimizer = OPTIMIZERS[name]
    found: dict[int, dict[float, list[float | None]]] = {batch: {} for batch in batches}
    missing = {batch: [optimizer.guess(batch) * k for k in (0.5, 1, 2)] for batch in batches}
    for number in range(MOST_ROUNDS):
        place = folder / f"{name}-{number}"
        rate = "schedule.base_learning_rate"
        sweep(place, optimizer, {b: [{rate: r} for r in rates] for b, rates in missing.items()})
        for (batch, of_rate), steps in crossings(place).items():
            found[batch][of_rate] = steps
        missing = {b: more for b in batches if (more := beyond_edge(found[b]))}
        print(f"{name}: to be widened {missing}", flush=True)
        if not missing:
            break
    return {batch: dict(sorted(of_batch.items())) for batch, of_batch in found.items()}


def mean_steps(steps: list[float | None]) -> float:
    """Over the seeds; infinite if one of them did not reach the target."""
    reached = [each for each in steps if each is not None]
    return mean(reached) if len(reached) == len(steps) else math.inf


def best_rate(grid: dict[float, list[float | None]]) -> float | None:
    """The rate of the fewest steps; None if the target was reached with none."""
    rate = min(grid, key=lambda each: mean_steps(grid[each]))
    return rate if mean_steps(grid[rate]) < math.inf else None


def beyond_edge(grid: dict[float, list[float | None]]) -> list[float]:
    """Rates to try besides: beyond the edge at which the best is, or both if none was reached."""
    low, high, best = min(grid), max(grid), best_rate(grid)
    below = [low / 2] if best in (low, None) else []
    above = [high * 2] if best in (high, None) else []
    return below + above


def noise(folder: Path, rates: dict[int, float]) -> dict[int, list[list[list[float | None]]]]:
    """Steps and gradient noise scale until the target, of each seed of SGD at the best rate of
    each batch.

    A moving average is over a twentieth of the steps to target, as the scale grows in training.
    """
    place, optimizer, cases = folder / "noise", OPTIMIZERS["sgd"], {}
    for batch, rate in rates.items():
        steps = optimizer.expected_steps(batch)
        cases[batch] = [
            {
                "schedule.base_learning_rate": rate,
                "train.noise_scale": {"decay": round(1 - 20 / steps, 4)},
                "train.log_every_steps": math.ceil(steps / 40),
            }
        ]
    sweep(place, optimizer, cases, {"batch.microbatches": 4})
    ends, curves = crossings(place), defaultdict(list)
    for row in pyarrow.parquet.read_table(place / "results.parquet").to_pylist():
        batch = row["global_batch"]
        end = ends[batch, rates[batch]][len(curves[batch])] or math.inf
        lines = (place / "runs" / f"{row['run']:04d}" / "measurements.jsonl").read_text()
        measured = (json.loads(line) for line in lines.splitlines())
        curves[batch].append(
            [
                [line["step"], line["noise_scale"] and round(line["noise_scale"], 1)]
                for line in measured
                if line["kind"] == "train" and line["step"] <= end
            ]
        )
    return dict(curves)


def main() -> None:
    """Train, and write `results.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    steps, curves = {}, {}
    for name in options.optimizers.split(","):
        steps[name] = tuned(name, folder, options.batches)
        if name == "sgd":
            best = {batch: best_rate(grid) for batch, grid in steps[name].items()}
            curves = noise(folder, {b: rate for b, rate in best.items() if rate is not None})
        result = {"target_test_loss": TARGET, "seeds": SEEDS, "steps": steps, "noise": curves}
        (HERE / "results.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
