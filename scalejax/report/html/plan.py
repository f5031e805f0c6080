"""Report section on plans: time to target, its cost, and the choices; its charts as a picture."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import altair as alt

from scalejax.core.units import format_seconds, unit_of_axis
from scalejax.planning.time_to_target import notes
from scalejax.planning.time_to_target.plan import Plan, soonest_by_devices
from scalejax.report.html.charts import PALETTE, Row, colored, device_axis, save_picture, specified
from scalejax.report.html.page import Page
from scalejax.report.terminal import plan as plan_tables

_HEIGHT = 320
_LOGARITHMIC = alt.Scale(type="log", nice=False, padding=20)
MARKS = {
    "soonest": ("circle", PALETTE[3], 400),
    "cheapest": ("square", PALETTE[2], 121),
    "knee": ("diamond", PALETTE[1], 49),
}
"""Shape, colour and size of each answer: outlines that nest, so that all are visible even at the
same point. The size is the area of the square around a shape, in pixels."""
EDGE = 1.5
"""Width of the outlines, in pixels."""


def add_plans(page: Page, plans: Sequence[Plan]) -> None:
    """Append every plan: its recommendations, two charts, and a table of all points."""
    page.add('<h2 id="plans">Plans</h2>')
    page.add(
        "<p>Time until the network reaches the target metric, not until a number of epochs has "
        "been trained: the steps that a batch size needs, from measured points, times the "
        "predicted step time. p10 and p90 cover the uncertainty of both: one run in ten should be "
        "faster than p10, one in ten slower than p90.</p>"
    )
    for plan in plans:
        _add_plan(page, plan)


def save_plan(plan: Plan, *, path: Path) -> None:
    """Write the charts of a plan as a picture: time to target over devices, cost over that time.

    Raises:
        ConfigError: if the file cannot be written.
    """
    title = alt.TitleParams(
        f"{plan.title}: time to {plan.target}",
        subtitle="Band: p10 to p90. Grey: none is sooner for less. Dashed: deadline and budget.",
    )
    charts = [
        chart.properties(width=380, height=_HEIGHT)
        for chart in (_time_chart(plan), _cost_chart(plan))
    ]
    picture = alt.hconcat(*charts, title=title)
    save_picture(picture.to_dict(), path)


def _add_plan(page: Page, plan: Plan) -> None:
    page.add_parts(plan_tables.planned(plan, is_wide=True))
    if plan.nearest is not None:
        page.add(f"<p>{escape(notes.missed(plan))}</p>")
    page.add_chart(
        "Time to target as devices are added",
        "The fastest batch size for each device count, with its range from p10 to p90. Where the "
        "line turns flat, more devices no longer help: the diamond is the knee, within the limits. "
        "The dashed line is the deadline.",
        specified(_time_chart(plan), _HEIGHT),
    )
    page.add_chart(
        "What the time costs",
        "Every cluster, device count and batch size. The grey line is the Pareto front: no other "
        "point is better in both time and cost. The dashed lines are deadline and "
        "budget.",
        specified(_cost_chart(plan), _HEIGHT),
    )


def _rows(plan: Plan) -> list[Row]:
    """Chart rows of all points; the fastest batch of each device count is marked `is_best`."""
    best = set(soonest_by_devices(plan))
    _, unit = _unit(plan)
    return [
        {
            "cluster": point.cluster,
            "devices": point.device_count,
            "batch": point.global_batch,
            "run": point.run_seconds / unit,
            "p10": (point.p10_run_seconds or point.run_seconds) / unit,
            "p90": (point.p90_run_seconds or point.run_seconds) / unit,
            "cost": point.cost,
            "time": format_seconds(point.run_seconds),
            "is_best": float(point in best),
            "is_front": float(position in plan.front),
        }
        for position, point in enumerate(plan.points)
    ]


def _unit(plan: Plan) -> tuple[str, float]:
    """Name and seconds of the time unit of both charts."""
    return unit_of_axis(max(point.p90_run_seconds or point.run_seconds for point in plan.points))


def _tooltip() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("cluster:N"),
        alt.Tooltip("devices:Q"),
        alt.Tooltip("batch:Q"),
        alt.Tooltip("time:N"),
        alt.Tooltip("cost:Q", format=",.3g"),
    ]


def _answer_layer(plan: Plan, x: alt.X, y: alt.Y) -> alt.Chart:
    rows = _rows(plan)
    marked: list[Row] = [
        {**rows[position], "answer": name}
        for name in MARKS
        if (position := getattr(plan, name)) is not None
    ]
    names = list(MARKS)
    shapes, colors, sizes = (
        {"scale": alt.Scale(domain=names, range=list(values)), "legend": alt.Legend(orient="top")}
        for values in zip(*MARKS.values(), strict=True)
    )
    return (
        alt.Chart(alt.Data(values=marked))
        .mark_point(filled=False, strokeWidth=EDGE, opacity=1)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("answer:N", title=None, **shapes),
            stroke=alt.Stroke("answer:N", title=None, **colors),
            size=alt.Size("answer:N", title=None, **sizes),
            tooltip=[alt.Tooltip("answer:N"), *_tooltip()],
        )
    )


def _cluster_color(plan: Plan) -> alt.Color:
    clusters = list(dict.fromkeys(point.cluster for point in plan.points))
    colors = [PALETTE[0], PALETTE[4], PALETTE[7], PALETTE[6], PALETTE[5]]
    return colored("cluster", clusters, colors=colors)


def _time_chart(plan: Plan) -> alt.LayerChart | alt.FacetChart:
    """Chart of time to target over devices: a line with its p10 to p90 band for each cluster."""
    best = [row for row in _rows(plan) if row["is_best"]]
    base = alt.Chart(alt.Data(values=best))
    devices = device_axis()
    color = _cluster_color(plan)
    name, unit = _unit(plan)
    run = alt.Y("run:Q", title=f"{name} to target", scale=_LOGARITHMIC)
    band = base.mark_area(opacity=0.18).encode(
        x=devices, y=alt.Y("p10:Q", title=f"{name} to target"), y2="p90:Q", color=color
    )
    line = base.mark_line(point=True, strokeWidth=1.8).encode(
        x=devices, y=run, color=color, tooltip=_tooltip()
    )
    layers = [band, line, _answer_layer(plan, devices, run)]
    if plan.deadline_seconds is not None:
        layers.append(_rule(y=plan.deadline_seconds / unit, color=PALETTE[3]))
    return alt.layer(*layers)


def _cost_chart(plan: Plan) -> alt.LayerChart | alt.FacetChart:
    """Chart of cost over time to target: all points, and the Pareto front."""
    rows = _rows(plan)
    title = plan.currency if plan.is_priced else "cost (device-hours)"
    cost = alt.Y(
        "cost:Q", title=title, scale=_LOGARITHMIC if plan.is_wide else alt.Scale(zero=True)
    )
    name, unit = _unit(plan)
    run = alt.X("run:Q", title=f"{name} to target", scale=_LOGARITHMIC)
    points = (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=40, opacity=0.6)
        .encode(x=run, y=cost, color=_cluster_color(plan), tooltip=_tooltip())
    )
    front = (
        alt.Chart(alt.Data(values=[row for row in rows if row["is_front"]]))
        .mark_line(strokeWidth=1.2, color=PALETTE[5])
        .encode(x=run, y=cost, order="run:Q")
    )
    layers = [front, points, _answer_layer(plan, run, cost)]
    if plan.deadline_seconds is not None:
        layers.append(_rule(x=plan.deadline_seconds / unit, color=PALETTE[3]))
    if plan.budget is not None:
        layers.append(_rule(y=plan.budget, color=PALETTE[2]))
    return alt.layer(*layers)


def _rule(*, color: str, x: float | None = None, y: float | None = None) -> alt.Chart:
    """A dashed line across the chart at a value of one of its axes."""
    chart = alt.Chart(alt.Data(values=[{"at": x if x is not None else y}]))
    rule = chart.mark_rule(strokeDash=[5, 5], strokeWidth=2, color=color)
    return rule.encode(x="at:Q") if x is not None else rule.encode(y="at:Q")
