"""What a plot says in words beside what it draws."""

import itertools
from pathlib import Path

import pytest
from ledger_cases import GPT, RESNET, ledger
from matplotlib.figure import Figure

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.planning.search import Candidate
from scalejax.report.figures import style
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
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Three rows of one family, 10, 20 and 40 % off, one of another, and one left out."""
    drawn: list[Figure] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, path: drawn.append(figure))
    other = GPT | {"source": "github:mosaicml/llm-foundry@abc"}
    cells = [*(RESNET | {"case_id": name} for name in "abc"), other, RESNET | {"case_id": "e"}]
    rows = read_ledger(ledger(tmp_path, *cells))
    results = [
        *(result(name, 1.0, 1 + off) for name, off in zip("abc", (0.1, -0.2, 0.4), strict=True)),
        result("one", 2.0, 2.0),
        result("e", 1.0, None),
    ]

    style.save_scatter(
        list(zip(rows, results, strict=True)), path=Path("s.png"), title="ledger.csv"
    )

    return drawn[0]


def test_the_legend_has_rows_and_error_of_each_family(figure: Figure):
    """The largest family first, then what the lines are."""
    labels = [text.get_text() for text in figure.legends[0].get_texts()]

    assert labels == ["dlperf: 3, 20%", "llm_foundry: 1, 0%", "equal", "x 0.8 and x 1.25"]
    assert "median error" in figure.legends[0].get_title().get_text()


def test_the_title_counts_what_is_left_out(figure: Figure):
    """One of five has no prediction."""
    title = figure.axes[0].get_title()

    assert title.startswith("ledger.csv: predicted against measured\n4 rows; 1 without")


@pytest.mark.parametrize("slowest", [1.02, 1.5, 4, 6, 20, 250, 400, 1e4, 1e6])
def test_labels_of_strategy_times_do_not_overlap(slowest: float, monkeypatch: pytest.MonkeyPatch):
    """Near or far apart: at least two names, none over another."""
    drawn: list[Figure] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, path: drawn.append(figure))
    strategy = Strategy(split=BatchSplit(global_batch=1, layout=Layout()))
    few = [
        Candidate(strategy=strategy, step_seconds=0.0137 * slowest**share, peak_memory_bytes=2**30)
        for share in (0, 0.5, 1)
    ]

    style.save_pareto(few, path=Path("p.png"), title="gpt")

    drawn[0].canvas.draw()
    axis = drawn[0].axes[0].xaxis
    low, high = axis.get_view_interval()
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert len({label.get_text() for label in labels}) == len(labels) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert not axis.get_minorticklabels()


def test_the_axes_fill_the_figure(figure: Figure):
    """A square of nearly its width: nothing blank beside it."""
    figure.canvas.draw()
    box = figure.axes[0].get_position()

    # what is left are the numbers and the name of the axis, and the title above
    assert box.width > 0.8
    assert box.y1 < 0.95
