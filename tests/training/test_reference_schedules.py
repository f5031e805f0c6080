"""Number by number: the learning rates of Horovod's callbacks and of tf_cnn_benchmarks.

The expected rates come from the literal tables, worked out by hand from the sources, and from a
loop over epochs and batches that fires callbacks, which scalejax does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalejax.config.optimizer import SgdConfig
from scalejax.config.schedule import (
    HorovodMultiplierConfig,
    HorovodScheduleConfig,
    LearningRateConfig,
    PiecewiseScheduleConfig,
    ScheduleConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.training.optimizers import build_optimizer
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.schedules import learning_rate_schedule

STEPS_PER_EPOCH = 4


def rates_of(config, epochs, steps_per_epoch=STEPS_PER_EPOCH):
    """The rate of every update of a run."""
    total = epochs * steps_per_epoch
    schedule = learning_rate_schedule(
        config, global_batch=256, steps_per_epoch=steps_per_epoch, total_steps=total
    )
    return np.asarray(schedule(np.arange(total)))


# --- Horovod ---


@dataclass
class Callback:
    """A Keras callback that sets the learning rate, as Horovod's source has it."""

    initial: float
    multiplier: Callable[[float], float]
    start: float = 0
    end: float | None = None
    staircase: bool = True

    def before_batch(self, epoch, batch, rate):
        """The rate after `on_batch_begin`."""
        if epoch < self.start or (self.end is not None and epoch >= self.end):
            return rate
        if self.staircase:
            return self.initial * self.multiplier(epoch) if batch == 0 else rate
        return self.initial * self.multiplier(epoch + batch / STEPS_PER_EPOCH)


def warmup(initial, workers, epochs):
    """LearningRateWarmupCallback."""
    return Callback(
        initial,
        lambda epoch: ((epoch + 1 / STEPS_PER_EPOCH) * (workers - 1) / epochs + 1) / workers,
        end=epochs,
        staircase=False,
    )


def fired(callbacks, initial, epochs):
    """The rate of every update when `callbacks` fire in turn before each."""
    rate, rates = initial, []
    for epoch in range(epochs):
        for batch in range(STEPS_PER_EPOCH):
            for callback in callbacks:
                rate = callback.before_batch(epoch, batch, rate)
            rates.append(rate)
    return rates


def test_horovod_warmup_by_hand():
    """8 workers, 0.1 each, 5 epochs of 4 batches: e = 1/4, 2/4, ...; 0.1 (7 e / 5 + 1)."""
    config = HorovodScheduleConfig(name="horovod", initial_learning_rate=0.8, workers=8)

    found = rates_of(config, 7)

    np.testing.assert_allclose(found[:4], [0.135, 0.17, 0.205, 0.24], rtol=1e-6)
    np.testing.assert_allclose(found[[7, 11, 15, 19]], [0.38, 0.52, 0.66, 0.8], rtol=1e-6)
    np.testing.assert_allclose(found[20:], 0.8, rtol=1e-6)  # held


def test_horovod_warmup_of_one_worker_is_level():
    """At size 1 the multiplier is 1 throughout."""
    config = HorovodScheduleConfig(name="horovod", initial_learning_rate=0.1, workers=1)

    np.testing.assert_allclose(rates_of(config, 6), 0.1, rtol=1e-6)


IMAGENET = [
    HorovodMultiplierConfig(multiplier=1.0, start_epoch=5, end_epoch=30),
    HorovodMultiplierConfig(multiplier=1e-1, start_epoch=30, end_epoch=60),
    HorovodMultiplierConfig(multiplier=1e-2, start_epoch=60, end_epoch=80),
    HorovodMultiplierConfig(multiplier=1e-3, start_epoch=80),
]
"""The callbacks of Horovod's examples/keras/keras_imagenet_resnet50.py, after its warmup."""


@pytest.mark.parametrize(
    ("meaning", "by_epoch"),
    [
        # what its authors meant, and what Horovod made of it before pull request 3135
        ("constant", {29: 1.0, 30: 0.1, 59: 0.1, 60: 0.01, 79: 0.01, 80: 0.001, 89: 0.001}),
        # what it makes of it since 3142 (platform_facts, finding 5)
        ("exponential", {29: 1.0, 30: 1.0, 31: 0.1, 32: 0.01, 60: 1.0, 61: 0.01, 80: 1.0}),
    ],
)
def test_horovods_imagenet_example_in_both_meanings(meaning, by_epoch):
    """A constant multiplier of 0.1 from epoch 30: x0.1, or x1 and then x0.1 every epoch."""
    config = HorovodScheduleConfig(
        name="horovod",
        initial_learning_rate=1.0,
        workers=8,
        multipliers=tuple(IMAGENET),
        constant_multiplier=meaning,
    )

    found = rates_of(config, 90)

    for epoch, rate in by_epoch.items():
        first = epoch * STEPS_PER_EPOCH
        np.testing.assert_allclose(found[first : first + 4], rate, rtol=1e-5)


