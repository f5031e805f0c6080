"""The ledger of 2026: of the rows that state their layout, those that are runs are predicted.

The rows that are predicted in closed form or compiled are those of `experiments/ledger_2026`.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

from scalejax.validation import Case, compile_cases, evaluate, read_ledger
from scalejax.validation.cases import case_of
from scalejax.validation.summary import kind_summaries
from scalejax.xla import has_cuda_compiler

LEDGER = Path(__file__).parents[3] / "shared" / "ledger" / "2026"
COVERAGE = Path(__file__).parents[2] / "experiments" / "ledger_2026" / "coverage.py"
SHARE = 0.9
"""Least share of the rows of a file and kind that state their layout."""
COMPILED = {
    ("automodel_and_rl", "lora"): 1,
    ("step_times_added", "dense"): 1,
}
"""Most rows of each file and kind that the closed form does not know; none of others."""
pytestmark = pytest.mark.skipif(
    not LEDGER.is_dir(), reason="../shared/ledger, beside the repository, is not here"
)


@pytest.fixture(scope="module")
def coverage() -> dict[str, Any]:
    """The names of the experiment's script."""
    return runpy.run_path(str(COVERAGE))


def test_rows_that_state_their_layout_are_runs(coverage: dict[str, Any]):
    """Of each file and kind nine in ten; 1,173 rows state it, of which 1,164 are."""
    counts: dict[tuple[str, str], list[bool]] = {}
    for name, rows in coverage["ledgers"](LEDGER).items():
        for row in rows:
            if row.states_layout:
                is_run = isinstance(case_of(row), Case)
                counts.setdefault((name, row.kind), []).append(is_run)

    assert sum(map(sum, counts.values())) >= 1164
    for place, found in counts.items():
        assert sum(found) / len(found) >= SHARE, place


@pytest.mark.slow  # the closed form of 1,164 rows: 15 s of processor time
def test_runs_are_predicted(coverage: dict[str, Any]):
    """In closed form, but for the listed ones, of which each is a run that can be compiled."""
    for name, rows in coverage["ledgers"](LEDGER).items():
        results = coverage["in_closed_form"](rows)
        others = {kind: len(places) for kind, places in coverage["to_compile"](results).items()}
        for kind, count in others.items():
            assert count <= COMPILED.get((name, kind), 0), (name, kind)
        for each in kind_summaries(results):
            if each.stating:
                known = each.in_closed_form + others.get(each.kind, 0)
                assert known / each.stating >= SHARE, (name, each.kind)


@pytest.mark.slow  # compiles for CUDA: 10 to 20 s of processor time each
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs pip install 'scalejax[gpu-target]'")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("step_times_added", "dense"),
        ("automodel_and_rl", "lora"),
    ],
)
def test_rows_that_the_closed_form_does_not_know_are_compiled(
    name: str, kind: str, coverage: dict[str, Any]
):
    """Of the file and kind, drawn with a seed."""
    rows = read_ledger(LEDGER / f"{name}.csv")
    results = coverage["in_closed_form"](rows)
    (index,) = coverage["sampled"](coverage["to_compile"](results)[kind], 1, seed=1)

    (result,) = evaluate(compile_cases([rows[index]]))

    assert result.status == "ok"
    assert not result.is_closed_form
