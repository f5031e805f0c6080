"""The accuracy of predictions, kept for each release and compared, and its page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import GPT, RESNET, ledger

from scalejax.cli.main import main
from scalejax.core.serialization import load, save
from scalejax.report.html.accuracy import write_accuracy
from scalejax.validation import RowResult, Validation
from scalejax.validation.accuracy import Accuracy, accuracy_of, changes, quantity_summaries

ROOT = Path(__file__).parents[2]


def result(measured: float, predicted: float, **fields: Any) -> RowResult:
    """A row of a step time, whose band is a tenth on either side."""
    row = RowResult(
        case_id="one",
        series="alike",
        device_count=8,
        measured_seconds=measured,
        predicted_seconds=predicted,
        p10_seconds=predicted * 0.9,
        p90_seconds=predicted * 1.1,
        status="ok",
        family="dlperf",
        framework="xla",
        chip="v100",
        source="github:Oneflow-Inc/DLPerf@c8, README.md:1 </script><b>",
    )
    return replace(row, **fields)


ROWS = (
    result(1.0, 1.05),
    result(1.0, 0.8),
    result(1.0, 1.5, chip="h100", measured_memory_bytes=4e9, predicted_memory_bytes=5e9),
    result(1.0, 3.0, status="skipped: a pipeline axis", predicted_seconds=None),
    result(2.0, 1.0, family="bloom"),
)
"""Off by 5, 20, 50 and 50 %, one of them skipped, and one of peak memory by 25 %."""


def test_cells_by_hand():
    """By quantity, family, framework and chip; a family counts once in the sum of all."""
    found = accuracy_of(ROWS, "1.0")

    first, other, memory, bloom = found.cells
    assert (first.key, first.rows) == (("step times", "dlperf", "xla", "v100"), 2)
    assert (first.mean_error, first.median_error) == (0.125, 0.125)
    assert (first.bias, first.coverage) == (-0.075, 0.5)
    assert (other.chip, other.mean_error) == ("h100", 0.5)
    assert (memory.quantity, memory.mean_error, memory.coverage) == ("memory", 0.25, None)
    assert bloom.bias == -0.5
    steps = quantity_summaries(found)[0]
    assert (steps.families, steps.rows) == (2, 4)
    assert steps.mean_error == pytest.approx(((0.05 + 0.2 + 0.5) / 3 + 0.5) / 2)


def test_releases_are_compared_cell_by_cell(tmp_path: Path):
    """Through a file; what got worse comes first, then what got better, then what one lacks."""
    save(accuracy_of(ROWS, "1.0"), tmp_path / "old.json")
    rows = (result(1.0, 1.0), result(1.0, 2.0, chip="h100"), result(1.0, 1.0, chip="k80"))

    found = changes(load(Accuracy, tmp_path / "old.json"), accuracy_of(rows, "2.0"))

    assert [(each.cell.quantity, each.cell.chip, each.points) for each in found] == [
        ("step times", "h100", 0.5),
        ("step times", "v100", -0.125),
        ("step times", "k80", None),
        ("memory", "h100", None),
        ("step times", "v100", None),
    ]
    assert not changes(accuracy_of(ROWS, "1.0"), accuracy_of(ROWS, "2.0"))


class _Page(HTMLParser):
    """Buttons of a page, the texts of its elements, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.buttons: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self.texts: dict[str, str] = {}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        cells = dict(attrs)
        if tag == "button":
            self.buttons.append(cells)
        self.fetched += [value for name, value in attrs if name in ("src", "srcset") and value]
        if tag in ("link", "img", "iframe"):
            self.fetched.append(tag)
        self._inside = cells.get("id") or ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data


def test_each_cell_of_the_page_opens_its_rows(tmp_path: Path):
    """With what was predicted, measured and published; it needs no network, and no name in it
    ends the script."""
    path, old = tmp_path / "page.html", accuracy_of((result(1.0, 2.0),), "0.9")
    found = Validation(ledger="ledger", families=(), rows=ROWS)

    write_accuracy(found, path, release="1.0", before=old)

    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert not page.fetched
    data = json.loads(page.texts["cells"])
    assert len(page.buttons) == len(data["cells"]) == 4
    opened = [data["cells"][int(each["data-cell"] or "")] for each in page.buttons]
    titles = {each["title"]: each["rows"] for each in opened}
    assert titles["memory, dlperf, xla, h100: 1 row"][0][2:4] == ["3.7 GiB", "4.7 GiB"]
    first, second = titles["step times, dlperf, xla, v100: 2 rows"]
    assert first[:7] == ["one", 8, "1 s", "1.05 s", "945 ms", "1.16 s", "+5.0 %"]
    assert data["sources"][second[-1]] == ROWS[0].source
    body = path.read_text(encoding="utf-8")
    assert re.search(r'class="fair"[^>]*>v100 <b>12.5 %</b> \(was 100 %\)', body)
    assert "<th>mean error in 0.9</th>" in body


def test_validate_writes_the_page_and_compares_releases(tmp_path: Path, capsys):
    """One command makes all three; a file that is none of an accuracy is refused."""
    path = str(ledger(tmp_path, RESNET, GPT))
    old, page = tmp_path / "old.json", tmp_path / "page.html"
    assert main(["validate", path, "--accuracy", str(old)]) == 0
    before = load(Accuracy, old)
    worse = replace(before.cells[0], mean_error=before.cells[0].mean_error + 0.1)
    save(replace(before, release="0.1", cells=(worse, *before.cells[1:])), old)
    capsys.readouterr()

    assert main(["validate", path, "--compare", str(old), "--html", str(page)]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    assert "Since 0.1" in printed
    assert f"{before.cells[0].mean_error + 0.1:.1%} {before.cells[0].mean_error:.1%}" in printed
    assert f"{len(before.cells) - 1} cell" in printed
    assert "(was " in page.read_text(encoding="utf-8")
    (tmp_path / "other.json").write_text("{}")
    assert main(["validate", path, "--compare", str(tmp_path / "other.json")]) == 2


def test_accuracy_of_releases_is_kept():
    """A file for each, small, that says of which release it is."""
    paths = sorted((ROOT / "docs" / "accuracy").glob("*.json"))

    assert paths
    for path in paths:
        kept = load(Accuracy, path)
        assert kept.release == path.stem
        assert len(kept.cells) > 100
        assert path.stat().st_size < 150_000
