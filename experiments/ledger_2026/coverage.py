"""Which rows of the ledgers of 2025 and 2026 are runs, which are predicted, and how far off.

    python experiments/ledger_2026/coverage.py

Prints, of the rows of each ledger by kind, how many state their layout, how many of these are
runs, and how many are predicted from kept programs or in closed form; why others are no runs;
and errors of the step by kind, ledger, framework and chip. Nothing is compiled.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from scalejax.validation import RowResult, validate
from scalejax.validation.summary import kind_summaries

LEDGERS = (
    "automodel_and_rl",
    "dgxc_benchmarking",
    "megatron_bridge",
    "misc_llm",
    "mlperf_v4.1",
    "mlperf_v5.1",
    "moe_multinode",
    "simumax_b200",
    "step_times_added",
    "tpu_and_jax",
    "trainium",
    "ultrascale_measured",
)
_NVIDIA = ("megatron_bridge", "dgxc_benchmarking")
_EXPERTS = ("megatron_bridge", "moe_multinode", "automodel_and_rl")


def _nvidia_dense(chip: str) -> Callable[[RowResult], bool]:
    """Whether a row is one that NVIDIA published of a dense network on a chip."""
    return lambda row: row.kind == "dense" and row.ledger in _NVIDIA and row.chip == chip


GROUPS: dict[str, Callable[[RowResult], bool]] = {
    "NVIDIA's dense rows, H100": _nvidia_dense("h100"),
    "NVIDIA's dense rows, B200": _nvidia_dense("b200"),
    "NVIDIA's dense rows, GB200": _nvidia_dense("gb200"),
    "experts of Megatron-Bridge, AWS and AutoModel": (
        lambda row: row.kind == "expert" and row.ledger in _EXPERTS
    ),
    "experts of NVIDIA's recipes for NeMo": (
        lambda row: row.kind == "expert" and row.ledger == "dgxc_benchmarking"
    ),
    "LoRA": lambda row: row.kind == "lora",
    "MaxText on TPUs": lambda row: row.framework == "maxtext-2025" and row.chip.startswith("tpu"),
    "MaxText on GPUs": (
        lambda row: row.framework == "maxtext-2025" and not row.chip.startswith("tpu")
    ),
    "nanotron's sweep, H100": lambda row: row.ledger == "ultrascale_measured",
}
"""Rows that people ask for together."""


def by_ledger(results: Iterable[RowResult]) -> dict[str, list[RowResult]]:
    """Step times of each ledger."""
    found: dict[str, list[RowResult]] = defaultdict(list)
    for each in results:
        if each.kind is not None:
            found[each.ledger].append(each)
    return dict(found)


def print_coverage(results: dict[str, list[RowResult]]) -> None:
    """Print how many rows are runs and predicted, and why rows that state their layout are none.

    Args:
        results: those of each ledger.
    """
    print("| ledger | kind | rows | stating | runs | nearest | predicted | of them closed form |")
    print("|---|---|" + "---:|" * 6)
    reasons = []
    for name, rows in results.items():
        for each in kind_summaries(rows):
            if each.stating:
                reasons += [f"`{name}`, {n} {each.kind}: {why}" for why, _, n in each.skipped if n]
                share = f"{each.mapped} ({each.mapped / each.stating:.1%})"
                counts = f"{each.rows} | {each.stating} | {share} | {each.nearest}"
                counts += f" | {each.predicted} | {each.in_closed_form}"
                print(f"| `{name}` | {each.kind} | {counts} |")
    print("\nRows that state their layout and are not predicted:\n")
    for reason in reasons:
        print(f"- {reason}")


def print_errors(results: Iterable[RowResult]) -> None:
    """Print errors of the rows that state their layout and did not stall."""
    found = [(row, row.error) for row in results if row.states_layout and row.error is not None]
    cells: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, error in found:
        cells[str(row.kind), row.ledger, row.framework, row.chip].append(error)
    print("\n| kind | ledger | framework | chip | rows | mean | median | bias |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for cell, errors in sorted(cells.items()):
        print(_line(" | ".join(cell), errors))
    print("\n| rows | number | mean | median | bias |")
    print("|---|---:|---:|---:|---:|")
    for name, belongs in GROUPS.items():
        print(_line(name, [error for row, error in found if belongs(row)]))
    others = [e for row, e in found if not any(belongs(row) for belongs in GROUPS.values())]
    print(_line("all others", others))


def _line(name: str, errors: Sequence[float]) -> str:
    """A row of a table: number, mean, median and bias of relative errors."""
    sizes = [abs(each) for each in errors]
    found = (statistics.mean(sizes), statistics.median(sizes))
    mean, median = (f"{each:.1%}" for each in found)
    return f"| {name} | {len(errors)} | {mean} | {median} | {statistics.mean(errors):+.1%} |"


def main() -> None:
    """Predict all rows, and print what there is to say of them."""
    results = by_ledger(validate(*LEDGERS).rows)
    print_coverage(results)
    print_errors(row for rows in results.values() for row in rows)


if __name__ == "__main__":
    main()
