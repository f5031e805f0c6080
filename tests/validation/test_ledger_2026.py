"""The ledgers of 2025 and 2026: of the rows that state their layout, those that are runs are
predicted.

Which rows these are says `experiments/ledger_2026`.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

from scalejax.validation import compile_cases, evaluate, find_ledger, read_any, validated
from scalejax.validation.summary import kind_summaries

COVERAGE = Path(__file__).parents[2] / "experiments" / "ledger_2026" / "coverage.py"
SHARE = 0.9
"""Least share of the rows of a ledger and kind that state their layout."""
KEPT = {"automodel_Qwen2.5_7B_1_36", "mtnlg530b_strong"}
"""Rows that state their layout and that the closed form does not know."""


@pytest.fixture(scope="module")
def coverage() -> dict[str, Any]:
    """The names of the experiment's script."""
    return runpy.run_path(str(COVERAGE))


def test_rows_that_state_their_layout_are_runs(coverage: dict[str, Any]):
    """Of each ledger and kind nine in ten; 1,173 rows state it, of which 1,165 are."""
    ledgers = [read_any(find_ledger(name)) for name in coverage["LEDGERS"]]
    found = coverage["by_ledger"](validated(ledgers, is_dry=True).rows)
    summaries = {name: kind_summaries(rows) for name, rows in found.items()}

    assert sum(each.mapped for kinds in summaries.values() for each in kinds) >= 1165
    for name, kinds in summaries.items():
        for each in kinds:
            assert each.mapped >= SHARE * each.stating, (name, each.kind)


@pytest.mark.slow  # the closed form of 514 rows: half a minute of processor time
def test_runs_are_predicted(coverage: dict[str, Any]):
    """In closed form, but for the listed ones, whose programs come with scalejax. Of the sweep
    of 900 rows, which differ in sizes alone, one in eight is asked."""
    ledgers = {name: read_any(find_ledger(name)).steps for name in coverage["LEDGERS"]}
    ledgers["ultrascale_measured"] = ledgers["ultrascale_measured"][::8]
    asked = [row for steps in ledgers.values() for row in steps if row.states_layout]
    results = evaluate(compile_cases(asked, compiles=False, closed_form=True))
    rows = [row for row in results if row.is_mapped]

    assert all(row.is_predicted for row in rows)
    assert {row.case_id for row in rows if not row.is_closed_form} == KEPT
