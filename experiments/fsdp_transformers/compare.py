"""Predicted beside published step times of transformers under FSDP and data parallelism.

Rows of MosaicML's llm-foundry and of PaxML (NVIDIA JAX-Toolbox) in bf16, without pipeline.
With `--fit`, the share of a chip's peak that fused attention reaches is found as well: of all
rows of the chip, the pair of factors for attention and for the other matrix products is taken
that makes the mean absolute logarithm of predicted over measured least. Attention is told from
the rest by the length of the sequence: it is 1 % of the time at 512 tokens, and 95 % at 65,536.
Only the share for attention is of use here; the other factor is printed for comparison.

    python experiments/fsdp_transformers/compare.py [--fit]

Reads `../shared/ledger/step_times.csv` beside this checkout. Programs come from the archive of
`scalejax.validation`; those that are not in it are compiled, about ten seconds each.
"""

import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from scalejax.core.progress import Progress
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.validation import CompiledCase, LedgerRow, Skipped, compile_cases, read_ledger

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
FAMILIES = ("llm_foundry", "paxml")


def main() -> None:
    """Print a table of the rows, what they come to by chip, and the fit if it is asked for."""
    if not LEDGER.exists():
        sys.exit(f"{LEDGER} is not there; it holds the measurements.")
    rows = [row for row in read_ledger(LEDGER) if is_compared(row)]
    cases = compile_cases(rows, on_progress=print_progress)
    compiled = [case for case in cases if not isinstance(case, Skipped)]
    print("| row | devices | measured s | predicted s | error | memory GB | attention |")
    print("|---|---|---|---|---|---|---|")
    by_chip: dict[tuple[str, str], list[CompiledCase]] = defaultdict(list)
    for case in compiled:
        by_chip[case.row.family, case.cluster.chip.name].append(case)
        print(row_of(case))
    for case in cases:
        if isinstance(case, Skipped):
            print(f"{case.row.case_id} is left out: {case.reason}")
    for (family, chip), group in by_chip.items():
        print_errors(f"{family} on {chip}", group)
    print_errors("all", compiled)
    if "--fit" in sys.argv[1:]:
        for (family, chip), group in by_chip.items():
            if family == "llm_foundry":
                print_fit(chip, group)


def is_compared(row: LedgerRow) -> bool:
    """Whether the row is of this experiment, and says how long it took."""
    is_measured = row.step_seconds is not None
    return is_measured and row.family in FAMILIES and row.work.precision == "bf16"


def measured_seconds(case: CompiledCase) -> float:
    """What was published."""
    if case.row.step_seconds is None:
        raise ValueError(f"{case.row.case_id} was not measured")
    return case.row.step_seconds


def print_progress(progress: Progress) -> None:
    """Say how many programs have been compiled."""
    print(f"compiled {progress.done} of {progress.total} programs", file=sys.stderr)


def row_of(case: CompiledCase) -> str:
    """The line of one case."""
    prediction, row = predict(case.program, case.cluster), case.row
    measured = measured_seconds(case)
    error = prediction.step_seconds / measured - 1
    memory = f"{prediction.peak_memory_bytes / 1e9:.1f}{'' if prediction.fits else ' (too much)'}"
    attention = attention_seconds(case) / prediction.step_seconds
    return (
        f"| {row.case_id} | {row.device_count} | {measured:.3f} | "
        f"{prediction.step_seconds:.3f} | {error:+.1%} | {memory} | {attention:.0%} |"
    )


def print_errors(title: str, cases: list[CompiledCase]) -> None:
    """Median and mean absolute error of some rows, and the median of predicted over measured."""
    ratios = [
        predict(case.program, case.cluster).step_seconds / measured_seconds(case) for case in cases
    ]
    errors = [abs(ratio - 1) for ratio in ratios]
    print(
        f"{title}: {len(cases)} rows, median error {median(errors):.1%}, mean {mean(errors):.1%}, "
        f"median of predicted over measured {median(ratios):.3f}"
    )


def attention_seconds(case: CompiledCase) -> float:
    """Time of fused attention in the predicted step."""
    return kind_seconds(case, "attention")


def kind_seconds(case: CompiledCase, kind: str) -> float:
    """Time of all operations of a kind in the predicted step."""
    return math.fsum(
        times * operation_time(item, case.cluster.chip).busy_seconds
        for item, times in case.program.walk()
        if item.kind == kind
    )


def print_fit(chip: str, cases: list[CompiledCase]) -> None:
    """The factors on the times of attention and of other products that fit `cases` best."""
    parts = []
    for case in cases:
        attention, products = attention_seconds(case), kind_seconds(case, "matmul")
        step = predict(case.program, case.cluster).step_seconds
        rest = step - attention - products
        parts.append([part / measured_seconds(case) for part in (attention, products, rest)])
    grid = [1.02**power for power in range(-60, 81)]

    def distance(factors: tuple[float, float]) -> float:
        a, b = factors
        return mean(abs(math.log(a * x + b * y + rest)) for x, y, rest in parts)

    best = min(((a, b) for a in grid for b in grid), key=distance)
    attainable = cases[0].cluster.chip.attainable
    print(
        f"{chip}: attention_fraction {attainable.attention_fraction / best[0]:.3f}, other products "
        f"{1 / best[1]:.2f} of their predicted rate; mean error then {distance(best):.1%}"
    )


if __name__ == "__main__":
    main()
