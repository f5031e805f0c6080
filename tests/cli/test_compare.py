"""`scalejax compare` of program files: what it prints, writes and exits with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from program_cases import PAPER, gather, matmul, program_of

from scalejax.cli.main import main
from scalejax.core import serialization
from scalejax.simulator.comparison import Comparison
from scalejax.simulator.program import Program

BEFORE = program_of(matmul("m", 10), gather("g", 2, is_async=False))
AFTER = program_of(
    matmul("m", 10), gather("g", 2, is_async=False), gather("h", 6, is_async=False, axis="tensor")
)
FEWER = program_of(matmul("m", 10), devices=4)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a.json, b.json, four.json and paper.toml."""
    for name, program in {"a": BEFORE, "b": AFTER, "four": FEWER}.items():
        serialization.save(program, tmp_path / f"{name}.json")
    serialization.save_toml(PAPER, tmp_path / "paper.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*words: str) -> int:
    """Exit code of `scalejax compare` on the paper cluster."""
    try:
        return main(["compare", *words, "--cluster", "paper.toml"])
    except SystemExit as left:
        return int(str(left.code))


def test_worse_step_exits_with_1_and_is_printed_in_80_columns(
    programs: Path, capsys: pytest.CaptureFixture[str]
):
    """Its ratio, the axis whose bytes grew, and the collective that appeared."""
    assert compare("a.json", "b.json", "--json", "out.json", "--save-program", "kept.json") == 1

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "A: a.json (data=8)" in lines
    assert "step time            12 ms     18 ms x 1.500" in lines
    assert "tensor       0 B   1.1 GiB     new" in lines
    assert "all-gather tensor 1.1 GiB 0 1 6 ms n/a" in lines
    assert any(line.startswith("Beyond a bound: the step takes 1.5 times") for line in lines)
    assert serialization.load(Comparison, programs / "out.json").time_ratio == pytest.approx(1.5)
    assert serialization.load(Program, programs / "kept.json") == AFTER


def test_step_within_the_bounds_exits_with_0(programs: Path, capsys: pytest.CaptureFixture[str]):
    """B is A with one collective less; and a worse one, where the bounds let it pass."""
    assert compare("b.json", "a.json") == 0
    assert "Within all bounds: step time +0.02" in capsys.readouterr().out

    assert compare("a.json", "b.json", "--max-slowdown", "0.6") == 1
    assert "the step takes" not in capsys.readouterr().out

    assert compare("a.json", "b.json", "--max-slowdown", "0.6", "--max-bytes-growth", "4") == 0
    assert compare("a.json", "a.json", "--max-slowdown", "0", "--devices", "8") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.json four.json", "devices of B=4 is refused: A is for 8"),
        ("a.json a.json --devices 4", "devices=4 is refused: a.json is for 8"),
        ("a.json c.json", "'c.json' does not exist"),
        ("a.json paper.json", "'paper.json' does not exist"),
        ("a.json a.json@HEAD", "only a run file can be taken at a commit"),
        ("a.json a.json --max-slowdown -1", "max_slowdown=-1.0 is refused"),
        (
            "a.json a.json --max-slowdown much",
            "--max-slowdown='much' is refused: it must be a number",
        ),
        ("a.json a.json --train.epochs 3", "--train.epochs replaces a field of a run file"),
        ("a.json a.json --framework other", "framework='other' is refused"),
        ("a.json run.toml@HEAD", "is in the working tree of no git repository"),
        ("a.json", "missing: B"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    programs: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
):
    """With exit code 2, in one sentence."""
    assert compare(*words.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_damaged_program_is_refused(programs: Path, capsys: pytest.CaptureFixture[str]):
    """JSON of another kind, and no JSON."""
    (programs / "other.json").write_text(json.dumps({"name": "x"}))
    (programs / "half.json").write_text("{")

    assert compare("a.json", "other.json") == 2
    assert "backend is missing" in capsys.readouterr().err
    assert compare("a.json", "half.json") == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_long_names_stay_within_80_columns(programs: Path, capsys: pytest.CaptureFixture[str]):
    """A collective over three axes from a long path."""
    moved = gather("h", 6, is_async=False)
    collective = moved.collective
    assert collective is not None
    group = replace(collective.group, axes=("data", "fsdp", "context"))
    moved = replace(
        moved,
        source="some/long/folder/of/a/project/my_networks.py:1234",
        collective=replace(collective, name="collective_permute", group=group),
    )
    serialization.save(program_of(*BEFORE.operations, moved), programs / "long.json")

    compare("a.json", "long.json")

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "collective-permute" in printed
