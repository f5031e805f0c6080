"""How well predicted step times rank the layouts that were measured.

python experiments/search_scored/score.py [--axes] [--left-out AXIS] [--framework NAME]

Predicts nanotron's sweep, which comes with scalejax, as `scalejax validate --closed-form` does;
runs that stalled are left out. Layouts whose allocator would reserve nearly all of a device come
last: they free and allocate again in every microbatch. --axes prints the error by each axis of the
layout; --left-out layers (or devices, tensor, pipeline) the error of steps by constants that were
fitted without the sizes of networks that are predicted, one after the other.
"""

import argparse
import runpy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from scalejax.hardware import load_chip
from scalejax.simulator.frameworks import framework_named
from scalejax.validation.evaluation import CompiledCase, compile_cases, evaluate
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.summary import RowResult

LEDGER = files("scalejax") / "validation" / "ledgers" / "ultrascale_measured.csv.xz"
LEAST = 8  # layouts of a model on so many devices, to be ranked
SHORT = 0.92
"""Share of a device's memory beyond which what is reserved leaves no room for the libraries:
context and communicators take 5 to 8 % of an H100."""
H100 = load_chip("h100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The layouts of one model on one number of devices."""

    layers: int
    """Layers of the model, which no two of the sweep have alike."""
    device_count: int
    """Devices."""
    rows: tuple[tuple[LedgerRow, RowResult], ...]
    """Each layout and its prediction."""

    @property
    def predicted(self) -> np.ndarray:
        """Predicted step times."""
        return np.array([found.predicted_seconds for _, found in self.rows])

    @property
    def measured(self) -> np.ndarray:
        """Measured step times."""
        return np.array([row.step_seconds for row, _ in self.rows])

    @property
    def rank(self) -> np.ndarray:
        """Predicted step times, those of layouts that are short of memory beyond all others."""
        memory = np.array([found.predicted_memory_bytes for _, found in self.rows])
        is_short = memory > SHORT * H100.memory_bytes
        return self.predicted + is_short * self.predicted.max()

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured times."""
        return float(np.corrcoef(rankdata(self.rank), rankdata(self.measured))[0, 1])

    @property
    def regret(self) -> float:
        """Measured time of the layout that is predicted to be the fastest, over that of the
        fastest, less 1."""
        return float(self.measured[self.rank.argmin()] / self.measured.min() - 1)


def predictions(framework: str | None = None) -> list[tuple[LedgerRow, RowResult]]:
    """Each run of the sweep that did not stall, with its prediction."""
    rows = [row for row in read_ledger(Path(str(LEDGER))) if not row.stalled]
    named = None if framework is None else framework_named(framework)
    found = evaluate(compile_cases(rows, framework=named, closed_form=True, compiles=False))
    return [(row, each) for row, each in zip(rows, found, strict=True) if each.is_predicted]


def groups(found: list[tuple[LedgerRow, RowResult]]) -> Iterator[Ranked]:
    """Yield the models and numbers of devices of at least `LEAST` layouts."""

    def key(pair: tuple[LedgerRow, RowResult]) -> tuple[int, int]:
        return pair[0].model.layers or 0, pair[0].device_count

    for (layers, devices), members in groupby(sorted(found, key=key), key=key):
        rows = tuple(members)
        if len(rows) >= LEAST:
            yield Ranked(layers=layers, device_count=devices, rows=rows)


def by_axis(found: list[tuple[LedgerRow, RowResult]]) -> Iterator[str]:
    """Yield a line for each axis: the median of predicted over measured, by its values."""
    for name, value in AXES.items():
        ratios: dict[int, list[float]] = defaultdict(list)
        for row, each in found:
            ratios[value(row)].append((each.error or 0.0) + 1)
        cells = (f"{key}: {np.median(v):.2f} ({len(v)})" for key, v in sorted(ratios.items()))
        yield f"{name:13}{', '.join(cells)}"


def _microbatches(row: LedgerRow) -> int:
    return round((row.work.per_device_batch or 0) / (row.work.microbatch or 1))


AXES = {
    "layers": lambda row: row.model.layers,
    "devices": lambda row: row.device_count,
    "data": lambda row: row.spread.data,
    "tensor": lambda row: row.spread.tensor,
    "pipeline": lambda row: row.spread.pipeline,
    "ZeRO": lambda row: row.spread.zero_stage,
    "microbatch": lambda row: row.work.microbatch,
    "microbatches": _microbatches,
}
"""What the runs of the sweep differ in, by rows."""


def left_out(axis: str) -> Iterator[str]:
    """Yield a line for each value of an axis of `AXES`: errors of its rows, by what is fitted to
    all others as `experiments/left_out/fit.py` fits them; and one of all these errors."""
    fit = runpy.run_path(str(Path(__file__).parents[1] / "left_out" / "fit.py"))
    rows = [row for row in read_ledger(Path(str(LEDGER))) if not row.stalled and _mfu(row) >= 5]
    cases = compile_cases(rows, closed_form=True, compiles=False)
    settings = fit["settings_of"]([case for case in cases if isinstance(case, CompiledCase)])
    values = np.array([AXES[axis](each.case.row) for each in settings])
    used = np.array([_mfu(each.case.row) for each in settings])
    errors = np.zeros(len(settings))
    for value in np.unique(values):
        rest = [each for each, of in zip(settings, values, strict=True) if of != value]
        rates = fit["fit"](fit["spaced"](rest))
        held = [each for each, of in zip(settings, values, strict=True) if of == value]
        errors[values == value] = np.abs(np.expm1(fit["log_errors"](held, rates)))
        yield f"{axis} {value}: {_by_use(errors[values == value], used[values == value])}"
    yield f"all: {_by_use(errors, used)}"


def _by_use(errors: np.ndarray, mfu_percent: np.ndarray) -> str:
    """Median errors of runs by their use of the device's FLOP."""
    parts = (
        f"{np.median(errors[chosen]):.1%} where MFU is {name} ({chosen.sum()})"
        for name, chosen in (("above 10 %", mfu_percent > 10), ("5 to 10 %", mfu_percent <= 10))
        if chosen.any()
    )
    return ", ".join(parts)


def _mfu(row: LedgerRow) -> float:
    """Percent of peak FLOP/s that a run printed."""
    return float((row.notes or "").split("MFU ")[1].split(" ")[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--axes", action="store_true", help="print the error by each axis")
    parser.add_argument("--framework", help="predict with this framework instead of nanotron")
    parser.add_argument("--left-out", choices=AXES, help="fit without each value of this")
    arguments = parser.parse_args()
    if arguments.left_out:
        print(*left_out(arguments.left_out), sep="\n")
        return
    found = predictions(arguments.framework)
    ranked = list(groups(found))
    print("| layers | devices | layouts | rank correlation | regret | best measured | predicted |")
    print("|---|---|---|---|---|---|---|")
    for each in ranked:
        best, taken = (each.rows[int(of.argmin())][0] for of in (each.measured, each.rank))
        print(
            f"| {each.layers} | {each.device_count} | {len(each.rows)} | {each.correlation:.2f} "
            f"| {each.regret:.1%} | {_layout(best)} | {_layout(taken)} |"
        )
    correlations = [each.correlation for each in ranked]
    regrets = [each.regret for each in ranked]
    errors = np.array([abs(each.error or 0.0) for _, each in found])
    print(f"{len(found)} runs: median error of the step {np.median(errors):.1%}")
    used = np.array([_mfu(row) for row, _ in found])
    print(_by_use(errors[used >= 5], used[used >= 5]))
    print(
        f"{len(ranked)} groups: median rank correlation {np.median(correlations):.2f}; regret "
        f"{np.median(regrets):.1%} in the median, {np.percentile(regrets, 90):.1%} at p90"
    )
    if arguments.axes:
        print("predicted over measured, median (runs):", *by_axis(found), sep="\n")


def _layout(row: LedgerRow) -> str:
    spread = row.spread
    zero = f" Z{spread.zero_stage}" if spread.zero_stage else ""
    return f"d{spread.data} t{spread.tensor} p{spread.pipeline} mb{row.work.microbatch}{zero}"


if __name__ == "__main__":
    main()
