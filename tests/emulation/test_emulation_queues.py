"""Virtual time keeps the laws of queues, and staleness that of conservation."""

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simpy
from emulate_cases import durations
from least_squares_cases import emulated

from scalejax.config.emulation import DownpourConfig, EmulationConfig, StragglersConfig
from scalejax.emulation.virtual_cluster import Line

ARRIVALS = 3_000_000
"""In batches of a hundredth, of whose means the standard error is taken."""


@dataclass
class Clock:
    """In place of a simulation, where nobody acts on being served: a time that can be set."""

    now: float = 0.0
    delay_seconds: float = 0.0
    timeouts: Any = field(default_factory=lambda: SimpleNamespace(callbacks=[]))

    def timeout(self, seconds: float) -> SimpleNamespace:
        """An event that nobody waits for."""
        self.delay_seconds = seconds
        self.timeouts.callbacks.clear()
        return self.timeouts


def waits(load: float, service_seconds: np.ndarray, seed: int) -> tuple[float, float]:
    """Mean wait in a `Line` that customers reach at random, and its standard error."""
    gaps = np.random.default_rng(seed).exponential(1 / load, len(service_seconds))
    clock = Clock()
    line = Line(clock)  # type: ignore[arg-type]  it asks for the time alone
    waited, marks = 0.0, []
    for place, (at, seconds) in enumerate(
        zip(np.cumsum(gaps).tolist(), service_seconds.tolist(), strict=True), start=1
    ):
        clock.now = at
        line.serve(seconds, dict)
        waited += clock.delay_seconds - seconds
        if place % (len(service_seconds) // 100) == 0:
            marks.append(waited)
    means = np.diff([0.0, *marks]) / (len(service_seconds) // 100)
    return waited / len(service_seconds), float(np.std(means, ddof=1) / 10)


SLOW = pytest.mark.slow  # so many arrivals take some seconds each


@pytest.mark.parametrize(
    ("load", "arrivals"), [(0.6, 500_000), pytest.param(0.9, ARRIVALS, marks=SLOW)]
)
def test_line_waits_as_m_d_1(load: float, arrivals: int):
    """Poisson arrivals, service of 1 s: rho / (2 (1 - rho)) s (Pollaczek-Khinchine), within 3 %."""
    mean, error = waits(load, np.ones(arrivals), seed=1)

    expected = load / (2 * (1 - load))
    print(f"load {load}: {mean:.4f} s, standard error {error:.4f}, expected {expected:.4f}")
    assert error < 0.015 * expected
    assert mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("load", "arrivals"), [(0.3, 500_000), pytest.param(0.6, 1_000_000, marks=SLOW)]
)
def test_line_waits_as_m_m_1(load: float, arrivals: int):
    """Service exponential too: twice as long, rho / (1 - rho) s."""
    mean, error = waits(load, np.random.default_rng(2).exponential(1.0, arrivals), seed=3)

    expected = load / (1 - load)
    print(f"load {load}: {mean:.4f} s, standard error {error:.4f}, expected {expected:.4f}")
    assert error < 0.015 * expected
    assert mean == pytest.approx(expected, rel=0.03)


def test_line_in_a_simulation_ends_each_service_when_lindley_says():
    """In real virtual time: the wait of one is what is left of the wait and service before it."""
    generator = np.random.default_rng(4)
    gaps, seconds = generator.exponential(1.0, 200), generator.exponential(0.8, 200)
    env, ended = simpy.Environment(), []
    line = Line(env)

    def arrivals():
        for gap, service in zip(gaps.tolist(), seconds.tolist(), strict=True):
            yield env.timeout(gap)
            line.serve(service, lambda: ended.append(env.now))

    env.process(arrivals())
    env.run()

    wait, expected = 0.0, []
    for place, at in enumerate(np.cumsum(gaps)):
        if place:
            wait = max(0.0, wait + seconds[place - 1] - gaps[place])
        expected.append(at + wait + seconds[place])
    assert ended == pytest.approx(expected)
    assert all(before < after for before, after in pairwise(ended))


def test_line_that_closes_puts_off_those_it_has_not_begun_with():
    """Of five of 2 s each, who come at 0 s, one is done when it closes for 3 s at 3 s, one is being
    served, and three wait until it opens; one that comes meanwhile is the last."""
    env, ended = simpy.Environment(), []
    line = Line(env)

    def story():
        for name in "abcde":
            line.serve(2.0, lambda name=name: ended.append((name, env.now)))
        yield env.timeout(3)
        line.close(3.0)
        yield env.timeout(1)
        line.serve(2.0, lambda: ended.append(("f", env.now)))

    env.process(story())
    env.run()

    assert ended == [("a", 2), ("b", 4), ("c", 8), ("d", 10), ("e", 12), ("f", 14)]


def test_line_that_closes_while_nobody_waits_opens_in_time():
    """Nobody there, or one whose service outlasts the outage."""
    env, ended = simpy.Environment(), []
    line = Line(env)

    def story():
        line.close(3.0)
        yield env.timeout(1)
        line.serve(4.0, lambda: ended.append(env.now))  # 3 s to 7 s
        yield env.timeout(3)
        line.serve(1.0, lambda: ended.append(env.now))
        line.close(1.0)

    env.process(story())
    env.run()

    assert ended == [7, 8]


@pytest.mark.parametrize("customers", [2, 12])
def test_closed_line_passes_as_mean_value_analysis_says(customers: int):
    """Customers who think 4 s and are served 1 s, both at random: throughput within 3 %.

    R = s (1 + Q of one customer less), X = n / (Z + R), Q = X R (Reiser & Lavenberg 1980).
    """
    env, generator, until = simpy.Environment(), np.random.default_rng(5), 30_000.0
    line, all_served = Line(env), 0

    def customer():
        nonlocal all_served
        while True:
            yield env.timeout(generator.exponential(4.0))
            served = env.event()
            line.serve(generator.exponential(1.0), served.succeed)
            yield served
            all_served += 1

    for _ in range(customers):
        env.process(customer())
    env.run(until)

    queue = rate = 0.0
    for population in range(1, customers + 1):
        response = 1 + queue
        rate = population / (4 + response)
        queue = rate * response
    print(f"{customers} customers: {all_served / until:.4f} a second, expected {rate:.4f}")
    assert all_served / until == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(("workers", "rate"), [(1, 1 / 1.2), (4, 4 / 1.2), (20, 5.0)])
def test_replicas_share_a_server_as_its_bound_says(workers: int, rate: float):
    """Gradients of 1 s, updates of 0.2 s: n / (1 + 0.2) updates a second, never above 1 / 0.2."""
    config = EmulationConfig(algorithm=DownpourConfig(), workers=workers)

    result = emulated(config, 2000, takes=durations(update_seconds=0.2))

    assert 2000 / result.cluster.now == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(("workers", "cv"), [(2, 0.5), (8, 0.0), (8, 0.5), (50, 0.5)])
def test_staleness_of_equal_workers_is_one_less_than_they_are(workers: int, cv: float):
    """While one computes, each other updates once: in the mean exactly, however times vary."""
    config = EmulationConfig(
        algorithm=DownpourConfig(),
        workers=workers,
        stragglers=StragglersConfig(distribution="lognormal"),
    )

    result = emulated(config, 200 * workers, takes=durations(gradient_deviation_seconds=cv))

    print(f"{workers} workers, cv {cv}: mean staleness {result.mean_staleness:.4f}")
    assert result.mean_staleness == pytest.approx(workers - 1, rel=0.02)
