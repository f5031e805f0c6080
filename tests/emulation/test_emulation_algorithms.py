"""Every algorithm, with the gradients of a real network: its limits are those of one device."""

from typing import Any

import pytest
from emulate_cases import config, durations

from scalejax.config.emulation import (
    DownpourConfig,
    EasgdConfig,
    EmulatedLocalSgdConfig,
    EmulationConfig,
)
from scalejax.config.run import resolve
from scalejax.core.serialization import build
from scalejax.emulation.record import Emulation
from scalejax.emulation.run import emulate_run
from scalejax.training.record import EvaluationMeasurement, Measurement, TrainMeasurement

ADAMW = {"optimizer": {"name": "adamw"}, "schedule": {"base_learning_rate": 0.01}}
MOMENTUM = {"optimizer": {"name": "sgd"}, "schedule": {"base_learning_rate": 0.02}}


def emulated(
    algorithm: dict[str, Any], workers: int, run: dict[str, Any] | None = None, **emulation: Any
) -> tuple[Emulation, list[Measurement]]:
    """A tiny run by so many workers, and its record."""
    tables = {"algorithm": algorithm, "workers": workers, **emulation}
    lines: list[Measurement] = []
    made = emulate_run(
        resolve(config(**(run or {})), 1),
        build(EmulationConfig, tables),
        durations(latency_seconds=0.01),
        write=lines.append,
    )
    return made, lines


def losses(lines: list[Measurement]) -> list[float | None]:
    """Of training, line by line, and of the test data."""
    trained = [line.loss for line in lines if isinstance(line, TrainMeasurement)]
    return trained + [line.test_loss for line in lines if isinstance(line, EvaluationMeasurement)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float | None]]:
    """Losses of one device, by the optimizer."""
    runs = {"adamw": ADAMW, "momentum": MOMENTUM}
    return {
        name: losses(emulated({"name": "synchronous"}, 1, run)[1]) for name, run in runs.items()
    }


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        ({"name": "stale_synchronous", "staleness_bound": 3}, "adamw"),
        ({"name": "hogwild"}, "momentum"),
        ({"name": "local_sgd", "every_steps": 1}, "adamw"),
        ({"name": "local_sgd", "every_steps": 1, "begin_step": 7}, "momentum"),
    ],
    ids=["stale_synchronous", "hogwild", "local_sgd", "post_local_sgd"],
)
def test_one_worker_is_one_device(algorithm: dict, optimizer: str, alone: dict):
    """Whom it would wait for, or share with, there is not; bit for bit."""
    run = {"adamw": ADAMW, "momentum": MOMENTUM}[optimizer]

    _, lines = emulated(algorithm, 1, run)

    assert losses(lines) == alone[optimizer]


def test_average_of_every_step_trains_as_one_device(alone: dict):
    """Four workers with a quarter of every batch, and momentum of their own."""
    made, lines = emulated({"name": "local_sgd", "every_steps": 1}, 4, MOMENTUM)

    assert losses(lines) == pytest.approx(alone["momentum"], rel=1e-4)
    assert made.updates == 32


@pytest.mark.parametrize(("run", "optimizer"), [(ADAMW, "adamw"), (MOMENTUM, "momentum")])
def test_synchronous_steps_before_local_ones_train_as_one_device(
    run: dict, optimizer: str, alone: dict
):
    """Any optimizer, as its state is of the mean gradient; up to the first round."""
    _, lines = emulated({"name": "local_sgd", "every_steps": 4, "begin_step": 20}, 4, run)

    trained = [line.loss for line in lines if line.kind == "train"]
    assert trained[:20] == pytest.approx(alone[optimizer][:20], rel=1e-3)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "stale_synchronous", "staleness_bound": 1},
        {"name": "easgd", "period_steps": 2},
        {"name": "hogwild"},
        {"name": "local_sgd", "every_steps": 5, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_several_workers_learn_and_do_it_again(algorithm: dict):
    """The test loss falls; the same config, once more, gives the same figures bit for bit."""
    stragglers = {"distribution": "lognormal", "cv": 0.5}
    run = MOMENTUM | {"train": {"epochs": 2, "log_every_steps": 16}}
    runs = [emulated(algorithm, 4, run, server_shards=2, stragglers=stragglers) for _ in range(2)]

    (first, lines), (second, again) = runs
    assert losses(lines) == losses(again)
    assert first.staleness == second.staleness
    tested = [line.test_loss or 9.0 for line in lines if line.kind == "evaluation"]
    assert tested[-1] < tested[0]
    assert lines[-1].step == 32


def test_optimizer_of_a_worker_goes_by_the_steps_of_the_run():
    """Elastic workers have one each, which makes its part of all updates."""
    assert EasgdConfig().steps_per_update(workers=5) == 5
    assert EmulatedLocalSgdConfig().steps_per_update(workers=5) == 1
    assert DownpourConfig(n_push=3).steps_per_update(workers=5) == 3
