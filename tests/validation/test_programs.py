"""Programs of rows: archived, widened, chosen; compiled only where they must be."""

from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import (
    GPT,
    RESNET,
    archive_for,
    case,
    derived,
    ledger,
    moved_bytes,
    operation_count,
    program,
)
from program_cases import matmul, program_of

from scalejax.core.errors import ConfigError
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.simulator.transforms.scale_out import reduced, scaled_out
from scalejax.validation.programs import archived_programs, find_programs
from scalejax.validation.rebuild import add, main, rebuild
from scalejax.xla.archive import Archive, read_archive, write_archive
from scalejax.xla.cache import case_key
from scalejax.xla.worker_pool import run_jobs


def test_wider_data_axis_changes_groups_and_totals_alone(row):
    """From two devices to sixteen: what each does stays the same."""
    (run,) = case(row(RESNET)).runs

    assert reduced(run).layout.data == 2
    assert scaled_out(program(2), reduced(run), run) == program(16)


def test_lone_device_sends_its_gradients_to_a_parameter_server(row):
    """Its program is that of two devices, with groups of one: it pushes and pulls all the same."""
    server = {"device_count": "1", "data": "1", "gradient_exchange": "parameter_server"}
    lone = case(row(RESNET | server))
    (run,) = lone.runs
    reduced_run = reduced(run, has_server=True)

    alone = scaled_out(program(2), reduced_run, run)

    assert reduced_run.layout.data == 2
    assert alone == program(1)
    assert derived(lone).compiled[0].run == reduced_run


def test_more_microbatches_are_more_trips_through_their_loop(row):
    """From two to six: the loop of two runs six times; the tokens of 16 more samples are held
    twice, each 32 inputs and 32 targets of 4 bytes."""
    (run,) = case(row(GPT | {"per_device_batch": "24", "microbatch": "4"})).runs
    small_program = replace(program(1), mesh_axes=(("data", 1), ("fsdp", 8), ("tensor", 1)))
    product, loop = small_program.operations
    assert isinstance(loop, Loop)
    small_program = replace(small_program, operations=(product, replace(loop, trip_count=2)))

    wide = scaled_out(small_program, reduced(run), run)

    assert reduced(run).split.microbatches == 2
    assert wide is not None
    assert wide.operations == (product, replace(loop, trip_count=6))
    assert wide.model_flop == 3 * 10**12
    assert wide.memory.peak_bytes - small_program.memory.peak_bytes == 2 * 16 * 64 * 4


def test_program_that_gathers_over_the_data_axis_is_not_widened(row):
    """The payload of a gather grows with the group; only the compiler knows how."""
    (run,) = case(row(RESNET)).runs
    small_program = program(2)
    loop = small_program.operations[1]
    assert isinstance(loop, Loop)
    (operation,) = loop.body
    assert isinstance(operation, Operation)
    assert operation.collective is not None
    gather = replace(operation, collective=replace(operation.collective, name="all_gather"))
    small_program = replace(
        small_program, operations=(small_program.operations[0], replace(loop, body=(gather,)))
    )

    assert scaled_out(small_program, reduced(run), run) is None


# The compiler divides what 32 divides, as 16 does.
IN_PARTS = {"device_count": "32", "data": "32", "zero_stage": "1", "hidden": "512"}


