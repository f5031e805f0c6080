"""Plots in files, drawn with matplotlib: schedules, prediction scatter plots, Pareto fronts.

The interactive charts of the report are in `report.html.charts`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import GIB, format_seconds
from scalejax.planning.search import Candidate, pareto
from scalejax.validation import LedgerRow, RowResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 2000
"""Most points of a curve; more add nothing visible."""
_LEGEND_COLUMNS = 3
_LEGEND_ROW_INCHES = 0.2
_FAMILY_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9")
_MARKERS = ("o", "^", "s", "D")  # the next one where there are more families than colours
_NEAR, _FAR = 5, 300
"""Ratio of largest to smallest time above which the axis is logarithmic; above the second, only
powers of ten are labelled."""
_SUFFIXES = (".png", ".svg", ".pdf")


def save_schedule(learning_rates: Sequence[float], *, epochs: Sequence[float], path: Path) -> None:
    """Draw the learning rate of every update over epochs.

    Args:
        learning_rates: of every update, in order.
        epochs: epochs trained before each update.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("output", path)
    stride = max(1, len(learning_rates) // _MOST_POINTS)
    steps = range(0, len(learning_rates), stride)
    figure = new_figure(7, 3.5)
    axes = figure.add_subplot()
    axes.plot(
        [epochs[step] for step in steps],
        [learning_rates[step] for step in steps],
        drawstyle="steps-post",
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_scatter(
    scored: Sequence[tuple[LedgerRow, RowResult]], *, path: Path, title: str = "step times"
) -> None:
    """Draw predicted against measured step times, one colour and mark for each family.

    On the line in the middle the two are equal; between the dotted ones they differ by less
    than a quarter. The legend has the rows and the median absolute error of each family; rows
    without a prediction, or without a time to compare with, are counted under the title.

    Args:
        scored: rows of a ledger with their results.
        path: output file; its suffix selects the format.
        title: what was predicted, such as the ledger's name.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("plot", path)
    points: dict[str, list[tuple[float, float]]] = {}
    for row, result in scored:
        if result.measured_seconds is not None and result.predicted_seconds is not None:
            point = (result.measured_seconds, result.predicted_seconds)
            points.setdefault(row.family, []).append(point)
    drawn = sum(map(len, points.values()))
    legend_rows = -(-(len(points) + 2) // _LEGEND_COLUMNS)  # two for the lines
    # So high that the axes are a square, to a few per cent: fixed, its words would be cut off.
    figure = new_figure(7, 7.5 + _LEGEND_ROW_INCHES * legend_rows)
    axes = figure.add_subplot(xscale="log", yscale="log")
    _draw_families(axes, points)
    if points:
        _draw_lines(axes, [each for pairs in points.values() for pair in pairs for each in pair])
        figure.legend(
            loc="outside lower center",
            fontsize="small",
            ncols=_LEGEND_COLUMNS,
            title="family: rows, median error of the step time",
            title_fontsize="small",
        )
    left_out = len(scored) - drawn
    rest = f"; {left_out:,} without a prediction or a time are left out" if left_out else ""
    axes.set_title(f"{title}: predicted against measured\n{drawn:,} rows{rest}", fontsize="medium")
    axes.set_xlabel("measured seconds per step")
    axes.set_ylabel("predicted seconds per step")
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_pareto(candidates: Sequence[Candidate], *, path: Path, title: str) -> None:
    """Draw the memory of strategies over their step time, with the Pareto front of the two.

    Args:
        candidates: those that fit.
        path: output file; its suffix selects the format.
        title: name of the search.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("output", path)
    front = pareto(tuple(candidates))
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    stride = max(1, len(candidates) // _MOST_POINTS)
    shown = candidates[::stride]
    every = f"one in {stride:,} of " if stride > 1 else ""
    axes.scatter(
        [each.step_seconds for each in shown],
        [each.peak_memory_bytes / GIB for each in shown],
        s=6,
        alpha=0.4,
        linewidths=0,
        label=f"{every}{len(candidates):,} strategies that fit",
    )
    axes.plot(
        [each.step_seconds for each in front],
        [each.peak_memory_bytes / GIB for each in front],
        color="C3",
        marker="o",
        markersize=4,
        drawstyle="steps-post",
        label="none is faster with less memory",
    )
    _scale_by_time(axes, [each.step_seconds for each in candidates])
    axes.set_xlabel("predicted time of a step")
    axes.set_ylabel("memory of a device, GiB")
    axes.set_ylim(0, 1.1 * max(each.peak_memory_bytes for each in candidates) / GIB)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def _draw_families(axes: "Axes", points: Mapping[str, list[tuple[float, float]]]) -> None:
    """Draw (measured, predicted) seconds of each family, the largest first."""
    for index, (family, pairs) in enumerate(sorted(points.items(), key=lambda item: -len(item[1]))):
        axes.scatter(
            *zip(*pairs, strict=True),
            s=14,
            alpha=0.6,
            label=_family_label(family, pairs),
            linewidths=0,
            color=_FAMILY_COLORS[index % len(_FAMILY_COLORS)],
            marker=_MARKERS[index // len(_FAMILY_COLORS) % len(_MARKERS)],
        )


def _scale_by_time(axes: "Axes", seconds: Sequence[float]) -> None:
    """Scale the x axis for times, logarithmically where they span a large ratio.

    Labels few ticks, so that labels do not overlap.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ratio = max(seconds) / min(seconds)
    if ratio < _NEAR:
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    else:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < _FAR else (1,)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))


def _draw_lines(axes: "Axes", seconds: Sequence[float]) -> None:
    """Draw the lines of exact predictions and of 25 % error over the range of `seconds`."""
    ends = (min(seconds) / 1.5, max(seconds) * 1.5)
    axes.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    for factor, label in ((0.8, "x 0.8 and x 1.25"), (1.25, None)):
        ys = [end * factor for end in ends]
        axes.plot(ends, ys, color="black", linewidth=0.8, linestyle="dotted", label=label)
    axes.set_xlim(ends)
    axes.set_ylim(ends)


def _family_label(family: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Legend text of a family: its row count and median absolute error."""
    error = median(abs(predicted / measured - 1) for measured, predicted in pairs)
    return f"{family}: {len(pairs):,}, {error:.0%}"


def require_plot_format(field: str, path: Path) -> None:
    """Refuse a path whose suffix is no supported image format.

    Raises:
        ConfigError: naming the formats.
    """
    if path.suffix not in _SUFFIXES:
        accepted = f"its suffix must be one of {', '.join(_SUFFIXES)}"
        raise ConfigError(refusal(field, str(path), accepted))


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """An empty figure, which `save_figure` writes."""
    # Not pyplot, which picks a window system and keeps every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the suffix of `path`.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
