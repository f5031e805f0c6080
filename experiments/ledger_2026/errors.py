"""How far the public predictions of the ledgers of 2025 and 2026 are off, by kind and chip.

    python experiments/ledger_2026/errors.py

Prints, of the rows that state their layout and did not stall, the mean and the median error of
the step time by kind, ledger, framework and chip; and those of the groups that people ask for.
Nothing is compiled: steps are those of kept programs, or in closed form. Two minutes.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from scalejax.validation import RowResult, validate

LEDGERS = (
    "step_times_added",
    "megatron_bridge",
    "dgxc_benchmarking",
    "automodel_and_rl",
    "moe_multinode",
    "mlperf_v4.1",
    "mlperf_v5.1",
    "tpu_and_jax",
    "simumax_b200",
    "misc_llm",
    "ultrascale_measured",
)
NVIDIA = ("megatron_bridge", "dgxc_benchmarking")
EXPERTS = ("megatron_bridge", "moe_multinode", "automodel_and_rl")


def _nvidia_dense(chip: str) -> Callable[[RowResult], bool]:
    """Whether a row is one that NVIDIA published of a dense network on a chip."""
    return lambda row: row.kind == "dense" and row.ledger in NVIDIA and row.chip == chip


GROUPS: dict[str, Callable[[RowResult], bool]] = {
    "NVIDIA's dense rows, H100": _nvidia_dense("h100"),
    "NVIDIA's dense rows, B200": _nvidia_dense("b200"),
    "NVIDIA's dense rows, GB200": _nvidia_dense("gb200"),
    "experts of Megatron-Bridge, AWS and AutoModel": (
        lambda row: row.kind == "expert" and row.ledger in EXPERTS
    ),
    "LoRA": lambda row: row.kind == "lora",
    "MaxText on TPUs": lambda row: row.chip.startswith("tpu") and "maxtext" in row.framework,
    "MaxText on GPUs": lambda row: not row.chip.startswith("tpu") and "maxtext" in row.framework,
}


def line(name: str, errors: Sequence[float]) -> str:
    """A row of a table: rows, mean, median and bias of relative errors."""
    sizes = [abs(each) for each in errors]
    mean, median = statistics.mean(sizes), statistics.median(sizes)
    return (
        f"| {name} | {len(errors)} | {mean:.1%} | {median:.1%} | {statistics.mean(errors):+.1%} |"
    )


def main() -> None:
    """Print both tables."""
    found = [
        (row, row.error)
        for row in validate(*LEDGERS).rows
        if row.kind is not None and row.states_layout and row.error is not None
    ]
    by_cell: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, error in found:
        by_cell[str(row.kind), row.ledger, row.framework, row.chip].append(error)
    print("| kind | ledger | framework | chip | rows | mean | median | bias |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for cell, errors in sorted(by_cell.items()):
        print(line(" | ".join(cell), errors))
    print("\n| rows | number | mean | median | bias |")
    print("|---|---:|---:|---:|---:|")
    for name, belongs in GROUPS.items():
        print(line(name, [error for row, error in found if belongs(row)]))


if __name__ == "__main__":
    main()
