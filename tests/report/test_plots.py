"""What a plot says in words beside what it draws."""

import re
from pathlib import Path

import pytest
from ledger_cases import GPT, RESNET, ledger

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.planning.search import Candidate
from scalejax.report import figures
from scalejax.report.html.charts import Spec, save_picture
from scalejax.simulator.transformer import Strategy
from scalejax.validation import RowResult, read_ledger


def result(case_id: str, measured: float | None, predicted: float | None) -> RowResult:
    """What became of a row."""
    return RowResult(
        case_id=case_id,
        series="alike",
        device_count=8,
        measured_seconds=measured,
        predicted_seconds=predicted,
        p10_seconds=None,
        p90_seconds=None,
        status="ok" if predicted else "skipped: a pipeline axis",
    )


@pytest.fixture
def scatter(tmp_path: Path) -> Spec:
    """Three rows of one family, 10, 20 and 40 % off, one of another, and one left out."""
    other = GPT | {"source": "github:mosaicml/llm-foundry@abc"}
    cells = [*(RESNET | {"case_id": name} for name in "abc"), other, RESNET | {"case_id": "e"}]
    rows = read_ledger(ledger(tmp_path, *cells))
    results = [
        *(result(name, 1.0, 1 + off) for name, off in zip("abc", (0.1, -0.2, 0.4), strict=True)),
        result("one", 2.0, 2.0),
        result("e", 1.0, None),
    ]
    return figures.scatter(list(zip(rows, results, strict=True)), title="ledger.csv")


def test_a_scatter_plot_has_rows_and_error_of_each_family(scatter: Spec):
    """The largest family first; of five rows one has no prediction."""
    color = scatter["layer"][-1]["encoding"]["color"]

    assert color["scale"]["domain"] == ["dlperf: 3, 20%", "llm_foundry: 1, 0%"]
    assert "median error" in color["legend"]["title"]
    assert scatter["title"]["text"] == "ledger.csv: predicted against measured"
    assert scatter["title"]["subtitle"][0].startswith("4 rows; 1 without")


@pytest.mark.parametrize("slowest", [1.02, 6, 1e6])
def test_times_of_strategies_are_labelled(slowest: float, tmp_path: Path):
    """Near or far apart: at least two times, in seconds, and each once."""
    strategy = Strategy(split=BatchSplit(global_batch=1, layout=Layout()))
    few = [
        Candidate(strategy=strategy, step_seconds=0.0137 * slowest**share, peak_memory_bytes=2**30)
        for share in (0, 0.5, 1)
    ]

    save_picture(figures.time_and_memory(few, title="gpt"), tmp_path / "plot.svg")

    drawn = (tmp_path / "plot.svg").read_text()
    labels = re.findall(r">([0-9.]+[mk]?s)<", drawn)
    assert len(set(labels)) == len(labels) >= 2
