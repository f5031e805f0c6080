"""Notes and descriptions of a plan: its target, the source of its steps, caveats, its answers.

Knows runs, points and predictions; does not cost or compare.
"""

import math
from collections.abc import Sequence

from scalejax.config.run import RunConfig
from scalejax.core.units import (
    UNKNOWN,
    counted,
    format_count,
    format_seconds,
    format_seconds_briefly,
)
from scalejax.planning.convergence import ConvergenceData, Hyperbola
from scalejax.planning.time_to_target.plan import (
    Plan,
    PlanPoint,
    deadline_probability,
    miss_factor,
    soonest_by_devices,
)
from scalejax.simulator.predict import RUN_CONDITIONS, STEP_CONDITIONS, Prediction


def other_optimizer(config: RunConfig, convergence: ConvergenceData | None) -> str | None:
    """Optimizer of the convergence points, if known and different from that of `config`."""
    theirs = None if convergence is None else convergence.optimizer
    return None if theirs == config.optimizer.name else theirs


def target_in_words(convergence: ConvergenceData | None, target: float | None) -> str:
    """Description of the target."""
    if convergence is None:
        return "the end of its epochs" if target is None else f"{target:g} (assumed)"
    value = convergence.target if convergence.target is not None else target
    words = convergence.metric or "target"
    return words if value is None else f"{words} {value:g}"


def source_in_words(
    config: RunConfig, convergence: ConvergenceData | None, curve: Hyperbola | None
) -> str:
    """Description of the source of the steps to target, and of their critical batch."""
    if convergence is None or curve is None:
        return f"the run's own {counted(config.train.epochs, 'epoch')}, whatever the batch"
    batches = [point.global_batch for point in convergence.points]
    critical, scale = curve.critical_batch, convergence.noise_scale
    measured = "" if scale is None else f"noise scale {format_count(scale)} samples, "
    is_assumed = scale is None and not convergence.compares_batches
    batch = " to ".join(map(str, sorted({min(batches), max(batches)})))
    return (
        f"{convergence.source}: {counted(len(batches), 'point')}, batch {batch}; "
        f"{measured}critical batch {'ASSUMED to be about ' if is_assumed else ''}"
        f"{format_count(critical.p50)} "
        f"({format_count(critical.p10)} to {format_count(critical.p90)})"
        f"{', as one batch cannot tell' if is_assumed else ''}"
    )


def notes_of(
    config: RunConfig,
    predictions: Sequence[Prediction],
    convergence: ConvergenceData | None,
    recipe: str | None,
    points: Sequence[PlanPoint],
) -> list[str]:
    """Notes on a plan, the most important caveat first."""
    notes = []
    if convergence is None:
        epochs = counted(config.train.epochs, "epoch")
        notes.append(
            f"NOBODY MEASURED that the target is reached: the run's own length, {epochs}, "
            "is assumed to suffice at every batch, though large batches need more, or fail; "
            "--convergence FILE gives measured points"
        )
    else:
        if (other := other_optimizer(config, convergence)) is not None:
            notes.append(
                f"the points were trained with {other}, and this run trains with "
                f"{config.optimizer.name}: nobody measured the steps that it needs, and every "
                f"time, range and probability assumes that it learns as {other} did"
            )
        notes += convergence.notes
        if convergence.noise_scale is not None and config.optimizer.moments:
            notes.append(
                f"the noise scale is likely too small for {config.optimizer.in_words}: it "
                "predicts the critical batch of SGD without momentum, and those of four other "
                "optimizers were 4 to 8 times as large (experiments/critical_batch); the range "
                "is widened upward for that, and steps at several batches narrow it"
            )
        recipes = convergence.recipes
        if recipe is not None:
            notes.append(f"steps are those of the recipe {recipe!r}")
        elif len(recipes) > 1:
            notes.append(
                f"the points are from {len(recipes)} recipes ({', '.join(recipes)}): each batch is "
                "assumed to use that of the point nearest to it; --recipe selects one"
            )
        if any(point.is_extrapolated for point in points):
            notes.append(
                "~ marks batches beyond the largest that was shown to reach the target, "
                f"{convergence.largest_reached}"
            )
    wanted = (*STEP_CONDITIONS, *RUN_CONDITIONS)
    unknown = [
        name
        for name in wanted
        if any(dict(each.waterfall).get(name) is None for each in predictions)
    ]
    if unknown:
        notes.append(
            f"not known, so not in any time: {', '.join(unknown)} (flags --conditions.NAME say it)"
        )
    notes.append("start-up and evaluations are not counted")
    # A plan does not show MFU, so notes on it are dropped.
    others = [note for each in predictions for note in each.notes if not note.startswith("MFU ")]
    return [*notes, *dict.fromkeys(others)]


# Descriptions of a plan: its answers, its limits, and the lack of an answer.

