"""Terminal table of a plan: each device count with its best batch, and the recommendations.

Fits 80 columns.
"""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from scalejax.core.units import format_seconds, format_seconds_briefly
from scalejax.planning.time_to_target.notes import (
    MARKS_IN_WORDS,
    described,
    format_cost,
    format_steps,
    in_words,
    marks_of,
    of_the_knee,
    shown,
)
from scalejax.planning.time_to_target.plan import Plan
from scalejax.report.terminal.tables import figures

_LONGEST_NAME = 16


def planned(plan: Plan) -> Iterator[RenderableType]:
    """The table, then the recommendations, the points left out, and notes."""
    yield Text.assemble((plan.title, "bold"), f"\nTo {plan.target}.\nSteps: {plan.steps_source}.")
    if plan.warning is not None:
        yield Text(f"WARNING: {plan.warning}.", style="bold")
    yield _table(plan)
    legend = [] if plan.nearest is not None else [MARKS_IN_WORDS]
    yield Text("\n".join([*legend, *_answers(plan)]))
    lines = [f"Left out, {reason}: {count}." for reason, count in plan.left_out]
    notes = [f"Note: {note}." for note in plan.notes if note != plan.warning]
    yield Text("\n".join([*lines, *notes]))


def _table(plan: Plan) -> RenderableType:
    """Table with a row for each cluster and device count, at its fastest batch size."""
    cost = "cost" if plan.is_priced else "device-h"
    clusters = list(dict.fromkeys(point.cluster for point in plan.points))
    marks = marks_of(plan)
    headings = ["devices", "batch", "steps", "step", "time", "p10", "p90", cost, ""]
    table = figures(*(["cluster"] if len(clusters) > 1 else []), *headings)
    for position in shown(plan):
        point = plan.points[position]
        row = [point.cluster[:_LONGEST_NAME]] if len(clusters) > 1 else []
        row += [
            str(point.device_count),
            f"{'~' if point.is_extrapolated else ''}{point.global_batch}",
            format_steps(point.steps),
            format_seconds(point.step_seconds),
            format_seconds_briefly(point.run_seconds),
            format_seconds_briefly(point.p10_run_seconds),
            format_seconds_briefly(point.p90_run_seconds),
            format_cost(point.cost),
            marks.get(position, ""),
        ]
        table.add_row(*row)
    return table


def _answers(plan: Plan) -> Iterator[str]:
    limits = in_words(plan)
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
        yield f"{' and '.join(each).capitalize()}: {described(plan, plan.points[position])}."
    yield of_the_knee(plan)
