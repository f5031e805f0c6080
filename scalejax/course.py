"""What a run has shown so far, and with what words it ends.

Follows from the record alone: a resumed run is told its record again, and need store nothing.
Knows lines of the record and the rules that end a run; neither devices nor files.
"""

import math
from collections.abc import Mapping
from typing import Any

from scalejax.config import ResolvedRun
from scalejax.divergence import Divergence, is_skipped
from scalejax.early_stopping import EarlyStopping
from scalejax.input_wait import wait_with_advice
from scalejax.progress import statistics_in_words
from scalejax.record import (
    DivergenceCause,
    EvaluationMeasurement,
    Measurement,
    Status,
    TrainMeasurement,
    finite,
)
from scalejax.this_process import machine_cores
from scalejax.units import counted, format_seconds


class Course:
    """Takes in the record of a run, line by line; says when the run is to end, and how it did."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._wanted = run.config.train.early_stopping
        self._stopping = EarlyStopping(self._wanted) if self._wanted else None
        self._divergence = Divergence(run.config.train.divergence)
        self._last_losses: dict[str, float | None] = {}
        self._statistics = ""
        self.updates: list[TrainMeasurement] = []
        """The lines of updates."""
        self.best_step: int | None = None
        """Updates after which early stopping saw the best evaluation; None if it saw none."""
        self.evaluated_step: int | None = None
        """Updates after which the latest evaluation was made; None if there was none."""

    @property
    def has_diverged(self) -> bool:
        """Whether a rule says that the run will not learn any more."""
        return self._divergence.cause is not None

    @property
    def has_stopped_early(self) -> bool:
        """Whether early stopping ends the run here."""
        return self._stopping is not None and self._stopping.has_stopped

    @property
    def has_ended_early(self) -> bool:
        """Whether anything does."""
        return self.has_stopped_early or self.has_diverged

    def see_loss(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of update `step`, which the record has no line of."""
        loss, loss_scale = finite(float(metrics["loss"])), metrics.get("loss_scale")
        self._keep_loss(loss, loss_scale)
        self._divergence.see_loss(step, loss, loss_scale)

    def note(self, measurement: Measurement) -> None:
        """Take in a line of the record."""
        self._divergence.update(measurement)
        if isinstance(measurement, TrainMeasurement):
            self._keep_loss(measurement.loss, measurement.loss_scale)
            self.updates.append(measurement)
            self._statistics = statistics_in_words(measurement)
        if isinstance(measurement, EvaluationMeasurement):
            self._last_losses["evaluation"] = measurement.test_loss
            self.evaluated_step = measurement.step
            self._watch(measurement)

    def ending(
        self, step: int, elapsed_seconds: float, remarks: str, *, is_tuned: bool
    ) -> tuple[Status, str, DivergenceCause | None]:
        """How the run ended, the same in words, and why if it diverged.

        Args:
            step: updates made.
            elapsed_seconds: that they took, over all sessions.
            remarks: of others, to be put behind the figures.
            is_tuned: whether the number of input workers was chosen by measuring.
        """
        took = f"{counted(step, 'step')} in {format_seconds(elapsed_seconds)}"
        if self._stopping is not None and self._stopping.best_epoch is not None:
            took += f", best after epoch {self._stopping.best_epoch + 1}"
        took += remarks + self._statistics
        how = self._run.config.input
        took += wait_with_advice(self.updates, how, machine_cores(), is_tuned=is_tuned)
        if self.has_diverged:
            return "diverged", f"{self._divergence.message}; {took}", self._divergence.cause
        if None in self._last_losses.values():
            return "diverged", f"{took}; the loss is not finite", "not_finite"
        if self.has_stopped_early and step < self._run.total_steps:
            return "stopped_early", took, None
        return "completed", took, None

    def _keep_loss(self, loss: float | None, loss_scale: float | None) -> None:
        if not is_skipped(loss, loss_scale):
            self._last_losses["train"] = loss

    def _watch(self, measurement: EvaluationMeasurement) -> None:
        if self._wanted is None or self._stopping is None:
            return
        value = getattr(measurement, self._wanted.monitor)
        epoch = round(measurement.epoch) - 1
        self._stopping.update(epoch, math.nan if value is None else value)
        if self._stopping.best_epoch == epoch:
            self.best_step = measurement.step
