"""Ledgers: read strictly, and refused with line and column."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import RESNET, ledger

from scalejax.cli.main import main
from scalejax.core.errors import ConfigError
from scalejax.validation import read_ledger


def test_blank_cells_are_unknown_and_others_typed(row):
    """And columns that nobody knows are no matter."""
    found = row(RESNET | {"layers": "", "weather": "fine"})

    assert found.device_count == 16
    assert found.step_seconds == 0.25
    assert found.model.layers is None
    assert found.family == "dlperf"


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_packed_ledger_is_read_as_it_is(
    suffix: str, pack: Callable[[bytes], bytes], row, tmp_path: Path
):
    """Whatever packs it; a damaged one is refused."""
    path = tmp_path / f"ledger.csv.{suffix}"
    path.write_bytes(pack(ledger(tmp_path, RESNET).read_bytes()))

    assert read_ledger(path) == [row(RESNET)]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ledger(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_count": "many"}, r"line 2, column 6: device_count='many' is refused"),
        (
            {"device_count": "0"},
            r"column 6: device_count='0' is refused: it must be a whole number, 1",
        ),
        ({"layers": "-1"}, r"layers='-1' is refused: it must be a whole number, 1 or more"),
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
    ("written", "meant"),
    [
        ("step_secs", "step_seconds"),
        ("Step_Seconds", "step_seconds"),
        ("micro_batch", "microbatch"),
    ],
)
def test_misspelt_column_is_refused(written: str, meant: str, tmp_path: Path):
    """Else what it holds would be taken for not stated."""
    cells = {written if name == meant else name: cell for name, cell in RESNET.items()}
    place = list(RESNET).index(meant) + 1
    message = rf"line 1, column {place}: heading='{written}' is refused: .* mean '{meant}'\?"

    with pytest.raises(ConfigError, match=message):
        read_ledger(ledger(tmp_path, cells))


def test_column_that_resembles_a_known_one_is_ignored(row):
    """The open ledger has such; beside the known one, or far from any that is missing."""
    found = row(RESNET | {"pipeline_chunks": "4", "year": "2019", "step_second": "1"})

    assert (found.spread.pipeline, found.step_seconds) == (None, 0.25)


def test_ledger_without_measured_times_is_predicted_and_says_so(tmp_path: Path, capsys):
    """In words, once; a table of unknown errors alone would look like a failure."""
    unmeasured = {name: cell for name, cell in RESNET.items() if name != "step_seconds"}

    assert main(["validate", str(ledger(tmp_path, unmeasured))]) == 0
    assert capsys.readouterr().out.count("NOTHING TO COMPARE WITH: no row states") == 1
    assert main(["validate", str(ledger(tmp_path, RESNET))]) == 0
    assert "NOTHING TO COMPARE" not in capsys.readouterr().out


def test_dry_run_says_which_rows_are_runs_and_compiles_nothing(tmp_path: Path, capsys):
    """And not how far off they are: the archive has no program of such a row. In every line rows
    are runs and skipped ones, and the reasons add up to these."""
    unknown = {"per_device_batch": "95", "microbatch": "95", "global_batch": "1520"}
    stated = {"layers": "50", "hidden": "64"}
    rows = (
        RESNET | unknown,
        RESNET | {"pipeline": "4"},
        RESNET | {"pipeline": "4"} | stated,
        RESNET | {"model": "mamba", "precision": "mxfp8"},  # of which the network is the reason
    )

    assert main(["validate", str(ledger(tmp_path, *rows)), "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Nothing is compiled and predicted" in printed
    assert "rows = are runs + skipped nearest" in printed
    assert "dense 4 1 (25.0%) 3 0 stating 1 0 (0.0%) 1 0" in printed
    assert "2 1 dense a pipeline of 'resnet50'" in printed
    assert "1 0 dense no network 'mamba'" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("case_id,series,source\n", "line 1: the column 'device_count' is missing"),
        ("{heading}\na,b\n", "line 2, column 3: there are 2 cells, but 16 columns"),
        (
            "{heading}\n{heading},b\n",
            "line 2, column 17: there are 17 cells, but 16 columns; ",
        ),
        ('{heading}\n"a\n', "line 2: this is not CSV"),
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
    assert message in " ".join(capsys.readouterr().err.split())
