"""Fit the constants of chips to published step times, and test them on rows left out.

Run from the root of the repository, with the open ledger beside it:
    python experiments/chip_constants/fit.py [FIT ...]

One set of constants for each chip, whatever the network, framework or paper; what is free, and
which rows it is fitted to, is in `fits.py`: the fastest framework of each setting, and for chips
on which several frameworks were measured, how the step of each scales. Prints the constants, how
far off the fitted rows are, and how far off each fifth of them is when it was left out of the
fit. The figures go into `scalejax/hardware/chips/` by hand, where their sources name this script.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from fits import FITS, Fit, group
from scipy.optimize import least_squares

from scalejax.hardware import NO_SITE, Chip
from scalejax.simulator.program import Program
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import WhatIf
from scalejax.simulator.uncertainty import Z_OF_P90
from scalejax.validation import CompiledCase, RowResult, compile_cases, read_ledger
from scalejax.validation.ledger import LedgerRow
from scalejax.validation.summary import scaling_pairs

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
FOLDS = 5
_UNKNOWN = RowResult(
    case_id="",
    series="",
    device_count=1,
    measured_seconds=1.0,
    predicted_seconds=1.0,
    p10_seconds=None,
    p90_seconds=None,
    status="ok",
)


def main(names: Sequence[str]) -> int:
    """Fit what `names` name, or everything."""
    if not LEDGER.is_file():
        print(f"{LEDGER} is not there: the published step times are not part of the repository.")
        return 1
    rows = read_ledger(LEDGER)
    for name in names or FITS:
        wanted = FITS[name]
        every = cases_of(wanted, rows)
        print(f"{name}: {len(fastest(every))} of {len(every)} rows, the fastest of each setting")
        fitted = fit(wanted, every)
        for constant, value in zip(wanted.free, fitted, strict=True):
            print(f"  {constant:28} {value:.4g}")
        logs = errors(wanted, every, fitted)
        show_errors("fitted", logs, every)
        show_errors("left out", left_out_errors(wanted, every), every)
        low, high = np.quantile(logs, (0.1, 0.9))
        print(
            f"  all rows: {(high - low) / 2 / Z_OF_P90:.3f} as a log standard deviation (p10..p90)"
        )
    return 0


def cases_of(wanted: Fit, rows: Sequence[LedgerRow]) -> list[CompiledCase]:
    """The rows that `wanted` is fitted to, with program and cluster.

    Pipelines are left out: a bubble has no constant, and so they tell whether it is right.
    """
    rows = [
        row
        for row in rows
        if row.family in wanted.families
        and row.device_count <= wanted.most_devices
        and (row.spread.pipeline or 1) == 1
    ]
    return [
        case
        for case in compile_cases(rows)
        if isinstance(case, CompiledCase)
        and case.cluster.chip.name in wanted.chips
        and case.row.step_seconds is not None
    ]


def fastest(cases: Sequence[CompiledCase]) -> list[int]:
    """Where the fastest row of each setting is: what frameworks add of their own is no chip's
    constant."""
    best: dict[tuple, int] = {}
    for index, case in enumerate(cases):
        row = case.row
        setting = (row.model, row.machine.hardware, row.device_count, row.work)
        known = best.get(setting)
        if known is None or measured_seconds(case) < measured_seconds(cases[known]):
            best[setting] = index
    return list(best.values())


def series(cases: Sequence[CompiledCase]) -> tuple[list[int], list[int]]:
    """Where the rows are that scale a step, and for each the one on fewest devices of its series.

    A series is one framework's, and so free of what it makes of one device.
    """
    named = [(case.row, replace(_UNKNOWN, case_id=str(i))) for i, case in enumerate(cases)]
    pairs = scaling_pairs(named)
    return [int(large.case_id) for large, _ in pairs], [int(small.case_id) for _, small in pairs]


def measured_seconds(case: CompiledCase) -> float:
    """The published time of a step; `cases_of` keeps no row without one."""
    return case.row.step_seconds or math.nan


def fit(wanted: Fit, cases: Sequence[CompiledCase]) -> np.ndarray:
    """The free constants, shape (constants,), that bring predictions nearest to `cases`.

    Nearest in the time of the fastest row of each setting, and where `wanted` says so in how every
    series scales, each error in units of what is typical of its kind. Rows of one family share
    their errors, so that together they count as the root of their number.
    """
    low, high = np.array(list(wanted.free.values())).T
    start = low + 0.5 * (high - low)
    best = fastest(cases)
    large, small = series(cases)
    of_best = _weights(cases, best) / wanted.typical_error
    of_large = _weights(cases, large) / (wanted.typical_scaling_error or math.inf)

    def residuals(values: np.ndarray) -> np.ndarray:
        logs = errors(wanted, cases, values)
        return np.concatenate((of_best * logs[best], of_large * (logs[large] - logs[small])))

    solution = least_squares(
        residuals,
        start,
        bounds=(low, high),
        x_scale=high - low,
        diff_step=1e-3,
        loss="soft_l1",
    )
    return solution.x


def _weights(cases: Sequence[CompiledCase], chosen: Sequence[int]) -> np.ndarray:
    """What each of the `chosen` counts for, shape (chosen,)."""
    families = [cases[index].row.family for index in chosen]
    members = Counter(families)
    return np.array([members[family] ** -0.25 for family in families])


def errors(wanted: Fit, cases: Sequence[CompiledCase], values: np.ndarray) -> np.ndarray:
    """log(predicted / measured) of each case with these constants, shape (cases,)."""
    constants = dict(zip(wanted.free, values.tolist(), strict=True))
    chips: dict[int, Chip] = {}

    def changed(chip: Chip) -> Chip:
        if id(chip) not in chips:
            chips[id(chip)] = replace(chip, attainable=replace(chip.attainable, **constants))
        return chips[id(chip)]

    known: dict[tuple[int, int], float] = {}  # frameworks were measured on the same
    for case in cases:
        key = id(case.program), id(case.cluster)
        if key not in known:
            cluster = replace(case.cluster, chip=changed(case.cluster.chip))
            times = what_if(case.program).timeline(cluster)
            terms = step_terms(case.program, cluster, NO_SITE, times.step_seconds)
            known[key] = times.step_seconds + (terms.stragglers_seconds or 0.0)
    seconds = [known[id(case.program), id(case.cluster)] for case in cases]
    measured = [measured_seconds(case) for case in cases]
    return np.log(np.array(seconds) / np.array(measured))


def left_out_errors(wanted: Fit, cases: Sequence[CompiledCase]) -> np.ndarray:
    """The same, each fifth of the settings by constants fitted to the others, shape (cases,).

    Rows of a network that differ in the number of devices alone are in one fifth.
    """
    fold_of = {each: i % FOLDS for i, each in enumerate(sorted({group(c.row) for c in cases}))}
    folds = np.array([fold_of[group(case.row)] for case in cases])
    result = np.empty(len(cases))
    for fold in range(FOLDS):
        others = [case for case, its in zip(cases, folds, strict=True) if its != fold]
        held = [case for case, its in zip(cases, folds, strict=True) if its == fold]
        result[folds == fold] = errors(wanted, held, fit(wanted, others))
    return result


_READY: dict[int, WhatIf] = {}


def what_if(program: Program) -> WhatIf:
    """The program, read once for all fits."""
    if id(program) not in _READY:
        _READY[id(program)] = WhatIf(program)
    return _READY[id(program)]


def show_errors(title: str, logs: np.ndarray, cases: Sequence[CompiledCase]) -> None:
    """Print the spread of the errors, and that of each setting's fastest row."""
    best, (large, small) = fastest(cases), series(cases)
    sizes = np.abs(np.expm1(logs[best]))
    ratios = np.abs(np.expm1(logs[large] - logs[small])) if large else np.full(1, np.nan)
    print(
        f"  {title}: median {np.median(sizes):.1%}, mean {np.mean(sizes):.1%}, log standard "
        f"deviation {np.std(logs[best]):.3f}; scaling ratios: median {np.median(ratios):.1%}, "
        f"p90 {np.quantile(ratios, 0.9):.1%} of {len(large)}"
    )
    for index in sorted(best, key=lambda each: cases[each].row.case_id):
        case = cases[index]
        row = case.row
        print(
            f"    {row.model.model:14} {row.work.precision} {row.work.per_device_batch!s:>5} "
            f"{row.device_count:4} {case.cluster.chip.name:14} "
            f"{measured_seconds(case) * 1e3:9.1f} ms {math.expm1(logs[index]):+7.1%}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
