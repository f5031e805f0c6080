"""Lines of a record, from what steps and evaluations return.

Knows metrics by name, a clock, and where a run stands; neither devices nor files.
"""

import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError
from scalejax.core.heartbeat import Heartbeat
from scalejax.training.multihost import is_first
from scalejax.training.record import (
    EvaluationMeasurement,
    Measurement,
    MeasurementLog,
    RunFolder,
    RunRecord,
    TrainMeasurement,
    finite,
)
from scalejax.training.reporter import Reporter
from scalejax.training.time_accounting import RunClock


class UpdateClock:
    """Times updates, from one line of the record to the next."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from here, after `step` updates: what came before is in the record, or was no
        training."""
        self.waited_seconds = 0.0
        """For how long since then devices had nothing to do, for want of a batch."""
        self._begin, self._step = time.perf_counter(), step

    def lap(self, step: int) -> tuple[float, float]:
        """Mean seconds of the updates since then, and of those the wait for a batch."""
        seconds, updates = time.perf_counter() - self._begin, step - self._step
        waited_seconds = self.waited_seconds
        self.restart(step)
        return seconds / updates, waited_seconds / updates


def train_measurement(
    run: ResolvedRun,
    metrics: Mapping[str, Any],
    *,
    step: int,
    step_seconds: float,
    data_wait_seconds: float | None = None,
    elapsed_seconds: float,
) -> TrainMeasurement:
    """The line of the update `step`.

    Args:
        run: what trains.
        metrics: of the update, one figure each.
        step: updates made.
        step_seconds: of an update, on average since the last line.
        data_wait_seconds: of it the devices had no batch; None if it was not measured.
        elapsed_seconds: since training began.
    """
    values = {name: float(value) for name, value in metrics.items()}
    skipped = values.get("skipped_updates")
    global_batch = run.phase_of(step - 1).split.global_batch
    scale = finite(values.get("noise_scale", math.nan)) or 0.0
    return TrainMeasurement(
        step=step,
        epoch=run.epoch_of(step),
        loss=finite(values["loss"]),
        accuracy=values["accuracy"],
        learning_rate=values["learning_rate"],
        step_seconds=step_seconds,
        samples_per_second=global_batch / step_seconds,
        global_batch=global_batch,
        elapsed_seconds=elapsed_seconds,
        data_wait_seconds=data_wait_seconds,
        loss_scale=values.get("loss_scale"),
        skipped_updates=None if skipped is None else int(skipped),
        gradient_norm=finite(values.get("gradient_norm", math.nan)),
        noise_scale=scale if scale > 0 else None,
    )


def evaluation_measurement(
    run: ResolvedRun,
    parts: Sequence[Mapping[str, Any]],
    *,
    step: int,
    seconds: float,
    elapsed_seconds: float,
) -> EvaluationMeasurement:
    """The line of an evaluation after `step` updates.

    Args:
        run: what trains.
        parts: of every batch of the test data, what the evaluation returns; of sums for each
            device, the averages of the devices are averaged, those that saw an example.
        step: updates made.
        seconds: that it took.
        elapsed_seconds: since training began.

    Raises:
        ConfigError: if no example could be read.
    """
    losses, hits, counts = (
        [
            math.fsum(sums)
            for sums in zip(*(np.atleast_1d(part[name]) for part in parts), strict=True)
        ]
        for name in ("loss_sum", "correct_sum", "count")
    )
    has_any = [number for number, count in enumerate(counts) if count]
    count = math.fsum(counts)
    if not has_any:
        raise ConfigError("no example of the test part can be read (data.test).")
    lowest = np.min([part["lowest_logits"] for part in parts], axis=0)
    highest = np.max([part["highest_logits"] for part in parts], axis=0)
    return EvaluationMeasurement(
        step=step,
        epoch=run.epoch_of(step),
        test_loss=finite(fmean(losses[number] / counts[number] for number in has_any)),
        test_accuracy=fmean(hits[number] / counts[number] for number in has_any),
        examples=round(count),
        seconds=seconds,
        elapsed_seconds=elapsed_seconds,
        is_constant=count > 1 and bool(np.all(lowest == highest)),
    )


# The record of a run while it is made: to its file and to whoever listens.


class MetricsLogger:
    """The record, the reporter and the clock of a run; writes in the first process alone."""

    def __init__(
        self,
        files: RunFolder,
        reporter: Reporter,
        heartbeat: Heartbeat,
        clock: RunClock,
        *,
        after_step: int,
    ) -> None:
        """Open the record in `files`, with the lines of steps up to `after_step`."""
        self.files = files
        self.reporter = reporter
        self.heartbeat = heartbeat
        self.clock = clock
        self.earlier: tuple[Measurement, ...] = ()
        self._log = None
        self._zero = time.perf_counter()
        if is_first():
            self._log = MeasurementLog(files.measurements, after_step=after_step)
            self._zero -= self._log.elapsed_seconds
        sync_global_devices("the record is cut")
        if after_step:  # filtered as well: a shared disk may show the file as it was
            measurements = RunRecord.load(files.path).measurements
            self.earlier = tuple(m for m in measurements if m.step <= after_step)

    @property
    def elapsed_seconds(self) -> float:
        """Time since training began, over all the sessions of the run."""
        return time.perf_counter() - self._zero

    def write(self, measurement: Measurement) -> None:
        """Put down one line, and say it."""
        if self._log is not None:
            self._log.append(measurement)
        self.reporter.measured(measurement)

    def close(self) -> None:
        """End the record of this session."""
        self.reporter.end()
        if self._log is not None:
            self._log.close()
