"""One replica that waits for nothing is SGD, bit for bit."""

from typing import Any

import jax
import numpy as np
import pytest
from emulated_outcomes import CONFIG, emulated, run_of, same_bits

from scalejax.config.emulation import DownpourConfig, EmulationConfig, SynchronousConfig
from scalejax.config.run import with_fields
from scalejax.data.datasets import open_source
from scalejax.data.loader.sampler import TrainingSampler
from scalejax.models import BatchNormScope
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.gradients import gradients
from scalejax.training.mesh import build_mesh
from scalejax.training.record import RunFolder, figures
from scalejax.training.setup import train_setup
from scalejax.training.step import build_step, init_state
from scalejax.training.train import train

OPTIMIZERS = {  # plain SGD is that of one synchronous worker, below
    "decay": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adagrad": {"name": "adagrad"},
    "dean": {"name": "adagrad", "initial_accumulator": 0.0, "epsilon": 0.0},
}


@pytest.fixture(autouse=True, scope="module")
def optimized_programs():
    """Programs optimised as users have them: two programs of one update agree in their last bits
    where the compiler treats products and sums of both alike."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def trained(folder, fields: dict[str, Any]) -> tuple[list[tuple[Any, ...]], Any]:
    """Lines and final parameters of the run that is trained for real."""
    train(with_fields(CONFIG, fields), folder, device_count=1)
    lines = [
        ("train" if rate else "test", step, loss, accuracy)
        for step, loss, accuracy, rate in figures(folder)
    ]
    run = run_of(fields)
    with Checkpoints(RunFolder(path=folder).checkpoints, keep=1) as checkpoints:
        assert checkpoints.latest_step == run.total_steps
        state = build_step(run, build_mesh(run.layout)).state
        return lines, checkpoints.restore(run.total_steps, state).params


@pytest.mark.slow_except("decay")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_replica_trains_as_train_does(tmp_path, name: str):
    """The parameters and every loss of the real step, bit for bit, on one server."""
    fields = {"optimizer": OPTIMIZERS[name]}
    lines, params = trained(tmp_path, fields)

    found = emulated(EmulationConfig(algorithm=DownpourConfig()), fields=fields)

    assert same_bits(found.params, params)
    assert found.figures == lines


def test_one_replica_trains_on_the_images_that_train_does(tmp_path):
    """Cropped and mirrored at random, each epoch otherwise; those of the test as they are."""
    fields = {"input.augmentation": {"crop_area": [0.4, 1.0], "flip": True}}
    lines, params = trained(tmp_path, fields)

    found = emulated(EmulationConfig(algorithm=DownpourConfig()), fields=fields)

    assert same_bits(found.params, params)
    assert found.figures == lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[list[tuple[Any, ...]], Any]:
    """The run of plain SGD that is trained for real."""
    return trained(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.slow_except("parameter_server")
@pytest.mark.parametrize("gradient_sync", ["all_reduce", "parameter_server"])
def test_one_synchronous_worker_trains_as_train_does(plain, gradient_sync: Any):
    """One synchronous worker on three servers is plain SGD too, bit for bit."""
    lines, params = plain

    algorithm = SynchronousConfig(gradient_sync=gradient_sync)
    found = emulated(EmulationConfig(algorithm=algorithm, server_shards=3))

    assert same_bits(found.params, params)
    assert found.figures == lines


def by_the_book(fields: dict[str, Any], *, n: int, rate: float) -> tuple[list[float], Any]:
    """Losses and parameters of algorithm 7.1 of Dean et al. 2012, with n_fetch = n_push = n, for
    one replica and plain SGD on the server."""
    run = run_of(fields)
    mesh = build_mesh(run.layout)
    setup, source = train_setup(run, mesh), open_source(run.config.data, "train", seed=0)
    order = TrainingSampler(source, 8, seed=0, steps=run.total_steps, first_epoch=0)
    schedule, schedule_step = setup.schedule, 0
    server = local = jax.device_get(init_state(run, mesh).params)
    of_batch = jax.jit(lambda *at: gradients(setup, BatchNormScope(), at[0], {}, at[1], None))
    accrued = jax.tree.map(np.zeros_like, server)
    losses = []
    for step in range(run.total_steps + 1):  # the last push is of one minibatch too many
        if step % n == 0:
            local = server
        batch = source.take(order[step].indices, order[step].epoch)
        gradient, _, metrics = of_batch(local, batch)
        losses.append(float(metrics["loss"]))
        accrued = jax.tree.map(np.add, accrued, gradient)
        local = jax.tree.map(lambda p, g: p - rate * g, local, gradient)
        if step % n == 0:
            now = np.asarray(schedule(schedule_step * n))
            server = jax.tree.map(lambda p, g: p - now * g, server, accrued)  # noqa: B023
            accrued, schedule_step = jax.tree.map(np.zeros_like, server), schedule_step + 1
    return losses, server


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_fetching_and_pushing_every_second_minibatch_is_by_the_book(rate: float):
    """The losses of every minibatch, and what the server has in the end."""
    algorithm = DownpourConfig(n_fetch=2, n_push=2, local_learning_rate=rate)
    fields = {"train.epochs": 3}

    found = emulated(EmulationConfig(algorithm=algorithm, server_shards=2), fields=fields)

    losses, params = by_the_book(fields, n=2, rate=rate)
    # The push of minibatches 2k - 1 and 2k makes a line of the mean of both.
    ours = {step: loss for kind, step, loss, _ in found.figures if kind == "train"}
    book = {1: losses[0]} | {
        step + 1: (losses[step - 1] + losses[step]) / 2 for step in range(2, 36, 2)
    }
    assert len(book) == 18
    assert {step: ours[step] for step in book} == pytest.approx(book, rel=1e-5)
    for leaf, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)
