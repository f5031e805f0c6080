"""Failures change the timing; the result of a run only where its definition says so."""

from dataclasses import replace
from itertools import groupby

import pytest
from emulated_outcomes import CONFIG, VARIED, emulated, same_bits
from least_squares_cases import LeastSquares
from least_squares_cases import emulated as least_squares

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    FailuresConfig,
    StragglersConfig,
    SynchronousConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.emulation.checks import emulated_run
from scalejax.emulation.virtual_cluster import VirtualCluster

STRAGGLERS = StragglersConfig(slow_share=0.3, slow_factor=4)
SYNCHRONOUS = {
    "all_reduce": SynchronousConfig(),
    "parameter_server": SynchronousConfig(gradient_sync="parameter_server"),
}
SEEDS = range(2)


def failing(algorithm, failures: FailuresConfig, *, workers: int = 4):
    """The small run by workers of different pace, and two servers, that fail."""
    emulation = EmulationConfig(
        algorithm=algorithm,
        workers=workers,
        server_shards=2,
        stragglers=STRAGGLERS,
        failures=failures,
    )
    return emulated(emulation, VARIED, {"optimizer": {"name": "adagrad"}})


@pytest.mark.slow_except("all_reduce")
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_killing_workers_leaves_synchronous_sgd_as_it_is(name: str, monkeypatch):
    """The very losses and parameters of the run without failures; only later."""
    whole = failing(SYNCHRONOUS[name], FailuresConfig())

    failures = FailuresConfig(
        worker_mtbf_seconds=6,
        worker_restart_seconds=1,
        server_mtbf_seconds=9,
        server_restart_seconds=1,
    )
    random = VirtualCluster.random
    for seed in SEEDS:  # other failures, all else as before

        def reseeded(cluster: VirtualCluster, *name: str | int, seed: int = seed):
            return random(cluster, *name, seed)

        monkeypatch.setattr(VirtualCluster, "random", reseeded)
        broken = failing(SYNCHRONOUS[name], failures)

        assert broken.emulation.worker_failures > 10
        assert broken.figures == whole.figures
        assert same_bits(broken.params, whole.params)
        assert broken.emulation.virtual_seconds > whole.emulation.virtual_seconds


def test_servers_that_fail_lose_nothing_of_downpour():
    """Their state is kept: what was sent to them waits, and is applied once (see the log)."""
    broken = failing(
        DownpourConfig(), FailuresConfig(server_mtbf_seconds=1, server_restart_seconds=0.5)
    )

    assert broken.emulation.server_failures > 2
    (initial,) = (each.outputs for each in broken.log if each.operation == "initial")
    server_of = {number: place for place, number in enumerate(initial)}
    applied: list[list[int]] = [[], []]
    for each in broken.log:
        if each.operation == "update":
            params, _, gradient = each.inputs
            server_of[each.outputs[0]] = place = server_of.pop(params)
            applied[place].append(gradient)
    parts = [each.outputs[:2] for each in broken.log if each.operation == "gradient"]
    for place, own in enumerate(zip(*parts, strict=True)):
        assert len(set(applied[place])) == len(applied[place])
        assert set(applied[place]) <= set(own)
    everywhere = [each for each in parts if each[0] in applied[0] and each[1] in applied[1]]
    assert len(everywhere) == broken.emulation.gradients  # the last to get there ends the run


def test_downpour_goes_on_while_a_replica_lives():
    """Others continue, as in the paper; the run is as long as ever, by those that are left."""
    broken = failing(DownpourConfig(), FailuresConfig(worker_mtbf_seconds=10), workers=5)

    assert 0 < broken.emulation.worker_failures < 5
    assert broken.emulation.gradients == 24


class Watched(LeastSquares):
    """Remembers whose gradients were begun."""

    def execute(self, operation, inputs, factors, rows):
        """As ever."""
        if operation == "gradient" and rows is not None:
            self.begun = [*getattr(self, "begun", []), rows.worker]
        return super().execute(operation, inputs, factors, rows)


@pytest.mark.parametrize("restart_seconds", [None, 5.0])
def test_another_replica_goes_on_with_the_warmstart_of_one_that_dies(restart_seconds: float | None):
    """One at a time, until the parameters are warm; then all that live, and the run ends."""
    failures = FailuresConfig(worker_mtbf_seconds=30, worker_restart_seconds=restart_seconds)
    config = EmulationConfig(
        algorithm=DownpourConfig(warmstart_updates=10), workers=8, failures=failures
    )
    took_over = 0
    for seed in range(20):
        problem = Watched()

        result = least_squares(config, 60, problem, seed=seed)

        assert result.servers.versions == [60]
        warming = [worker for worker, _ in groupby(problem.begun[:10])]
        assert warming[0] == 0
        assert len(warming) == len(set(warming))
        took_over += len(warming) > 1
        assert len(set(problem.begun)) > 3
    assert took_over > 2


@pytest.mark.parametrize("servers", [None, 5.0])
def test_workers_that_are_all_dead_end_the_run_with_an_error(servers: float | None):
    """And not with silence, nor with servers that fail on and on."""
    failures = FailuresConfig(worker_mtbf_seconds=1, server_mtbf_seconds=servers)

    with pytest.raises(ConfigError, match="does not end: 4 of 4 workers have failed for good"):
        failing(DownpourConfig(), failures)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_waiting_for_the_dead_is_refused(name: str):
    """At the door, where one dead worker is enough for all to wait; and if it gets past it."""
    failures = FailuresConfig(worker_mtbf_seconds=9)
    emulation = EmulationConfig(algorithm=SYNCHRONOUS[name], workers=4, failures=failures)

    with pytest.raises(ConfigError, match="worker_restart_seconds is missing: others wait"):
        emulated_run(replace(CONFIG, emulation=emulation))
    with pytest.raises(ConfigError, match="the run does not end"):
        failing(SYNCHRONOUS[name], failures)
