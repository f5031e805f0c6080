"""Goodput of a long run under checkpoints and failures, and the cost of stragglers.

Closed formulas in seconds, independent of any program.
"""

import math
from functools import cache

import numpy as np

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.hardware import Chip, RunConditions

_MAX_FAILURES_PER_INTERVAL = 20.0  # mean times between failures per interval: e^20 attempts at each


def best_interval_seconds(checkpoint_seconds: float, run_mtbf_seconds: float) -> float:
    """Checkpoint interval that minimises the time lost to checkpoints and failures.

    interval = sqrt(2 checkpoint mtbf): shorter intervals lose more to checkpoints, longer ones to
    failures. First order in checkpoint / mtbf; the optimum is flat.

    Args:
        checkpoint_seconds: time that training stalls for one checkpoint.
        run_mtbf_seconds: mean time between failures of the run: that of a node over the nodes.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval", CACM
        17(9).
    """
    require_above("checkpoint_seconds", checkpoint_seconds, 0)
    require_above("run_mtbf_seconds", run_mtbf_seconds, 0)
    return math.sqrt(2 * checkpoint_seconds * run_mtbf_seconds)


def checkpoint_goodput(interval_seconds: float, checkpoint_seconds: float) -> float:
    """Fraction of the time spent on training with checkpoints and no failures, 0..1.

    goodput = interval / (interval + checkpoint)
    """
    require_above("interval_seconds", interval_seconds, 0)
    require_at_least("checkpoint_seconds", checkpoint_seconds, 0)
    return interval_seconds / (interval_seconds + checkpoint_seconds)


def goodput(
    interval_seconds: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    run_mtbf_seconds: float,
    *,
    latency_seconds: float = 0.0,
    down_seconds: float = 0.0,
) -> float:
    """Fraction of the time spent on training with checkpoints and failures, 0..1.

    goodput = interval / seconds_without_failure(interval + checkpoint),

    which for a mean time between failures M much larger than the rest is the well-known
    1 - C/interval - (interval/2 + R)/M.

    Args:
        interval_seconds: time of training between checkpoints.
        checkpoint_seconds: C, time that training stalls for one checkpoint.
        restart_seconds: R, time from a failure until training resumes.
        run_mtbf_seconds: M, mean time between failures of the run: that of a node over the nodes.
        latency_seconds: time after the stall until a checkpoint is complete, if it is written
            asynchronously.
        down_seconds: time from a failure until the restart starts, if the restart does not
            include it.

    Raises:
        ConfigError: if failures are so frequent that the run would never end.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", Future Generation Computer Systems 22(3), section 3.
    """
    require_above("interval_seconds", interval_seconds, 0)
    require_at_least("checkpoint_seconds", checkpoint_seconds, 0)
    needed_seconds = interval_seconds + checkpoint_seconds
    return interval_seconds / seconds_without_failure(
        needed_seconds,
        restart_seconds,
        run_mtbf_seconds,
        latency_seconds=latency_seconds,
        down_seconds=down_seconds,
    )


