"""Time and cost to target by cluster, device count and batch; the soonest, cheapest and knee.

Arithmetic on predictions and on steps to target; compiles nothing. Time to target is steps(batch)
times the step time on that many devices, over the goodput.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist

from scalejax.core import drawing
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.planning.bill import NO_RATES, Rates, bill
from scalejax.planning.convergence import Estimate
from scalejax.simulator.predict import Prediction
from scalejax.simulator.uncertainty import Z_OF_P90

_WIDE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """Time and cost to target with one cluster, device count and batch."""

    cluster: str
    """Name of the cluster."""
    device_count: int
    """Devices in the run."""
    global_batch: int
    """Samples per update over all devices."""
    per_device_batch: int | None
    """Samples per update on each device; None if the program does not say."""
    steps: float
    """Updates until the target is reached, the median."""
    step_seconds: float
    """Time of an update, the median."""
    goodput: float | None
    """Fraction of the time spent on updates that count, 0..1; None if unknown."""
    run_seconds: float
    """Time until the target is reached, failures included where known: the median."""
    p10_run_seconds: float | None
    """10th percentile of the time to target; None if its uncertainty is unknown."""
    p90_run_seconds: float | None
    """90th percentile of the time to target; None if its uncertainty is unknown, or one run in ten
    does not reach the target."""
    device_hours: float
    """Hours of one device that the run takes."""
    cost: float
    """Device-hours times the price of one, or device-hours if no price is known."""
    is_extrapolated: bool = False
    """Whether the batch is beyond any that was measured to reach the target."""
    are_steps_extrapolated: bool = False
    """Whether the updates are extrapolated to parameters or tokens beyond any run."""
    tokens: float | None = None
    """Tokens trained on until the target is reached, the median; None without a loss surface."""
    learning_rate: float | None = None
    """Best peak learning rate at the batch; None without a loss surface."""
    strategy: str | None = None
    """Layout, microbatch, recompute and ZeRO stage; None if the run's file gives them."""
    energy_joules: float | None = None
    """Energy of the run at the given power of a device; None without it."""

    def __post_init__(self) -> None:
        for name in ("device_count", "global_batch"):
            require_at_least(f"points.{name}", getattr(self, name), 1)
        for name in ("steps", "step_seconds", "run_seconds"):
            require_above(f"points.{name}", getattr(self, name), 0)
        for name in ("p10_run_seconds", "p90_run_seconds", "cost"):
            require_at_least(f"points.{name}", getattr(self, name), 0)


