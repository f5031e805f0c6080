"""The schedules of Horovod and of tf_cnn_benchmarks, to the letter, as functions of the step.

Knows epochs and steps; nothing of batches and optimizers.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from scalejax.schedule_config import (
    HorovodMultiplierConfig,
    HorovodScheduleConfig,
    PiecewiseScheduleConfig,
)

_Schedule = Callable[[ArrayLike], jax.Array]


def horovod_schedule(config: HorovodScheduleConfig, steps_per_epoch: int) -> _Schedule:
    """The rate by step that Horovod's callbacks leave in the optimizer.

    Warmup over E epochs of S steps and n workers, before step t: initial / n (e (n - 1) / E + 1)
    with e = (t + 1) / S, so that epochs end at round numbers; the last epoch ends at the initial
    rate. A callback sets the rate within the epochs [start, end) alone; after them it stays what
    it was. Where several set it before the same step, the last one counts.

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
    """From a step to the step at which `each` last set the rate, or -1, and to that rate."""
    # Horovod compares the number of the epoch, whole, with the bounds as they are given.
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


def piecewise_schedule(config: PiecewiseScheduleConfig, steps_per_epoch: int) -> _Schedule:
    """The rate by step of tf_cnn_benchmarks' --piecewise_learning_rate_schedule.

    The rate after epoch e begins with step int(e S) for S steps per epoch; in a warmup of W steps
    the rate before step t is first t / W, so step 0 moves nothing. tf_cnn_benchmarks lets S be a
    fraction where the batch does not divide the data; here the rest of an epoch is dropped.

    Source: scripts/tf_cnn_benchmarks/benchmark_cnn.py (2023-10-05), get_piecewise_learning_rate
    and get_learning_rate.
    """
    boundaries = [int(epoch * steps_per_epoch) for epoch in config.epochs]
    warmup_end = int(config.warmup_epochs * steps_per_epoch)
    rates = jnp.asarray(config.rates, jnp.float32)

    def schedule(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        passed = jnp.zeros(step.shape, jnp.int32)
        for boundary in boundaries:
            passed = passed + (step >= boundary)
        rate = rates[passed]
        if warmup_end == 0:
            return rate
        return jnp.where(step < warmup_end, rates[0] * step / warmup_end, rate)

    return schedule