def seconds_without_failure(
    needed_seconds: float,
    restart_seconds: float,
    run_mtbf_seconds: float,
    *,
    latency_seconds: float = 0.0,
    down_seconds: float = 0.0,
) -> float:
    """Mean time until an interval of `needed_seconds` has passed without a failure.

    Failures occur at random with mean time M between them, during the interval and restarts alike,
    but not while the run is down (D), when nothing runs that could fail. Each failure puts the run
    back to the start of the interval, after D and a restart of R. An attempt succeeds with
    probability p = e^(-needed/M), and takes M (1 - p) until it succeeds or fails; a restart takes,
    including failures during it, M (e^(R/M) - 1) + D e^(R/M), and there are 1/p - 1 restarts on
    average; together

    seconds = (M + D) e^(R/M) (e^(needed/M) - 1).

    A checkpoint that is complete only L after its stall cannot be used until then: a failure costs
    that much more, as if R were R + L.

    Args:
        needed_seconds: length of the interval.
        restart_seconds: R, time from the start of a restart until the interval starts again.
        run_mtbf_seconds: M, mean time between failures of the run while it is up.
        latency_seconds: L, time after the stall until a checkpoint is complete.
        down_seconds: D, time from a failure until the restart begins.

    Raises:
        ConfigError: if failures are so frequent that the interval would never pass.
    Source: Daly 2006, section 3, for D = L = 0; Vaidya 1997, "Impact of checkpoint latency on
        overhead ratio of a checkpointing scheme", IEEE Transactions on Computers 46(8), for L
        (there, of the whole checkpoint: L + C); Bougeret et al. 2011, "Checkpointing strategies for
        parallel jobs", SC11, with D.
    """
    require_above("needed_seconds", needed_seconds, 0)
    require_at_least("restart_seconds", restart_seconds, 0)
    require_above("run_mtbf_seconds", run_mtbf_seconds, 0)
    require_at_least("latency_seconds", latency_seconds, 0)
    require_at_least("down_seconds", down_seconds, 0)
    attempt = needed_seconds / run_mtbf_seconds
    restart = (restart_seconds + latency_seconds) / run_mtbf_seconds
    if attempt + restart > _MAX_FAILURES_PER_INTERVAL:
        least = (needed_seconds + restart_seconds + latency_seconds) / _MAX_FAILURES_PER_INTERVAL
        accepted = (
            f"with {needed_seconds:.4g} s to the next checkpoint, its own time included, and "
            f"{restart_seconds:.4g} s for a restart, it must be above {least:.4g}, or the run "
            "never ends"
        )
        raise ConfigError(refusal("run_mtbf_seconds", run_mtbf_seconds, accepted))
    return (run_mtbf_seconds + down_seconds) * math.exp(restart) * math.expm1(attempt)


# Stragglers: a synchronous step ends when the slowest of n devices does.

_FARTHEST, _INTERVALS = 12.0, 2400  # standard deviations, and steps of a 200th of one


def step_deviation_seconds(
    chip: Chip, conditions: RunConditions, step_seconds: float
) -> float | None:
    """Standard deviation of a step of `step_seconds` on one device; None if unknown.

    If the site's conditions give a `step_cv`, it is used alone. Otherwise the variances of two
    causes add up: one slows a whole step, with a deviation that is a fraction of the step
    (`step_cv`); the other is random disturbances within the step, whose variance grows with its
    length as for every Poisson process (`step_dispersion_seconds`), so that long steps average
    them out. Steps shorter than the shortest measured have its coefficient of variation.
    """
    if conditions.step_cv is not None:
        return step_seconds * conditions.step_cv
    attainable = chip.attainable
    if attainable.step_cv is None:
        return None
    dispersed_cv = 0.0
    if attainable.step_dispersion_seconds:
        seen_seconds = max(step_seconds, attainable.dispersed_from_seconds)
        dispersed_cv = math.sqrt(attainable.step_dispersion_seconds / seen_seconds)
    return step_seconds * math.hypot(attainable.step_cv, dispersed_cv)


def straggler_seconds(deviation_seconds: float, device_count: int) -> float:
    """Time by which the slowest of n devices is later than their mean, on average.

    seconds = deviation E[max of n standard normals], for steps that vary normally and
    independently. Left out: devices that are slow at every step, or slow down together.

    Args:
        deviation_seconds: standard deviation of a step on one device.
        device_count: devices that wait for each other.

    Raises:
        ConfigError: if there is no device.
    Source: order statistics, as in Chen et al. 2016, "Revisiting distributed synchronous SGD",
        arXiv 1604.00981, section 2.
    """
    return deviation_seconds * expected_maximum(device_count)


@cache
def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` standard normal variables.

    The integral of 1 - F^n over the positive and of -F^n over the negative numbers, F being the
    normal distribution, by the trapezoidal rule, which is exact to rounding for functions this
    smooth: 0.5642 for two, 1.5388 for ten. Its limit sqrt(2 ln n) is 39 % above it for ten and
    11 % for 10,000.

    Raises:
        ConfigError: if `count` is below 1.
    """
    require_at_least("device_count", count, 1)
    step = _FARTHEST / _INTERVALS
    places = (i * step for i in range(_INTERVALS + 1))
    # 1 - F(x)^n on both sides of 0, less 1 on the left.
    both = [_at_least_one_above(x, count) + _at_least_one_above(-x, count) - 1 for x in places]
    return max(0.0, float(np.trapezoid(both, dx=step)))  # for one it is 0 up to rounding


def _at_least_one_above(x: float, count: int) -> float:
    """Probability that the largest of `count` standard normals is above x."""
    above = math.erfc(x / math.sqrt(2)) / 2
    return 1.0 if above >= 1 else -math.expm1(count * math.log1p(-above))
