"""Memory of frameworks on PyTorch against the peaks that runs printed.

python experiments/framework_memory/compare.py [--fit]

Reads the ledgers that come with scalejax; nothing is compiled. --fit fits nanotron's four constants
anew and leaves out sizes and layouts in turn, in half a minute.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from scalejax.config.run import ResolvedRun
from scalejax.core.units import GIB
from scalejax.hardware import load_chip
from scalejax.simulator.frameworks.memory import (
    MEGATRON_CORE,
    NANOTRON,
    EagerMemory,
    memory_use,
    stage_memories,
)
from scalejax.simulator.memory import memory_verdict
from scalejax.validation.cases import Case, case_of
from scalejax.validation.ledger import LedgerRow, read_ledger

LEDGERS = files("scalejax") / "validation" / "ledgers"
H100 = load_chip("h100")
"""The chip of the sweep of nanotron."""
CONSTANTS = "reserve, GB; fragmentation; spare gathers within a node; over nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run whose source prints its peak."""

    row: LedgerRow
    """The row of the ledger."""
    run: ResolvedRun
    """What ran, without recompute, which none of these sources states."""
    peak_gib: float | None
    """Peak of a device; None of a run that died."""


def measured(name: str, every: int = 1) -> list[Measured]:
    """The runs of a ledger, or one of so many; those marked as stalled, too, as their time alone is
    unexplained."""
    found = []
    for row in read_ledger(Path(str(LEDGERS / f"{name}.csv.xz")))[::every]:
        case = case_of(replace(row, stalled=None))
        if isinstance(case, Case):
            found.append(Measured(row=row, run=case.runs[0], peak_gib=row.peak_memory_gib))
    return found


def errors(held: EagerMemory, runs: list[Measured]) -> np.ndarray:
    """(predicted - measured) / measured of what the allocator reserves, of each run that is
    counted; NaN of others."""
    uses = [memory_use(held, each.run) for each in runs]
    found = [use.reserved.bytes / GIB if use and use.reserved else np.nan for use in uses]
    return np.array(found) / np.array([each.peak_gib for each in runs]) - 1


def fits(held: EagerMemory, each: Measured) -> bool:
    """Whether a run is said to fit into an H100, the runtime's reserve counted."""
    use = memory_use(held, each.run)
    return use is None or memory_verdict(use, H100).fits


def state_exceeds(held: EagerMemory, each: Measured) -> bool:
    """Whether weights, gradients and optimizer state alone are more than an H100 has."""
    return max(stage.state for stage in stage_memories(held, each.run)) > H100.memory_bytes


