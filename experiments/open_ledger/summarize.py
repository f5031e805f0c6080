"""Hold predictions against the open ledger: write the golden summary, print the README's table.

Run from the root of the repository: python experiments/open_ledger/summarize.py

Uses archived programs alone, so that it takes seconds; families of which not one row is archived
are left out.
"""

from pathlib import Path

from scalejax import documents
from scalejax.units import UNKNOWN
from scalejax.validation import Summary, Validation, compile_cases, read_ledger, validation

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "step_times.csv"
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "validation.json"
SCALING_FAMILIES = ("tensorflow_2017", "dlperf", "deep_learning_examples")
"""Those of which every framework trained the same networks on growing numbers of devices."""


def main() -> None:
    """Write and print."""
    rows = read_ledger(LEDGER)
    found = validation(LEDGER.name, compile_cases(rows, compiles=False))
    families = {each.name for each in found.families if each.predicted}
    rows = [row for row in rows if row.family in families]
    found = validation(LEDGER.name, compile_cases(rows, compiles=False))
    golden = Validation(ledger=LEDGER.name, families=found.families, rows=())
    documents.save(golden, GOLDEN)
    print_table(found.families)
    together = [row for row in rows if row.family in SCALING_FAMILIES]
    (*_, total) = validation(LEDGER.name, compile_cases(together, compiles=False)).families
    print(
        f"\n{', '.join(SCALING_FAMILIES)} together: scaling ratio within a series: median error "
        f"{percent(total.median_ratio_error)}, p90 {percent(total.p90_ratio_error)} "
        f"({total.ratios} ratios); step time against the fastest framework of each setting: "
        f"median {percent(total.median_fastest_error)} ({total.settings} settings)."
    )


def print_table(families: tuple[Summary, ...]) -> None:
    """One Markdown row for each family."""
    print("| rows | of | median error | mean | bias | ratio | its p90 | fastest | in band |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each in families:
        bias = UNKNOWN if each.bias is None else f"{each.bias:+.0%}"
        figures = (
            percent(each.median_error),
            percent(each.mean_error),
            bias,
            percent(each.median_ratio_error),
            percent(each.p90_ratio_error),
            percent(each.median_fastest_error),
            percent(each.coverage),
        )
        print(f"| {each.name} | {each.predicted} of {each.rows} | {' | '.join(figures)} |")


def percent(fraction: float | None) -> str:
    """A share for people."""
    return UNKNOWN if fraction is None else f"{fraction:.1%}"


if __name__ == "__main__":
    main()
