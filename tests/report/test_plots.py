"""What a plot says in words beside what it draws."""

import re
from pathlib import Path

import pytest

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.planning.search import Candidate
from scalejax.report import figures
from scalejax.report.html.charts import Spec, save_picture
from scalejax.simulator.transformer import Strategy
from scalejax.validation import RowResult


def result(measured: float | None, predicted: float | None, family: str = "dlperf") -> RowResult:
    """What became of a row."""
    return RowResult(
        case_id="one",
        series="alike",
        device_count=8,
        measured_seconds=measured,
        predicted_seconds=predicted,
        p10_seconds=None,
        p90_seconds=None,
        status="ok" if predicted else "skipped: a pipeline axis",
        family=family,
    )


@pytest.fixture
def scatter() -> Spec:
    """Three rows of one family, 10, 20 and 40 % off, one of another, and one left out."""
    results = [
        *(result(1.0, 1 + off) for off in (0.1, -0.2, 0.4)),
        result(2.0, 2.0, "llm_foundry"),
        result(1.0, None),
    ]
    return figures.scatter(results, title="ledger.csv")


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
