"""Who fails in a collective, or before it, keeps all others from its end."""

import pytest
from emulate_cases import durations
from least_squares_cases import emulated

from scalejax.emulate.world import World
from scalejax.emulation_algorithms import DelayedConfig, LocalSgdConfig
from scalejax.emulation_config import (
    EmulationConfig,
    FailuresConfig,
    StragglersConfig,
    SynchronousConfig,
)

ALGORITHMS = {
    "all_reduce": SynchronousConfig(),
    "local_sgd": LocalSgdConfig(every_steps=1),
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
        ([], 6.0),  # 1 s, and 3 s for the slow one; an exchange of 2 s, hidden by nothing
        ([0.5], 6.0),  # back at 1 s, and done at 2 s
        ([2.5], 6.0),  # while it waits: again from 3 s to 4 s, as late as the slow one
        ([3.5], 7.0),  # likewise, until 5 s
        ([5.0], 8.5),  # in the exchange: again from 5.5 s to 6.5 s, and 2 s
        ([3.5, 2.0], 9.5),  # in both
    ],
)
def test_exchange_is_of_all_who_live(fails_at: list[float], ends_at: float, monkeypatch):
    """Two workers, of 1 s and 4 s, and the faster fails at times that are given."""
    config = EmulationConfig(
        algorithm=SynchronousConfig(),
        workers=2,
        stragglers=StragglersConfig(slow_share=0.5, slow_factor=4.0),
        failures=FailuresConfig(worker_mtbf_seconds=1.0, worker_restart_seconds=0.5),
    )
    random, takes = World.random, durations(exchange_seconds=2.0)
    fast = World(config, takes, seed=0)._slowness.index(1.0)

    def given(world: World, *name):
        if name[0] != "failures":
            return random(world, *name)
        return Given(*fails_at) if name[1] == fast else Given()

    monkeypatch.setattr(World, "random", given)

    assert emulated(config, 1, takes=takes).world.now == pytest.approx(ends_at)


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
    takes = durations(exchange_seconds=1.0, gradient_deviation_seconds=0.3)

    broken, expected = (emulated(each, 40, takes=takes) for each in (failing, whole))

    assert broken.world.worker_failures > 10
    assert (broken.params == expected.params).all()
    assert broken.world.now > expected.world.now
