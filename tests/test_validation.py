"""Ledgers: read strictly, mapped to runs row by row, and summed up by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from scalejax.cli import main
from scalejax.documents import load, plain
from scalejax.errors import ConfigError
from scalejax.hardware import load_chip
from scalejax.profile.cache import case_key
from scalejax.profile.workers import run_jobs
from scalejax.program import (
    Collective,
    DeviceGroup,
    Loop,
    MemoryUse,
    Operation,
    Program,
)
from scalejax.validation import (
    CompiledCase,
    Skipped,
    Validation,
    compile_cases,
    evaluate,
    read_ledger,
    summaries,
    with_chips,
)
from scalejax.validation.archive import Archive, read_archive, write_archive
from scalejax.validation.cases import Case, case_of
from scalejax.validation.ledger import LedgerRow
from scalejax.validation.programs import Programs, asked_for
from scalejax.validation.summary import RowResult, Scored, summarize
from scalejax.validation.widen import narrowed, widened

RESNET = {
    "case_id": "one",
    "series": "alike",
    "source": "github:Oneflow-Inc/DLPerf@c89430bac6",
    "model": "resnet50",
    "hardware": "v100_sxm2_16gb",
    "device_count": "16",
    "devices_per_node": "8",
    "intra_node_link": "nvlink2_mesh",
    "node_network_gbit_per_second": "100",
    "precision": "fp32",
    "data": "16",
    "per_device_batch": "96",
    "microbatch": "96",
    "global_batch": "1536",
    "recompute": "none",
    "step_seconds": "0.25",
}
"""Cells of a row that can be predicted."""
GPT = RESNET | {
    "model": "gpt",
    "layers": "2",
    "hidden": "64",
    "heads": "4",
    "seq_len": "32",
    "vocab": "512",
    "hardware": "a100_sxm_80gb",
    "intra_node_link": "nvlink3_nvswitch",
    "precision": "bf16",
    "device_count": "8",
    "data": "1",
    "fsdp": "8",
    "per_device_batch": "4",
    "microbatch": "2",
    "global_batch": "32",
}


def ledger(folder: Path, *rows: dict[str, str]) -> Path:
    """A file with these rows; cells that a row lacks are blank."""
    path = folder / "ledger.csv"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def row(tmp_path: Path):
    """Reads one row from its cells."""

    def read(cells: dict[str, str]) -> LedgerRow:
        (found,) = read_ledger(ledger(tmp_path, cells))
        return found

    return read


def case(row: LedgerRow) -> Case:
    """The case of a row that has one."""
    found = case_of(row)
    assert isinstance(found, Case), found
    return found


# --- reading ---


def test_blank_cells_are_unknown_and_others_typed(row):
    """And columns that nobody knows are no matter."""
    found = row(RESNET | {"layers": "", "weather": "fine"})

    assert found.device_count == 16
    assert found.step_seconds == 0.25
    assert found.model.layers is None
    assert found.family == "dlperf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_count": "many"}, r"line 2, column 6: device_count='many' is refused"),
        ({"device_count": "0"}, r"column 6: device_count='0' is refused: it must be a whole"),
        ({"step_seconds": "-1"}, r"step_seconds='-1' is refused: it must be a number above 0"),
        ({"step_seconds": "nan"}, r"step_seconds='nan' is refused"),
        ({"step_seconds": "inf"}, r"step_seconds='inf' is refused"),
        ({"model": ""}, r"line 2, column 4: model='' is refused: it may not be blank"),
    ],
)
def test_malformed_cell_is_refused_with_its_place(change, message, tmp_path: Path):
    """Line and column, as an editor counts them."""
    with pytest.raises(ConfigError, match=message):
        read_ledger(ledger(tmp_path, RESNET | change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("case_id,series,source\n", "line 1: the column 'device_count' is missing"),
        ("{heading}\na,b\n", "line 2, column 3: there are 2 cells, but 16 columns"),
        ('{heading}\n"a\n', "line 2: this is no CSV"),
        ("{heading}\n\xff\n", "cannot be read"),
    ],
)
def test_malformed_file_is_refused(text: str, message: str, tmp_path: Path, capsys):
    """By the command too, with exit code 2 and no traceback."""
    path = tmp_path / "broken.csv"
    path.write_bytes(text.format(heading=",".join(RESNET)).encode("latin-1"))

    with pytest.raises(ConfigError, match=message):
        read_ledger(path)
    assert main(["validate", str(path)]) == 2
    assert message in capsys.readouterr().err


# --- from row to run ---


def test_image_row_becomes_its_run(row):
    """Network, arithmetic, batch and layout as stated; BatchNorm per device."""
    run = case(row(RESNET)).runs[0]

    assert run.config.model.name == "resnet50"
    assert run.config.model.compute_dtype == "float32"
    assert run.dataset.input_shape == (224, 224, 3)
    assert (run.layout.data, run.split.per_device_batch, run.split.microbatches) == (16, 96, 1)
    assert run.bn_groups == 16


def test_text_row_becomes_its_run(row):
    """Half precision of either kind is traced as bfloat16."""
    run = case(row(GPT | {"precision": "fp16", "attention": "unfused"})).runs[0]

    assert run.config.model.compute_dtype == "bfloat16"
    assert run.config.model.attention == "unfused"
    assert (run.layout.fsdp, run.split.microbatches) == (8, 2)
    assert run.dataset.classes == 512


def test_what_a_row_leaves_open_is_tried_in_order(row):
    """The largest microbatch first, each without recompute and then with it."""
    runs = case(row(GPT | {"microbatch": "", "recompute": ""})).runs

    tried = [(run.split.microbatches, run.config.model.remat) for run in runs]
    assert tried == [(n, remat) for n in (1, 2, 4) for remat in ("none", "full")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hardware": "abacus"}, "the catalogue has no chip for 'abacus'"),
        ({"intra_node_link": "string"}, "the link 'string' is none of"),
        ({"model": "perceptron"}, "no network 'perceptron'"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"precision": "tf32"}, "precision 'tf32', which v100 does not have"),
        ({"pipeline": "4"}, "a pipeline axis"),
        ({"context": "2"}, "a context axis"),
        ({"zero_stage": "1"}, "ZeRO stage 1"),
        ({"recompute": "selective"}, "selective recompute"),
        ({"data": "4"}, "its axes multiply to 4, not to 16 devices"),
        ({"per_device_batch": "", "global_batch": ""}, "neither per_device_batch nor global_batch"),
        ({"gradient_exchange": "pigeons"}, "gradient_exchange 'pigeons'"),
    ],
)
def test_row_that_cannot_be_expressed_is_skipped_with_a_reason(change, reason, row):
    """One line that says what is in the way."""
    found = case_of(row(RESNET | change))

    assert isinstance(found, Skipped)
    assert reason in found.reason


def test_network_is_the_rows_own(row):
    """100 Gb/s are 12.5e9 bytes per second, whatever the catalogue's cluster has."""
    slow = case(row(RESNET | {"node_network_gbit_per_second": "10"})).cluster

    assert slow.network is not None
    assert slow.network.bytes_per_second == 1.25e9
    assert slow.chip.name == "v100"
    assert slow.devices_per_node == 8


