"""Hold predictions against the open ledger: its golden summary, and the README's table.

Run from the root of the repository: python experiments/open_ledger/summarize.py

Prints the table that is in tests/golden/validation.json. With --write it first predicts every
row whose program is archived, which takes seconds, and writes the summary and the README's table
anew. With --plain it predicts every row with none of the properties of its framework, as
`predict --framework xla` does (with stages, `pytorch`, which has none either, and runs 1F1B).
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scalejax.core import serialization
from scalejax.core.units import UNKNOWN
from scalejax.simulator.frameworks import framework_named
from scalejax.validation import (
    CompiledCase,
    Skipped,
    Summary,
    Validation,
    compile_cases,
    find_ledger,
    read_ledger,
    validation,
)

ROOT = Path(__file__).parents[2]
LEDGER = find_ledger("step_times")
GOLDEN = ROOT / "tests" / "golden" / "validation.json"
README = ROOT / "README.md"
SCALING_FAMILIES = ("tensorflow_2017", "dlperf", "deep_learning_examples")
"""Those of which every framework trained the same networks on growing numbers of devices."""
DECODER_FAMILIES = (
    "llm_foundry",
    "paxml",
    "torchtitan",
    "megatron",
    "vtrain_multi",
    "vtrain_single",
    "bloom",
)
"""Those of decoders: gpt and llama. BERT is in the others."""
HEADING = "| rows | predicted | median error | mean | bias | ratio | p90 | fastest | in band |"


def main() -> None:
    """Write if asked to, and print."""
    if "--plain" in sys.argv[1:]:
        print(table(_predicted(is_plain=True)), end="")
        return
    if "--write" in sys.argv[1:]:
        families = _predicted()
        golden = Validation(ledger="step_times.csv", families=families, rows=())
        serialization.save(golden, GOLDEN)
        text = README.read_text(encoding="utf-8")
        pattern = re.escape(HEADING) + r"\n(\|.*\n)*"
        README.write_text(re.sub(pattern, lambda _: table(families), text), encoding="utf-8")
    print(table(serialization.load(Validation, GOLDEN).families), end="")


def _predicted(*, is_plain: bool = False) -> tuple[Summary, ...]:
    """A summary of each family, of the three that scale, of decoders, and of all."""
    rows = read_ledger(LEDGER)
    framework = framework_named("pytorch") if is_plain else None
    cases = compile_cases(rows, compiles=False, framework=framework)
    *each_family, total = validation(LEDGER.name, cases).families
    groups = {
        " + ".join(SCALING_FAMILIES): SCALING_FAMILIES,
        "decoders, all seven": DECODER_FAMILIES,
    }
    together = [replace(_summary(cases, group), name=name) for name, group in groups.items()]
    return *each_family, *together, total


def _summary(cases: Sequence[CompiledCase | Skipped], families: tuple[str, ...]) -> Summary:
    """Of the rows of several families."""
    members = [case for case in cases if case.row.family in families]
    return validation(LEDGER.name, members).families[-1]


def table(families: tuple[Summary, ...]) -> str:
    """One Markdown row for each family."""
    lines = [HEADING, "|---|---|---|---|---|---|---|---|---|"]
    for each in families:
        bias = UNKNOWN if each.bias is None else f"{each.bias:+.1%}"
        figures = (
            each.name,
            f"{each.predicted} of {each.rows}",
            percent(each.median_error),
            percent(each.mean_error),
            bias,
            percent(each.median_ratio_error),
            percent(each.p90_ratio_error),
            percent(each.median_fastest_error),
            percent(each.coverage),
        )
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def percent(fraction: float | None) -> str:
    """A share for people."""
    return UNKNOWN if fraction is None else f"{fraction:.1%}"


if __name__ == "__main__":
    main()
