"""Plots in files, by matplotlib. Knows how figures are drawn, and nothing of where they come from.

The interactive ones of the report are in `report_charts`.
"""

from collections.abc import Sequence
from pathlib import Path

from scalejax.errors import ConfigError, refusal

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
    if path.suffix not in _SUFFIXES:
        accepted = f"its suffix must be one of {', '.join(_SUFFIXES)}"
        raise ConfigError(refusal("output", str(path), accepted))
    # Not pyplot, which picks a window system and keeps every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stride = max(1, len(learning_rates) // _MOST_POINTS)
    steps = range(0, len(learning_rates), stride)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
