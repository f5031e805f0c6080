"""Intervals over seeds: of a mean, and of the difference of two settings with the same seeds.

Student's t: the values of seeds are assumed to be independent and normal. Two values have no
interval, as it would be 12.7 times as wide as they are apart: the values themselves are shown.
Plain arithmetic; knows nothing about runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95
"""Confidence level of the intervals."""
LEAST_COUNT = 3
"""Number of values that an interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval, or with its two values."""

    mean: float
    """The mean."""
    half_width: float | None
    """Half the width of the interval around it; None for fewer than three values."""
    count: int
    """Number of values."""
    least: float
    """Least value."""
    most: float
    """Largest value."""

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def bar(self) -> tuple[float, float] | None:
        """What a figure draws around the mean: the interval; both of two values; None for one."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return None if self.count == 1 else (self.least, self.most)

    def in_words(self, factor: float = 1, decimals: int = 4, sign: str = "") -> str:
        """The mean, times `factor`, with half its interval: "0.5000 ± 0.0100"; if there are two
        values, with both: "0.5000 (0.4900, 0.5100)"; if there is one, alone.

        Args:
            factor: 100 for per cent.
            decimals: number of decimals.
            sign: "+" to give positive numbers a sign, for differences.
        """

        def number(value: float) -> str:
            return f"{factor * value:{sign}.{decimals}f}"

        if self.half_width is not None:
            return f"{number(self.mean)} ± {factor * self.half_width:.{decimals}f}"
        if self.count == 1:
            return number(self.mean)
        return f"{number(self.mean)} ({number(self.least)}, {number(self.most)})"


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The mean of `values` with its interval, mean +- t(n - 1) s / sqrt(n) for three or more; None
    if there are no values.

    Source: Student 1908, Biometrika 6(1).
    """
    if not values:
        return None
    count, half_width = len(values), None
    if count >= LEAST_COUNT:
        # Imported here: it takes 0.1 s, and plans do not need it.
        from scipy.special import stdtrit

        quantile = float(stdtrit(count - 1, (1 + confidence) / 2))
        half_width = quantile * stdev(values) / math.sqrt(count)
    return Interval(
        mean=mean(values), half_width=half_width, count=count, least=min(values), most=max(values)
    )


def spread_in_words(count: int) -> str:
    """Caption for what accompanies a mean over `count` seeds: for three or more, some of which may
    have diverged; for two; empty for one."""
    if count >= LEAST_COUNT:
        return "95 % t intervals (of two runs, both values)"
    return "both values, as an interval needs three" if count > 1 else ""


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = CONFIDENCE
) -> Interval | None:
    """The mean difference of `values` and `baseline`, both by seed, over the seeds that they share,
    with its interval; None if there is no such seed.

    Effects of a seed that are the same in both (of initial parameters, data order, held-out data)
    cancel, so the interval is narrower than that of a difference of independent means.
    """
    seeds = sorted(set(values) & set(baseline))
    return t_interval([values[seed] - baseline[seed] for seed in seeds], confidence)
