"""How far off are rows with pipeline stages, to which nothing is fitted, beside those without?

Run from the root of the repository: python experiments/open_ledger/pipelines.py

Predicts what is archived, in seconds. Left of the table: the family and whether its rows have
stages; mean absolute error of the step time; and by how much longer it took than predicted.
"""

from collections import defaultdict
from statistics import fmean, median

from summarize import LEDGER

from scalejax.validation import compile_cases, read_ledger, validation


def main() -> None:
    """Print a row for each family that has rows with stages."""
    cases = compile_cases(read_ledger(LEDGER), compiles=False)
    measured_over_predicted: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for case, row in zip(cases, validation(LEDGER.name, cases).rows, strict=True):
        if row.predicted_seconds is not None and row.measured_seconds is not None:
            has_stages = (case.row.spread.pipeline or 1) > 1
            ratio = row.measured_seconds / row.predicted_seconds
            measured_over_predicted[case.row.family, has_stages].append(ratio)
    print("| rows | stages | number | mean error | took longer, median |")
    print("|---|---|---|---|---|")
    for family in sorted({name for name, has_stages in measured_over_predicted if has_stages}):
        for has_stages in (False, True):
            ratios = measured_over_predicted.get((family, has_stages))
            if ratios:
                error = fmean(abs(1 / ratio - 1) for ratio in ratios)
                kind = "yes" if has_stages else "no"
                longer = median(ratios) - 1
                print(f"| {family} | {kind} | {len(ratios)} | {error:.1%} | {longer:+.1%} |")


if __name__ == "__main__":
    main()
