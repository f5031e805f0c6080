"""Results of rows, summed up by hand."""

from dataclasses import replace

import pytest
from ledger_cases import RESNET, case, program

from scalejax.hardware import load_chip
from scalejax.report.terminal import tables
from scalejax.validation import CompiledCase, Skipped, Validation, evaluate, with_chips
from scalejax.validation.ledger import LedgerRow
from scalejax.validation.summary import RowResult, Scored, kind_summaries, summarize


def scored(row: LedgerRow, measured: float, predicted: float, **fields: object) -> Scored:
    """A row with its two times."""
    result = RowResult(
        case_id=row.case_id,
        series=row.series,
        device_count=row.device_count,
        measured_seconds=measured,
        predicted_seconds=predicted,
        p10_seconds=predicted * 0.9,
        p90_seconds=predicted * 1.1,
        status="ok",
    )
    return row, replace(result, **fields)  # type: ignore[arg-type]


def test_summary_by_hand(row):
    """Errors +10 %, -20 %, +50 %: median 20 %, mean 26.7 %, bias +13.3 %; one of three in its
    band; and against the faster of two rows of one setting, 10 % and 50 %."""
    one, two = (row(RESNET | {"device_count": n, "data": n}) for n in ("1", "8"))
    found = summarize(
        "all",
        [
            scored(one, 1.0, 1.1),
            scored(replace(one, series="slow"), 2.0, 1.6),
            scored(replace(two, series="other"), 1.0, 1.5),
        ],
    )

    assert found.median_error == pytest.approx(0.2)
    assert found.mean_error == pytest.approx(0.8 / 3)
    assert found.bias == pytest.approx(0.4 / 3)
    assert found.coverage == pytest.approx(1 / 3)
    assert found.settings == 2
    assert found.median_fastest_error == pytest.approx(0.3)
    assert (found.ratios, found.median_ratio_error) == (0, None)


def test_scaling_ratio_is_free_of_the_frameworks_speed(row):
    """Twice as fast as measured everywhere is no error of the ratio; 10 % slower growth is."""
    rows = [row(RESNET | {"device_count": n, "data": n}) for n in ("1", "2", "8")]

    found = summarize(
        "all",
        [scored(rows[0], 2.0, 1.0), scored(rows[1], 2.0, 1.0), scored(rows[2], 4.0, 1.8)],
    )

    assert found.ratios == 2
    assert found.median_ratio_error == pytest.approx(0.05)
    assert found.p90_ratio_error == pytest.approx(0.09)


@pytest.mark.parametrize(
    "change", [{"per_device_batch": "192", "microbatch": "192"}, {"data": "8", "tensor": "2"}]
)
def test_rows_that_differ_in_more_are_no_scaling_series(change, row):
    """In the batch of each device, or the tensor axis: though the ledger puts them in one."""
    small = row(RESNET | {"device_count": "1", "data": "1", "tensor": "1"})
    large = row(RESNET | {"tensor": "1"} | change)

    assert summarize("all", [scored(small, 1.0, 1.0), scored(large, 2.0, 2.0)]).ratios == 0


def test_skipped_rows_count_but_do_not_score(row):
    """And a row without a measured time is predicted all the same."""
    known, hidden = row(RESNET), row(RESNET | {"step_seconds": ""})
    cluster = case(known).cluster
    cases = [
        CompiledCase(row=known, program=program(16), cluster=cluster),
        CompiledCase(row=hidden, program=program(16), cluster=cluster),
        Skipped(row=known, reason="for a reason"),
    ]

    results = evaluate(cases)

    assert [result.status for result in results] == ["ok", "ok", "skipped: for a reason"]
    assert results[1].predicted_seconds == results[0].predicted_seconds
    assert results[1].error is None
    found = summarize(
        "all", [(each.row, result) for each, result in zip(cases, results, strict=True)]
    )
    assert (found.rows, found.predicted) == (3, 2)


def test_rows_are_counted_by_kind_and_by_what_they_state(row):
    """Of those that state their layout: what is a run, what is predicted, and why others are not;
    rows that stalled are left out."""
    stated = RESNET | {"layers": "50", "hidden": "64"}
    known, stalled = row(stated), row(stated | {"stalled": "1"})
    adapted = row(stated | {"case_id": "llama2_70b_lora"})
    mixture = row(RESNET | {"model": "qwen3_moe"})
    cluster = case(row(RESNET)).cluster
    cases = [
        CompiledCase(row=known, program=program(16), cluster=cluster, nearest=("nearly",)),
        Skipped(row=known, reason="too large", is_mapped=True),
        Skipped(row=known, reason="unknown"),
        Skipped(row=stalled, reason="unknown"),
        Skipped(row=adapted, reason="unknown"),
        Skipped(row=mixture, reason="unknown"),
    ]

    dense, expert, lora = kind_summaries(evaluate(cases))

    assert (dense.kind, dense.rows, dense.stating) == ("dense", 4, 3)
    assert (dense.mapped, dense.predicted, dense.nearest) == (2, 1, 1)
    assert dense.skipped == (("unknown", 2, 1), ("too large", 1, 1))
    assert (expert.kind, expert.rows, expert.stating) == ("expert", 1, 0)
    assert (lora.kind, lora.stating, lora.mapped) == ("lora", 1, 0)


def test_other_chips_change_predictions_and_nothing_is_compiled(row):
    """Half the attainable rate, nearly twice the time of a step of products."""
    known = row(RESNET)
    cases = [CompiledCase(row=known, program=program(16), cluster=case(known).cluster)]
    chip = cases[0].cluster.chip
    slow = replace(
        chip,
        attainable=replace(chip.attainable, matmul_fraction=chip.attainable.matmul_fraction / 2),
    )

    (before,), (after,) = evaluate(cases), evaluate(with_chips(cases, {chip.name: slow}))

    assert after.predicted_seconds is not None
    assert before.predicted_seconds is not None
    assert after.predicted_seconds > 1.5 * before.predicted_seconds


def test_other_chips_keep_fp32_free_of_tf32(row):
    """A chip from a fit has tf32 again; the row still asks for fp32."""
    known = row(RESNET | {"hardware": "a100_sxm_80gb", "intra_node_link": "nvlink3_nvswitch"})
    cases = [CompiledCase(row=known, program=program(16), cluster=case(known).cluster)]

    (changed,) = with_chips(cases, {"a100-80gb": load_chip("a100-80gb")})

    assert isinstance(changed, CompiledCase)
    assert changed.cluster.chip.rate_type("f32") == "f32"


def test_table_of_validation_fits_80_columns(row, capsys, monkeypatch: pytest.MonkeyPatch):
    """The longest name of a family whole, and the reason of a skipped row beneath."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "deep_learning_examples"
    pairs = [scored(row(RESNET), 1.0, 1.25), scored(row(RESNET), 2.0, 1.0)]
    summary = replace(summarize(name, pairs), rows=960, predicted=488)
    skipped = replace(pairs[0][1], predicted_seconds=None, status="skipped: a pipeline axis")
    found = Validation(ledger="ledger.csv", families=(summary,), rows=(skipped,))

    tables.show(tables.validation(found))

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (figures,) = [line for line in lines if name in line]
    assert "37.5%" in figures
    assert "-12.5%" in figures
    assert any("1      0  dense  a pipeline axis" in line for line in lines)
