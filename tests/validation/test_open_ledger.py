"""The open ledger: no family gets worse, and its archive is what a compiler says today."""

from pathlib import Path

import pytest
from ledger_cases import moved_bytes, operation_count

from scalejax.core.serialization import load
from scalejax.simulator.program import Program
from scalejax.validation import (
    Ledger,
    Validation,
    compile_cases,
    evaluate,
    find_ledger,
    read_any,
    read_ledger,
    summaries,
    validated,
)
from scalejax.validation.cases import Case, case_of
from scalejax.validation.programs import archived_programs, find_programs
from scalejax.xla.archive import Archive

OPEN_LEDGER = find_ledger("step_times")
GOLDEN = Path(__file__).parents[1] / "golden" / "validation.json"


def test_open_ledger_is_predicted_as_well_as_before():
    """No family gets worse by more than a tenth of a point in the mean, and none loses rows.

    Medians move in steps, from one row to the next: by a point at most.

    If this fails after a change to how programs are read or costed, decide which is right: the
    physics of the change, or the errors it brings. If it is the change, write new figures with
    `python experiments/open_ledger/summarize.py --write`, and say why they are worse.
    """
    golden = {each.name: each for each in load(Validation, GOLDEN).families}
    rows = [row for row in read_ledger(OPEN_LEDGER) if row.family in golden]
    cases = compile_cases(rows, compiles=False)
    results = evaluate(cases)

    scored_rows = [(case.row, result) for case, result in zip(cases, results, strict=True)]

    for summary in summaries(scored_rows):
        before = golden[summary.name]
        assert summary.predicted >= before.predicted, summary.name
        for figure, allowed in (
            ("mean_error", 0.001),
            ("median_error", 0.01),
            ("median_ratio_error", 0.01),
            ("median_fastest_error", 0.01),
        ):
            now, then = getattr(summary, figure), getattr(before, figure)
            if then is not None:
                assert now <= then + allowed, f"{summary.name}: {figure} {then:.2%} -> {now:.2%}"


def test_validate_predicts_the_open_ledger_as_the_table_of_the_readme_does():
    """To the last digit: every kept program is taken before the closed form, which adds no row;
    one row in 25, of every family."""
    ledger = read_any(OPEN_LEDGER)
    rows = ledger.steps[::25]

    found = validated([Ledger(name="part", quantity=ledger.quantity, rows=rows)])

    expected = evaluate(compile_cases(rows, compiles=False))
    for one, other in zip(found.rows, expected, strict=True):
        assert one.status.startswith(other.status[:7]), one.case_id
        assert not one.is_closed_form
        assert one.predicted_seconds == other.predicted_seconds
        assert one.band == other.band


@pytest.mark.slow  # a compile for CUDA each
@pytest.mark.parametrize("family", ["tensorflow_2017", "llm_foundry"])
def test_archive_holds_what_the_compiler_says_today(family: str, tmp_path: Path, monkeypatch):
    """The smallest network of a family, compiled anew: the same operations, FLOP and bytes.

    If this fails, `python -m scalejax.validation.rebuild LEDGER.csv --anew` makes the archive
    again.
    """
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    rows = [row for row in read_ledger(OPEN_LEDGER) if row.family == family]
    cases = [each for each in map(case_of, rows) if isinstance(each, Case)]
    kept = find_programs(cases, archived_programs(compiles=False))
    programs = [each for each in kept if isinstance(each, Program)]
    archived = min(programs, key=operation_count)
    case = cases[kept.index(archived)]

    (compiled,) = find_programs([case], archived_programs(Archive({})))

    assert isinstance(compiled, Program)
    # Another generation of the compiler fuses a little differently.
    tolerance = 0 if compiled.compiler == archived.compiler else 0.05
    assert archived.flop == pytest.approx(compiled.flop, rel=tolerance)
    for figure in (moved_bytes, operation_count):
        assert figure(archived) == pytest.approx(figure(compiled), rel=tolerance)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        expected = compiled.collective_bytes(name)
        assert archived.collective_bytes(name) == pytest.approx(expected, rel=tolerance)
