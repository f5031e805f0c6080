"""Batches that grow while a run goes on: which one an update has, as a function of samples seen.

Arithmetic on counts; knows no schedules and no arrays. A batch changes between epochs alone, so
that every epoch still holds each example at most once.

Source: Smith et al. 2018, "Don't decay the learning rate, increase the batch size", arXiv
1711.00489.
"""

from dataclasses import dataclass, replace
from functools import cache

from scalejax.layout import BatchSplit
from scalejax.metrics import steps_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Epochs of one batch."""

    first_epoch: int
    """The first of them, counted from 0."""
    first_step: int
    """Updates made before it."""
    steps_per_epoch: int
    """Updates in one pass over the data."""
    split: BatchSplit
    """The batch, and how it is divided."""


@cache  # asked for before every update
def ramp(
    split: BatchSplit,
    epochs: tuple[int, ...],
    factor: int,
    train_examples: int,
    *,
    is_filled: bool = False,
) -> tuple[Phase, ...]:
    """The phases of a run whose batch is multiplied by `factor` at each of `epochs`; the last batch
    of an epoch is dropped if it is incomplete, or `is_filled` up.

    Raises:
        ConfigError: if a batch comes to be larger than the data.
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
