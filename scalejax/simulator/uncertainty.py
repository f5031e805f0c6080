"""Error band of a predicted step time, propagated from the residuals of the fits.

No sampling: the same inputs give the same band.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scalejax.hardware import Cluster
from scalejax.simulator.timeline.timeline import NOMINAL, Scales

Z_OF_P90 = 1.2815515655446004
"""Standard deviations from the median of a normal distribution to its 90th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Range that should contain four of five measurements."""

    p10_seconds: float
    """A tenth of measurements should be below."""
    p90_seconds: float
    """A tenth of measurements should be above."""


def residuals(cluster: Cluster, *, communicates: bool) -> dict[str, float] | None:
    """Log standard deviation of each class of cost by its name in `Scales`; None if not fitted.

    Args:
        cluster: hardware with the residuals of its fits.
        communicates: whether the step has collectives; otherwise their residual may be unknown.
    """
    chip, library = cluster.chip.residuals, cluster.library.residual
    if chip is None or (library is None and communicates):
        return None
    return {
        "compute": chip.compute,
        "memory": chip.memory,
        "launch": chip.launch,
        "communication": library or 0.0,
    }


def band(
    step_seconds: Callable[[Scales], float],
    deviations: Mapping[str, float],
    step_deviation: float = 0.0,
) -> Band:
    """The 80 % range of a step time.

    The error of a class of cost is one factor for all its operations, and the classes are
    independent. So each class is scaled to its own 90th (10th) percentile, and the changes of the
    logarithm of the step time are added in quadrature. This is exact for a product of the classes;
    for a sum, which a step is, the error is of second order in the deviations.

    Args:
        step_seconds: step time with each class of cost scaled by a factor.
        deviations: log standard deviation of each class, by its name in `Scales`.
        step_deviation: log standard deviation of whole steps, in addition to that of their parts.

    Source: linear propagation of uncertainty, JCGM 100:2008 (GUM), section 5.1.2.
    """
    median = step_seconds(NOMINAL)

    def shift(sign: int) -> float:
        changes = [Z_OF_P90 * step_deviation]
        for name, deviation in deviations.items():
            if deviation:
                factor = math.exp(sign * Z_OF_P90 * deviation)
                scaled = step_seconds(replace(NOMINAL, **{name: factor}))
                changes.append(math.log(scaled / median))
        return math.hypot(*changes)

    return Band(
        p10_seconds=median * math.exp(-shift(-1)),
        p90_seconds=median * math.exp(shift(+1)),
    )
