"""Intervals over seeds: of a mean, and of the difference of two settings with the same seeds.

Student's t: the values of seeds are taken for independent and normal. Of two values there is no
interval, as it would be 12.7 times as wide as they are apart: they are shown themselves. Plain
arithmetic; knows nothing of runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95
"""Confidence level of the intervals."""
LEAST_COUNT = 3
"""Values that an interval needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval, or with the two values that it is of."""

    mean: float
    """The mean."""
    half_width: float | None
    """Half the width of the interval around it; None of less than three values, which have none."""
    count: int
    """Values."""
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
        """What a figure draws about the mean: the interval, of two values both, of one nothing."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return None if self.count == 1 else (self.least, self.most)

    def in_words(self, factor: float = 1, decimals: int = 4, sign: str = "") -> str:
        """The mean, times `factor`, with half its interval: "0.5000 ± 0.0100"; with both of two
        values, "0.5000 (0.4900, 0.5100)"; alone of one.

        Args:
            factor: 100 for per cent.
            decimals: of all numbers.
            sign: "+" where positive numbers have a sign, for differences.
        """

        def number(value: float) -> str:
            return f"{factor * value:{sign}.{decimals}f}"

        if self.half_width is not None:
            return f"{number(self.mean)} ± {factor * self.half_width:.{decimals}f}"
        if self.count == 1:
            return number(self.mean)
        return f"{number(self.mean)} ({number(self.least)}, {number(self.most)})"


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The mean of `values` with its interval, of three or more mean +- t(n - 1) s / sqrt(n); None
    of no value.

    Source: Student 1908, Biometrika 6(1).
    """
    if not values:
        return None
    count, half_width = len(values), None
    if count >= LEAST_COUNT:
        # Imported here: it takes 0.1 s, and plans need none.
        from scipy.special import stdtrit

        quantile = float(stdtrit(count - 1, (1 + confidence) / 2))
        half_width = quantile * stdev(values) / math.sqrt(count)
    return Interval(
        mean=mean(values), half_width=half_width, count=count, least=min(values), most=max(values)
    )


def spread_in_words(count: int) -> str:
    """What stands beside a mean over `count` seeds, for captions: of three or more, of which some
    may have diverged; of two; nothing of one."""
    if count >= LEAST_COUNT:
        return "95 % t intervals (of two runs, both values)"
    return "both values, as an interval needs three" if count > 1 else ""


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