@document("plan")
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Tabular):
    """All plan points, and the best of them as found by `answered`."""

    title: str
    """Title of the plan: network and clusters."""
    target: str
    """Description of the target."""
    steps_source: str
    """Where the steps to target come from."""
    has_convergence: bool
    """Whether steps to target are measured by batch; if not, every batch trains for the run's own
    epochs, and whether that reaches a target is unknown."""
    is_priced: bool
    """Whether `cost` is in a currency; if not, in device-hours."""
    currency: str = "cost"
    """Unit of a `cost` in a currency: "dollars" for list prices, "cost" for prices that were
    given."""
    deadline_seconds: float | None = None
    """Time within which the target must be reached; None if there is none."""
    budget: float | None = None
    """Maximum cost; None if there is none."""
    points: tuple[PlanPoint, ...]
    """Every point that fits, by cluster, devices and batch."""
    front: tuple[int, ...] = ()
    """Positions of the Pareto front in time and cost, the soonest first."""
    soonest: int | None = None
    """Position of the point with the least time, of those within deadline and budget."""
    cheapest: int | None = None
    """Position of the point with the least cost, of those within deadline and budget."""
    knee: int | None = None
    """Position of the point with the least product of time and cost, of those within deadline and
    budget. If no other point has a smaller product, saving a per cent of time beyond it costs more
    than a per cent."""
    nearest: int | None = None
    """Position of the point that misses deadline and budget by the least factor, if none is within
    them."""
    left_out: tuple[tuple[str, int], ...] = ()
    """(reason, count) of configurations that were excluded."""
    notes: tuple[str, ...] = ()
    """Caveats of the figures."""
    points_optimizer: str | None = None
    """Optimizer of the convergence points, where it differs from the run's."""

    def __post_init__(self) -> None:
        require_above("deadline_seconds", self.deadline_seconds, 0)
        require_above("budget", self.budget, 0)
        answers = (self.soonest, self.cheapest, self.knee, self.nearest)
        for position in (*self.front, *(each for each in answers if each is not None)):
            if not 0 <= position < len(self.points):
                accepted = f"positions must be of the {len(self.points)} points"
                raise ConfigError(refusal("points", position, accepted))

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The points, a row for each."""
        return [asdict(point) for point in self.points]

    def _repr_html_(self) -> str:
        """What a notebook shows: the Pareto front in time and cost, with the answers in bold."""
        shown = self.front or range(len(self.points))
        answers = (self.soonest, self.cheapest, self.knee, self.nearest)
        rows: list[dict[str, JsonValue]] = []
        for position in shown:
            point, names = self.points[position], ("soonest", "cheapest", "knee", "nearest")
            found = [name for name, each in zip(names, answers, strict=True) if each == position]
            unit = self.currency if self.is_priced else "device-hours"
            rows.append(
                {
                    "cluster": point.cluster,
                    "device_count": point.device_count,
                    "global_batch": point.global_batch,
                    "steps": round(point.steps),
                    "step_seconds": point.step_seconds,
                    "run_seconds": point.run_seconds,
                    unit: point.cost,
                    "which is": ", ".join(found),
                }
            )
        bold = [place for place, row in enumerate(rows) if row["which is"]]
        said = f"{self.title}: {self.target}, {len(self.points)} points, of which the best"
        return drawing.heading(said) + drawing.table(rows, bold=bold) + drawing.notes(self.notes)

    @property
    def warning(self) -> str | None:
        """The first note, if the figures would be misleading without it; else None."""
        is_measured = self.has_convergence and self.points_optimizer is None
        return None if is_measured or not self.notes else self.notes[0]

    @property
    def is_wide(self) -> bool:
        """Whether costs along the front differ so much that they need a logarithmic axis."""
        costs = [self.points[position].cost for position in self.front]
        return bool(costs) and min(costs) > 0 and max(costs) > _WIDE * min(costs)

    @property
    def knee_without_limits(self) -> int | None:
        """Position of the knee of all points, without deadline and budget."""
        return knee_of(self.points, range(len(self.points)))

    @property
    def pays_to_the_end(self) -> bool:
        """Whether the knee is the soonest of all points, so that more devices still pay."""
        return self.knee == self.knee_without_limits and self.front[:1] == (self.knee,)


def plan_point(
    prediction: Prediction,
    steps: Estimate | float,
    *,
    rates: Rates = NO_RATES,
    is_extrapolated: bool = False,
) -> PlanPoint:
    """Time and cost to target with the devices and batch of `prediction`.

    Args:
        prediction: prediction of one step; its batch must be known.
        steps: updates to target with its batch; a number if its uncertainty is unknown.
        rates: price and power of a device.
        is_extrapolated: whether the batch is larger than any measured to reach the target.

    Raises:
        ConfigError: if the prediction is not of a training step.
    """
    if prediction.global_batch is None:
        raise ConfigError(refusal("prediction.global_batch", None, "a training step has a batch"))
    needed = steps if isinstance(steps, float | int) else steps.p50
    run_seconds = needed * prediction.step_seconds / (prediction.goodput or 1.0)
    low, high = _run_range(prediction, steps)
    found = bill(run_seconds, prediction.device_count, rates)
    return PlanPoint(
        cluster=prediction.cluster,
        device_count=prediction.device_count,
        global_batch=prediction.global_batch,
        per_device_batch=prediction.per_device_batch,
        steps=needed,
        step_seconds=prediction.step_seconds,
        goodput=prediction.goodput,
        run_seconds=run_seconds,
        p10_run_seconds=low and run_seconds * low,
        # Infinite if one run in ten never reaches the target.
        p90_run_seconds=run_seconds * high if high is not None and math.isfinite(high) else None,
        device_hours=found.device_hours,
        cost=found.device_hours if found.price is None else found.price,
        energy_joules=found.energy_joules,
        is_extrapolated=is_extrapolated,
    )


def _run_range(
    prediction: Prediction, steps: Estimate | float
) -> tuple[float, float] | tuple[None, None]:
    """Factors from the median of the run's time to its p10 and p90.

    The errors of the number of steps and of the step time are independent, and both logarithmic:
    those that are known are added in quadrature.
    """
    low, high = [], []
    if isinstance(steps, Estimate):
        low.append(math.log(steps.p10 / steps.p50))
        high.append(math.log(steps.p90 / steps.p50))
    if prediction.p10_step_seconds is not None and prediction.p90_step_seconds is not None:
        low.append(math.log(prediction.p10_step_seconds / prediction.step_seconds))
        high.append(math.log(prediction.p90_step_seconds / prediction.step_seconds))
    if not low:
        return None, None
    return math.exp(-math.hypot(*low)), math.exp(math.hypot(*high))


def pareto_front(points: Sequence[PlanPoint]) -> tuple[int, ...]:
    """Positions of the Pareto front of `points` in time and cost, the soonest first."""
    order = sorted(range(len(points)), key=lambda i: (points[i].run_seconds, points[i].cost))
    front: list[int] = []
    for position in order:
        if not front or points[position].cost < points[front[-1]].cost:
            front.append(position)
    return tuple(front)


def soonest_by_devices(plan: Plan) -> list[PlanPoint]:
    """The soonest point of each cluster and device count, in the plan's order."""
    best: dict[tuple[str, int], PlanPoint] = {}
    for point in plan.points:
        key = (point.cluster, point.device_count)
        if key not in best or point.run_seconds < best[key].run_seconds:
            best[key] = point
    return list(best.values())


