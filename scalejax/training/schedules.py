"""Learning-rate schedules as pure functions of the step: scaling, then warmup, then decay.

Knows the batch and the number of steps; nothing of optimizers.
"""

import math
from collections.abc import Callable, Sequence
from functools import singledispatch

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from scalejax.config.schedule import (
    HorovodMultiplierConfig,
    HorovodScheduleConfig,
    LearningRateConfig,
    PiecewiseScheduleConfig,
    ScheduleConfig,
)
from scalejax.core.errors import require_at_least

Schedule = Callable[[ArrayLike], jax.Array]
"""Maps a step (or an array of steps), counted from 0, to the learning rate of its update."""


@singledispatch
def build_schedule(
    config: LearningRateConfig, *, global_batch: int, steps_per_epoch: int, total_steps: int
) -> Schedule:
    """The learning rate of every step; each schedule registers its own, by class of its config."""
    raise NotImplementedError(f"build_schedule is not registered for {type(config).__name__}")


# Exact schedules of Horovod and of tf_cnn_benchmarks, as functions of the step.


@build_schedule.register
def _horovod(config: HorovodScheduleConfig, *, steps_per_epoch: int, **_: object) -> Schedule:
    """The rate by step that Horovod's callbacks leave in the optimizer.

    Warmup over E epochs of S steps and n workers, before step t: initial / n (e (n - 1) / E + 1)
    with e = (t + 1) / S, so that epochs end at round numbers; the last epoch ends at the initial
    rate. A callback sets the rate only within the epochs [start, end); after them the rate stays
    unchanged. If several callbacks set it before the same step, the last one wins.

    Source: horovod/_keras/callbacks.py, Horovod 0.28.1; its multipliers before pull request 3135
    and since 3142.
    """
    initial, workers = config.initial_learning_rate, float(config.workers)
    warmup_end = config.warmup_epochs * steps_per_epoch

    def warmup(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        set_at = jnp.minimum(step, warmup_end - 1)
        epoch = (set_at + 1) / steps_per_epoch
        return set_at, initial / workers * (epoch * (workers - 1) / config.warmup_epochs + 1)

    def schedule(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        rate, last_set = jnp.full(step.shape, initial, jnp.float32), jnp.full(step.shape, -1)
        callbacks = [warmup] if config.warmup_epochs else []
        callbacks += [_multiplied(config, each, steps_per_epoch) for each in config.multipliers]
        for callback in callbacks:
            set_at, value = callback(step)
            is_latest = (set_at >= 0) & (set_at >= last_set)
            rate = jnp.where(is_latest, value, rate)
            last_set = jnp.where(is_latest, set_at, last_set)
        return rate

    return schedule


def _multiplied(
    config: HorovodScheduleConfig, each: HorovodMultiplierConfig, steps_per_epoch: int
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Maps a step to the step at which `each` last set the rate, or -1, and to that rate."""
    # Horovod compares the whole number of the epoch with the bounds as given.
    first = math.ceil(each.start_epoch)
    after = math.inf if each.end_epoch is None else math.ceil(each.end_epoch)

    def callback(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        set_at = step // steps_per_epoch * steps_per_epoch if each.staircase else step
        if after != math.inf:
            begin_of_last = (after - 1) * steps_per_epoch
            end_of_last = after * steps_per_epoch - 1
            set_at = jnp.minimum(set_at, begin_of_last if each.staircase else end_of_last)
        power = 1.0
        if config.constant_multiplier == "exponential":
            power = set_at / steps_per_epoch - each.start_epoch
        value = config.initial_learning_rate * jnp.asarray(each.multiplier) ** power
        return jnp.where(set_at >= first * steps_per_epoch, set_at, -1), value

    return callback


@build_schedule.register
def _piecewise(config: PiecewiseScheduleConfig, *, steps_per_epoch: int, **_: object) -> Schedule:
    """The rate by step of tf_cnn_benchmarks' --piecewise_learning_rate_schedule.

    The rate after epoch e begins with step int(e S) for S steps per epoch; in a warmup of W steps
    the rate before step t is first t / W, so step 0 moves nothing. tf_cnn_benchmarks lets S be a
    fraction where the batch does not divide the data; here the rest of an epoch is dropped.

    Source: scripts/tf_cnn_benchmarks/benchmark_cnn.py (2023-10-05), get_piecewise_learning_rate
    and get_learning_rate.
    """
    boundaries = [int(epoch * steps_per_epoch) for epoch in config.epochs]
    warmup_end = int(config.warmup_epochs * steps_per_epoch)
    stairs = _stairs(config.rates, boundaries)
    if warmup_end == 0:
        return stairs

    def schedule(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        warmup = jnp.float32(config.rates[0]) * step / warmup_end
        return jnp.where(step < warmup_end, warmup, stairs(step))

    return schedule


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
    return build_schedule(
        config,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
    )


@build_schedule.register
def _composed(
    config: ScheduleConfig, *, global_batch: int, steps_per_epoch: int, total_steps: int
) -> Schedule:
    peak, warmup_epochs = config.scaled(global_batch)
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
            boundaries = [round(epoch * steps_per_epoch) for epoch in config.decay_epochs]
            rates = [peak * config.decay_factor**passed for passed in range(len(boundaries) + 1)]
            return _stairs(rates, boundaries)
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


def _stairs(rates: Sequence[float], boundaries: Sequence[int]) -> Schedule:
    """The first of `rates`, and the next one from each boundary on.

    Not `optax.piecewise_constant_schedule`, whose dictionary would drop one of two boundaries
    that round to the same step.
    """

    def schedule(step: ArrayLike) -> jax.Array:
        passed = jnp.searchsorted(jnp.asarray(boundaries), jnp.asarray(step), side="right")
        return jnp.asarray(rates, jnp.float32)[passed]

    return schedule
