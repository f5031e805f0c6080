"""The metrics logger of a run: turns metrics of steps and evaluations into lines of its record.

Knows metrics by name and a clock; no devices. Only the first process writes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from scalejax.config.data import MixtureConfig, Split
from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError
from scalejax.core.heartbeat import Heartbeat
from scalejax.data.loader.loader import InputSeconds
from scalejax.data.readers.mixture import Turns
from scalejax.data.stage_clock import STAGES
from scalejax.models.moe import ROUTER_METRICS, WINDOW_METRIC
from scalejax.training.multihost import is_first
from scalejax.training.record import (
    Choice,
    Evaluated,
    EvaluationMeasurement,
    InputMeasurement,
    Measurement,
    MeasurementLog,
    RecordPosition,
    RunFolder,
    RunRecord,
    Status,
    StatusChange,
    TrainMeasurement,
    ValidationMeasurement,
    finite,
)
from scalejax.training.reporter import Reporter
from scalejax.training.time_accounting import RunClock
from scalejax.training.trackers import Tracker, open_trackers, tracked_values


class UpdateClock:
    """Measures the mean time of updates between two lines of the record."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure from now on, after `step` updates."""
        self.waited_seconds = 0.0
        """Time since then that devices waited for a batch."""
        self._begin, self._step = time.perf_counter(), step

    def lap(self, step: int) -> tuple[float, float]:
        """Mean seconds per update since the restart, and mean seconds of waiting for a batch."""
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
    """The line of the record for update `step`.

    Args:
        run: the run that trains.
        metrics: scalar metrics of the update.
        step: updates made.
        step_seconds: mean time per update since the last line.
        data_wait_seconds: mean wait for a batch in it; None if it was not measured.
        elapsed_seconds: time since training began.
    """
    of_layers = metrics.get(_LAYERS)
    values = {name: float(value) for name, value in metrics.items() if name != _LAYERS}
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
        layer_gradient_norms=None if of_layers is None else _by_layer(of_layers),
        noise_scale=scale if scale > 0 else None,
        mtp_loss=finite(values.get("mtp_loss", math.nan)),
        expert_load_of_window=values.get(WINDOW_METRIC) or None,
        samples_by_source=samples_by_source(run, step),
        **{name: values[name] for name in ROUTER_METRICS if name in values},  # type: ignore[arg-type]
    )


def samples_by_source(run: ResolvedRun, step: int) -> tuple[int, ...] | None:
    """Samples of the first `step` updates from each source of a mixture, padding left out; None for
    other data sets."""
    if not isinstance(run.config.data, MixtureConfig):
        return None
    examples = run.dataset.train_examples
    turns, epoch, counted = Turns(run.config.data, examples), 0, np.zeros(1, np.int64)
    while step > 0:
        phase = [each for each in run.phases if each.first_epoch <= epoch][-1]
        updates = min(step, phase.steps_per_epoch)
        begin = epoch * examples
        end = begin + min(updates * phase.split.global_batch, examples)
        counted = counted + turns.before(end) - turns.before(begin)
        step, epoch = step - updates, epoch + 1
    return tuple(counted.tolist())


_LAYERS = "layer_gradient_norms"


def _by_layer(norms: Mapping[str, Any]) -> dict[str, float | None]:
    """A number for each layer, also of those that are stacked in one array."""
    found: dict[str, float | None] = {}
    for name, norm in norms.items():
        if np.ndim(norm):
            numbered = enumerate(np.asarray(norm).tolist())
            found |= {f"{name}/{index}": finite(value) for index, value in numbered}
        else:
            found[name] = finite(float(norm))
    return found


