"""Intervals over seeds: of a mean, and of the difference of two settings with the same seeds.

Student's t: the values of seeds are taken for independent and normal. Plain arithmetic; knows
nothing of runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95
"""Confidence level of the intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    """The mean."""
    half_width: float | None
    """Half the width of the interval around it; None of a single value, which has none."""
    count: int
    """Values."""

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The mean of `values` with its interval, mean +- t(n - 1) s / sqrt(n); None of no value.

    Source: Student 1908, Biometrika 6(1).
    """
    if not values:
        return None
    count, middle = len(values), mean(values)
    if count == 1:
        return Interval(mean=middle, half_width=None, count=1)
    # Imported here: it takes 0.1 s, and plans need none.
    from scipy.special import stdtrit

    quantile = float(stdtrit(count - 1, (1 + confidence) / 2))
    return Interval(
        mean=middle, half_width=quantile * stdev(values) / math.sqrt(count), count=count
    )


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = CONFIDENCE
) -> Interval | None:
    """The mean difference of `values` and `baseline` over the seeds that both have, by seed, with
    its interval; None if there is no such seed.

    What a seed does to both (initial parameters, order of the data, what is held out) is in
    neither: the interval is narrower than that of two means where it does the same to both.
    """
    seeds = sorted(set(values) & set(baseline))
    return t_interval([values[seed] - baseline[seed] for seed in seeds], confidence)
