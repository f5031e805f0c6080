"""Our errors on published steps beside those that other simulators of training reach.

Run from the root of the repository, with the open ledger beside it:
    python experiments/peers/compare.py [--rows]

Predicts what is archived, in seconds. Of the peers only means are known, so that rows are held
against those: `nearer` is the share of rows that are closer to what was measured than the peer is
on average. With --rows also prints each row.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from scalejax.validation import LedgerRow, RowResult, compile_cases, read_ledger, validation

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What one simulator reaches on some rows of the ledger."""

    name: str
    """The simulator."""
    rows: str
    """What it predicted."""
    mean_error: tuple[float, float]
    """Mean absolute error of the step time, from lowest to highest that is known."""
    is_among: Callable[[LedgerRow], bool]
    """Whether a row of the ledger is one of them."""


def _of_family(name: str) -> Callable[[LedgerRow], bool]:
    return lambda row: row.family == name


def _of_series(start: str) -> Callable[[LedgerRow], bool]:
    return lambda row: row.series.startswith(start)


# Calculon at commit caa4b11 was run on rows of the ledger; vTrain reports its own, with every layer
# profiled on an A100 (Bang et al. 2024, MICRO, and VIA-Research/vTrain).
PEERS = (
    Peer(
        name="vTrain",
        rows="vTrain, several nodes",
        mean_error=(0.147, 0.147),
        is_among=_of_family("vtrain_multi"),
    ),
    Peer(
        name="Calculon",
        rows="vTrain, several nodes",
        mean_error=(0.15, 0.15),
        is_among=_of_family("vtrain_multi"),
    ),
    Peer(
        name="vTrain",
        rows="vTrain, one node",
        mean_error=(0.084, 0.084),
        is_among=_of_family("vtrain_single"),
    ),
    Peer(
        name="Calculon",
        rows="vTrain, one node",
        mean_error=(0.39, 0.39),
        is_among=_of_family("vtrain_single"),
    ),
    Peer(
        name="Calculon",
        rows="Megatron-LM 2021, A100",
        mean_error=(0.15, 0.15),
        is_among=_of_series("megatron_sc21"),
    ),
    Peer(
        name="Calculon",
        rows="BLOOM's trials",
        mean_error=(0.33, 0.33),
        is_among=_of_family("bloom"),
    ),
    Peer(
        name="Calculon",
        rows="MPT with FSDP",
        mean_error=(0.20, 0.50),
        is_among=_of_family("llm_foundry"),
    ),
    Peer(
        name="Calculon",
        rows="Megatron-Core, H100",
        mean_error=(0.35, 0.65),
        is_among=_of_series("megatron_core_h100"),
    ),
)


def main() -> None:
    """Print one line for each peer on each family."""
    if not LEDGER.is_file():
        print(f"{LEDGER} is not there: the published step times are not part of the repository.")
        return
    rows = read_ledger(LEDGER)
    results = validation(LEDGER.name, compile_cases(rows, compiles=False)).rows
    print("| rows | number | ours, mean | median | peer | its mean | nearer |")
    print("|---|---|---|---|---|---|---|")
    for peer in PEERS:
        print(_line(peer, rows, results))
    if "--rows" in sys.argv[1:]:
        _print_rows(rows, results)


def _line(peer: Peer, rows: Sequence[LedgerRow], results: Sequence[RowResult]) -> str:
    sizes = [
        abs(result.error)
        for row, result in zip(rows, results, strict=True)
        if result.error is not None and peer.is_among(row)
    ]
    low, high = peer.mean_error
    known = f"{low:.1%}" if low == high else f"{low:.0%} to {high:.0%}"
    nearer = fmean(size < low for size in sizes)
    return (
        f"| {peer.rows} | {len(sizes)} | {fmean(sizes):.1%} | {median(sizes):.1%} "
        f"| {peer.name} | {known} | {nearer:.0%} |"
    )


def _print_rows(rows: Sequence[LedgerRow], results: Sequence[RowResult]) -> None:
    for row, result in zip(rows, results, strict=True):
        if result.error is not None and any(peer.is_among(row) for peer in PEERS):
            print(
                f"{row.case_id:34} {row.device_count:5} {result.measured_seconds:9.3f} s "
                f"{result.error:+7.1%}"
            )


if __name__ == "__main__":
    main()