def test_fp32_is_computed_without_tf32(row):
    """On chips that would round f32 operands, unless the row says tf32."""
    ampere = {"hardware": "a100_sxm_80gb", "intra_node_link": "nvlink3_nvswitch"}
    by_precision = {
        precision: case(row(RESNET | ampere | {"precision": precision})).cluster.chip
        for precision in ("fp32", "tf32")
    }

    assert by_precision["fp32"].rate_type("f32") == "f32"
    assert by_precision["tf32"].rate_type("f32") == "tf32"


def test_parameter_servers_replace_the_all_reduce(row):
    """The library is another, the hardware the same."""
    plain = case(row(RESNET)).cluster
    served = case(row(RESNET | {"gradient_exchange": "parameter_server"})).cluster

    assert {method.algorithm for method in served.library.methods} == {"parameter_server"}
    assert replace(served, library=plain.library) == plain


# --- programs ---


def program(data: int = 2, *, payload_bytes: int = 8_000_000) -> Program:
    """A step that multiplies for a while and sums gradients over `data` devices."""
    group = DeviceGroup(extents=((data, 1),), axes=("data",))
    collective = Collective(
        name="all_reduce", payload_bytes=payload_bytes, group=group, is_async=False
    )
    return Program(
        name="step",
        backend="cuda",
        target="sm_80",
        compiler="by hand",
        mesh_axes=(("data", data), ("fsdp", 1), ("tensor", 1)),
        operations=(
            Operation(
                name="dot", kind="matmul", dtype="f32", flop=10**12, shape=(1, 4096, 4096, 29802)
            ),
            Loop(
                name="loop",
                trip_count=3,
                body=(
                    Operation(
                        name="sum",
                        kind="collective",
                        dtype="f32",
                        collective=collective,
                        source="here.py:1",
                    ),
                ),
            ),
        ),
        memory=MemoryUse(
            argument_bytes=10**9, output_bytes=10**9, alias_bytes=10**9, temporary_bytes=10**9
        ),
        global_batch=96 * data,
        model_flop=data * 10**12,
    )


