"""Config of learning rate schedules, their scaling with the batch, and growing batches.

Each class checks its own fields when built.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal

from scalejax.config.optimizer import OptimizerConfig
from scalejax.config.parallelism import BatchSplit
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_fraction,
)
from scalejax.core.metrics import steps_per_epoch
from scalejax.core.serialization import Family

SMOOTH_DECAYS = ("cosine", "polynomial", "one_minus_sqrt")
"""The decays that depend on the length of the run."""

Named = Iterator[tuple[str, object, float]]
"""Names of fields, their values, and a number that follows from each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateConfig(Family):
    """One of the schedules, selected by `name`."""

    unnamed = "scaled"
    name: str

    @property
    def is_constant(self) -> bool:
        """Whether the rate stays at its peak after the warmup."""
        return False

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate at a step depends on the length of the run."""
        return False

    def scaled(self, global_batch: int | None) -> tuple[float, float]:
        """The peak learning rate (after warmup, before decay) and the epochs of warmup, scaled to
        `global_batch`; as given if that is None."""
        raise NotImplementedError

    def scaled_optimizer(self, optimizer: OptimizerConfig, global_batch: int) -> OptimizerConfig:
        """The optimizer at `global_batch`, with its hyper-parameters scaled by the rule, if at
        all."""
        return optimizer

    def at_batch(self, global_batch: int) -> "LearningRateConfig":
        """The schedule as if tuned for that batch, so that nothing is scaled at it."""
        return self

    def largest_rates(self, global_batch: int) -> Named:
        """Fields that determine a rate, and the largest rate that follows from each."""
        raise NotImplementedError

    def last_epochs(self) -> Named:
        """Fields other than the warmup that give epochs, and the last epoch of each."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig(LearningRateConfig):
    """The learning rate as a function of the step: scaling, then warmup, then decay."""

    name: Literal["scaled"] = "scaled"
    """Selects this schedule, the default where no name is given."""
    base_learning_rate: float
    """Learning rate tuned for `reference_batch`."""
    scaling: Literal["none", "linear", "sqrt", "sde", "legw"] = "none"
    """Scaling rule for k = global_batch / reference_batch. none: nothing changes. linear: the peak
    rate is multiplied by k. sqrt: by root k. sde: by root k, and the betas and epsilon of Adam are
    scaled with it (Malladi et al. 2022, arXiv 2205.10287). legw: by root k, and the epochs of
    warmup by k (You et al. 2019, arXiv 1901.08256)."""
    reference_batch: int = 256
    """Global batch for which `base_learning_rate` was tuned."""
    warmup: Literal["none", "constant", "gradual"] = "none"
    """How the peak rate is reached. none: at once. constant: the start value is held, then jumps to
    the peak. gradual: linearly, step by step (Goyal et al. 2017, section 2.2)."""
    warmup_epochs: float = 0.0
    """Length of the warmup, 0 for none; with scaling "legw", at `reference_batch`."""
    warmup_from: Literal["base", "zero"] = "base"
    """Start value of a warmup: `base_learning_rate`, or zero."""
    decay: Literal["constant", "step", "cosine", "polynomial", "one_minus_sqrt"] = "constant"
    """Decay after the warmup; one_minus_sqrt is peak x (1 - root of the elapsed share of the decay)
    (Haegele et al. 2024, arXiv 2405.18392)."""
    decay_epochs: tuple[float, ...] = ()
    """Epochs, from the start of training, at which a step decay multiplies the rate."""
    decay_factor: float = 0.1
    """Factor of a step decay."""
    decay_power: float = 2.0
    """Exponent of a polynomial decay; 1 is linear."""
    decay_share: float | None = None
    """Share of the run, at its end, that a cosine, polynomial or one_minus_sqrt decay takes; before
    it the peak rate is held (warmup-stable-decay). If absent, everything after the warmup."""
    end_learning_rate: float = 0.0
    """Learning rate at the end of a cosine, polynomial or one_minus_sqrt decay."""

    def __post_init__(self) -> None:
        require_above("schedule.base_learning_rate", self.base_learning_rate, 0)
        require_at_least("schedule.reference_batch", self.reference_batch, 1)
        require_at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        require_at_least("schedule.end_learning_rate", self.end_learning_rate, 0)
        require_above("schedule.decay_factor", self.decay_factor, 0)
        require_above("schedule.decay_power", self.decay_power, 0)
        _require_possible_warmup(self)
        _require_possible_decay(self)

    @property
    def is_constant(self) -> bool:
        """Whether there is no decay."""
        return self.decay == "constant"

    @property
    def depends_on_length(self) -> bool:
        """Whether the decay is smooth."""
        return self.decay in SMOOTH_DECAYS

    def scaled(self, global_batch: int | None) -> tuple[float, float]:
        """The peak learning rate and the epochs of warmup, by the scaling rule.

        With k = global_batch / reference_batch the rate is the base times 1 (none), k (linear;
        Goyal et al. 2017, section 2.1, arXiv 1706.02677) or root k (sqrt, sde, legw; Krizhevsky
        2014, section 5, arXiv 1404.5997); "legw" has k times the epochs (You et al. 2019, section
        3, arXiv 1901.08256).
        """
        if global_batch is None:
            return self.base_learning_rate, self.warmup_epochs
        require_at_least("batch.global_batch", global_batch, 1)
        k = global_batch / self.reference_batch
        factor = {"none": 1.0, "linear": k, "sqrt": k**0.5, "sde": k**0.5, "legw": k**0.5}
        stretch = k if self.scaling == "legw" else 1.0
        return self.base_learning_rate * factor[self.scaling], self.warmup_epochs * stretch

    def scaled_optimizer(self, optimizer: OptimizerConfig, global_batch: int) -> OptimizerConfig:
        """The optimizer at `global_batch`, its hyper-parameters scaled if scaling is "sde".

        Raises:
            ConfigError: if scaling is "sde" and the optimizer has no such rule.
        """
        if self.scaling != "sde":
            return optimizer
        return optimizer.scaled_by_sde(global_batch / self.reference_batch, self.reference_batch)

    def at_batch(self, global_batch: int) -> "ScheduleConfig":
        """The schedule with another reference batch."""
        return replace(self, reference_batch=global_batch)

    def largest_rates(self, global_batch: int) -> Named:
        """The peak, and the rates that follow from a decay."""
        peak, _ = self.scaled(global_batch)
        yield "base_learning_rate", self.base_learning_rate, peak
        yield "end_learning_rate", self.end_learning_rate, self.end_learning_rate
        yield "decay_power", self.decay_power, self.decay_power
        if self.decay_factor > 1 and self.decay_epochs:
            doublings = math.log2(peak) + len(self.decay_epochs) * math.log2(self.decay_factor)
            yield "decay_factor", self.decay_factor, 2.0 ** min(doublings, 1000)

    def last_epochs(self) -> Named:
        """The epochs of a step decay."""
        if self.decay_epochs:
            yield "decay_epochs", self.decay_epochs, self.decay_epochs[-1]


