"""A plan in words: its answers, its limits, and what it says where there is no answer.

Shared by the terminal and the report; knows neither.
"""

from scalejax.plan import Plan, PlanPoint, deadline_probability, miss_factor, soonest_by_devices
from scalejax.units import UNKNOWN, counted, format_count, format_seconds, format_seconds_briefly

_SURE = 0.98
"""Probability beyond which a range of p10 to p90 says no more."""


def shown(plan: Plan) -> list[int]:
    """Positions of the points in the table: of each cluster and number of devices the soonest,
    and those that are an answer."""
    best = {id(point) for point in soonest_by_devices(plan)}
    found = [position for position, point in enumerate(plan.points) if id(point) in best]
    answers = {plan.soonest, plan.cheapest, plan.knee, plan.nearest} - {None}
    return sorted({*found, *(each for each in answers if each is not None)})


MARKS_IN_WORDS = "S soonest, C cheapest, K knee."
"""What the letters of `marks_of` mean."""


def marks_of(plan: Plan) -> dict[int, str]:
    """What each point is the answer to, by position, in letters: S, C, K."""
    marks: dict[int, str] = {}
    for letter, position in (("S", plan.soonest), ("C", plan.cheapest), ("K", plan.knee)):
        if position is not None:
            marks[position] = marks.get(position, "") + letter
    return marks


def described(plan: Plan, point: PlanPoint) -> str:
    """A point in one line: where, how long, at which cost, and how likely within the deadline."""
    span = ""
    if point.p10_run_seconds is not None:
        low, high = point.p10_run_seconds, point.p90_run_seconds
        span = f" ({format_seconds_briefly(low)} to {format_seconds_briefly(high)})"
    words = (
        f"{counted(point.device_count, 'device')} of {point.cluster}, batch {point.global_batch}: "
        f"{format_seconds(point.run_seconds)}{span}, {_cost_in_words(plan, point.cost)}"
    )
    if plan.deadline_seconds is not None:
        chance = deadline_probability(point, plan.deadline_seconds)
        words += f", in time with probability {_probability(chance)}"
        if plan.points_optimizer is not None:
            words += f" if it learns as {plan.points_optimizer} did"
    return words


def _probability(chance: float | None) -> str:
    """A probability in whole per cent; of the tails no more is known."""
    if chance is None:
        return UNKNOWN
    if chance > _SURE or chance < 1 - _SURE:
        return f"above {_SURE:.0%}" if chance > _SURE else f"below {1 - _SURE:.0%}"
    return f"{chance:.0%}"


def in_words(plan: Plan) -> str:
    """The limits: "2 h 00 min and 500 device-hours"; empty if there are none."""
    limits = []
    if plan.deadline_seconds is not None:
        limits.append(format_seconds(plan.deadline_seconds))
    if plan.budget is not None:
        limits.append(_cost_in_words(plan, plan.budget))
    return " and ".join(limits)


def _cost_in_words(plan: Plan, cost: float) -> str:
    """A cost with its unit: device-hours, or the currency of the prices, whichever that is."""
    found = format_cost(cost)
    return f"a cost of {found}" if plan.is_priced else f"{found} device-hours"


def format_steps(steps: float) -> str:
    """A number of updates, of which a run makes whole ones, at least one."""
    return format_count(max(1, round(steps)))


def format_cost(cost: float) -> str:
    """A cost to three digits, or whole."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def of_the_knee(plan: Plan) -> str:
    """What the knee says of more devices, which is nothing where limits cut it off."""
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
    """No answer as an answer: how near the nearest comes."""
    point = plan.points[plan.nearest or 0]
    factor = miss_factor(point, plan.deadline_seconds, plan.budget)
    return (
        f"nothing reaches {plan.target} within {in_words(plan)}; the nearest misses by a factor of "
        f"{factor:.3g}: {described(plan, point)}."
    )


def nothing(plan: Plan) -> str:
    """Why there is not even a point."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in plan.left_out)
    return f"nothing can be planned with: {reasons}. Try --global-batch, or other --devices."