_JOULES_PER_KWH = 3.6e6
_SURE = 0.98
"""Probability beyond which the range from p10 to p90 says nothing more."""


def shown(plan: Plan) -> list[int]:
    """Positions of the points in the table: the soonest of each cluster and device count, and
    the answers."""
    best = set(soonest_by_devices(plan))
    found = [position for position, point in enumerate(plan.points) if point in best]
    answers = {plan.soonest, plan.cheapest, plan.knee, plan.nearest} - {None}
    return sorted({*found, *(each for each in answers if each is not None)})


MARKS_IN_WORDS = "S soonest, C cheapest, K knee."
"""Legend of the letters of `marks_of`."""


def marks_of(plan: Plan) -> dict[int, str]:
    """Letters S, C, K of the points that are answers, by position."""
    marks: dict[int, str] = {}
    for letter, position in (("S", plan.soonest), ("C", plan.cheapest), ("K", plan.knee)):
        if position is not None:
            marks[position] = marks.get(position, "") + letter
    return marks


def described(plan: Plan, point: PlanPoint) -> str:
    """One-line description of a point: devices, time, cost, probability to meet the deadline."""
    span = ""
    if point.p10_run_seconds is not None:
        low, high = point.p10_run_seconds, point.p90_run_seconds
        span = f" ({format_seconds_briefly(low)} to {format_seconds_briefly(high)})"
    words = (
        f"{counted(point.device_count, 'device')} of {point.cluster}, batch {point.global_batch}: "
        f"{format_seconds(point.run_seconds)}{span}, {_cost_in_words(plan, point.cost)}"
    )
    if point.energy_joules is not None:
        words += f", {format_cost(point.energy_joules / _JOULES_PER_KWH)} kWh"
    if point.tokens is not None and point.learning_rate is not None:
        words += f", {format_count(point.tokens)} tokens at peak rate {point.learning_rate:.2g}"
    if point.strategy is not None:
        words += f" ({point.strategy})"
    if plan.deadline_seconds is not None:
        chance = deadline_probability(point, plan.deadline_seconds)
        words += f", in time with probability {_probability(chance)}"
        if plan.points_optimizer is not None:
            words += f" if it learns as {plan.points_optimizer} did"
    return words


def _probability(chance: float | None) -> str:
    """A probability in whole per cent, clipped in the tails."""
    if chance is None:
        return UNKNOWN
    if chance > _SURE or chance < 1 - _SURE:
        return f"above {_SURE:.0%}" if chance > _SURE else f"below {1 - _SURE:.0%}"
    return f"{chance:.0%}"


def in_words(plan: Plan) -> str:
    """Description of the limits: "2 h 00 min and 500 device-hours"; empty if there are none."""
    limits = []
    if plan.deadline_seconds is not None:
        limits.append(format_seconds(plan.deadline_seconds))
    if plan.budget is not None:
        limits.append(_cost_in_words(plan, plan.budget))
    return " and ".join(limits)


def _cost_in_words(plan: Plan, cost: float) -> str:
    """A cost with its unit: device-hours, dollars, or "a cost of" if prices were given."""
    found = format_cost(cost)
    if plan.is_priced and plan.currency == "dollars":
        return f"{found} dollars"
    return f"a cost of {found}" if plan.is_priced else f"{found} device-hours"


def format_steps(steps: float) -> str:
    """A number of updates, rounded to at least one; unknown if it is not finite."""
    if not math.isfinite(steps):
        return UNKNOWN
    return format_count(max(1, round(steps)))


def format_cost(cost: float) -> str:
    """A cost with three digits, or as a whole number."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def of_the_knee(plan: Plan) -> str:
    """Sentence on whether more devices pay, by the position of the knee."""
    free = plan.knee_without_limits
    if free is not None and plan.knee != free:
        point = plan.points[free]
        return (
            "The limits end before the knee: without them it is "
            f"{counted(point.device_count, 'device')} of {point.cluster}, "
            f"batch {point.global_batch}."
        )
    if plan.pays_to_the_end:
        return "The knee is the soonest of all: more devices might still pay."
    return "Beyond the knee, one per cent of time saved costs more than one per cent more."


def missed(plan: Plan) -> str:
    """Sentence on the point nearest to the limits, if none is within them."""
    point = plan.points[plan.nearest or 0]
    factor = miss_factor(point, plan.deadline_seconds, plan.budget)
    return (
        f"nothing reaches {plan.target} within {in_words(plan)}; the nearest misses by a factor of "
        f"{factor:.3g}: {described(plan, point)}."
    )


def nothing(plan: Plan) -> str:
    """Sentence on why no configuration could be planned."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in plan.left_out)
    # For a language model, batches are chosen around the best one, and the flag is refused.
    is_of_loss = plan.target.startswith("loss ")
    other = "another target or model" if is_of_loss else "--global-batch"
    return f"nothing can be planned with: {reasons}. Try {other}, or other --devices."
