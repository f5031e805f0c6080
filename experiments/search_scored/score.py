"""How well predicted step times rank the layouts that were measured.

python experiments/search_scored/score.py [--axes] [--host] [--framework NAME]

Predicts nanotron's sweep, which comes with scalejax, as `scalejax validate --closed-form` does;
runs that stalled are left out. Layouts whose allocator would reserve nearly all of a device come
last: they free and allocate again in every microbatch. --axes prints the error by each axis of the
layout; --host fits the time that the host takes for a layer and microbatch, which predictions lack,
and ranks by the longer of the two, with each size left out of the fit.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.stats import rankdata

from scalejax.config.parallelism import balanced_layers
from scalejax.hardware import load_chip
from scalejax.simulator.frameworks import framework_named
from scalejax.validation.evaluation import compile_cases, evaluate
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.summary import RowResult

LEDGER = files("scalejax") / "validation" / "ledgers" / "ultrascale_measured.csv.xz"
LEAST = 8  # layouts of a model on so many devices, to be ranked
SHORT = 0.92
"""Share of a device's memory beyond which what is reserved leaves no room for the libraries:
context and communicators take 5 to 8 % of an H100."""
H100 = load_chip("h100")
NODE, VOCABULARY = 8, 131072
"""Devices of a node, and words, of the sweep."""


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

    axes = {
        "layers": lambda row: row.model.layers,
        "devices": lambda row: row.device_count,
        "data": lambda row: row.spread.data,
        "tensor": lambda row: row.spread.tensor,
        "pipeline": lambda row: row.spread.pipeline,
        "ZeRO": lambda row: row.spread.zero_stage,
        "microbatch": lambda row: row.work.microbatch,
        "microbatches": _microbatches,
    }
    for name, value in axes.items():
        ratios: dict[int, list[float]] = defaultdict(list)
        for row, each in found:
            ratios[value(row)].append((each.error or 0.0) + 1)
        cells = (f"{key}: {np.median(v):.2f} ({len(v)})" for key, v in sorted(ratios.items()))
        yield f"{name:13}{', '.join(cells)}"


def _microbatches(row: LedgerRow) -> int:
    return round((row.work.per_device_batch or 0) / (row.work.microbatch or 1))


def host_terms(row: LedgerRow) -> tuple[float, float, float]:
    """What multiplies the seconds of the host for a layer and microbatch of the longest stage: of
    every run, for each device along tensor of a pipeline over nodes, and for each along tensor
    over nodes."""
    stages, tensor = row.spread.pipeline or 1, row.spread.tensor or 1
    model = row.model
    layers, hidden = model.layers or 0, model.hidden or 0
    weights = 4 * hidden**2 + 3 * hidden * (model.ffn_hidden or 0)
    longest = max(balanced_layers(layers, stages, weights, VOCABULARY * hidden))
    passes = (_microbatches(row) + stages - 1) * longest
    is_wide = stages > 1 and row.device_count > NODE
    return passes, passes * tensor * is_wide, passes * tensor * (tensor > NODE)


def with_host(found: list[tuple[LedgerRow, RowResult]]) -> list[tuple[LedgerRow, RowResult]]:
    """Predictions no shorter than the host takes, by a fit that leaves out each size of model."""
    terms = np.array([host_terms(row) for row, _ in found])
    predicted = np.array([each.predicted_seconds for _, each in found])
    measured = np.array([row.step_seconds for row, _ in found])
    layers = np.array([row.model.layers for row, _ in found])

    def seconds(constants: np.ndarray) -> np.ndarray:
        return np.maximum(predicted, terms @ constants)

    def fitted(of: np.ndarray) -> np.ndarray:
        def error(constants: np.ndarray) -> float:
            if min(constants) < 0:
                return np.inf
            return float(np.mean(np.abs(np.log(seconds(constants) / measured))[of]))

        start = np.array([4e-3, 2e-3, 2e-4])
        return minimize(error, start, method="Nelder-Mead").x

    print(f"ms of the host, fitted to all: {np.round(1e3 * fitted(layers > 0), 2)}")
    longer = predicted.copy()
    for size in np.unique(layers):
        out = layers == size
        longer[out] = seconds(fitted(~out))[out]
    return [
        (row, replace(each, predicted_seconds=float(value)))
        for (row, each), value in zip(found, longer, strict=True)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--axes", action="store_true", help="print the error by each axis")
    parser.add_argument("--framework", help="predict with this framework instead of nanotron")
    parser.add_argument("--host", action="store_true", help="rank with the time of the host")
    arguments = parser.parse_args()
    found = predictions(arguments.framework)
    if arguments.host:
        found = with_host(found)
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
    errors = [abs(each.error) for _, each in found if each.error is not None]
    print(f"{len(found)} runs: median error of the step {np.median(errors):.1%}")
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
