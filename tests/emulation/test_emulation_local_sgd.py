"""Local SGD, post-local SGD, DiLoCo and model averaging are those of their papers."""

import numpy as np
import pytest
from emulate_cases import durations
from least_squares_cases import BATCH, LeastSquares, emulated

from scalejax.config.emulation import (
    EmulatedLocalSgdConfig,
    EmulationConfig,
    FailuresConfig,
    StragglersConfig,
    SynchronousConfig,
)
from scalejax.core.errors import ConfigError

WORKERS = 3


def config(shards: int = 1, **algorithm) -> EmulationConfig:
    """Local SGD on three workers."""
    return EmulationConfig(
        algorithm=EmulatedLocalSgdConfig(**algorithm), workers=WORKERS, server_shards=shards
    )


def local_steps(problem: LeastSquares, begin: np.ndarray, buffers: list, first: int, steps: int):
    """What each worker makes of `begin` by itself; its buffer goes on in `buffers`."""
    copies = []
    for worker in range(WORKERS):
        params = begin
        for step in range(first, first + steps):
            size = BATCH // WORKERS
            part = slice(worker * size, (worker + 1) * size)
            gradient = problem.gradient(params, worker, step, part)
            buffers[worker] = problem.momentum * buffers[worker] + gradient
            params = params - problem.learning_rate * buffers[worker]
        copies.append(params)
    return copies


def by_hand(problem: LeastSquares, every: int, steps: int, rate: float = 1.0, momentum: float = 0):
    """DiLoCo's algorithm 1, the outer step as PyTorch's SGD with Nesterov momentum makes it."""
    params, buffers, velocity = problem.initial, [0.0] * WORKERS, 0.0
    for first in range(0, steps, every):
        copies = local_steps(problem, params, buffers, first, min(every, steps - first))
        outer_gradient = params - np.mean(copies, axis=0)
        velocity = momentum * velocity + outer_gradient
        params = params - rate * (outer_gradient + momentum * velocity)
    return params


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_average_of_every_step_is_synchronous_sgd(momentum: float):
    """One local step moves parameters and momentum by amounts whose mean is that of the mean."""
    problem = LeastSquares(momentum=momentum, learning_rate=0.02)
    synchronous = EmulationConfig(algorithm=SynchronousConfig(), workers=WORKERS)

    local = emulated(config(every_steps=1), 20, problem)

    expected = emulated(synchronous, 20, problem).params
    np.testing.assert_allclose(local.params, expected, rtol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shards", [1, 4])
def test_rounds_are_those_of_a_plain_loop(momentum: float, shards: int):
    """Four steps to a round, the last one cut short; each worker keeps its momentum."""
    problem = LeastSquares(momentum=momentum, shards=shards, learning_rate=0.02)

    result = emulated(config(shards, every_steps=4), 18, problem)

    np.testing.assert_allclose(result.params, by_hand(problem, 4, 18), rtol=1e-10)
    assert result.servers.versions == [5] * shards


def test_outer_step_is_that_of_diloco():
    """Rate 0.7 and Nesterov momentum 0.9, on the difference."""
    problem = LeastSquares(learning_rate=0.02)
    algorithm = {"every_steps": 3, "outer_learning_rate": 0.7, "outer_momentum": 0.9}

    result = emulated(config(**algorithm), 18, problem)

    expected = by_hand(problem, 3, 18, rate=0.7, momentum=0.9)
    np.testing.assert_allclose(result.params, expected, rtol=1e-10)
    assert np.abs(expected - by_hand(problem, 3, 18)).max() > 0.1


def test_post_local_sgd_is_synchronous_before():
    """Six synchronous steps with one momentum, with which each worker then goes on."""
    problem = LeastSquares(momentum=0.9, learning_rate=0.02)

    result = emulated(config(every_steps=4, begin_step=6), 14, problem)

    params, buffer = problem.initial, 0.0
    for step in range(6):
        buffer = 0.9 * buffer + problem.gradient(params, 0, step, slice(None))
        params = params - 0.02 * buffer
    buffers = [buffer] * WORKERS
    for first in (6, 10):
        params = np.mean(local_steps(problem, params, buffers, first, 4), axis=0)
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


def test_one_average_at_the_end_is_model_averaging():
    """The mean of the parameters that each worker reaches by itself."""
    problem = LeastSquares()

    result = emulated(config(every_steps=None), 25, problem)

    alone = local_steps(problem, problem.initial, [0.0] * WORKERS, 0, 25)
    np.testing.assert_allclose(result.params, np.mean(alone, axis=0), rtol=1e-10)
    assert result.servers.versions == [1]


def test_all_reduce_is_paid_once_a_round():
    """20 steps of 1 s; 5 all-reduces of 3 s, or 8 and the 3 that are left."""
    takes = durations(collective_seconds=3.0)

    assert emulated(config(every_steps=4), 20, takes=takes).cluster.now == 20 + 5 * 3
    late = emulated(config(every_steps=4, begin_step=8), 20, takes=takes)
    assert late.cluster.now == 20 + (8 + 3) * 3


def test_rounds_wait_less_for_stragglers():
    """The slowest of sums is less slow than the sum of the slowest."""
    settings = EmulationConfig(
        algorithm=EmulatedLocalSgdConfig(every_steps=16),
        workers=WORKERS,
        stragglers=StragglersConfig(distribution="lognormal"),
    )
    takes = durations(gradient_deviation_seconds=0.5)

    rounds = emulated(settings, 160, takes=takes).cluster.now

    assert 160 < rounds < emulated(config(every_steps=1), 160, takes=takes).cluster.now


def test_failures_change_the_time_and_not_the_result():
    """A worker that is back makes its round again, from what all began with."""
    failing = EmulationConfig(
        algorithm=EmulatedLocalSgdConfig(every_steps=4),
        workers=WORKERS,
        failures=FailuresConfig(worker_mtbf_seconds=15, worker_restart_seconds=2),
    )

    whole, failed = (emulated(each, 40) for each in (config(every_steps=4), failing))

    assert failed.cluster.worker_failures > 3
    assert failed.cluster.now > whole.cluster.now
    np.testing.assert_array_equal(failed.params, whole.params)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"every_steps": 0}, "every_steps=0 is refused"),
        ({"begin_step": -1}, "begin_step=-1 is refused"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0 is refused"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate=0.0 is refused"),
    ],
)
def test_what_cannot_work_is_refused(algorithm: dict, words: str):
    """By field, at the door."""
    with pytest.raises(ConfigError, match=words):
        EmulatedLocalSgdConfig(**algorithm)
