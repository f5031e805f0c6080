"""Plots in files, by matplotlib. Knows how figures are drawn, and nothing of where they come from.

The interactive ones of the report are in `report_charts`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalejax.errors import ConfigError, refusal
from scalejax.validation import LedgerRow, RowResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 2000
"""Points beyond which a line on paper gains nothing."""
_SUFFIXES = (".png", ".svg", ".pdf")


def save_schedule(learning_rates: Sequence[float], *, steps_per_epoch: int, path: Path) -> None:
    """Draw the learning rate of every update over epochs.

    Args:
        learning_rates: of every update, in order.
        steps_per_epoch: updates in one pass over the data.
        path: the picture; its suffix says which format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("output", path)
    stride = max(1, len(learning_rates) // _MOST_POINTS)
    steps = range(0, len(learning_rates), stride)
    figure = _figure(7, 3.5)
    axes = figure.add_subplot()
    axes.plot(
        [step / steps_per_epoch for step in steps],
        [learning_rates[step] for step in steps],
        drawstyle="steps-post",
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    _save(figure, path)


def save_scatter(scored: Sequence[tuple[LedgerRow, RowResult]], *, path: Path) -> None:
    """Draw predicted against measured step times, one colour for each family.

    On the line in the middle the two are equal; between the dotted ones they differ by less
    than a quarter.

    Args:
        scored: rows of a ledger, and what became of them.
        path: the picture; its suffix says which format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("plot", path)
    points: dict[str, list[tuple[float, float]]] = {}
    for row, result in scored:
        if result.measured_seconds is not None and result.predicted_seconds is not None:
            point = (result.measured_seconds, result.predicted_seconds)
            points.setdefault(row.family, []).append(point)
    figure = _figure(7, 6)
    axes = figure.add_subplot(xscale="log", yscale="log", aspect="equal")
    for family, pairs in points.items():
        axes.scatter(*zip(*pairs, strict=True), s=12, alpha=0.6, label=family, linewidths=0)
    every = [seconds for pairs in points.values() for pair in pairs for seconds in pair]
    if every:
        ends = (min(every) / 1.5, max(every) * 1.5)
        axes.plot(ends, ends, color="black", linewidth=0.8)
        for factor in (0.8, 1.25):
            ys = [end * factor for end in ends]
            axes.plot(ends, ys, color="black", linewidth=0.8, linestyle="dotted")
        axes.set_xlim(ends)
        axes.set_ylim(ends)
        axes.legend(fontsize="small")
    axes.set_xlabel("measured seconds per step")
    axes.set_ylabel("predicted seconds per step")
    axes.grid(alpha=0.3)
    _save(figure, path)


def require_plot_format(field: str, path: Path) -> None:
    """Refuse a path whose suffix names no format that can be drawn.

    Raises:
        ConfigError: naming the formats.
    """
    if path.suffix not in _SUFFIXES:
        accepted = f"its suffix must be one of {', '.join(_SUFFIXES)}"
        raise ConfigError(refusal(field, str(path), accepted))


def _figure(width_inches: float, height_inches: float) -> "Figure":
    # Not pyplot, which picks a window system and keeps every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
