"""What a worker sends to a server comes in the order in which it was sent."""

import numpy as np
import pytest
from emulate_cases import durations
from least_squares_cases import LeastSquares, emulated

from scalejax.config.emulation import (
    DownpourConfig,
    EasgdConfig,
    EmulationConfig,
    KvStoreConfig,
    StaleSynchronousConfig,
    StragglersConfig,
    VariableUpdateConfig,
)

ALGORITHMS = {
    "downpour": DownpourConfig(),
    "stale_synchronous": StaleSynchronousConfig(staleness_bound=3),
    "dist_async": KvStoreConfig(type="dist_async"),
    "variable_update": VariableUpdateConfig(
        variable_update="parameter_server", cross_replica_sync=False
    ),
}
LINKS = {
    "latency": {"latency_seconds": 0.3},
    "worker_link": {"worker_bytes_per_second": 90.0},
    "server_link": {"latency_seconds": 0.05, "server_bytes_per_second": 70.0},
    "updates": {"update_seconds": 0.4},
    "all": {
        "gradient_deviation_seconds": 0.5,
        "latency_seconds": 0.05,
        "update_seconds": 0.2,
        "worker_bytes_per_second": 90.0,
        "server_bytes_per_second": 70.0,
    },
}
"""96 bytes a gradient."""


def config(name: str, *, workers: int, shards: int) -> EmulationConfig:
    """So many workers, of which times vary."""
    return EmulationConfig(
        algorithm=ALGORITHMS[name],
        workers=workers,
        server_shards=shards,
        stragglers=StragglersConfig(distribution="lognormal", slow_share=1.0, slow_factor=1.7),
    )


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_lone_worker_is_plain_sgd_however_slow_its_links(name: str, shards: int, links: str):
    """It reads what its own last push came to: the parameters of the run without delays."""
    alone = config(name, workers=1, shards=shards)

    slow = emulated(alone, 30, takes=durations(**LINKS[links]))

    at_once = emulated(alone, 30)
    problem = LeastSquares()
    params = problem.initial
    for step in range(30):
        params = params - problem.learning_rate * problem.gradient(params, 0, step)
    assert set(slow.servers.staleness) == {0}
    np.testing.assert_array_equal(slow.params, at_once.params)
    np.testing.assert_allclose(slow.params, params, rtol=1e-12)


def test_lone_worker_of_a_usual_network_is_never_stale():
    """A request is small, a gradient is not: the one does not overtake the other."""
    takes = durations(latency_seconds=1e-3, worker_bytes_per_second=125e6)

    result = emulated(EmulationConfig(algorithm=DownpourConfig()), 100, takes=takes)

    assert result.servers.staleness == {0: 100}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("name", ["downpour", "dist_async"])
@pytest.mark.parametrize("workers", [2, 6])
def test_staleness_of_equal_workers_is_one_less_than_they_are(name: str, workers: int, links: str):
    """Between two updates of one, each other makes one in the mean, whatever the links."""
    faster = {
        key: value * 20 if "bytes_per" in key else value / 20 for key, value in LINKS[links].items()
    }
    takes = durations(**faster)  # so that workers wait for each other little

    result = emulated(config(name, workers=workers, shards=2), 300 * workers, takes=takes)

    print(f"{workers} workers, {links}: mean staleness {result.mean_staleness:.4f}")
    assert result.mean_staleness == pytest.approx(workers - 1, rel=0.02)


def test_centre_that_a_worker_asks_for_is_the_one_that_it_has_moved():
    """Elastic averaging by one worker: the plain loop of algorithm 1, though what it sends takes
    longer than a gradient. The run ends while the last of it is on its way."""
    problem = LeastSquares(learning_rate=0.02)
    alone = EmulationConfig(algorithm=EasgdConfig(period_steps=1, moving_rate=0.5))
    takes = durations(worker_bytes_per_second=60.0, latency_seconds=0.1, update_seconds=0.3)

    result = emulated(alone, 20, problem, takes=takes)

    own = centre = before = problem.initial
    for step in range(20):
        gradient = problem.gradient(own, 0, step)
        difference = 0.5 * (own - centre)
        own, before, centre = own - difference - 0.02 * gradient, centre, centre + difference
    assert result.servers.staleness == {0: 19}
    np.testing.assert_allclose(result.params, before, rtol=1e-12)
