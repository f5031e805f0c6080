"""Hyper-parameters scaled with the batch: learning rate, warmup, moments of Adam.

Arithmetic on configs; knows no steps and no arrays.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from scalejax.config.optimizer import OptimizerConfig
from scalejax.config.schedule import (
    HorovodScheduleConfig,
    LearningRateConfig,
    PiecewiseScheduleConfig,
    ScheduleConfig,
)
from scalejax.core.errors import ConfigError, refusal, require_at_least

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32 (IEEE 754, binary32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A hyper-parameter that the scaling rule changes."""

    name: str
    """Name of its field."""
    before: float
    """Value at the reference batch."""
    after: float
    """Value at the batch of the run."""

    def __str__(self) -> str:
        """A phrase such as "learning_rate scaled from 0.1 to 3.2"."""
        return f"{self.name} scaled from {self.before:.6g} to {self.after:.6g}"


def scaled_schedule(schedule: ScheduleConfig, global_batch: int) -> tuple[float, float]:
    """The peak learning rate (after warmup, before decay) and the epochs of warmup.

    With k = global_batch / reference_batch the rate is the base times 1 (none), k (linear; Goyal
    et al. 2017, section 2.1, arXiv 1706.02677) or root k (sqrt, sde, legw; Krizhevsky 2014,
    section 5, arXiv 1404.5997); "legw" has k times the epochs (You et al. 2019, section 3, arXiv
    1901.08256).
    """
    require_at_least("batch.global_batch", global_batch, 1)
    k = global_batch / schedule.reference_batch
    factor = {"none": 1.0, "linear": k, "sqrt": k**0.5, "sde": k**0.5, "legw": k**0.5}
    stretch = k if schedule.scaling == "legw" else 1.0
    return schedule.base_learning_rate * factor[schedule.scaling], schedule.warmup_epochs * stretch


def require_single_precision(schedule: LearningRateConfig, global_batch: int) -> None:
    """Refuse learning rates beyond float32, in which they are computed.

    Raises:
        ConfigError: naming the field that makes them so large.
    """
    for name, value, largest in _largest_rates(schedule, global_batch):
        if not largest <= _LARGEST:
            accepted = (
                "learning rates, and what makes them, must stay below "
                f"{_LARGEST:.2g}, the largest of float32"
            )
            raise ConfigError(refusal(f"schedule.{name}", value, accepted))


def _largest_rates(
    schedule: LearningRateConfig, global_batch: int
) -> Iterator[tuple[str, object, float]]:
    """Fields that determine a rate, their values, and the largest rate that follows from each."""
    match schedule:
        case ScheduleConfig():
            peak, _ = scaled_schedule(schedule, global_batch)
            yield "base_learning_rate", schedule.base_learning_rate, peak
            yield "end_learning_rate", schedule.end_learning_rate, schedule.end_learning_rate
            yield "decay_power", schedule.decay_power, schedule.decay_power
            if schedule.decay_factor > 1 and schedule.decay_epochs:
                doublings = math.log2(peak) + len(schedule.decay_epochs) * math.log2(
                    schedule.decay_factor
                )
                grown = 2.0 ** min(doublings, 1000)
                yield "decay_factor", schedule.decay_factor, grown
        case HorovodScheduleConfig():
            initial = schedule.initial_learning_rate
            yield "initial_learning_rate", initial, initial
            for each in schedule.multipliers:
                yield "multipliers.multiplier", each.multiplier, initial * each.multiplier
        case PiecewiseScheduleConfig():
            yield "learning_rates", schedule.learning_rates, max(schedule.rates)


def warmup_epochs(schedule: LearningRateConfig, global_batch: int) -> float:
    """Epochs of warmup at `global_batch`; 0 without one."""
    if isinstance(schedule, ScheduleConfig):
        _, epochs = scaled_schedule(schedule, global_batch)
        return epochs
    return schedule.warmup_epochs


def scaled_optimizer(
    schedule: LearningRateConfig, optimizer: OptimizerConfig, global_batch: int
) -> OptimizerConfig:
    """The optimizer at `global_batch`, its hyper-parameters scaled if scaling is "sde".

    With k = global_batch / reference_batch, "sde" multiplies 1 - beta1 and 1 - beta2 by k and
    epsilon by 1 / root k (Malladi et al. 2022, definition 5.3, arXiv 2205.10287); weight decay,
    which they do not treat, is unchanged.

    Raises:
        ConfigError: if scaling is "sde" and the optimizer not adamw, or k makes a beta negative.
    """
    if not isinstance(schedule, ScheduleConfig) or schedule.scaling != "sde":
        return optimizer
    k = global_batch / schedule.reference_batch
    return optimizer.scaled_by_sde(k, schedule.reference_batch)


def changes(
    schedule: LearningRateConfig, optimizer: OptimizerConfig, global_batch: int
) -> tuple[Change, ...]:
    """The hyper-parameters that the scaling rule of `schedule` changes at `global_batch`."""
    if not isinstance(schedule, ScheduleConfig):
        return ()
    peak, warmup_epochs = scaled_schedule(schedule, global_batch)
    scaled = scaled_optimizer(schedule, optimizer, global_batch)
    pairs = [
        ("learning_rate", schedule.base_learning_rate, peak),
        ("warmup_epochs", schedule.warmup_epochs, warmup_epochs),
    ]
    if scaled is not optimizer:
        names = [each.name for each in fields(optimizer)]
        pairs += [(name, getattr(optimizer, name), getattr(scaled, name)) for name in names]
    return tuple(Change(name=n, before=a, after=b) for n, a, b in pairs if a != b)