def test_wider_data_axis_changes_groups_and_totals_alone(row):
    """From two devices to sixteen: what each does stays the same."""
    (run,) = case(row(RESNET)).runs

    assert narrowed(run).layout.data == 2
    assert widened(program(2), run) == program(16)


def test_more_microbatches_are_more_trips_through_their_loop(row):
    """From two to six: the loop of two runs six times; the tokens of 16 more samples are held
    twice, each 32 inputs and 32 targets of 4 bytes."""
    (run,) = case(row(GPT | {"per_device_batch": "24", "microbatch": "4"})).runs
    narrow = replace(program(1), mesh_axes=(("data", 1), ("fsdp", 8), ("tensor", 1)))
    product, loop = narrow.operations
    assert isinstance(loop, Loop)
    narrow = replace(narrow, operations=(product, replace(loop, trip_count=2)))

    wide = widened(narrow, run)

    assert narrowed(run).split.microbatches == 2
    assert wide is not None
    assert wide.operations == (product, replace(loop, trip_count=6))
    assert wide.model_flop == 3 * 10**12
    assert wide.memory.peak_bytes - narrow.memory.peak_bytes == 2 * 16 * 64 * 4


def test_program_that_gathers_over_the_data_axis_is_not_widened(row):
    """The payload of a gather grows with the group; only the compiler knows how."""
    (run,) = case(row(RESNET)).runs
    narrow = program(2)
    loop = narrow.operations[1]
    assert isinstance(loop, Loop)
    (operation,) = loop.body
    assert isinstance(operation, Operation)
    assert operation.collective is not None
    gather = replace(operation, collective=replace(operation.collective, name="all_gather"))
    narrow = replace(narrow, operations=(narrow.operations[0], replace(loop, body=(gather,))))

    assert widened(narrow, run) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        # Four microbatches; the same over fsdp; one, on two nodes.
        {"device_count": "4", "data": "2", "tensor": "2", "per_device_batch": "8"},
        {"device_count": "4", "data": "1", "fsdp": "4", "per_device_batch": "8"},
        {"device_count": "16", "data": "8", "tensor": "2", "per_device_batch": "2"},
    ],
)
def test_compiler_makes_the_program_that_was_widened(change, row, tmp_path: Path, monkeypatch):
    """Compiled in full for comparison: the same products and exchanges, in the same order."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    whole = case(row(GPT | {"fsdp": "1", "microbatch": "2"} | change))
    job = asked_for(whole, 0, is_narrow=False).job

    (wide,) = Programs(Archive({})).find([whole])
    compiled: list[Program] = []
    run_jobs([job], lambda _, result: compiled.append(result.program))

    assert isinstance(wide, Program)
    assert _products_and_exchanges(wide) == _products_and_exchanges(compiled[0])
    # The tokens of the whole batch are divided for the loop, by one small operation or by two.
    assert _operation_count(wide) == pytest.approx(_operation_count(compiled[0]), rel=0.02)
    assert _moved_bytes(wide) == pytest.approx(_moved_bytes(compiled[0]), rel=0.01)
    assert wide.memory.peak_bytes == pytest.approx(compiled[0].memory.peak_bytes, rel=0.01)
    assert wide.mesh_axes == compiled[0].mesh_axes
    assert wide.model_flop == compiled[0].model_flop


def _products_and_exchanges(found: Program) -> list[tuple[object, ...]]:
    return [
        (operation.kind, operation.dtype, operation.shape, operation.collective, times)
        for operation, times in found.walk()
        if operation.flop or operation.collective
    ]


def test_archive_returns_what_was_put_in(tmp_path: Path):
    """But for the places in source files."""
    path = tmp_path / "programs.xz"
    write_archive({"a": program(2), "b": program(4)}, path)

    found = read_archive(path).program("b")

    assert found is not None
    assert found.mesh_axes == program(4).mesh_axes
    assert found.collective_bytes("all_reduce") == 24_000_000
    assert all(operation.source is None for operation, _ in found.walk())
    assert read_archive(path).program("c") is None


def test_damaged_archive_is_refused(tmp_path: Path):
    """With its name."""
    path = tmp_path / "programs.xz"
    path.write_bytes(b"no archive")

    with pytest.raises(ConfigError, match=r"programs\.xz"):
        read_archive(path)


def archive_for(row: LedgerRow, found: Program, choice: int = 0) -> Archive:
    """An archive that holds `found` for a row."""
    job = asked_for(case(row), choice, is_narrow=True).job
    return Archive({case_key(job): json.dumps(plain(found))})


def test_archived_program_serves_every_size_of_the_data_axis(row):
    """Nothing is compiled, and rows that differ in nothing else share one object."""
    rows = [row(RESNET | {"device_count": str(n), "data": str(n)}) for n in (2, 16, 32, 16)]
    compiled = []

    programs = Programs(archive_for(rows[0], program(2)), lambda *counts: compiled.append(counts))
    found = programs.find([case(each) for each in rows])

    assert [each.device_count for each in found if isinstance(each, Program)] == [2, 16, 32, 16]
    assert found[1] is found[3]
    assert compiled == []


def test_first_run_that_fits_is_taken(row):
    """A program that is too large for the device gives way to the next."""
    open_row = row(GPT | {"microbatch": "", "recompute": "none"})
    large = replace(program(1), memory=replace(program(1).memory, temporary_bytes=10**12))
    lines = {}
    for choice, each in enumerate((large, program(1), program(1))):
        lines |= archive_for(open_row, each, choice).lines

    (found,) = Programs(Archive(lines)).find([case(open_row)])

    assert found == program(1)


# --- results ---


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


def test_rows_of_other_batches_are_no_scaling_series(row):
    """Though the ledger puts them in one."""
    small = row(RESNET | {"device_count": "1", "data": "1"})
    large = row(RESNET | {"per_device_batch": "192", "microbatch": "192"})

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


# --- the open ledger ---

OPEN_LEDGER = Path(__file__).parents[2] / "shared" / "ledger" / "step_times.csv"
GOLDEN = Path(__file__).parent / "golden" / "validation.json"
needs_ledger = pytest.mark.skipif(
    not OPEN_LEDGER.is_file(), reason="../shared/ledger, beside the repository, is not here"
)


@needs_ledger
def test_open_ledger_is_predicted_as_well_as_before():
    """No family gets worse by more than a point, and none loses rows.

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
        for figure in ("median_error", "median_ratio_error", "median_fastest_error"):
            now, then = getattr(summary, figure), getattr(before, figure)
            if then is not None:
                assert now <= then + 0.01, f"{summary.name}: {figure} {then:.1%} -> {now:.1%}"


