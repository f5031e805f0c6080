"""Run status: whether a run has diverged or stops early, and the message that it ends with.

Depends on the record alone: a resumed run replays its record, and stores no other state. Knows
lines of the record and the rules that end a run; neither devices nor files.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from scalejax.config.run import ResolvedRun
from scalejax.config.training import DivergenceConfig, EarlyStoppingConfig
from scalejax.core.environment import machine_cores
from scalejax.core.units import counted, format_seconds
from scalejax.training.input_stalls import wait_with_advice
from scalejax.training.manifest import StoppingState
from scalejax.training.record import (
    Choice,
    DivergenceCause,
    Evaluated,
    EvaluationMeasurement,
    Measurement,
    Status,
    TrainMeasurement,
    UnreadableExamples,
    ValidationMeasurement,
    finite,
)
from scalejax.training.reporter import statistics_in_words, unreadable_in_words

# Divergence: rules over measurements that tell when a run will no longer learn.

_MIN_LOSS_SCALE = 1.0
"""DeepSpeed, fp16 options, `min_loss_scale`."""


def is_skipped(value: float | None, loss_scale: float | None) -> bool:
    """Whether dynamic loss scaling skipped the update: its `value` (loss or gradient norm) is not
    finite (None) only because float16 overflowed."""
    return value is None and loss_scale is not None and loss_scale >= _MIN_LOSS_SCALE


_FAR_ABOVE_A_GUESS = 2.0
"""Factor over the loss of a guess, ln(classes), at which a network begins: far beyond what noise
and small rates do to that loss, and far below the losses of runs that diverge without overflow (1e2
to 1e35)."""
_LAST_SHARE = 0.1
_FEWEST_LINES = 3
"""Fewer batch losses say nothing about a run; the median of this many tolerates one outlier."""


def divergence_at_end(
    last_losses: Mapping[str, float | None], logged: Sequence[float | None], classes: int
) -> tuple[DivergenceCause, str] | None:
    """Why a run that reached its end diverged, also in words; None if it did not.

    It is worse than guessing if the median of its last training losses is far above the loss of a
    guess, and not below the first that was logged, and its last evaluation, if it has one, is as
    far above: training losses are of few batches, and include z-loss and smoothing.

    Args:
        last_losses: the last training loss, "train", and that of the last evaluation, "evaluation";
            None if not finite.
        logged: training losses of the record, in order; the last tenth is checked, at least three,
            and nothing if there are fewer.
        classes: classes, or size of the vocabulary, of a cross-entropy.
    """
    if None in last_losses.values():
        return "not_finite", "the loss is not finite"
    losses = [each for each in logged if each is not None]
    if len(losses) < _FEWEST_LINES or classes < 2:
        return None
    loss = median(losses[-max(_FEWEST_LINES, round(_LAST_SHARE * len(losses))) :])
    evaluated = last_losses.get("evaluation")
    guess = math.log(classes)
    is_far = all(
        each > _FAR_ABOVE_A_GUESS * guess for each in (loss, evaluated) if each is not None
    )
    if is_far and loss >= losses[0]:
        said = f"its final training loss is {loss:.3g}, and that of a guess is {guess:.3g}"
        return "worse_than_guessing", said
    return None


def is_monitored(measurement: Measurement) -> TypeGuard[Evaluated]:
    """Whether it is an evaluation during a run, not that of test data at the end of one that has
    validation data: what is found there no longer changes anything."""
    if isinstance(measurement, EvaluationMeasurement):
        return measurement.chosen_step is None
    return isinstance(measurement, ValidationMeasurement)


class Divergence:
    """Watches the measurements of a run until a rule finds that it diverged."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config
        self._norms: list[float] = []
        self.cause: DivergenceCause | None = None
        """Rule that ended the run; None while none did."""
        self.message = ""
        """Explanation of the cause, with the figures that show it."""

    def update(self, measurement: Measurement) -> None:
        """Check a line of the record; the first cause found is kept."""
        if self.cause is not None:
            return
        if isinstance(measurement, TrainMeasurement):
            self.see_loss(measurement.step, measurement.loss, measurement.loss_scale)
            self._watch_norm(measurement)
        elif is_monitored(measurement):
            self._watch_outputs(measurement)

    def see_loss(self, step: int, loss: float | None, loss_scale: float | None) -> None:
        """Check a training loss that is not logged; the first cause found is kept.

        Args:
            step: updates made.
            loss: loss of the last update; None if it is not finite.
            loss_scale: loss scale in float16; None in other types.
        """
        is_lost = loss is None and not is_skipped(loss, loss_scale)
        if self._config.stops_not_finite and is_lost and self.cause is None:
            self.cause = "not_finite"
            self.message = f"the training loss is not finite at step {step}"

    def _watch_outputs(self, measurement: Evaluated) -> None:
        if self._config.stops_dead and measurement.is_constant:
            loss = "n/a" if measurement.loss is None else f"{measurement.loss:.4f}"
            part = "validation" if isinstance(measurement, ValidationMeasurement) else "test"
            self.cause = "dead"
            self.message = (
                f"dead at step {measurement.step}: all {measurement.examples:,} {part} examples "
                f"get the same output, {part} loss {loss}"
            )

    def _watch_norm(self, measurement: TrainMeasurement) -> None:
        growth, patience = self._config.max_gradient_growth, self._config.patience
        norm, loss_scale = measurement.gradient_norm, measurement.loss_scale
        if growth is None or is_skipped(norm, loss_scale):
            return
        self._norms.append(math.inf if norm is None else norm)  # None as it overflowed
        before, last = self._norms[:-patience], self._norms[-patience:]
        if before and min(last) > growth * median(before):
            self.cause = "exploding_gradient"
            self.message = (
                f"exploding gradient: its norm is {last[-1]:.3g} at step {measurement.step}, over "
                f"{growth:g} times the median {median(before):.3g} before, in {patience} lines of "
                "the record in a row"
            )