@pytest.mark.slow  # two compiles for CUDA each
@pytest.mark.parametrize(
    "change",
    [
        # Four microbatches over fsdp; one over tensor, on two nodes; state in parts.
        {"device_count": "4", "data": "1", "fsdp": "4", "per_device_batch": "8"},
        {"device_count": "16", "data": "8", "tensor": "2", "per_device_batch": "2"},
        IN_PARTS | {"per_device_batch": "8"},
    ],
)
def test_compiler_makes_the_program_that_was_widened(change, row, tmp_path: Path, monkeypatch):
    """Compiled in full for comparison: equal products and collectives, in order."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    whole = case(row(GPT | {"fsdp": "1", "microbatch": "2"} | change))
    job = derived(whole, is_reduced=False).compiled[0]

    programs = archived_programs(Archive({}))
    (wide,) = find_programs([whole], programs)
    compiled: list[Program] = []
    run_jobs([job], lambda _, result: compiled.append(result.program))

    assert isinstance(wide, Program)
    assert case_key(job) not in programs.compiled.known
    ours, its = map(_products_and_collectives, (wide, compiled[0]))
    if "zero_stage" in change:  # smaller parts of an update are begun a little earlier or later
        ours, its = sorted(ours, key=str), sorted(its, key=str)
    assert ours == its
    # The tokens of the whole batch are divided for the loop, by one small operation or by two.
    assert operation_count(wide) == pytest.approx(operation_count(compiled[0]), rel=0.02)
    # Of 64 tokens on a device, the update of a 16th and not of a 32nd is much.
    few = 0.06 if "zero_stage" in change else 0.01
    assert moved_bytes(wide) == pytest.approx(moved_bytes(compiled[0]), rel=few)
    assert wide.memory.peak_bytes == pytest.approx(compiled[0].memory.peak_bytes, rel=few)
    assert wide.mesh_axes == compiled[0].mesh_axes
    assert wide.model_flop == compiled[0].model_flop


def _products_and_collectives(found: Program) -> list[tuple[object, ...]]:
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


def test_archive_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch, capsys):
    """With its name and exit code 2, and no draft left beside it; here it is a folder."""
    path = tmp_path / "programs.xz"
    path.mkdir()
    unknown = ledger(tmp_path, RESNET | {"model": "perceptron"})  # so nothing is compiled
    flags = ["rebuild", str(unknown), "--anew", "--output", str(path)]
    monkeypatch.setattr("sys.argv", flags)

    assert main() == 2

    assert f"error: '{path}' cannot be written: " in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ledger.csv", "programs.xz"]


def test_archived_program_serves_every_size_of_the_data_axis(row):
    """Nothing is compiled, and rows that differ in nothing else share one object."""
    rows = [row(RESNET | {"device_count": str(n), "data": str(n)}) for n in (2, 16, 32, 16)]
    compiled = []

    archive = archive_for(rows[0], program(2))
    programs = archived_programs(archive, lambda *counts: compiled.append(counts))
    found = find_programs([case(each) for each in rows], programs)

    assert [each.device_count for each in found if isinstance(each, Program)] == [2, 16, 32, 16]
    assert found[1] is found[3]
    assert compiled == []


def test_archive_needs_no_compiler_for_gpus(row, monkeypatch: pytest.MonkeyPatch):
    """What it made is found where it is not installed."""
    known = row(RESNET)
    archive = archive_for(known, program(2))
    monkeypatch.setattr("scalejax.xla.target.has_cuda_compiler", lambda: False)

    (found,) = find_programs([case(known)], archived_programs(archive, compiles=False))

    assert isinstance(found, Program)


def test_rebuilt_archive_holds_what_the_rows_need(row, tmp_path: Path):
    """And nothing else; what was archived is not compiled again."""
    path = tmp_path / "programs.xz"
    known = row(RESNET)
    archive = archive_for(known, program(2))
    lines = dict(archive.lines) | {"of another row": next(iter(archive.lines.values()))}

    count, size = rebuild([known], Archive(lines), path, lambda *counts: pytest.fail("compiled"))

    assert (count, size) == (1, path.stat().st_size)
    assert list(read_archive(path).lines) == list(archive.lines)


def test_added_programs_are_those_that_the_closed_form_does_not_know(row, tmp_path: Path):
    """The archive keeps what it holds, and gets none of a decoder, whose step has a closed form."""
    path = tmp_path / "programs.xz"
    known, decoder = row(RESNET), row(GPT | {"hardware": "h100_sxm_80gb", "intra_node_link": ""})
    archive = archive_for(known, program(2))
    lines = dict(archive.lines) | {"another": next(iter(archive.lines.values()))}

    count, _ = add([known, decoder], Archive(lines), path, lambda *counts: pytest.fail("compiled"))

    assert count == 2
    assert set(read_archive(path).lines) == set(lines)


def test_first_run_that_fits_is_taken(row):
    """A program that is too large for the device gives way to the next."""
    open_row = row(GPT | {"microbatch": "", "recompute": "none"})
    large = replace(program(1), memory=replace(program(1).memory, temporary_bytes=10**12))
    lines = {}
    for choice, each in enumerate((large, program(1), program(1))):
        lines |= archive_for(open_row, each, choice).lines

    (found,) = find_programs([case(open_row)], archived_programs(Archive(lines)))

    assert found == program(1)


def test_fastest_run_of_a_pipeline_that_fits_is_taken(row):
    """4 samples in 8 stages: of one at a time, 4 + 7 ms; of two, 2 (2 + 7) ms; 4 have no loop."""
    cells = {"layers": "8", "fsdp": "1", "pipeline": "8", "microbatch": "", "recompute": "full"}
    open_row = row(GPT | cells | {"global_batch": "4"})
    lines = {}
    for choice in (1, 2):  # a single microbatch has no loop, and is refused
        split = derived(case(open_row), choice).compiled[0].run.split
        work = matmul("block", split.microbatch)
        loop = Loop(name="work", trip_count=split.microbatches, body=(work,))
        lines |= archive_for(open_row, program_of(loop, devices=1), choice).lines

    programs = archived_programs(Archive(lines), compiles=False)
    (found,) = find_programs([case(open_row)], programs)

    assert isinstance(found, Program)
    assert [loop.trip_count for loop in found.operations if isinstance(loop, Loop)] == [4, 7]