@needs_ledger
@pytest.mark.slow
@pytest.mark.parametrize("family", ["tensorflow_2017", "dlperf", "llm_foundry"])
def test_archive_holds_what_the_compiler_says_today(family: str, tmp_path: Path, monkeypatch):
    """The first row of a family, compiled anew: the same operations, FLOP and bytes.

    If this fails, `python -m scalejax.validation.rebuild LEDGER.csv --anew` makes the archive
    again.
    """
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    rows = [row for row in read_ledger(OPEN_LEDGER) if row.family == family]
    first = next(each for each in map(case_of, rows) if isinstance(each, Case))

    (archived,) = Programs(compiles=False).find([first])
    (compiled,) = Programs(Archive({})).find([first])

    assert isinstance(archived, Program)
    assert isinstance(compiled, Program)
    # Another generation of the compiler fuses a little differently.
    tolerance = 0 if compiled.compiler == archived.compiler else 0.05
    assert archived.flop == pytest.approx(compiled.flop, rel=tolerance)
    for figure in (_moved_bytes, _operation_count):
        assert figure(archived) == pytest.approx(figure(compiled), rel=tolerance)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        expected = compiled.collective_bytes(name)
        assert archived.collective_bytes(name) == pytest.approx(expected, rel=tolerance)


def _moved_bytes(found: Program) -> int:
    return sum((each.read_bytes + each.write_bytes) * times for each, times in found.walk())


def _operation_count(found: Program) -> int:
    return sum(times for _, times in found.walk())