# Early stopping, with exactly the rules of Keras 3.


class EarlyStopping:
    """Watches one metric over the epochs of a run, and stops it when the metric stagnates."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self._config = config
        self._falls = config.monitor == "validation_loss"
        self._best_value: float | None = None
        self.wait = 0
        """Epochs since the best one."""
        self.best_epoch: int | None = None
        """Epoch whose weights are the best, counted from 0; None before any was watched."""
        self.has_stopped = False
        """Whether the run stops after the latest epoch."""

    def update(self, epoch: int, value: float) -> None:
        """Update with the metric after an epoch.

        Args:
            epoch: counted from 0.
            value: validation loss or accuracy, as `monitor` says; may be NaN.
        """
        config = self._config
        if epoch < config.start_from_epoch:
            return
        self.wait += 1
        if self._is_better(value, self._best_value):
            self._best_value, self.best_epoch = value, epoch
            if config.baseline is None or self._is_better(value, config.baseline):
                self.wait = 0
            return
        self.has_stopped = self.wait >= config.patience and epoch > 0

    def _is_better(self, value: float, reference: float | None) -> bool:
        """Whether `value` beats `reference` by more than `min_delta`; anything beats None.

        Compared in float32, as in Keras: 0.9 against 1.0 is no change of more than 0.1.
        """
        if reference is None:
            return True
        min_delta = abs(self._config.min_delta)
        if self._falls:
            return bool(np.float32(value + min_delta) < np.float32(reference))
        return bool(np.float32(value - min_delta) > np.float32(reference))


class RunStatus:
    """Status of a run, updated line by line of its record: whether it is to end, and how."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._wanted = run.config.train.early_stopping
        self._stopping = EarlyStopping(self._wanted) if self._wanted else None
        self._divergence = Divergence(run.config.train.divergence)
        self._last_losses: dict[str, float | None] = {}
        self._statistics = ""
        self._unreadable_rows = 0
        self.updates: list[TrainMeasurement] = []
        """The lines of updates."""
        self.best_step: int | None = None
        """Updates after which early stopping saw the best evaluation; None if it saw none."""
        self.evaluated_step: int | None = None
        """Updates after which the latest evaluation was made; None if there was none."""

    @property
    def stopping(self) -> StoppingState:
        """The state of early stopping."""
        wanted = self._wanted
        return StoppingState(
            best_step=self.best_step,
            evaluated_step=self.evaluated_step,
            wait=0 if self._stopping is None else self._stopping.wait,
            restored_step=self.best_step if wanted and wanted.restores_best_weights else None,
        )

    @property
    def has_diverged(self) -> bool:
        """Whether a divergence rule ends the run."""
        return self._divergence.cause is not None

    @property
    def is_lost(self) -> bool:
        """Whether the run, if it ends here, has diverged: by a rule, or by its last losses."""
        return self.has_diverged or self._lost_at_end is not None

    @property
    def _lost_at_end(self) -> tuple[DivergenceCause, str] | None:
        logged = [each.loss for each in self.updates]
        return divergence_at_end(self._last_losses, logged, self._run.dataset.classes)

    @property
    def has_stopped_early(self) -> bool:
        """Whether early stopping ends the run here."""
        return self._stopping is not None and self._stopping.has_stopped

    def chosen(self, step: int) -> tuple[int, Choice]:
        """Updates behind the weights that the run ends with after `step` updates, and what they
        were chosen by."""
        wanted = self._wanted
        if wanted is None or not wanted.restores_best_weights or self.best_step is None:
            return step, "last"
        return self.best_step, wanted.monitor

    @property
    def has_ended_early(self) -> bool:
        """Whether the run ends here, by early stopping or divergence."""
        return self.has_stopped_early or self.has_diverged

    def see_loss(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Update with the metrics of update `step`, which is not logged."""
        loss, loss_scale = finite(float(metrics["loss"])), metrics.get("loss_scale")
        self._keep_loss(loss, loss_scale)
        self._divergence.see_loss(step, loss, loss_scale)

    def note(self, measurement: Measurement) -> None:
        """Update with a line of the record."""
        self._divergence.update(measurement)
        if isinstance(measurement, TrainMeasurement):
            self._keep_loss(measurement.loss, measurement.loss_scale)
            self.updates.append(measurement)
            self._statistics = statistics_in_words(measurement)
        if is_monitored(measurement):
            self._last_losses["evaluation"] = measurement.loss
            self.evaluated_step = measurement.step
            self._watch(measurement)
        if isinstance(measurement, UnreadableExamples) and measurement.part == "train":
            self._unreadable_rows += measurement.rows

    def ending(
        self, step: int, elapsed_seconds: float, remarks: str, *, is_tuned: bool
    ) -> tuple[Status, str, DivergenceCause | None]:
        """Final status of the run, its message, and the cause if it diverged.

        Args:
            step: updates made.
            elapsed_seconds: training time over all sessions.
            remarks: text to append to the figures.
            is_tuned: whether the number of input workers was chosen by measuring.
        """
        took = f"{counted(step, 'step')} in {format_seconds(elapsed_seconds)}"
        if self._stopping is not None and self._stopping.best_epoch is not None:
            took += f", best after epoch {self._stopping.best_epoch + 1}"
        took += remarks
        if self._unreadable_rows:
            rows = unreadable_in_words(self._unreadable_rows, "training")
            took += f", {rows} in all epochs together"
        took += self._statistics
        how = self._run.config.input
        took += wait_with_advice(self.updates, how, machine_cores(), is_tuned=is_tuned)
        if self.has_diverged:
            return "diverged", f"{self._divergence.message}; {took}", self._divergence.cause
        if (lost := self._lost_at_end) is not None:
            cause, said = lost
            return "diverged", f"{took}; {said}", cause
        if self.has_stopped_early and step < self._run.total_steps:
            return "stopped_early", took, None
        return "completed", took, None

    def _keep_loss(self, loss: float | None, loss_scale: float | None) -> None:
        if not is_skipped(loss, loss_scale):
            self._last_losses["train"] = loss

    def _watch(self, measurement: Evaluated) -> None:
        if self._wanted is None or self._stopping is None:
            return
        value = getattr(measurement, self._wanted.monitor)
        epoch = round(measurement.epoch) - 1
        self._stopping.update(epoch, math.nan if value is None else value)
        if self._stopping.best_epoch == epoch:
            self.best_step = measurement.step
