"""Ledgers: read strictly, and refused with line and column."""

from pathlib import Path

import pytest
from ledger_cases import RESNET, ledger

from scalejax.cli import main
from scalejax.errors import ConfigError
from scalejax.validation import (
    read_ledger,
)


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
