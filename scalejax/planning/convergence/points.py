"""Convergence data of a network: measured points, failed batches, gradient noise scale.

Knows neither files nor curves.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev

from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
)

_SAME_TARGET = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Runs with one batch and one recipe, all of which reached the target."""

    global_batch: int
    """Samples per update over all devices."""
    samples: float
    """Samples trained until the target was reached, the mean of the runs."""
    run_deviation: float | None = None
    """Standard deviation between runs over their mean; None if unknown."""
    run_count: int = 1
    """Runs behind the mean."""
    recipe: str = ""
    """Name of the recipe: points of one recipe have hyperparameters that follow one rule.
    Recipes of one data set share a critical batch, and differ in samples."""

    def __post_init__(self) -> None:
        require_at_least("points.global_batch", self.global_batch, 1)
        require_above("points.samples", self.samples, 0)
        require_at_least("points.run_count", self.run_count, 1)
        require_at_least("points.run_deviation", self.run_deviation, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceData:
    """Convergence measurements of one network on one data set with one target."""

    name: str
    """Name of the network: "resnet50"."""
    target: float | None = None
    """Value of the metric to reach, such as an accuracy of 0.759; None if not stated."""
    metric: str | None = None
    """Metric of the target: "top-1 accuracy"."""
    points: tuple[Point, ...] = ()
    """Batches with which the target was reached."""
    failed_batches: tuple[int, ...] = ()
    """Batches with which the target was not reached."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, an estimate of the critical batch: B_simple of McCandlish
    et al. 2018, arXiv 1812.06162, section 2.2; None if it was not measured."""
    optimizer: str | None = None
    """Optimizer of all points, as named in a run.toml; None if unknown."""
    train_examples: int | None = None
    """Samples of the data set; None if that does not matter."""
    starts_from_checkpoint: bool = False
    """Whether samples are counted from pretrained weights."""
    notes: tuple[str, ...] = ()
    """Caveats of the measurements."""
    source: str = ""
    """Source of the points."""

    def __post_init__(self) -> None:
        if not self.points:
            accepted = "at least one batch must have reached the target"
            raise ConfigError(refusal("convergence.points", [], accepted))
        for batch in self.failed_batches:
            require_at_least("convergence.failed_batches", batch, 1)
        require_above("convergence.noise_scale", self.noise_scale, 0)
        # Published scales are 1 to 1e8 samples; far outside that range no curve has any weight.
        require_at_least("convergence.noise_scale", self.noise_scale, 1e-6)
        require_at_most("convergence.noise_scale", self.noise_scale, 1e15)

    @property
    def recipes(self) -> tuple[str, ...]:
        """Names of the recipes of the points."""
        return tuple(sorted({point.recipe for point in self.points}))

    @property
    def compares_batches(self) -> bool:
        """Whether some recipe was measured at several batches, so that a curve is known."""
        return len({(point.recipe, point.global_batch) for point in self.points}) > len(
            self.recipes
        )

    @property
    def largest_reached(self) -> int:
        """Largest batch with which the target was reached."""
        return max(point.global_batch for point in self.points)

    @property
    def smallest_failed(self) -> int | None:
        """Smallest batch above all that reached the target that did not; None if unknown."""
        above = [batch for batch in self.failed_batches if batch > self.largest_reached]
        return min(above, default=None)


def point_of_runs(samples: Iterable[float], global_batch: int, recipe: str = "") -> Point:
    """Point of several runs with one batch, from the samples that each needed."""
    values = list(samples)
    mean = fmean(values)
    return Point(
        global_batch=global_batch,
        samples=mean,
        run_deviation=stdev(values) / mean if len(values) > 1 else None,
        run_count=len(values),
        recipe=recipe,
    )


def merged(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points with the single runs of one batch and recipe merged into their mean."""

    def key(point: Point) -> tuple[str, int]:
        return point.recipe, point.global_batch

    found: list[Point] = []
    for (recipe, batch), group in groupby(sorted(points, key=key), key):
        together = list(group)
        single = [point for point in together if point.run_count == 1]
        found += [point for point in together if point.run_count > 1]
        if single:
            found.append(point_of_runs([point.samples for point in single], batch, recipe))
    return tuple(found)


def parse_target(text: str) -> float:
    """A target as typed: "0.759" or "75.9%".

    Raises:
        ConfigError: if it is no number.
    """
    number, is_percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number)
    except ValueError as error:
        accepted = "it must be a number, such as 0.759 or 75.9%"
        raise ConfigError(refusal("target", text, accepted)) from error
    if not math.isfinite(value):
        raise ConfigError(refusal("target", text, "it must be finite"))
    return value / 100 if is_percent else value


def is_same_target(one: float | None, other: float | None) -> bool:
    """Whether two targets are equal up to rounding; None equals None only."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_SAME_TARGET)
