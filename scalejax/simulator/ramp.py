"""What a run takes whose batch grows: a prediction of each batch, and their sum.

Arithmetic on predictions; compiles nothing.
"""

import math
from dataclasses import dataclass

from scalejax.core.errors import ConfigError, refusal
from scalejax.simulator.predict import Prediction, ScalingPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrediction:
    """Epochs of one batch, on growing numbers of devices."""

    first_epoch: int
    """The first of them, counted from 0."""
    epochs: int
    """How many they are."""
    study: ScalingPrediction
    """What they take: the run in it is of these epochs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RampPrediction:
    """A run whose batch grows, on growing numbers of devices."""

    title: str
    """What was predicted, for people."""
    phases: tuple[PhasePrediction, ...]
    """Its batches one after another, each on the same numbers of devices."""

    def __post_init__(self) -> None:
        if len({self.device_counts_of(phase) for phase in self.phases}) != 1:
            accepted = "each must be on the same numbers of devices, and there must be one"
            raise ConfigError(refusal("phases", len(self.phases), accepted))

    @staticmethod
    def device_counts_of(phase: PhasePrediction) -> tuple[int, ...]:
        """The numbers of devices that `phase` was predicted on."""
        return tuple(each.device_count for each in phase.study.predictions)

    @property
    def device_counts(self) -> tuple[int, ...]:
        """The numbers of devices, ascending."""
        return self.device_counts_of(self.phases[0])

    def total_steps(self, device_count: int) -> int | None:
        """Updates in all epochs; None if an epoch's are unknown."""
        steps = 0
        for phase in self.phases:
            of_epoch = self._of(phase, device_count).steps_per_epoch
            if of_epoch is None:
                return None
            steps += phase.epochs * of_epoch
        return steps

    def run_seconds(self, device_count: int) -> float | None:
        """Time of all epochs; None if that of a batch is unknown. Evaluation is not counted, nor
        the moment at which the next batch takes over: its step was compiled before."""
        times = [self._of(phase, device_count).run_seconds for phase in self.phases]
        known = [seconds for seconds in times if seconds is not None]
        return math.fsum(known) if len(known) == len(times) else None

    def fits(self, device_count: int) -> bool:
        """Whether every batch fits into the memory of a device."""
        return all(self._of(phase, device_count).fits for phase in self.phases)

    def _of(self, phase: PhasePrediction, device_count: int) -> Prediction:
        return phase.study.predictions[self.device_counts.index(device_count)]
