"""The learning rate as one pure function of the step: scaling, then warmup, then decay.

Knows the batch and the number of steps; nothing of optimizers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from scalejax.errors import require_at_least
from scalejax.reference_schedules import horovod_schedule, piecewise_schedule
from scalejax.scaling import scaled_schedule
from scalejax.schedule_config import (
    HorovodScheduleConfig,
    LearningRateConfig,
    PiecewiseScheduleConfig,
    ScheduleConfig,
)

Schedule = Callable[[ArrayLike], jax.Array]
"""From a step (or an array of steps), counted from 0, to the learning rate of its update."""


def learning_rate_schedule(
    config: LearningRateConfig, *, global_batch: int, steps_per_epoch: int, total_steps: int
) -> Schedule:
    """The learning rate of every step of a run.

    For step t and warmup of W steps:
    t < W: start (constant warmup), or start + (peak - start) t / W (gradual);
    t >= W: the decay. A step decay counts its epochs from the start of training; a smooth one
    (cosine, polynomial, one_minus_sqrt) goes from peak at W, or where its share of the run
    begins, to `end_learning_rate` at `total_steps` and stays there.

    Args:
        config: which rules, and their numbers.
        global_batch: samples per update.
        steps_per_epoch: updates in one pass over the data.
        total_steps: updates in the run.
    """
    require_at_least("batch.global_batch", global_batch, 1)
    require_at_least("steps_per_epoch", steps_per_epoch, 1)
    require_at_least("total_steps", total_steps, 1)
    match config:
        case HorovodScheduleConfig():
            return horovod_schedule(config, steps_per_epoch)
        case PiecewiseScheduleConfig():
            return piecewise_schedule(config, steps_per_epoch)
        case ScheduleConfig():
            return _composed(config, global_batch, steps_per_epoch, total_steps)


def _composed(
    config: ScheduleConfig, global_batch: int, steps_per_epoch: int, total_steps: int
) -> Schedule:
    peak, warmup_epochs = scaled_schedule(config, global_batch)
    start = config.base_learning_rate if config.warmup_from == "base" else 0.0
    warmup_end = round(warmup_epochs * steps_per_epoch)
    begin = warmup_end
    if config.decay_share is not None:
        begin = max(warmup_end, total_steps - round(config.decay_share * total_steps))
    decay = _decay(config, peak, steps_per_epoch, begin, total_steps)
    if warmup_end == 0:
        return decay
    if config.warmup == "gradual":
        warmup = optax.linear_schedule(start, peak, warmup_end)
    else:
        warmup = optax.constant_schedule(start)

    def schedule(step: ArrayLike) -> jax.Array:
        return jnp.where(jnp.asarray(step) < warmup_end, warmup(step), decay(step))

    return schedule


def _decay(
    config: ScheduleConfig, peak: float, steps_per_epoch: int, begin: int, end: int
) -> Schedule:
    """The rate by absolute step, as if there were no warmup."""
    # A run that ends within its warmup never reads the decay; it still needs a length.
    length = max(end - begin, 1)
    final = config.end_learning_rate
    match config.decay:
        case "step":
            return _step_decay(
                peak, config.decay_factor, [round(e * steps_per_epoch) for e in config.decay_epochs]
            )
        case "cosine":
            cosine = optax.cosine_decay_schedule(peak, length, final / peak)
            return lambda step: jnp.asarray(cosine(jnp.maximum(jnp.asarray(step) - begin, 0)))
        case "polynomial":
            polynomial = optax.polynomial_schedule(
                peak, final, config.decay_power, length, transition_begin=begin
            )
            return lambda step: jnp.asarray(polynomial(step))
        case "one_minus_sqrt":

            def falling(step: ArrayLike) -> jax.Array:
                part_over = jnp.clip((jnp.asarray(step) - begin) / length, 0, 1)
                return final + (peak - final) * (1 - jnp.sqrt(part_over))

            return falling
        case "constant":
            return lambda step: jnp.full(jnp.shape(step), peak, jnp.float32)


def _step_decay(peak: float, factor: float, boundaries: list[int]) -> Schedule:
    """`peak` times `factor` for every boundary at or before the step.

    Not `optax.piecewise_constant_schedule`, whose dictionary would drop one of two boundaries
    that round to the same step.
    """
    rates = [peak * factor**passed for passed in range(len(boundaries) + 1)]

    def schedule(step: ArrayLike) -> jax.Array:
        passed = jnp.searchsorted(jnp.asarray(boundaries), jnp.asarray(step), side="right")
        return jnp.asarray(rates, jnp.float32)[passed]

    return schedule
