"""Stale synchronous parallel: nobody gets further ahead than the bound, nor waits before it."""

import heapq

import numpy as np
import pytest
from emulate_cases import durations
from least_squares_cases import LeastSquares, emulated

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    StaleSynchronousConfig,
    StragglersConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.emulation.virtual_cluster import random_stream, slowness


def config(bound: int, workers: int, shards: int = 1, **stragglers) -> EmulationConfig:
    """So many workers within `bound` clocks."""
    return EmulationConfig(
        algorithm=StaleSynchronousConfig(staleness_bound=bound),
        workers=workers,
        server_shards=shards,
        stragglers=StragglersConfig(**stragglers),
    )


@pytest.mark.parametrize("cv", [0.0, 0.6])
@pytest.mark.parametrize("shards", [1, 3])
def test_bound_of_0_is_bulk_synchronous(cv: float, shards: int):
    """Whatever the stragglers, all gradients of a clock are of the parameters that it began with:
    one device that sums the gradients of all minibatches."""
    problem, workers, clocks = LeastSquares(shards=shards), 4, 5

    result = emulated(
        config(0, workers, shards, distribution="lognormal"),
        workers * clocks,
        problem,
        takes=durations(gradient_deviation_seconds=cv, latency_seconds=0.1, update_seconds=0.05),
    )

    params = problem.initial
    for clock in range(clocks):
        whole = sum(problem.gradient(params, worker, clock) for worker in range(workers))
        params = params - problem.learning_rate * whole
    np.testing.assert_allclose(result.params, params, rtol=1e-12)
    assert set(result.servers.staleness) == set(range(workers))


def by_hand(problem: LeastSquares, seconds: list[float], bound: int, steps: int) -> np.ndarray:
    """The rule of the paper's section 3 as a plain queue of events, without delays."""
    params, clocks, made = problem.initial, [0] * len(seconds), 0
    events = sorted((second, worker, params) for worker, second in enumerate(seconds))
    waiting: dict[int, float] = {}
    held: list[tuple[int, int, np.ndarray]] = []
    while made < steps:
        now, worker, read = heapq.heappop(events)
        held.append((clocks[worker], worker, problem.gradient(read, worker, clocks[worker])))
        clocks[worker] += 1
        waiting[worker] = now
        for update in sorted(held, key=lambda each: each[:2]):
            if update[0] < min(clocks) + bound and made < steps:
                params = params - problem.learning_rate * update[2]
                held = [each for each in held if each is not update]
                made += 1
        for each in sorted(waiting):
            if clocks[each] - min(clocks) <= bound:
                heapq.heappush(events, (now + seconds[each], each, params))
                del waiting[each]
    return params


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_bounded_run_is_that_of_a_plain_loop(bound: int):
    """Two workers, one of which takes 2.317 times as long."""
    stragglers = StragglersConfig(slow_share=0.5, slow_factor=2.317)
    seconds = list(slowness(stragglers, 2, random_stream(0, "slowness")))
    problem = LeastSquares()

    result = emulated(config(bound, 2, slow_share=0.5, slow_factor=2.317), 40, problem)

    expected = by_hand(problem, seconds, bound, 40)
    np.testing.assert_allclose(result.params, expected, rtol=1e-12)


def test_pace_is_that_of_the_slowest_but_for_the_bound():
    """In the long run all wait for the slowest; without a bound they would not."""

    bounded = emulated(config(2, 4, slow_share=0.25, slow_factor=3.0), 400)
    free = emulated(config(10**6, 4, slow_share=0.25, slow_factor=3.0), 400)

    assert 400 / bounded.cluster.now == pytest.approx(4 / 3, rel=0.02)
    assert 400 / free.cluster.now == pytest.approx(3 + 1 / 3, rel=0.02)


def test_without_a_bound_it_is_downpour():
    """Bit for bit, with delays and servers that differ in age."""
    takes = durations(
        gradient_deviation_seconds=0.4,
        latency_seconds=0.03,
        update_seconds=0.1,
        server_bytes_per_second=500.0,
    )
    downpour = EmulationConfig(algorithm=DownpourConfig(), workers=5, server_shards=3)

    bounded = emulated(config(10**6, 5, 3), 60, takes=takes)
    free = emulated(downpour, 60, takes=takes)

    np.testing.assert_array_equal(bounded.params, free.params)
    assert bounded.servers.staleness == free.servers.staleness
    assert bounded.cluster.now == free.cluster.now


def test_bound_is_refused_below_0():
    """There is no clock before the present one."""
    with pytest.raises(ConfigError, match="staleness_bound=-1 is refused"):
        StaleSynchronousConfig(staleness_bound=-1)
