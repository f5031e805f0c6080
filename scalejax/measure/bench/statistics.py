"""Statistics of step times: throughput, its scatter, and a confidence interval of the median.

Plain arithmetic; knows nothing of where the times come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalejax.core.errors import ConfigError, refusal, require_at_least

CONFIDENCE = 0.95
"""Confidence level of the median intervals."""
_RESAMPLES = 2000
_SEED = 0  # fixed, so that equal data give an equal interval
_TO_DEVIATION = 1.4826  # normal distribution: deviation over median absolute deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Throughput as tf_cnn_benchmarks reports it."""

    mean: float
    """Samples per second: the batch over the mean time of a step."""
    uncertainty: float
    """Standard error of the speeds of single steps: population deviation over sqrt(n)."""
    jitter: float
    """Scatter of those speeds: 1.4826 times the median absolute deviation from their median."""
    steps: int
    """Number of timed steps."""

    def __str__(self) -> str:
        """The line that tf_cnn_benchmarks prints."""
        return (
            f"images/sec: {self.mean:.1f} +/- {self.uncertainty:.1f} (jitter = {self.jitter:.1f})"
        )


def speed(global_batch: int, step_seconds: Sequence[float]) -> Speed:
    """Throughput of steps of `global_batch` samples.

    Raises:
        ConfigError: if there are no steps, or a step took no time.
    Source: tf_cnn_benchmarks, `get_perf_timing` of `benchmark_cnn.py`, 2023.
    """
    times = _times(step_seconds)
    speeds = global_batch / times
    return Speed(
        mean=float(global_batch / np.mean(times)),
        uncertainty=float(np.std(speeds) / math.sqrt(len(speeds))),
        jitter=float(_TO_DEVIATION * np.median(np.abs(speeds - np.median(speeds)))),
        steps=len(speeds),
    )


def median_interval(
    rounds: Sequence[Sequence[float]], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Confidence interval of the median step time, by the block bootstrap.

    Rounds are resampled with replacement, and within each, blocks of n^(1/3) consecutive steps,
    because steps delayed by another program are consecutive. The ends are percentiles of the
    medians of 2,000 resamples. With a single round, it covers only the variation within that
    process; with two or three, it is rather too narrow.

    Args:
        rounds: step times in seconds of each round.
        confidence: share of such intervals that contain the true median, 0..1.

    Raises:
        ConfigError: if there are no rounds, or one is empty.
    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", ch. 8 and 13;
        Politis & Romano 1992 for circular blocks.
    """
    if not rounds:
        raise ConfigError(refusal("rounds", [], "at least one is needed"))
    times = [_times(each) for each in rounds]
    random = np.random.default_rng(_SEED)
    medians = np.empty(_RESAMPLES)
    for draw in range(_RESAMPLES):
        chosen = random.integers(len(times), size=len(times))
        medians[draw] = np.median(
            np.concatenate([_blocks(times[index], random) for index in chosen])
        )
    tail = 50 * (1 - confidence)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return float(low), float(high)


def _blocks(times: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A resample of `times` of the same length, in circular blocks with random starts."""
    count = len(times)
    length = max(1, math.ceil(count ** (1 / 3)))
    begins = random.integers(count, size=math.ceil(count / length))
    return times[(begins[:, None] + np.arange(length)).ravel()[:count] % count]


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Means of `width` consecutive values, len(values) - width + 1 of them; empty if too few.

    Raises:
        ConfigError: if width < 1.
    """
    require_at_least("width", width, 1)
    if len(values) < width:
        return []
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    return ((sums[width:] - sums[:-width]) / width).tolist()


def _times(step_seconds: Sequence[float]) -> np.ndarray:
    times = np.asarray(step_seconds, float)
    if not times.size or not np.all(times > 0):
        accepted = "it must hold at least one time, all above 0"
        raise ConfigError(refusal("step_seconds", list(step_seconds), accepted))
    return times