def knee_of(points: Sequence[PlanPoint], among: Sequence[int]) -> int | None:
    """Position of the point, of those `among`, beyond which more devices stop paying.

    It has the least product of time and cost. On a curve of cost over time that is where
    d ln cost = -d ln time: saving a per cent of time costs less than a per cent before it, and more
    beyond it. With one price, cost is devices times time, and the product is least where
    efficiency over time is greatest, the knee of Eager, Zahorjan & Lazowska 1989, "Speedup versus
    efficiency in parallel systems", IEEE Transactions on Computers 38(3).
    """
    return min(among, key=lambda i: points[i].run_seconds * points[i].cost, default=None)


def miss_factor(point: PlanPoint, deadline_seconds: float | None, budget: float | None) -> float:
    """Factor by which a point exceeds the deadline or the budget, the larger of the two; at most
    1 if it is within both."""
    late = point.run_seconds / deadline_seconds if deadline_seconds is not None else 0.0
    dear = point.cost / budget if budget is not None else 0.0
    return max(late, dear)


def deadline_probability(point: PlanPoint, deadline_seconds: float) -> float | None:
    """Probability that the point meets the deadline, 0..1; None if its range is unknown.

    Log time is assumed normal on either side of its median.
    """
    off = math.log(deadline_seconds / point.run_seconds)
    end = point.p90_run_seconds if off > 0 else point.p10_run_seconds
    if end is None:
        return None
    deviation = abs(math.log(end / point.run_seconds)) / Z_OF_P90
    if not deviation:
        return float(off >= 0)
    return NormalDist().cdf(off / deviation)


def answered(plan: Plan) -> Plan:
    """`plan` with its points sorted and its answers filled in: the Pareto front, the soonest, the
    cheapest and the knee, or else the nearest."""
    ordered = tuple(sorted(plan.points, key=lambda p: (p.cluster, p.device_count, p.global_batch)))
    misses = [miss_factor(point, plan.deadline_seconds, plan.budget) for point in ordered]
    within = [position for position, miss in enumerate(misses) if miss <= 1]
    by_time = sorted(within, key=lambda i: (ordered[i].run_seconds, ordered[i].cost))
    by_cost = sorted(within, key=lambda i: (ordered[i].cost, ordered[i].run_seconds))
    return replace(
        plan,
        points=ordered,
        front=pareto_front(ordered),
        soonest=by_time[0] if by_time else None,
        cheapest=by_cost[0] if by_cost else None,
        knee=knee_of(ordered, within),
        nearest=None if within else min(range(len(ordered)), key=misses.__getitem__, default=None),
    )