def _require_possible_warmup(config: ScheduleConfig) -> None:
    if config.warmup == "none" and config.warmup_epochs != 0:
        accepted = (
            'warmup="none" needs it to be 0; to sweep with and without warmup, set '
            'warmup="gradual" and vary warmup_epochs, where 0 is none'
        )
        raise ConfigError(refusal("schedule.warmup_epochs", config.warmup_epochs, accepted))
    if config.scaling == "legw" and config.warmup != "gradual":
        accepted = 'it scales the epochs of a gradual warmup; use warmup="gradual"'
        raise ConfigError(refusal("schedule.scaling", config.scaling, accepted))
    if config.warmup == "constant" and config.warmup_from == "zero":
        accepted = (
            'a constant warmup from zero would not train; it must be "base", or warmup "gradual"'
        )
        raise ConfigError(refusal("schedule.warmup_from", config.warmup_from, accepted))
    if config.warmup != "none" and config.warmup_from == "base" and config.scaling == "none":
        accepted = 'with scaling="none" the base is already the peak; use warmup_from="zero"'
        raise ConfigError(refusal("schedule.warmup_from", config.warmup_from, accepted))


def _require_possible_decay(config: ScheduleConfig) -> None:
    if (config.decay == "step") != bool(config.decay_epochs):
        accepted = f'decay="{config.decay}" needs ' + (
            "at least one epoch" if config.decay == "step" else "it empty"
        )
        raise ConfigError(refusal("schedule.decay_epochs", config.decay_epochs, accepted))
    _require_rising("schedule.decay_epochs", config.decay_epochs)
    share = config.decay_share
    if share is None:
        return
    if not config.depends_on_length:
        accepted = f"decay={config.decay!r} has no end to count from; use a smooth one"
        raise ConfigError(refusal("schedule.decay_share", share, accepted))
    require_fraction("schedule.decay_share", share)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodMultiplierConfig:
    """One LearningRateScheduleCallback of Horovod with a constant multiplier."""

    multiplier: float
    """Factor on the initial learning rate."""
    start_epoch: float = 0.0
    """First epoch, counted from 0, in which the callback sets the rate."""
    end_epoch: float | None = None
    """First epoch in which it no longer sets the rate, which is then held; if absent, none."""
    staircase: bool = True
    """Whether the rate is set at the start of an epoch only, or before every update."""

    def __post_init__(self) -> None:
        require_above("schedule.multipliers.multiplier", self.multiplier, 0)
        require_at_least("schedule.multipliers.start_epoch", self.start_epoch, 0)
        if self.end_epoch is not None and self.end_epoch <= self.start_epoch:
            accepted = f"it must be above start_epoch={self.start_epoch}"
            raise ConfigError(refusal("schedule.multipliers.end_epoch", self.end_epoch, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class HorovodScheduleConfig(LearningRateConfig):
    """Horovod's LearningRateWarmupCallback followed by its LearningRateScheduleCallbacks."""

    name: Literal["horovod"]
    """Selects this schedule."""
    initial_learning_rate: float
    """Learning rate after warmup, already multiplied by the workers (Horovod pull request 88)."""
    workers: int
    """Number of workers (hvd.size()): warmup begins near initial_learning_rate / workers."""
    warmup_epochs: int = 5
    """Length of the warmup; 0 for none."""
    multipliers: tuple[HorovodMultiplierConfig, ...] = ()
    """The callbacks after warmup, in order; the last one that sets a rate counts."""
    constant_multiplier: Literal["constant", "exponential"] = "constant"
    """How a constant multiplier m is applied: as m, as before Horovod's pull request 3135, or as m
    to the power of epoch - start_epoch, as since pull request 3142."""

    def __post_init__(self) -> None:
        require_above("schedule.initial_learning_rate", self.initial_learning_rate, 0)
        require_at_least("schedule.workers", self.workers, 1)
        require_at_least("schedule.warmup_epochs", self.warmup_epochs, 0)

    def scaled(self, global_batch: int | None) -> tuple[float, float]:
        """As given."""
        return self.initial_learning_rate, self.warmup_epochs

    def largest_rates(self, global_batch: int) -> Named:
        """The initial rate, and its multiples."""
        initial = self.initial_learning_rate
        yield "initial_learning_rate", initial, initial
        for each in self.multipliers:
            yield "multipliers.multiplier", each.multiplier, initial * each.multiplier

    def last_epochs(self) -> Named:
        """The bounds of the callbacks."""
        for each in self.multipliers:
            yield "multipliers.start_epoch", each.start_epoch, each.start_epoch
            if each.end_epoch is not None:
                yield "multipliers.end_epoch", each.end_epoch, each.end_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseScheduleConfig(LearningRateConfig):
    """The piecewise schedule of tf_cnn_benchmarks: rates, and the epochs at which they change.

    A slow start (Akiba et al. 2017, arXiv 1711.04325) is a schedule with a lower first rate.
    """

    name: Literal["piecewise"]
    """Selects this schedule."""
    learning_rates: str
    """Rates and epochs, alternating: "0.1;30;0.01;60;0.001" is 0.1 until epoch 30, and so on."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate rises linearly from 0 to the first one."""

    def __post_init__(self) -> None:
        require_at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        field, parts = "schedule.learning_rates", self.learning_rates.split(";")
        try:
            numbers = [float(part) for part in parts]
        except ValueError as error:
            accepted = "it must be numbers with semicolons between them"
            raise ConfigError(refusal(field, self.learning_rates, accepted)) from error
        if len(numbers) % 2 == 0:
            accepted = 'it must begin and end with a rate, as "0.1;30;0.01"'
            raise ConfigError(refusal(field, self.learning_rates, accepted))
        if not all(0 <= rate < math.inf for rate in self.rates):
            accepted = "rates must be at least 0, and finite"
            raise ConfigError(refusal(field, self.learning_rates, accepted))
        _require_rising(field, self.epochs)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates, in order."""
        return tuple(float(part) for part in self.learning_rates.split(";")[::2])

    @property
    def epochs(self) -> tuple[float, ...]:
        """Epochs at which each rate except the first begins."""
        return tuple(float(part) for part in self.learning_rates.split(";")[1::2])

    def scaled(self, global_batch: int | None) -> tuple[float, float]:
        """As given."""
        return self.rates[0], self.warmup_epochs

    def largest_rates(self, global_batch: int) -> Named:
        """The largest of the rates."""
        yield "learning_rates", self.learning_rates, max(self.rates)

    def last_epochs(self) -> Named:
        """The last change of the rate."""
        if self.epochs:
            yield "learning_rates", self.learning_rates, self.epochs[-1]


def _require_rising(field: str, epochs: tuple[float, ...]) -> None:
    if list(epochs) != sorted(set(epochs)) or any(not 0 < epoch < math.inf for epoch in epochs):
        raise ConfigError(refusal(field, epochs, "epochs must be above 0 and rise"))


# What a scaling rule changes with the batch, and the largest rates.

_LARGEST_RATE = 1e6
"""Far above any rate at which a network learns, and far below the largest float32 number, the type
in which rates are computed."""


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


def require_learnable(schedule: LearningRateConfig, global_batch: int) -> None:
    """Refuse scaled learning rates at which nothing can learn.

    Raises:
        ConfigError: naming the field that makes them too large.
    """
    for name, value, largest in schedule.largest_rates(global_batch):
        if not largest <= _LARGEST_RATE:
            scaled = f"with batch.global_batch={global_batch:,} it comes to {largest:.3g}; "
            accepted = (
                f"{'' if largest == value else scaled}learning rates, and what makes them, must be "
                f"at most {_LARGEST_RATE:g}: nothing learns at larger ones"
            )
            raise ConfigError(refusal(f"schedule.{name}", value, accepted))


def changes(
    schedule: LearningRateConfig, optimizer: OptimizerConfig, global_batch: int
) -> tuple[Change, ...]:
    """The hyper-parameters that the scaling rule of `schedule` changes at `global_batch`."""
    before, after = schedule.scaled(None), schedule.scaled(global_batch)
    pairs = list(zip(("learning_rate", "warmup_epochs"), before, after, strict=True))
    scaled = schedule.scaled_optimizer(optimizer, global_batch)
    if scaled is not optimizer:
        names = [each.name for each in fields(optimizer)]
        pairs += [(name, getattr(optimizer, name), getattr(scaled, name)) for name in names]
    return tuple(Change(name=n, before=a, after=b) for n, a, b in pairs if a != b)


# Batch size ramps: the phases of a run whose batch grows.


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Consecutive epochs with one global batch."""

    first_epoch: int
    """First epoch of the phase, counted from 0."""
    first_step: int
    """Updates made before the phase."""
    steps_per_epoch: int
    """Updates in one pass over the data."""
    split: BatchSplit
    """The batch, and how it is divided."""


@cache  # called before every update
def ramp(
    split: BatchSplit,
    epochs: tuple[int, ...],
    factor: int,
    train_examples: int,
    *,
    is_filled: bool = False,
) -> tuple[Phase, ...]:
    """The phases of a run whose batch is multiplied by `factor` at each of `epochs`.

    The last batch of an epoch is dropped if it is incomplete, or padded if `is_filled`.

    Raises:
        ConfigError: if a batch is larger than the data.
    """
    phases: list[Phase] = []
    for index, first_epoch in enumerate((0, *epochs)):
        batch = split.global_batch * factor**index
        first_step = 0
        if phases:
            last = phases[-1]
            first_step = last.first_step + (first_epoch - last.first_epoch) * last.steps_per_epoch
        phases.append(
            Phase(
                first_epoch=first_epoch,
                first_step=first_step,
                steps_per_epoch=steps_per_epoch(train_examples, batch, is_filled=is_filled),
                split=replace(split, global_batch=batch),
            )
        )
    return tuple(phases)
