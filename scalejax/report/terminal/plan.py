"""Terminal table of a plan: each device count with its best batch, and the recommendations.

Fits 80 columns.
"""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.core.units import format_fraction, format_seconds, format_seconds_briefly
from scalejax.planning.time_to_target import notes
from scalejax.planning.time_to_target.plan import Plan
from scalejax.report.terminal.tables import figures

_LONGEST_NAME = 16


def planned(plan: Plan, *, is_wide: bool = False) -> Iterator[RenderableType]:
    """The table, then the recommendations, the points left out, and notes."""
    yield Text(f"{plan.title}: {plan.target}", style="bold")
    yield Text(f"Steps to target: {plan.steps_source}.")
    if plan.warning is not None:
        yield Text(f"WARNING: {plan.warning}.", style="bold red")
    yield table(plan, is_wide=is_wide)
    legend = [] if plan.nearest is not None else [notes.MARKS_IN_WORDS]
    yield Text("\n".join([*legend, *_answers(plan)]))
    lines = [f"Left out, {reason}: {count}." for reason, count in plan.left_out]
    lines += [f"Note: {note}." for note in plan.notes if note != plan.warning]
    yield Text("\n".join(lines), style="dim")


def table(plan: Plan, *, is_wide: bool = False) -> Table:
    """Table with a row for each cluster and device count, at its fastest batch size; a wide one
    also has goodput and the clusters' full names."""
    clusters = {point.cluster for point in plan.points}
    seconds, grouped = (format_seconds, ",") if is_wide else (format_seconds_briefly, "")
    marks = notes.marks_of(plan)
    rows = []
    for position in notes.shown(plan):
        point = plan.points[position]
        rows.append(
            {
                "cluster": point.cluster if is_wide else point.cluster[:_LONGEST_NAME],
                "devices": format(point.device_count, grouped),
                "batch": "~" * point.is_extrapolated + format(point.global_batch, grouped),
                "steps": "~" * point.are_steps_extrapolated + notes.format_steps(point.steps),
                "step": format_seconds(point.step_seconds),
                "goodput": format_fraction(point.goodput),
                "time": seconds(point.run_seconds),
                "p10": seconds(point.p10_run_seconds),
                "p90": seconds(point.p90_run_seconds),
                plan.currency if plan.is_priced else "device-h": notes.format_cost(point.cost),
                "best": marks.get(position, ""),
            }
        )
    left_out = set() if is_wide else {"goodput", *(["cluster"] if len(clusters) == 1 else [])}
    found = figures(*(name for name in rows[0] if name not in left_out))
    for row in rows:
        found.add_row(*(cell for name, cell in row.items() if name not in left_out))
    return found


def _answers(plan: Plan) -> Iterator[str]:
    limits = notes.in_words(plan)
    if plan.nearest is not None:
        yield f"Nothing is within {limits}."
        return
    yield f"Within {limits}:" if limits else "Of all these:"
    names: dict[int, list[str]] = {}
    for name in ("soonest", "cheapest", "knee"):
        position = getattr(plan, name)
        if position is not None:
            names.setdefault(position, []).append(name)
    for position, each in names.items():
        yield f"{' and '.join(each).capitalize()}: {notes.described(plan, plan.points[position])}."
    yield notes.of_the_knee(plan)
