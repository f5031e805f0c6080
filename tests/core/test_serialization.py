"""Promises of reading and writing dataclasses."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from scalejax.config.training import LayoutConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import (
    build,
    kind_of,
    load,
    plain,
    require_writable,
    require_writable_folder,
    save,
)
from scalejax.simulator.program import Collective, DeviceGroup, Loop, MemoryUse, Operation, Program

PROGRAM = Program(
    name="test",
    backend="cuda",
    target="sm_90",
    compiler="none",
    mesh_axes=(("data", 4), ("tensor", 2)),
    operations=(
        Operation(name="gemm", kind="matmul", dtype="bf16", flop=100, shape=(1, 2, 5, 5)),
        Loop(
            name="while",
            trip_count=3,
            body=(
                Operation(name="gemm.1", kind="matmul", dtype="bf16", flop=10),
                Operation(
                    name="all-reduce-start",
                    kind="collective",
                    dtype="f32",
                    collective=Collective(
                        name="all_reduce",
                        payload_bytes=64,
                        group=DeviceGroup(extents=((4, 2),), axes=("data",)),
                        is_async=True,
                    ),
                ),
                Operation(name="done", kind="wait", dtype="f32", waits_for="all-reduce-start"),
            ),
        ),
    ),
    memory=MemoryUse(argument_bytes=10, output_bytes=8, alias_bytes=6, temporary_bytes=5),
)


def test_a_program_survives_a_round_trip(tmp_path):
    """Nested loops, tuples and missing values come back as they were."""
    save(PROGRAM, tmp_path / "program.json")

    assert load(Program, tmp_path / "program.json") == PROGRAM


def test_a_document_says_what_it_is(tmp_path):
    """First of all; and one of before, which did not say, is read too."""
    path = tmp_path / "program.json"
    save(PROGRAM, path)

    fields = json.loads(path.read_text())
    assert list(fields.items())[:2] == [("kind", "program"), ("version", 1)]
    assert kind_of(path) == "program"
    del fields["kind"], fields["version"]
    path.write_text(json.dumps(fields))
    assert kind_of(path) is None
    assert load(Program, path) == PROGRAM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "plan"}, r"program\.json: kind='plan' is refused: a document of kind 'program'"),
        ({"version": 2}, r"version=2 is refused: of 'program' it must be 1 to 1"),
        ({"version": "new"}, r"version='new' is refused"),
    ],
)
def test_a_document_of_another_kind_or_of_a_later_version_is_refused(tmp_path, change, message):
    """By name, and not by the first field that is missing."""
    path = tmp_path / "program.json"
    save(PROGRAM, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(ConfigError, match=message):
        load(Program, path)


def test_loops_multiply_what_is_in_them():
    """100 outside, 10 three times inside."""
    assert PROGRAM.flop == 130
    assert PROGRAM.collective_bytes("all_reduce") == 192
    assert PROGRAM.collective_bytes("all_gather") == 0


def test_donated_buffers_count_once():
    """10 in, 8 out of which 6 are the same memory, 5 besides."""
    assert PROGRAM.memory.peak_bytes == 17


def test_a_damaged_file_is_named(tmp_path):
    """The message holds the path and the place."""
    path = tmp_path / "program.json"
    path.write_text('{"name": "x", ')

    with pytest.raises(ConfigError, match=r"program\.json: this is not valid JSON: .*line 1"):
        load(Program, path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    """Every missing field is named."""
    path = tmp_path / "program.json"
    path.write_text('{"name": "x"}')

    with pytest.raises(ConfigError, match=r"program\.json: backend is missing"):
        load(Program, path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """All or nothing: a reader never sees half a file."""
    path = tmp_path / "program.json"
    save(PROGRAM, path)
    before = path.read_text()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", no_space)
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left"):
        save(PROGRAM, path)

    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["program.json"]


@pytest.mark.parametrize("place", ["file/program.json", "."])
def test_a_place_that_is_no_place_for_a_file_is_refused(tmp_path, monkeypatch, place):
    """A file where a folder should be, and a folder where a file should be."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written"):
        save(PROGRAM, Path(place))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file/new/out.json", "'.*/file' is a file, not a folder"),
        ("folder", "it is a folder, and must be a file"),
        ("/proc/new/out.json", "it cannot be written"),
        ("x" * 300 + "/out.json", "File name too long"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused(tmp_path, monkeypatch, place, reason):
    """Whatever is in the way; nothing is made."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("folder").mkdir()
    before = sorted(tmp_path.iterdir())

    with pytest.raises(ConfigError, match=f"^json='{place}' is refused: .*{reason}"):
        require_writable("json", Path(place))
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_can_be_written_is_accepted(tmp_path):
    """There already, new, in a new folder, or none; and so is a folder."""
    (tmp_path / "old").write_text("")
    for path in (tmp_path / "old", tmp_path / "new", tmp_path / "a" / "b" / "new", None):
        require_writable("json", path)
    for path in (tmp_path, tmp_path / "a" / "b", None):
        require_writable_folder("output", path)
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        require_writable_folder("output", tmp_path / "old")


@dataclass(frozen=True, kw_only=True)
class _Pair:
    left: int
    right: float = 0.0


def test_integers_are_numbers_and_nothing_else_is_converted():
    """1 is a float; "1" and 1.0 are no integers."""
    assert build(_Pair, {"left": 1, "right": 2}) == _Pair(left=1, right=2.0)
    for wrong in ("1", 1.0, True, None):
        with pytest.raises(ConfigError, match="left"):
            build(_Pair, {"left": wrong})


def test_plain_is_the_inverse_of_build():
    """Tables, lists and scalars only."""
    assert plain(_Pair(left=1)) == {"left": 1, "right": 0.0}


def test_true_is_no_whole_number_of_a_choice():
    """Of the stages 0 to 2, where Python would find that 1 is meant."""
    with pytest.raises(ConfigError, match=r"^layout\.zero_stage=True is refused: .* whole number"):
        build(LayoutConfig, {"zero_stage": True}, where="layout")
