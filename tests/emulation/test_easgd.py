"""Elastic averaging is that of the paper's algorithm 1."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from emulate_cases import durations
from least_squares_cases import LeastSquares, emulated

from scalejax.config.emulation import EasgdConfig, EmulationConfig, FailuresConfig, StragglersConfig
from scalejax.core.errors import ConfigError
from scalejax.emulation.virtual_cluster import random_stream, slowness


def config(workers: int, shards: int = 1, **algorithm) -> EmulationConfig:
    """So many workers and a centre."""
    return EmulationConfig(
        algorithm=EasgdConfig(**algorithm), workers=workers, server_shards=shards
    )


def step_of(problem: LeastSquares, own: np.ndarray, centre: np.ndarray, rate: float, seed, meets):
    """(own parameters, centre) after one pass of the loop of algorithm 1, without momentum."""
    gradient = problem.gradient(own, *seed)
    difference = rate * (own - centre) * meets
    return own - difference - problem.learning_rate * gradient, centre + difference


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("shards", [1, 2])
def test_workers_of_one_pace_are_those_of_the_synchronous_equations(period: int, shards: int):
    """x_i - r g_i - a (x_i - c) and c + sum a (x_i - c), of what was before (equations 3, 4)."""
    problem, workers, rate = LeastSquares(shards=shards, learning_rate=0.02), 4, 0.9 / 4

    result = emulated(config(workers, shards, period_steps=period), workers * 12, problem)

    centre, own = problem.initial, [problem.initial] * workers
    for step in range(12):
        moved = [
            step_of(problem, own[worker], centre, rate, (worker, step), step % period == 0)
            for worker in range(workers)
        ]
        own = [params for params, _ in moved]
        centre = centre + sum(each - centre for _, each in moved)
    np.testing.assert_allclose(result.params, centre, rtol=1e-10)


@pytest.mark.parametrize("period", [1, 3])
def test_workers_of_their_own_pace_are_those_of_a_plain_loop(period: int):
    """Two workers, one of which takes 2.317 times as long, meet the centre in the order of time."""
    stragglers = StragglersConfig(slow_share=0.5, slow_factor=2.317)
    seconds = slowness(stragglers, 2, random_stream(0, "slowness"))
    settings = replace(config(2, period_steps=period), stragglers=stragglers)
    problem = LeastSquares(learning_rate=0.02)

    result = emulated(settings, 40, problem)

    centre, own, steps = problem.initial, [problem.initial] * 2, [0, 0]
    moments = [(seconds[worker] * step, worker) for worker in (0, 1) for step in range(40)]
    ends = sorted((at + seconds[worker], worker) for at, worker in moments)[:40]
    for at, worker in sorted(moments, key=lambda each: each[0]):
        if at >= ends[-1][0]:
            break
        meets = steps[worker] % period == 0
        seed = (worker, steps[worker])
        own[worker], centre = step_of(problem, own[worker], centre, 0.45, seed, meets)
        steps[worker] += 1
    np.testing.assert_allclose(result.params, centre, rtol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_worker_without_ties_is_its_own_optimizer(momentum: float):
    """A single worker, met once, has moved by its own rule with its own momentum."""
    problem = LeastSquares(momentum=momentum, learning_rate=0.02)

    result = emulated(config(1, period_steps=10, moving_rate=1.0), 11, problem)

    params, buffer = problem.initial, 0.0
    for step in range(10):
        buffer = momentum * buffer + problem.gradient(params, 0, step)
        params = params - 0.02 * buffer
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


class Decaying(LeastSquares):
    """Its state is a count of steps, by which the rate decays."""

    def execute(self, operation, inputs, factors, rows):
        """As ever, but for updates; counts are kept."""
        if operation == "optimizer":
            return [0]
        if operation == "update":
            params, count, gradient = inputs
            self.counts = [*getattr(self, "counts", []), count]
            return [params - 0.05 / (1 + count) * gradient, count + 1]
        return super().execute(operation, inputs, factors, rows)


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_that_comes_back_goes_on_with_its_schedule(workers: int):
    """Each makes its step 0 once, its step 1 once, and so on, however often it fails."""
    failures = FailuresConfig(worker_mtbf_seconds=8, worker_restart_seconds=2)
    problem = Decaying()

    result = emulated(replace(config(workers), failures=failures), 40 * workers, problem)

    assert result.cluster.worker_failures > 3
    made = Counter(problem.counts)
    assert made[0] == workers
    assert [made[step] for step in sorted(made)] == sorted(made.values(), reverse=True)
    assert made.total() == 40 * workers


def test_centre_moves_less_often_with_a_longer_period():
    """Traffic and waiting for it go by the period."""
    takes = durations(latency_seconds=0.5)

    often, seldom = (
        emulated(config(4, period_steps=period), 400, takes=takes) for period in (1, 10)
    )

    # each worker's first parameters, and 2 messages for each exchange with it, the last in flight
    whole = LeastSquares().initial.nbytes
    assert often.servers.sent_bytes == pytest.approx(4 * whole * (1 + 2 * 100), rel=0.01)
    assert seldom.servers.sent_bytes == pytest.approx(4 * whole * (1 + 2 * 10), rel=0.05)
    assert seldom.cluster.now == pytest.approx(100 + 10, rel=0.03)
    assert often.cluster.now == pytest.approx(100 + 100, rel=0.03)


def test_centre_comes_to_what_is_learned():
    """To within its noise, as far as plain SGD does."""
    centre = emulated(config(4, period_steps=2), 4 * 400, LeastSquares(learning_rate=0.02))

    assert np.abs(centre.params - np.arange(12)).max() < 0.5


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"period_steps": 0}, "period_steps=0 is refused"),
        ({"moving_rate": 0.0}, "moving_rate=0.0 is refused"),
        ({"moving_rate": 1.5}, "moving_rate=1.5 is refused"),
    ],
)
def test_what_cannot_work_is_refused(algorithm: dict, words: str):
    """By field, at the door."""
    with pytest.raises(ConfigError, match=words):
        EasgdConfig(**algorithm)