def evaluation_measurement(
    run: ResolvedRun,
    parts: Sequence[Mapping[str, Any]],
    *,
    split: Split,
    step: int,
    seconds: float,
    elapsed_seconds: float,
    chosen: tuple[int, Choice] | None = None,
) -> Evaluated:
    """The line of the record for an evaluation after `step` updates.

    Args:
        run: the run that trains.
        parts: results of the evaluation of every batch; if they are sums per device, the result is
            the mean of each device's mean, over the devices that saw an example.
        split: part of the data that was evaluated.
        step: updates made.
        seconds: duration of the evaluation.
        elapsed_seconds: time since training began.
        chosen: updates behind the weights that were tested at the end, and what they were chosen
            by; None for an evaluation during the run.

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
    non_empty = [number for number, count in enumerate(counts) if count]
    examples = round(math.fsum(float(part["examples"]) for part in parts))
    if not non_empty:
        raise ConfigError(f"no example of the {split} part can be read (data.{split}).")
    lowest = np.min([part["lowest_logits"] for part in parts], axis=0)
    highest = np.max([part["highest_logits"] for part in parts], axis=0)
    loss = finite(fmean(losses[number] / counts[number] for number in non_empty))
    accuracy = fmean(hits[number] / counts[number] for number in non_empty)
    is_constant = examples > 1 and bool(np.all(lowest == highest))
    by_source = _loss_by_source(parts) if "source_losses" in parts[0] else None
    if split == "validation":
        return ValidationMeasurement(
            step=step,
            epoch=run.epoch_of(step),
            validation_loss=loss,
            validation_accuracy=accuracy,
            examples=examples,
            seconds=seconds,
            elapsed_seconds=elapsed_seconds,
            is_constant=is_constant,
            loss_by_source=by_source,
        )
    return EvaluationMeasurement(
        step=step,
        epoch=run.epoch_of(step),
        test_loss=loss,
        test_accuracy=accuracy,
        examples=examples,
        seconds=seconds,
        elapsed_seconds=elapsed_seconds,
        is_constant=is_constant,
        loss_by_source=by_source,
        chosen_step=chosen and chosen[0],
        chosen_by=chosen and chosen[1],
    )


def _loss_by_source(parts: Sequence[Mapping[str, Any]]) -> tuple[float | None, ...]:
    """The mean loss of the examples of each source that could be read; None if there are none, or
    it is not finite."""
    losses, counts = (
        np.sum([np.asarray(part[name], np.float64) for part in parts], axis=0)
        for name in ("source_losses", "source_counts")
    )
    return tuple(
        finite(loss / count) if count else None
        for loss, count in zip(losses.tolist(), counts.tolist(), strict=True)
    )


def input_measurement(
    seconds: InputSeconds,
    *,
    workers: int,
    shares_cores: bool,
    step: int = 0,
    epoch: float = 0.0,
    of_updates_seconds: float | None = None,
    elapsed_seconds: float = 0.0,
) -> InputMeasurement:
    """Life of a batch: the means of `seconds`.

    Args:
        seconds: time of at least one batch by stage.
        workers: worker processes that made them.
        shares_cores: whether the devices are the host's CPU.
        step: updates made.
        epoch: passes over the data made.
        of_updates_seconds: time of the updates of these batches, with the waits for them; None if
            none was made.
        elapsed_seconds: time since training began.
    """
    count = seconds.batches
    *stages, processor = (seconds.stages / count).tolist()
    means = dict(zip(STAGES, stages, strict=True))
    of_step = of_updates_seconds
    return InputMeasurement(
        step=step,
        epoch=epoch,
        batches=count,
        workers=workers,
        cores=machine_cores(),
        shares_cores=shares_cores,
        storage_seconds=means["storage"],
        decode_seconds=means["decode"],
        augment_seconds=means["augment"],
        hand_over_seconds=means["hand over"],
        processor_seconds=processor,
        copy_seconds=seconds.copy / count,
        step_seconds=None if of_step is None else max(0.0, of_step - seconds.waited) / count,
        wait_seconds=seconds.waited / count,
        elapsed_seconds=elapsed_seconds,
    )


# The metrics logger, which writes lines to the record and passes them to the reporter.


class MetricsLogger:
    """The record, the reporter and the clock of a run; only the first process writes."""

    def __init__(
        self,
        files: RunFolder,
        reporter: Reporter,
        heartbeat: Heartbeat,
        clock: RunClock,
        *,
        after_step: int,
        proved: RecordPosition | None = None,
        runs_together: int = 1,
        config: RunConfig | None = None,
    ) -> None:
        """Open the record in `files`.

        Args:
            files: the folder of the run.
            reporter: receives each line.
            heartbeat: of this process.
            clock: of this session.
            after_step: lines of later steps are removed.
            proved: the position of the record when its checkpoint was saved: what is before it is
                kept as it is; None if there is no checkpoint.
            runs_together: number of runs that share one program, and its time.
            config: the run, for its trackers; if None, it has none.

        Raises:
            Damaged: if what is before `proved` is not what was written.
        """
        self.files = files
        self.reporter = reporter
        self.heartbeat = heartbeat
        self.clock = clock
        self.earlier: tuple[Measurement, ...] = ()
        self._log = None
        self._runs_together = runs_together
        self._zero = time.perf_counter()
        if is_first():
            self._log = MeasurementLog(files.measurements, after_step=after_step, proved=proved)
            self._zero -= self._log.elapsed_seconds * runs_together
        sync_global_devices("the record is cut")
        if proved is not None:
            self.earlier = proved.measurements_of(files.measurements)
        elif after_step:  # filtered again: a shared disk may still show the old file
            measurements = RunRecord.load(files.path).measurements
            self.earlier = tuple(m for m in measurements if m.step <= after_step)
        self._status: Status | None = None
        opening = time.perf_counter()
        self._trackers = open_trackers(config, files, reporter.say) if config and is_first() else []
        self._zero += time.perf_counter() - opening  # MLflow's database takes seconds
        self._unix_zero = time.time() - self.elapsed_seconds
        for measurement in self.earlier:
            self._track(measurement)

    @property
    def elapsed_seconds(self) -> float:
        """Time since training began, over all the sessions of the run."""
        return (time.perf_counter() - self._zero) / self._runs_together

    @property
    def position(self) -> RecordPosition | None:
        """The end of the record; None except in the first process."""
        return None if self._log is None else self._log.position

    def write(self, measurement: Measurement) -> None:
        """Append one line to the record, and report it; the line of an end is flushed to disk
        first."""
        if self._log is not None:
            self._log.append(measurement)
            is_change = isinstance(measurement, StatusChange)
            if is_change and measurement.status not in ("started", "resumed"):
                self._log.sync()
        self._track(measurement)
        self.reporter.measured(measurement)

    def _track(self, measurement: Measurement) -> None:
        """Pass a line to the trackers."""
        if isinstance(measurement, StatusChange):
            self._status = measurement.status
        if not self._trackers or not (values := tracked_values(measurement)):
            return
        unix_seconds = self._unix_zero + measurement.elapsed_seconds
        self._tell_trackers(lambda each: each.write(measurement.step, values, unix_seconds))

    def _tell_trackers(self, told: Callable[[Tracker], None]) -> None:
        """Have each tracker do something; one that fails is left out until the run is resumed."""
        for each in tuple(self._trackers):
            try:
                told(each)
            except each.errors() as error:
                self._trackers.remove(each)
                self.reporter.say(
                    f"Note: {each.name} is left out from here on, as it failed: {error}"
                )

    def close(self) -> None:
        """End the record of this session."""
        self.reporter.end()
        self._tell_trackers(lambda each: each.close(self._status))
        if self._log is not None:
            self._log.close()
