"""The learning rate as one pure function of the step: scaling, then warmup, then decay.

Knows the batch and the number of steps; nothing of optimizers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from scalejax.errors import require_at_least
from scalejax.training_config import ScheduleConfig

Schedule = Callable[[ArrayLike], jax.Array]
"""From a step (or an array of steps), counted from 0, to the learning rate of its update."""


def peak_learning_rate(config: ScheduleConfig, global_batch: int) -> float:
    """The learning rate after scaling and warmup, before decay.

    With k = global_batch / reference_batch: base, base k (linear; Goyal et al. 2017, section 2.1,
    arXiv 1706.02677) or base root(k) (sqrt; Krizhevsky 2014, section 5, arXiv 1404.5997).
    """
    require_at_least("batch.global_batch", global_batch, 1)
    k = global_batch / config.reference_batch
    factor = {"none": 1.0, "linear": k, "sqrt": k**0.5}[config.scaling]
    return config.base_learning_rate * factor


def warmup_steps(config: ScheduleConfig, steps_per_epoch: int) -> int:
    """Updates before the first one at the peak rate: the epochs of warmup, rounded to steps."""
    return round(config.warmup_epochs * steps_per_epoch)


def learning_rate_schedule(
    config: ScheduleConfig, *, global_batch: int, steps_per_epoch: int, total_steps: int
) -> Schedule:
    """The learning rate of every step of a run.

    For step t and warmup of W steps:
    t < W: start (constant warmup), or start + (peak - start) t / W (gradual);
    t >= W: the decay. A step decay counts its epochs from the start of training; a cosine or
    polynomial one goes from peak at W to `end_learning_rate` at `total_steps` and stays there.

    Args:
        config: which rules, and their numbers.
        global_batch: samples per update.
        steps_per_epoch: updates in one pass over the data.
        total_steps: updates in the run.
    """
    require_at_least("steps_per_epoch", steps_per_epoch, 1)
    require_at_least("total_steps", total_steps, 1)
    peak = peak_learning_rate(config, global_batch)
    start = config.base_learning_rate if config.warmup_from == "base" else 0.0
    warmup_end = warmup_steps(config, steps_per_epoch)
    decay = _decay(config, peak, steps_per_epoch, warmup_end, total_steps)
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
    match config.decay:
        case "step":
            return _step_decay(
                peak, config.decay_factor, [round(e * steps_per_epoch) for e in config.decay_epochs]
            )
        case "cosine":
            cosine = optax.cosine_decay_schedule(peak, length, config.end_learning_rate / peak)
            return lambda step: jnp.asarray(cosine(jnp.maximum(jnp.asarray(step) - begin, 0)))
        case "polynomial":
            polynomial = optax.polynomial_schedule(
                peak, config.end_learning_rate, config.decay_power, length, transition_begin=begin
            )
            return lambda step: jnp.asarray(polynomial(step))
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
