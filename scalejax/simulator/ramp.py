"""Prediction of a run with batch-size ramp-up: one prediction per batch, and their sum.

Arithmetic on predictions; compiles nothing.
"""

import math
from dataclasses import dataclass

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.simulator.predict import Prediction, ScalingPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrediction:
    """Consecutive epochs with one global batch, on growing numbers of devices."""

    first_epoch: int
    """First epoch of the phase, counted from 0."""
    epochs: int
    """Number of epochs in the phase."""
    study: ScalingPrediction
    """Prediction per device count; its run time covers these epochs alone."""


@document("ramp_prediction")
@dataclass(frozen=True, slots=True, kw_only=True)
class RampPrediction(Tabular):
    """A run whose global batch grows, on growing numbers of devices."""

    title: str
    """Title of the predicted run."""
    phases: tuple[PhasePrediction, ...]
    """One phase per batch, in order, all on the same device counts."""

    def __post_init__(self) -> None:
        if len({self.device_counts_of(phase) for phase in self.phases}) != 1:
            accepted = "each must be on the same numbers of devices, and there must be one"
            raise ConfigError(refusal("phases", len(self.phases), accepted))

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The main figures, a row for each batch and number of devices."""
        return [
            {"phase": place, "epochs": phase.epochs, **row}
            for place, phase in enumerate(self.phases, start=1)
            for row in phase.study.to_rows()
        ]

    @staticmethod
    def device_counts_of(phase: PhasePrediction) -> tuple[int, ...]:
        """The numbers of devices that `phase` was predicted on."""
        return tuple(each.device_count for each in phase.study.predictions)

    @property
    def device_counts(self) -> tuple[int, ...]:
        """The numbers of devices, ascending."""
        return self.device_counts_of(self.phases[0])

    def total_steps(self, device_count: int) -> int | None:
        """Updates in all epochs; None if unknown for any epoch."""
        steps = 0
        for phase in self.phases:
            of_epoch = self._of(phase, device_count).steps_per_epoch
            if of_epoch is None:
                return None
            steps += phase.epochs * of_epoch
        return steps

    def run_seconds(self, device_count: int) -> float | None:
        """Time of all epochs; None if unknown for any batch. Evaluation is not counted, nor is the
        change to the next batch, whose step was compiled before."""
        times = [self._of(phase, device_count).run_seconds for phase in self.phases]
        known = [seconds for seconds in times if seconds is not None]
        return math.fsum(known) if len(known) == len(times) else None

    def fits(self, device_count: int) -> bool:
        """Whether every batch fits into the memory of a device."""
        return all(self._of(phase, device_count).fits for phase in self.phases)

    def _of(self, phase: PhasePrediction, device_count: int) -> Prediction:
        return phase.study.predictions[self.device_counts.index(device_count)]