class Fit:
    """The four constants of nanotron that are fitted, by least mean relative error."""

    def __init__(self, runs: list[Measured]) -> None:
        self.runs, self.peaks = runs, np.array([each.peak_gib or 0.0 for each in runs])
        terms = [(index, *term) for index, each in enumerate(runs) for term in _terms(each.run)]
        self.index = np.array([term[0] for term in terms])
        self.fixed, *self.terms = np.array([term[1:] for term in terms]).T

    def predicted(self, constants: np.ndarray) -> np.ndarray:
        """GiB of each run."""
        reserve, *shares = constants
        stages = self.fixed + reserve * 1e9
        for share, term in zip(shares, self.terms, strict=True):
            stages = stages + share * term
        most = np.zeros(len(self.runs))
        np.maximum.at(most, self.index, stages)
        return most / GIB

    def error(self, constants: np.ndarray, of: np.ndarray) -> float:
        """Mean relative error of the runs `of`."""
        if min(constants) < 0:
            return np.inf
        return float(np.mean(np.abs(self.predicted(constants) / self.peaks - 1)[of]))

    def fitted(self, of: np.ndarray) -> np.ndarray:
        """Constants of the runs `of`."""
        start = np.array([0.2, 0.2, 0.3, 0.1])
        options = {"maxiter": 800, "xatol": 1e-4, "fatol": 1e-6}
        return minimize(self.error, start, args=(of,), method="Nelder-Mead", options=options).x

    def left_out(self, key: Callable[[ResolvedRun], int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (value, runs, measured over predicted) of the runs of each value of `key`, with
        the constants of the others."""
        values = np.array([key(each.run) for each in self.runs])
        for value in np.unique(values):
            out = values == value
            predicted = self.predicted(self.fitted(~out))
            yield int(value), int(out.sum()), (self.peaks / predicted)[out]


def _terms(run: ResolvedRun) -> Iterator[tuple[float, float, float, float]]:
    """(bytes in use, what fragmentation, and either share of gathers, multiply) of each stage."""
    many, is_wide = 1 - 1 / run.split.microbatches, run.layout.tensor > 8
    bare = replace(NANOTRON, reserve_bytes=0)
    for stage in stage_memories(bare, run):
        gathered = many * stage.gathered
        within, over = (0.0, gathered) if is_wide else (gathered, 0.0)
        yield stage.state + stage.activations, many * stage.activations, within, over


def _summary(found: np.ndarray) -> str:
    low, high = np.percentile(1 / (1 + found), (10, 90))
    return (
        f"mean error {np.mean(np.abs(found)):.1%}, median {np.median(np.abs(found)):.1%}, "
        f"bias {np.mean(found):+.1%}; measured over predicted {low:.2f} to {high:.2f} (p10, p90)"
    )


def main() -> None:
    """Print the errors, and with --fit the constants and what is left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true", help="fit nanotron's constants anew")
    arguments = parser.parse_args()
    nanotron, megatron = measured("ultrascale_measured"), measured("simumax_b200")
    print(f"nanotron, {len(nanotron)} runs: {_summary(errors(NANOTRON, nanotron))}")
    for title, key in (("hidden", _hidden), ("pipeline", _stages), ("tensor", _tensor)):
        values = np.array([key(each.run) for each in nanotron])
        found = np.abs(errors(NANOTRON, nanotron))
        cells = (f"{value}: {found[values == value].mean():.1%}" for value in np.unique(values))
        print(f"  by {title}: {', '.join(cells)}")
    wrong = sum(not fits(NANOTRON, each) for each in nanotron)
    died = measured("ultrascale_crashed_or_oom")
    exceeding = [each for each in died if state_exceeds(NANOTRON, each)]
    said = sum(fits(NANOTRON, each) for each in exceeding)
    print(f"  of {len(nanotron)} that ran, {wrong} are said not to fit")
    refused = sum(not fits(NANOTRON, each) for each in died)
    print(
        f"  of {len(died)} that died, {refused} are said not to fit; of {len(exceeding)} whose "
        f"state exceeds the chip, {said} are said to"
    )
    print(f"Megatron-Core, {len(megatron)} runs: {_summary(errors(MEGATRON_CORE, megatron))}")
    for each, error in zip(megatron, errors(MEGATRON_CORE, megatron), strict=True):
        if each.row.case_id.endswith("mbc4_cef"):
            print(f"  {each.row.case_id}: {each.peak_gib} GiB, {error:+.1%}")
    if not arguments.fit:
        return
    fit = Fit(nanotron)
    all_runs = np.ones(len(nanotron), bool)
    constants = fit.fitted(all_runs)
    print(f"fitted to all ({CONSTANTS}): {np.round(constants, 3)}")
    print(f"  mean error {fit.error(constants, all_runs):.1%}")
    for title, key in (("hidden", _hidden), ("pipeline", _stages), ("tensor", _tensor)):
        parts = list(fit.left_out(key))
        ratios = np.concatenate([each for *_, each in parts])
        low, high = np.percentile(ratios, (10, 90))
        cells = (f"{value}: {np.mean(np.abs(1 / each - 1)):.1%}" for value, _, each in parts)
        inside = np.mean((ratios > NANOTRON.band[0]) & (ratios < NANOTRON.band[1]))
        print(
            f"left out by {title}: {np.mean(np.abs(1 / ratios - 1)):.1%} of all "
            f"({', '.join(cells)}); measured over predicted {low:.2f} to {high:.2f} (p10, p90); "
            f"{inside:.0%} in the band"
        )


def _hidden(run: ResolvedRun) -> int:
    return getattr(run.config.model, "hidden", 0)


def _stages(run: ResolvedRun) -> int:
    return run.layout.pipeline


def _tensor(run: ResolvedRun) -> int:
    return run.layout.tensor


if __name__ == "__main__":
    main()