@pytest.mark.parametrize("meaning", ["constant", "exponential"])
@pytest.mark.parametrize("seed", range(12))
def test_every_rate_is_the_one_that_horovods_callbacks_leave(meaning, seed):
    """Random callbacks: gaps in which the last rate is held, overlaps, fractions of epochs."""
    draw = np.random.default_rng(seed)
    workers, epochs = int(draw.integers(1, 9)), int(draw.integers(0, 4))
    multipliers = []
    for _ in range(3):
        start = float(draw.choice([0, 1, 2.5, 4, 6]))
        end = None if draw.random() < 0.3 else start + float(draw.choice([0.5, 1, 2, 3]))
        multipliers.append(
            HorovodMultiplierConfig(
                multiplier=float(draw.choice([0.1, 0.5, 1.0, 2.0])),
                start_epoch=start,
                end_epoch=end,
                staircase=bool(draw.random() < 0.5),
            )
        )
    config = HorovodScheduleConfig(
        name="horovod",
        initial_learning_rate=0.8,
        workers=workers,
        warmup_epochs=epochs,
        multipliers=tuple(multipliers),
        constant_multiplier=meaning,
    )
    callbacks = [warmup(0.8, workers, epochs)] if epochs else []
    for each in multipliers:

        def multiplier(epoch, each=each):
            power = epoch - each.start_epoch if meaning == "exponential" else 1
            return each.multiplier**power

        callbacks.append(
            Callback(0.8, multiplier, each.start_epoch, each.end_epoch, each.staircase)
        )

    np.testing.assert_allclose(rates_of(config, 9), fired(callbacks, 0.8, 9), rtol=1e-5)


@pytest.mark.parametrize("form", ["rate_outside", "rate_inside_corrected"])
def test_horovods_momentum_correction_is_ours(form):
    """Keras' v = m v - r g, with m r / r_before for the one batch in which r changed."""
    config = HorovodScheduleConfig(
        name="horovod",
        initial_learning_rate=0.8,
        workers=8,
        warmup_epochs=2,
        multipliers=(HorovodMultiplierConfig(multiplier=0.1, start_epoch=3),),
    )
    rates = rates_of(config, 5)
    gradients = np.random.default_rng(0).normal(size=len(rates))
    position, velocity, before, expected = 0.0, 0.0, 0.8, []
    for rate, gradient in zip(rates, gradients, strict=True):
        momentum = 0.9 * rate / before
        velocity = momentum * velocity - rate * gradient
        position, before = position + velocity, rate
        expected.append(position)

    optimizer = build_optimizer(
        SgdConfig(momentum=0.9, momentum_form=form),
        lambda step: jnp.asarray(rates)[step],
        hidden=HiddenMatrices(()),
    )
    params: Any = {"kernel": jnp.zeros(())}
    state, found = optimizer.init(params), []
    for gradient in gradients:
        updates, state = optimizer.update({"kernel": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(params["kernel"]))

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# --- tf_cnn_benchmarks ---


def test_piecewise_rates_by_hand():
    """ "0.1;30;0.01;60;0.001" at 10 steps an epoch, after two epochs that climb from 0."""
    config = PiecewiseScheduleConfig(
        name="piecewise", learning_rates="0.1;30;0.01;60;0.001", warmup_epochs=2
    )

    found = rates_of(config, 90, steps_per_epoch=10)

    climb = [0.1 * step / 20 for step in range(20)]
    expected = climb + [0.1] * 280 + [0.01] * 300 + [0.001] * 300
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_piecewise_boundaries_are_those_of_the_flag():
    """tf.train.piecewise_constant has x <= boundary, and the boundaries are one step early."""
    epochs, rates = [1, 2, 5], [0.4, 0.3, 0.2, 0.1]
    config = PiecewiseScheduleConfig(name="piecewise", learning_rates="0.4;1;0.3;2;0.2;5;0.1")
    boundaries = [int(epoch * 7) - 1 for epoch in epochs]
    expected = [rates[sum(step > boundary for boundary in boundaries)] for step in range(56)]

    np.testing.assert_allclose(rates_of(config, 8, steps_per_epoch=7), expected, rtol=1e-6)


# --- at the door ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "piecewise", "learning_rates": "0.1;30"}, "begin and end with a rate"),
        ({"name": "piecewise", "learning_rates": "0.1;x;0.01"}, "numbers with semicolons"),
        ({"name": "piecewise", "learning_rates": "0.1;60;0.01;30;1"}, "must be above 0 and rise"),
        ({"name": "piecewise", "learning_rates": "-0.1"}, "rates must be at least 0"),
        ({"name": "horovod", "initial_learning_rate": 1.0, "workers": 0}, "workers=0 is refused"),
        ({"name": "horovod", "workers": 8}, r"schedule\.initial_learning_rate is missing"),
        ({"name": "horovods", "workers": 8}, r"schedule\.name='horovods' is refused: did you mean"),
        ({"base_learning_rate": 1.0, "warmups": 3}, r"schedule\.warmups is not a field"),
        (
            {
                "name": "horovod",
                "initial_learning_rate": 1.0,
                "workers": 8,
                "multipliers": [{"multiplier": 0.1, "start_epoch": 3, "end_epoch": 3}],
            },
            "must be above start_epoch=3.0",
        ),
    ],
)
def test_impossible_schedules_are_refused(fields, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        build(LearningRateConfig, fields, where="schedule")


def test_a_schedule_without_a_name_is_the_composed_one():
    """As in every run.toml before there were others."""
    found = build(LearningRateConfig, {"base_learning_rate": 0.1})

    assert found == build(LearningRateConfig, {"name": "scaled", "base_learning_rate": 0.1})
    assert isinstance(found, ScheduleConfig)
