"""Predicted beside published peak memory of Llama 3.1 trained by torchtitan.

    python experiments/published_memory/compare.py

Reads `../shared/ledger/step_times.csv` beside this checkout for what was run. Programs come from
the archive of `scalejax.validation`; nothing is compiled.

What was published is what PyTorch's allocator had reserved, and so holds what lay free between
its blocks, which no program tells. How much that is in proportion is taken from the runs of the
other network, so that no row has a part in its own prediction.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scalejax.units import GIB
from scalejax.validation import LedgerRow, Skipped, compile_cases, read_ledger

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
PUBLISHED_GIB = {
    # pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bfdb7: tables 1 to 4
    ("titan_llama8b_eager", 8): 82.4,
    ("titan_llama8b_torch.compile", 8): 77.0,
    ("titan_llama8b_torch.compile_Float8", 8): 76.8,
    ("titan_llama8b_eager", 128): 67.0,
    ("titan_llama8b_torch.compile", 128): 62.0,
    ("titan_llama8b_torch.compile_Float8", 128): 61.8,
    ("titan_llama8b_cp", 8): 83.9,
    ("titan_llama70b_2d", 256): 71.9,
    ("titan_llama70b_2d_asynctp", 256): 67.6,
    # the same, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md at 1af29373a0
    ("titan_llama8b_h200", 32): 47.96,
    ("titan_llama8b_h200", 64): 46.97,
}
"""Most memory of a device, by case of the ledger and devices: what PyTorch's allocator had
reserved (max_reserved of torchtitan's metrics), without the driver's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    run: LedgerRow
    """What was run."""
    in_use_gib: float
    """The peak of the compiled step and of what PyTorch holds beyond it, without what the chip's
    runtime takes."""
    published_gib: float
    """What was published."""

    @property
    def network(self) -> tuple[int | None, int | None]:
        """Layers and width, which tell the networks apart."""
        return self.run.model.layers, self.run.model.hidden

    @property
    def in_use_error(self) -> float:
        """(in use - published) / published."""
        return self.in_use_gib / self.published_gib - 1

    @property
    def reserved_over_used(self) -> float:
        """What was reserved, over what is predicted to be in use."""
        return self.published_gib / self.in_use_gib


def reserved_gib(row: Row, rows: Sequence[Row]) -> float:
    """What the allocator is predicted to have reserved for `row`, as for the other networks."""
    return row.in_use_gib * median(
        other.reserved_over_used for other in rows if other.network != row.network
    )


def compared() -> Iterator[Row]:
    """Every row whose memory was published."""
    runs = [run for run in read_ledger(LEDGER) if (run.case_id, run.device_count) in PUBLISHED_GIB]
    for case in compile_cases(runs, compiles=False):
        if not isinstance(case, Skipped):
            yield Row(
                run=case.row,
                in_use_gib=case.program.memory.peak_bytes / GIB,
                published_gib=PUBLISHED_GIB[case.row.case_id, case.row.device_count],
            )


def main() -> None:
    """Print one Markdown row for each run."""
    if not LEDGER.exists():
        sys.exit(f"{LEDGER} is not there; it says what was run.")
    rows = list(compared())
    print(
        "| run | devices | recompute | published GiB | in use GiB | error | reserved GiB | error |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        reserved = reserved_gib(row, rows)
        print(
            f"| {row.run.case_id} | {row.run.device_count} | {row.run.work.recompute} | "
            f"{row.published_gib:.1f} | {row.in_use_gib:.1f} | {row.in_use_error:+.1%} | "
            f"{reserved:.1f} | {reserved / row.published_gib - 1:+.1%} |"
        )
    print("\nreserved over in use, in the median of a network's runs:")
    for layers, hidden in sorted({row.network for row in rows}, key=str):
        found = [row.reserved_over_used for row in rows if row.network == (layers, hidden)]
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{layers} layers of {hidden}: {median(found):.3f}, {spread} ({len(found)} runs)")


if __name__ == "__main__":
    main()
