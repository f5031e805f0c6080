"""The notebooks of `docs/notebooks`: they run, and print what they show."""

import ast
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from notebooks import NOTEBOOKS, differences, executed, same, text_of  # noqa: E402

_EPOCHS = "4"
"""Of runs that notebooks train, in place of ten."""


def read(path: Path) -> Any:
    """A notebook as it is kept."""
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


def shows(source: str) -> bool:
    """Whether a cell has something to show: what it prints, or the expression that ends it."""
    return "print(" in source or isinstance(ast.parse(source).body[-1], ast.Expr)


@pytest.mark.slow  # starts a kernel for each, compiles for CUDA, searches layouts, and trains
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch):
    """But for rounding, and numbers of what was trained; and nothing on standard error.

    `python tests/support/notebooks.py NAME` writes what is printed now.
    """
    folders = (str(Path(__file__).parents[1]), *sys.path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setenv("NOTEBOOK_EPOCHS", _EPOCHS)
    kept = read(path)

    now = executed(path, tmp_path)

    streams = [each for cell in now.cells for each in cell.get("outputs", ())]
    assert [text_of(each) for each in streams if each.get("name") == "stderr"] == []
    if (shown := kept.metadata["scalejax"]["jax"]) != jax.__version__:  # other programs
        pytest.skip(f"it runs, and shows what JAX {shown} prints; this is {jax.__version__}")
    assert differences(kept, now) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_every_result(path: Path):
    """As it is kept: a cell that prints, or ends in an expression, has its output."""
    kept = read(path)
    silent = [
        cell.source
        for cell in kept.cells
        if cell.cell_type == "code" and shows(cell.source) and not cell.outputs
    ]

    assert path.stat().st_size < 100_000
    assert kept.cells[0].source.startswith("# ")
    assert silent == []
    assert sum(len(cell.get("outputs", ())) for cell in kept.cells) >= 4


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        ("42.9 ms a step", "42.8 ms a step", True),
        ("42.9 ms a step", "44.1 ms a step", False),
        ("1,024 devices", "1,024 devices fit", False),
        ("fits: True", "fits: False", False),
        ("2.95e9 FLOP", "2.96e9 FLOP", True),
    ],
)
def test_outputs_differ_by_more_than_rounding(a: str, b: str, is_same: bool):
    """Else a notebook would go stale, or fail on another machine."""
    assert same(a, b) is is_same


def test_measured_numbers_are_not_compared():
    """But what they are called is."""
    assert same("accuracy 85.1 %", "accuracy 20 % 3 %", are_numbers_compared=False)
    assert not same("accuracy 85.1 %", "loss 0.4 %", are_numbers_compared=False)
