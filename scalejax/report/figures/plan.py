"""Plot of a plan in a file, drawn with matplotlib: time to target, and its cost.

The interactive charts of plans are in `report.html.plan`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from scalejax.core.units import unit_of_axis
from scalejax.planning.time_to_target.plan import Plan, soonest_by_devices
from scalejax.report.figures.style import new_figure, require_plot_format, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("C4", "C5", "C6", "C7", "C8", "C9", "C0")
"""Colours of clusters, distinct from those of the recommendations."""
ANSWERS = (
    ("soonest", "C3", "o", 17),
    ("cheapest", "C2", "s", 9.5),
    ("knee", "C1", "D", 4.5),
)
"""Name, colour, mark and size in points of each recommendation of a plan. The marks are outlines
that nest, so that all are visible where they share one point."""
EDGE = 1.5
"""Width of the outlines, in points."""


def save_plan(plan: Plan, *, path: Path) -> None:
    """Draw the time to target over devices, and the cost over that time.

    Each cluster has a colour; of several batch sizes the fastest is drawn. Deadline and budget are
    dashed, and the soonest, the cheapest and the knee are marked.

    Args:
        plan: with at least one point.
        path: output file; its suffix selects the format.

    Raises:
        ConfigError: if the format is none of png, svg and pdf, or the file cannot be written.
    """
    require_plot_format("output", path)
    longest = max(point.p90_run_seconds or point.run_seconds for point in plan.points)
    unit, seconds = unit_of_axis(longest)
    figure = new_figure(10, 4.5)
    figure.suptitle(f"{plan.title}: time to {plan.target}", fontsize="medium", wrap=True)
    left, right = figure.subplots(1, 2)
    for index, cluster in enumerate(dict.fromkeys(point.cluster for point in plan.points)):
        best = [point for point in soonest_by_devices(plan) if point.cluster == cluster]
        color = _COLORS[index % len(_COLORS)]
        counts = [point.device_count for point in best]
        times = [point.run_seconds / seconds for point in best]
        left.plot(counts, times, color=color, marker=".", label=cluster)
        if all(point.p10_run_seconds and point.p90_run_seconds for point in best):
            low = [(point.p10_run_seconds or 0) / seconds for point in best]
            high = [(point.p90_run_seconds or 0) / seconds for point in best]
            left.fill_between(counts, low, high, color=color, alpha=0.2, linewidth=0)
        every = [point for point in plan.points if point.cluster == cluster]
        right.scatter(
            [point.run_seconds / seconds for point in every],
            [point.cost for point in every],
            s=12, alpha=0.5, linewidths=0, color=color, label=cluster,
        )  # fmt: skip
    front = [plan.points[position] for position in plan.front]
    right.plot(
        [point.run_seconds / seconds for point in front],
        [point.cost for point in front],
        color="black", linewidth=0.8, label="none is sooner for less",
    )  # fmt: skip
    _mark_answers(left, right, plan, seconds)
    _scale(left, right, plan, unit)
    left.legend(fontsize="small", title="band: p10 to p90", title_fontsize="small", markerscale=0.7)
    right.legend(fontsize="small")
    save_figure(figure, path)


def _scale(left: "Axes", right: "Axes", plan: Plan, unit: str) -> None:
    """Label the axes of both plots, and set logarithmic scales with few round ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    left.set(xscale="log", yscale="log", xlabel="devices", ylabel=f"time, {unit}")
    right.set(xscale="log", xlabel=f"time, {unit}")
    dearest = max(*(point.cost for point in plan.points), plan.budget or 0.0)
    right.set_ylabel("cost" if plan.is_priced else "cost, device-hours")
    logarithmic = [left.yaxis, right.xaxis]
    if plan.is_wide:
        right.set_yscale("log")
        logarithmic.append(right.yaxis)
    else:
        right.set_ylim(0, 1.1 * dearest)
    for axis in logarithmic:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    for axes in (left, right):
        axes.grid(alpha=0.3)
    counts = sorted({point.device_count for point in plan.points})
    left.set_xticks(counts, [str(count) for count in counts], rotation=45 if len(counts) > 8 else 0)
    left.set_xticks([], minor=True)


def _mark_answers(left: "Axes", right: "Axes", plan: Plan, seconds: float) -> None:
    """Draw the recommendations and limits of a plan into both plots."""
    for name, color, marker, size in ANSWERS:
        position = getattr(plan, name)
        if position is None:
            continue
        point = plan.points[position]
        time = point.run_seconds / seconds
        style = {"color": color, "marker": marker, "markersize": size, "linestyle": "none"}
        style |= {"markerfacecolor": "none", "markeredgewidth": EDGE}
        left.plot([point.device_count], [time], label=name, **style)
        right.plot([time], [point.cost], **style)
    if plan.deadline_seconds is not None:
        left.axhline(plan.deadline_seconds / seconds, color="C3", linestyle="--", label="deadline")
        right.axvline(plan.deadline_seconds / seconds, color="C3", linestyle="--")
    if plan.budget is not None:
        right.axhline(plan.budget, color="C2", linestyle="--", label="budget")
