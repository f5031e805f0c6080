"""When a run will not learn any more, and why: rules over what is measured of it.

Knows figures alone. What it holds follows from the record, so a resumed run gives it that again
and need store nothing.

Neither rule that is on by default can end a run that still learns:

- A loss that is not finite has a gradient that is no number, and so has every parameter after the
  update. Float16 alone skips such updates; there the rule waits until the loss scale is below 1,
  DeepSpeed's `min_loss_scale`, which takes 17 skipped updates to get to from where it begins.
- A network that gives all test examples the same output, in every class and to the last bit,
  does not see its input: no gradient comes through to the layers before (the units are dead). A
  loss near that of guessing would be no such proof: a network whose units are nearly all dead
  has it too, and may recover; so has one that is asked to learn what is random.
"""

import math
from collections.abc import Sequence
from statistics import median

from scalejax.record import DivergenceCause, EvaluationMeasurement, Measurement, TrainMeasurement
from scalejax.training_config import DivergenceConfig

_MIN_LOSS_SCALE = 1.0
"""DeepSpeed, fp16 options, `min_loss_scale`."""


def is_skipped(value: float | None, loss_scale: float | None) -> bool:
    """Whether an update of float16 was not made, so that a `value` of it that is not finite (None),
    its loss or the norm of its gradient, tells nothing of the run."""
    return value is None and loss_scale is not None and loss_scale >= _MIN_LOSS_SCALE


class Divergence:
    """Follows the record of a run until a rule ends it."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config
        self._norms: list[float] = []
        self.cause: DivergenceCause | None = None
        """What ends the run; None while nothing does."""
        self.message = ""
        """The same for people, with the figures that show it."""

    def update(self, measurement: Measurement) -> None:
        """Take in a line of the record; the first cause stays."""
        if self.cause is not None:
            return
        if isinstance(measurement, TrainMeasurement):
            self.see_loss(measurement.step, measurement.loss, measurement.loss_scale)
            self._watch_norm(measurement)
        elif isinstance(measurement, EvaluationMeasurement):
            self._watch_outputs(measurement)

    def see_loss(self, step: int, loss: float | None, loss_scale: float | None) -> None:
        """Take in a training loss that the record has no line of; the first cause stays.

        Args:
            step: updates made.
            loss: of the last one; None if it is not finite.
            loss_scale: of float16; None of other types.
        """
        is_lost = loss is None and not is_skipped(loss, loss_scale)
        if self._config.stops_not_finite and is_lost and self.cause is None:
            self.cause = "not_finite"
            self.message = f"the training loss is not finite at step {step}"

    def _watch_outputs(self, measurement: EvaluationMeasurement) -> None:
        if self._config.stops_dead and measurement.is_constant:
            loss = "n/a" if measurement.test_loss is None else f"{measurement.test_loss:.4f}"
            self.cause = "dead"
            self.message = (
                f"dead at step {measurement.step}: all {measurement.examples:,} test examples get "
                f"the same output, test loss {loss}"
            )

    def _watch_norm(self, measurement: TrainMeasurement) -> None:
        growth, patience = self._config.max_gradient_growth, self._config.patience
        norm, loss_scale = measurement.gradient_norm, measurement.loss_scale
        if growth is None or is_skipped(norm, loss_scale):
            return
        self._norms.append(math.inf if norm is None else norm)  # it is measured: so it overflowed
        before, last = self._norms[:-patience], self._norms[-patience:]
        if before and _is_beyond(last, growth * median(before)):
            self.cause = "exploding_gradient"
            self.message = (
                f"exploding gradient: its norm is {last[-1]:.3g} at step {measurement.step}, over "
                f"{growth:g} times the median {median(before):.3g} before, in {patience} lines of "
                "the record in a row"
            )


def _is_beyond(norms: Sequence[float], limit: float) -> bool:
    return min(norms) > limit
