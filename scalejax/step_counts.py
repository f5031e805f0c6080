"""What a run may count: its updates are numbers of 32 bits on devices.

Knows which fields give epochs and how many steps an epoch has; nothing of what the steps do.
"""

from collections.abc import Iterator

from scalejax.errors import ConfigError, refusal
from scalejax.scaling import warmup_epochs
from scalejax.schedule_config import (
    HorovodScheduleConfig,
    LearningRateConfig,
    PiecewiseScheduleConfig,
    ScheduleConfig,
)

MOST_STEPS = 2**31 - 1
"""That JAX counts in the integers it has by default, int32."""
MOST_RATES = 2**22
"""Steps whose learning rates are listed one by one: some seconds, and 0.1 GB of Python's numbers;
90 epochs of ImageNet, 32 images at a time, are 3.6 million."""


def require_counted_steps(
    schedule: LearningRateConfig, *, epochs: int, steps_per_epoch: int, global_batch: int
) -> None:
    """Refuse epochs, of the run or in its schedule, whose steps are beyond `MOST_STEPS`.

    Args:
        schedule: of the learning rate.
        epochs: of the run.
        steps_per_epoch: updates in one pass over the data.
        global_batch: samples per update.

    Raises:
        ConfigError: naming the field and the most epochs that it may give.
    """
    _require_within("train.epochs", epochs, epochs, steps_per_epoch, MOST_STEPS, "counted")
    for name, value, last in _epochs_of(schedule, global_batch):
        _require_within(f"schedule.{name}", value, last, steps_per_epoch, MOST_STEPS, "counted")


def require_listed_steps(epochs: int, steps_per_epoch: int) -> None:
    """Refuse epochs of a run that is too long for the rates of all its steps to be listed.

    Raises:
        ConfigError: naming the most epochs that are shown.
    """
    _require_within("train.epochs", epochs, epochs, steps_per_epoch, MOST_RATES, "shown")


def _require_within(
    field: str, value: object, epochs: float, steps_per_epoch: int, most: int, what: str
) -> None:
    if epochs * steps_per_epoch > most:
        accepted = (
            f"at most {most:,} steps are {what}, which are {most // steps_per_epoch:,} epochs "
            f"of {steps_per_epoch:,} steps, as data and batch make them"
        )
        raise ConfigError(refusal(field, value, accepted))


def _epochs_of(
    schedule: LearningRateConfig, global_batch: int
) -> Iterator[tuple[str, object, float]]:
    """Fields that give epochs, their values, and the last epoch of each."""
    yield "warmup_epochs", schedule.warmup_epochs, warmup_epochs(schedule, global_batch)
    match schedule:
        case ScheduleConfig() if schedule.decay_epochs:
            yield "decay_epochs", schedule.decay_epochs, schedule.decay_epochs[-1]
        case PiecewiseScheduleConfig() if schedule.epochs:
            yield "learning_rates", schedule.learning_rates, schedule.epochs[-1]
        case HorovodScheduleConfig():
            for each in schedule.multipliers:
                yield "multipliers.start_epoch", each.start_epoch, each.start_epoch
                if each.end_epoch is not None:
                    yield "multipliers.end_epoch", each.end_epoch, each.end_epoch
