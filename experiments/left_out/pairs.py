"""Which dispatcher wins, and whether overlap helps: signs of pairs of published steps.

Run from the root of the repository:
    python experiments/left_out/pairs.py [--fit]

A pair are two rows of `moe_multinode` that differ in the dispatcher alone, or in overlap of the
all-to-alls alone, and by more than 10 % in the measured step. Printed are the share of pairs that
are predicted to go the same way, and the errors of the steps, with the constants that ship and
with those fitted to the other chip alone. `--fit` prints seconds of a message of DeepEP over EFA
by library and chip, fitted to steps in microbatches of 4, with errors of those of 1, left out.
"""

import argparse
import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import fit
import numpy as np

from scalejax.hardware import DispatchLibrary
from scalejax.simulator.frameworks import FRAMEWORKS
from scalejax.simulator.frameworks.software import Rates
from scalejax.validation import CompiledCase, compile_cases, read_ledger

LEDGER = "moe_multinode"
LEAST_RATIO = 1.1
"""Ratio of two measured steps from which on their order counts."""
_NAME = re.compile(r"(nccl_alltoall|deepep_uccl|deepep_nvshmem)_(ep\d+_pp\d+_mb(\d))_ovl(on|off)")
GRID = np.geomspace(0.1e-6, 6e-6, 60)


def read_cases() -> list[CompiledCase]:
    """AWS's runs, each with its program."""
    rows = read_ledger(fit.LEDGERS / f"{LEDGER}.csv.xz")
    rows = [row for row in rows if row.step_seconds and _NAME.search(row.case_id)]
    found = compile_cases(rows, compiles=False, closed_form=True)
    return [case for case in found if isinstance(case, CompiledCase)]


def name_parts(case: CompiledCase) -> tuple[str, str, str, str]:
    """(dispatcher, network and layout, microbatch, overlap) of a run."""
    found = _NAME.search(case.row.case_id)
    assert found is not None  # noqa: S101  as read
    rest = case.row.case_id[: found.start()] + found[2]
    return found[1], rest, found[3], found[4]


def pairs(cases: Sequence[CompiledCase]) -> dict[str, list[tuple[CompiledCase, CompiledCase]]]:
    """Pairs that differ in one thing alone, and by more than 10 %."""
    found: dict[str, list[tuple[CompiledCase, CompiledCase]]] = {"dispatcher": [], "overlap": []}
    for one, other in itertools.combinations(cases, 2):
        first, second = name_parts(one), name_parts(other)
        if first[1] != second[1]:
            continue
        ratio = measured(one) / measured(other)
        if max(ratio, 1 / ratio) <= LEAST_RATIO:
            continue
        if first[3] == second[3] and first[0] != second[0]:
            found["dispatcher"].append((one, other))
        elif first[0] == second[0]:
            found["overlap"].append((one, other))
    return found


def measured(case: CompiledCase) -> float:
    """Seconds of the published step."""
    return case.row.step_seconds or math.nan


def predicted(case: CompiledCase, rates: Rates) -> float:
    """Seconds of the step with these rates of the framework."""
    return fit.seconds(fit.Setting(case, measured(case)), rates)


def show(title: str, cases: Sequence[CompiledCase], seconds: Mapping[str, float]) -> None:
    """Print shares of pairs that go the same way, and errors by chip."""
    print(title)
    for what, found in pairs(cases).items():
        right = [
            (seconds[one.row.case_id] < seconds[other.row.case_id])
            == (measured(one) < measured(other))
            for one, other in found
        ]
        print(f"  {what}: {sum(right)} of {len(right)} pairs go the right way")
    for chip in sorted({case.cluster.chip.name for case in cases}):
        sizes = [
            abs(seconds[case.row.case_id] / measured(case) - 1)
            for case in cases
            if case.cluster.chip.name == chip
        ]
        print(
            f"  {chip}: {len(sizes)} steps, mean {np.mean(sizes):.1%} median {np.median(sizes):.1%}"
        )


def with_messages(case: CompiledCase, seconds: float) -> CompiledCase:
    """`case` whose library takes that long for a message, on any chip."""
    library = case.cluster.dispatch
    assert library is not None  # noqa: S101  of DeepEP
    chips = {name: replace(each, message_seconds=seconds) for name, each in library.chips.items()}
    rates = replace(library.rates, message_seconds=seconds)
    changed: DispatchLibrary = replace(library, rates=rates, chips=chips)
    return replace(case, cluster=replace(case.cluster, dispatch=changed))


def fitted_messages(cases: Sequence[CompiledCase], rates: Mapping[str, Rates]) -> None:
    """Print seconds of a message by library and chip, and errors of what was fitted and not."""
    groups: dict[tuple[str, str], list[CompiledCase]] = {}
    for case in cases:
        if case.cluster.dispatch is not None:
            groups.setdefault((case.cluster.dispatch.name, case.cluster.chip.name), []).append(case)
    for (library, chip), members in sorted(groups.items()):

        def misfit(seconds: float, chosen: Sequence[CompiledCase], on: Rates) -> float:
            return float(
                np.mean([
                    abs(math.log(predicted(with_messages(each, seconds), on) / measured(each)))
                    for each in chosen
                ])
            )  # fmt: skip

        large = [each for each in members if name_parts(each)[2] != "1"]
        small = [each for each in members if name_parts(each)[2] == "1"]
        best = min(GRID, key=lambda seconds: misfit(seconds, large, rates[chip]))
        print(
            f"  {library} on {chip}: {best:.2e} s, log error {misfit(best, large, rates[chip]):.3f}"
            f" of {len(large)}, {misfit(best, small, rates[chip]):.3f} of {len(small)} left out"
        )


def main(arguments: Sequence[str]) -> int:
    """Print all of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--fit", action="store_true", help="seconds of a message of DeepEP over EFA"
    )
    asked = parser.parse_args(arguments)
    cases = read_cases()
    software = FRAMEWORKS[cases[0].framework].software
    chips = sorted({case.cluster.chip.name for case in cases})
    shipped = {chip: software.rates_on(chip) for chip in chips}
    if asked.fit:
        fitted_messages(cases, shipped)
        return 0
    show(
        "constants that ship",
        cases,
        {case.row.case_id: predicted(case, shipped[case.cluster.chip.name]) for case in cases},
    )
    left: dict[str, float] = {}
    for chip in chips:
        others = [case for case in cases if case.cluster.chip.name != chip]
        rates = fit.fit_framework(fit.settings_of(others)).pooled
        for case in (each for each in cases if each.cluster.chip.name == chip):
            dispatch = case.cluster.dispatch
            if dispatch is not None:
                other = next(name for name in chips if name != chip)
                case = with_messages(case, dispatch.rates_on(other).message_seconds)
            left[case.row.case_id] = predicted(case, rates)
    show("fitted to the other chip", cases, left)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
