"""Plots of a sweep: final accuracy and accuracy curves, with mean and deviation over seeds."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalejax.report.figures.style import new_figure, require_plot_format, save_figure
from scalejax.sweep.plan import in_words
from scalejax.sweep.results import Arm, RunRow, arms, mean_and_deviation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CURVES = 20
"""Most curves that colour and dash can tell apart."""
_DASHES = ("solid", "dashed", "dotted", "dashdot")


def save_finals(rows: Sequence[RunRow], *, path: Path) -> None:
    """Draw the final accuracy of each arm over the numeric field with the most values.

    Points are single runs; lines join means, bars are standard deviations over seeds. A run that
    diverged before its last evaluation is in no mean: it is a cross at the bottom.

    Args:
        rows: of a sweep; unfinished ones are left out.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("path", path)
    found = [arm for arm in arms(rows) if arm.rows]
    x_name = _numeric_field(found)
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for number, (label, series) in enumerate(_series(found, x_name).items()):
        color = f"C{number % 10}"
        xs = [x for x, _ in series]
        spreads = [mean_and_deviation(arm.accuracies) for _, arm in series]
        axes.errorbar(
            xs,
            [mean for mean, _ in spreads],
            yerr=[0 if math.isnan(deviation) else deviation for _, deviation in spreads],
            color=color,
            linestyle=_DASHES[number // 10 % len(_DASHES)],
            capsize=3,
            label=label,
        )
        for x, arm in series:
            axes.scatter([x] * len(arm.accuracies), arm.accuracies, color=color, s=10, alpha=0.5)
            lost = [x] * len(arm.without_final)
            _mark_diverged(axes, lost, color=color)
    if x_name and min(x for s in _series(found, x_name).values() for x, _ in s) > 0:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for s in _series(found, x_name).values() for x, _ in s})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    elif not x_name:
        axes.set_xticks([])
    axes.set_xlabel(x_name or "arms of the sweep")
    axes.set_ylabel("test accuracy after the last epoch")
    axes.grid(alpha=0.3)
    _add_legend(axes, found, fontsize="small")
    save_figure(figure, path)


def save_curves(rows: Sequence[RunRow], *, path: Path) -> None:
    """Draw accuracy over epochs for each arm: the mean over seeds, shaded by its deviation.

    Once some seeds have ended, the mean of the rest is a separate dotted line labelled with their
    number: otherwise the mean would rise because the worst are gone. A run that diverged before
    its last evaluation is a cross at the bottom, where it ended.

    Args:
        rows: of a sweep; unfinished ones are left out.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("path", path)
    found = [arm for arm in arms(rows) if arm.rows]
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for number, arm in enumerate(found[:_MOST_CURVES]):
        points = sorted(
            (each.epoch, each.test_accuracy) for row in arm.rows for each in row.evaluations
        )
        groups = [
            (epoch, [value for _, value in group])
            for epoch, group in groupby(points, key=lambda point: point[0])
        ]
        whole = [(epoch, values) for epoch, values in groups if len(values) == len(arm.rows)]
        epochs = [epoch for epoch, _ in whole]
        spreads = [mean_and_deviation(values) for _, values in whole]
        low = [m - (0 if math.isnan(d) else d) for m, d in spreads]
        high = [m + (0 if math.isnan(d) else d) for m, d in spreads]
        color, dashes = f"C{number % 10}", _DASHES[number // 10 % len(_DASHES)]
        label = in_words(arm.varied) or "all runs"
        axes.plot(epochs, [m for m, _ in spreads], color=color, linestyle=dashes, label=label)
        axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        _draw_rest(axes, groups, len(arm.rows), color=color)
        lost = [row.planned.run.epoch_of(row.steps) for row in arm.without_final]
        _mark_diverged(axes, lost, color=color)
    left_out = len(found) - _MOST_CURVES
    if left_out > 0:
        axes.set_title(f"the first {_MOST_CURVES} arms; {left_out} are left out", fontsize="medium")
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    _add_legend(axes, found[:_MOST_CURVES], fontsize="x-small", loc="lower right")
    save_figure(figure, path)


def _draw_rest(
    axes: "Axes", groups: Sequence[tuple[float, list[float]]], seeds: int, *, color: str
) -> None:
    """Draw the mean over the remaining seeds, a dotted line for each number of them."""
    for count, part in groupby(groups, key=lambda group: len(group[1])):
        if count == seeds:
            continue
        points = [(epoch, mean_and_deviation(values)[0]) for epoch, values in part]
        axes.plot(*zip(*points, strict=True), color=color, linestyle=":", marker=".", alpha=0.6)
        label = f"{count} of {seeds} seeds from here"
        axes.annotate(label, points[0], color=color, fontsize="x-small")


def _mark_diverged(axes: "Axes", xs: Sequence[float], *, color: str) -> None:
    """Draw a cross for each diverged run at the bottom of the axes, whatever their scale."""
    if xs:
        bottom = axes.get_xaxis_transform()
        axes.scatter(xs, [0.02] * len(xs), color=color, marker="x", s=36, transform=bottom)


def _add_legend(axes: "Axes", found: Sequence[Arm], **options: Any) -> None:
    """Draw the legend, with an entry for the crosses of diverged runs if there are any."""
    count = sum(len(arm.without_final) for arm in found)
    if count:
        label = f"diverged ({count} run{'s'[: count > 1]}, in no mean)"
        axes.scatter([], [], color="black", marker="x", s=36, label=label)
    axes.legend(**options)


def _numeric_field(found: Sequence[Arm]) -> str | None:
    """The varied field with only numeric values and the most of them; None if there is none."""
    numbers: dict[str, set[float]] = {}
    for name in found[0].varied if found else ():
        values = [arm.varied[name] for arm in found]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers[name] = {float(value) for value in values if isinstance(value, int | float)}
    return max(numbers, key=lambda name: len(numbers[name]), default=None)


def _series(found: Sequence[Arm], x_name: str | None) -> Mapping[str, list[tuple[float, Arm]]]:
    """(x, arm) sorted by x, grouped by the other varied fields; x is the index without a field."""
    series: dict[str, list[tuple[float, Arm]]] = {}
    for place, arm in enumerate(found):
        rest = {name: value for name, value in arm.varied.items() if name != x_name}
        x = arm.varied[x_name] if x_name else place
        if isinstance(x, int | float):
            series.setdefault(in_words(rest) or "all runs", []).append((x, arm))
    return {label: sorted(s, key=lambda pair: pair[0]) for label, s in series.items()}
