"""Who fails in a collective, or before it, keeps all others from its end."""

import pytest
from emulate_cases import config, durations
from least_squares_cases import emulated

from scalejax.config.emulation import (
    DelayedConfig,
    DownpourConfig,
    EmulatedLocalSgdConfig,
    EmulationConfig,
    FailuresConfig,
    StragglersConfig,
    SynchronousConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.emulation.checks import emulated_run, require_progress
from scalejax.emulation.run import emulate_run
from scalejax.emulation.virtual_cluster import VirtualCluster

ALGORITHMS = {
    "all_reduce": SynchronousConfig(),
    "local_sgd": EmulatedLocalSgdConfig(every_steps=1),
    "delayed": DelayedConfig(delayed="reads"),
}


class Given:
    """Times to failures of a worker that are given, one after the other; then none."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)

    def exponential(self, mean_seconds: float) -> float:
        """The next of them."""
        return self._left.pop(0) if self._left else 1e9


@pytest.mark.parametrize(
    ("fails_at", "ends_at"),
    [
        ([], 6.0),  # 1 s, and 3 s for the slow one; a collective of 2 s, fully exposed
        ([0.5], 6.0),  # back at 1 s, and done at 2 s
        ([2.5], 6.0),  # while it waits: again from 3 s to 4 s, as late as the slow one
        ([3.5], 7.0),  # while waiting, until 5 s
        ([5.0], 8.5),  # during the collective: again from 5.5 s to 6.5 s, and 2 s
        ([3.5, 2.0], 9.5),  # in both
    ],
)
def test_collective_needs_all_living_workers(fails_at: list[float], ends_at: float, monkeypatch):
    """Two workers, of 1 s and 4 s, and the faster fails at times that are given."""
    emulation = EmulationConfig(
        algorithm=SynchronousConfig(),
        workers=2,
        stragglers=StragglersConfig(slow_share=0.5, slow_factor=4.0),
        failures=FailuresConfig(worker_mtbf_seconds=1.0, worker_restart_seconds=0.5),
    )
    random, takes = VirtualCluster.random, durations(collective_seconds=2.0)
    fast = VirtualCluster(emulation, takes, seed=0)._slowness.index(1.0)

    def given(cluster: VirtualCluster, *name):
        if name[0] != "failures":
            return random(cluster, *name)
        return Given(*fails_at) if name[1] == fast else Given()

    monkeypatch.setattr(VirtualCluster, "random", given)

    assert emulated(emulation, 1, takes=takes).cluster.now == pytest.approx(ends_at)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_failures_change_the_time_and_not_the_parameters(name: str):
    """The same as without, later: by what all algorithms of collectives have."""
    failing, whole = (
        EmulationConfig(algorithm=ALGORITHMS[name], workers=3, failures=failures)
        for failures in (
            FailuresConfig(worker_mtbf_seconds=9, worker_restart_seconds=2),
            FailuresConfig(),
        )
    )
    takes = durations(collective_seconds=1.0, gradient_deviation_seconds=0.3)

    broken, expected = (emulated(each, 40, takes=takes) for each in (failing, whole))

    assert broken.cluster.worker_failures > 10
    assert (broken.params == expected.params).all()
    assert broken.cluster.now > expected.cluster.now


@pytest.mark.parametrize(
    ("algorithm", "workers", "mtbf_seconds", "is_refused"),
    [
        (EmulatedLocalSgdConfig(), 1, 3.4, True),  # 32 s at once: exp(32 / 3.4) = 12,000 tries
        (EmulatedLocalSgdConfig(every_steps=2), 1, 3.4, False),
        (SynchronousConfig(), 16, 2.0, True),  # ((2 + 1 + 1) / 2)^16 = 65,536
        (SynchronousConfig(), 8, 2.0, False),  # 256
        (SynchronousConfig(gradient_sync="parameter_server"), 16, 2.0, False),  # each by itself
        (DownpourConfig(), 4, 0.1, True),  # exp(10)
    ],
)
def test_rounds_that_nobody_lives_through_are_refused(
    algorithm, workers: int, mtbf_seconds: float, is_refused: bool
):
    """Before anything is computed; a gradient takes 1 s, and a restart 1 s."""
    failures = FailuresConfig(worker_mtbf_seconds=mtbf_seconds, worker_restart_seconds=1.0)
    asked = EmulationConfig(algorithm=algorithm, workers=workers, failures=failures)
    run, emulation = emulated_run(config(asked))

    if is_refused:
        with pytest.raises(ConfigError, match="tried more than 10000 times"):
            emulate_run(run, emulation, durations())
    else:
        require_progress(run, emulation, durations())
