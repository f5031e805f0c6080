"""The life of a batch, stage by stage: as measured and predicted, what hides it, what a setting
would change.

Arithmetic on a measurement and a prediction; measures nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scalejax.simulator.predict import Prediction
from scalejax.training.input_stalls import WORTH_SAYING
from scalejax.training.record import InputMeasurement

Hidden = Literal["yes", "in part", "no", "takes the step's cores"]
"""Whether a stage runs concurrently with the step; if it does so on the cores of the step, it makes
the step longer."""


EXCHANGE = "exchange"
"""Name of the stage that no clock sees: the program runs it as part of the time of compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStage:
    """A stage in the life of a batch."""

    stage: str
    """Name of the stage."""
    measured_seconds: float | None
    """Mean time of a batch in it; None if it was not measured."""
    predicted_seconds: float | None
    """The predicted time; None if it was not predicted."""
    place: str
    """Where it runs: workers, training process, devices."""
    hidden: Hidden | None
    """Whether it is hidden behind the step; None for parts of the step itself."""


def life_of(
    measured: InputMeasurement,
    prediction: Prediction | None = None,
    input_stages: Mapping[str, float] | None = None,
) -> tuple[LifeStage, ...]:
    """The stages of a batch in order.

    Args:
        measured: what was measured.
        prediction: that of the same run; None if there is none.
        input_stages: predicted seconds of a batch by stage; by default those of `prediction`.
    """
    if input_stages is None:
        input_stages = {} if prediction is None else dict(prediction.input_stages)
    workers = measured.workers
    at = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "training process"
    beside = _hidden(measured)
    stages = [
        LifeStage(
            stage=name,
            measured_seconds=seconds,
            predicted_seconds=input_stages.get(name),
            place=place,
            hidden=beside,
        )
        for name, seconds, place in (
            ("storage", measured.storage_seconds, at),
            ("decode", measured.decode_seconds, at),
            ("augment", measured.augment_seconds, at),
            ("hand over", measured.hand_over_seconds if workers else None, "both"),
            ("copy to device", measured.copy_seconds, "training process"),
        )
        if name != "hand over" or workers
    ]
    if measured.step_seconds is None:
        return tuple(stages)
    step, exchange, wait = (None, None, None) if prediction is None else _predicted(prediction)
    of_devices: tuple[tuple[str, float | None, float | None], ...] = (
        ("compute + exchange", measured.step_seconds, step),
        (EXCHANGE, None, exchange),
        ("wait for the batch", measured.wait_seconds, wait),
    )
    for name, seconds, predicted in of_devices:
        stages.append(
            LifeStage(
                stage=name,
                measured_seconds=seconds,
                predicted_seconds=predicted,
                place="devices",
                hidden="no" if name.startswith("wait") else None,
            )
        )
    return tuple(stages)


def _hidden(measured: InputMeasurement) -> Hidden | None:
    """Whether the input runs concurrently with the step."""
    if measured.step_seconds is None:
        return None
    if measured.shares_cores:
        return "takes the step's cores"
    period = measured.step_seconds + measured.wait_seconds
    return "in part" if measured.wait_seconds >= WORTH_SAYING * period else "yes"


def _predicted(prediction: Prediction) -> tuple[float, float, float | None]:
    """Predicted seconds of an update without its wait, of its exchange that nothing hides, and of
    the wait."""
    terms = prediction.waterfall
    wait = dict(terms)["input"]
    exchange = math.fsum(s or 0.0 for name, s in terms if name.startswith("communication"))
    return prediction.step_seconds - (wait or 0.0), exchange, wait


def period_seconds(
    measured: InputMeasurement, *, workers: int | None = None, is_cached: bool = False
) -> float:
    """Time from one update to the next with other settings, from the measured stages.

    n workers make a batch in 1 / n of the time that one takes, or as fast as the cores allow, and
    updates come at the pace of the slower of input and step:

    max((storage + own) / n, processor / cores, step + processor * wait / (step + wait) / cores)

    with own = decode + augment + hand over, or the processor time if threads decoded and a worker,
    which has one thread, is to. The last term is for devices that are the host's CPU: input work
    that was done while they waited is then done during the step, on its cores.

    Left out: that workers share storage, and decode row groups more often than one does.

    Args:
        measured: stages of a batch, with a step.
        workers: number of workers; by default those that were measured.
        is_cached: whether nothing is read from storage any more.
    """
    step, wait = measured.step_seconds or 0.0, measured.wait_seconds
    if workers is None and not is_cached:
        return step + wait
    processor = measured.processor_seconds
    count = measured.workers if workers is None else workers
    own = measured.decode_seconds + measured.augment_seconds + measured.hand_over_seconds
    if count and not measured.workers:
        own = max(own, processor)
    storage = 0.0 if is_cached else measured.storage_seconds
    beside = 0.0
    if measured.shares_cores and wait:
        beside = processor * wait / (step + wait) / measured.cores
    return max((storage + own) / max(1, count), processor / measured.cores, step + beside)


def other_settings(measured: InputMeasurement) -> tuple[tuple[str, float, float], ...]:
    """(setting, seconds from one update to the next with it, seconds now): for more workers, longer
    prefetching and a cache."""
    now = period_seconds(measured)
    more = 2 * measured.workers or measured.cores
    cached = min(now, period_seconds(measured, is_cached=True))
    return (
        (f"input.workers = {more}", period_seconds(measured, workers=more), now),
        # On average a queue is as fast as what fills it, however long it is.
        ("a longer input.read_ahead_batches", now, now),
        ("data in memory (cache)", cached, now),
    )
