"""Averages of parameters: closed forms, what is evaluated, and a run that is resumed."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.training.evaluation import Evaluation, build_evaluation, trained_weights
from scalejax.training.gradients import normalised
from scalejax.training.mesh import build_mesh
from scalejax.training.optimizers.averaging import averaged
from scalejax.training.record import RunRecord
from scalejax.training.reporter import Silent
from scalejax.training.signals import Interrupted
from scalejax.training.step import build_step, init_state
from scalejax.training.train import train

TABLES: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16]},
    "data": {
        "name": "synthetic_images",
        "image_size": 8,
        "channels": 1,
        "classes": 4,
        "train_examples": 40,
        "test_examples": 12,
    },
    "batch": {"global_batch": 8},  # 5 steps an epoch
    "optimizer": {"name": "adamw"},
    "schedule": {"base_learning_rate": 0.01},
    "train": {"epochs": 3, "log_every_steps": 1},
}


def run_of(averaging, **others):
    """A run of 15 updates."""
    return resolve(build(RunConfig, TABLES | {"averaging": averaging} | others), 1)


CNN: dict[str, Any] = TABLES | {"model": {"name": "cnn", "channels": [4]}}


def averages(averaging, weights):
    """The average after each update, of weights that are given."""
    run, average, found = run_of(averaging), jnp.asarray(weights[0], jnp.float32), []
    for step, weight in enumerate(weights[1:], start=1):
        average = averaged(run, jnp.int32(step), average, jnp.asarray(weight, jnp.float32))
        found.append(float(average))
    return found


def test_an_exponential_average_has_its_closed_form():
    """From 1 at weights of 0: decay to the power of the updates."""
    found = averages({"name": "ema", "decay": 0.9}, [1.0] + [0.0] * 8)

    assert found == pytest.approx([0.9**t for t in range(1, 9)])


def test_an_exponential_average_that_warms_up():
    """After t updates at most (1 + t) / (10 + t) is kept: 2/11, 3/12, ..."""
    found = averages({"name": "ema", "decay": 0.3, "warms_up": True}, [1.0] + [0.0] * 4)

    assert found == pytest.approx(np.cumprod([2 / 11, 3 / 12, 0.3, 0.3]))


def test_an_equal_average_takes_one_in_so_many():
    """From epoch 1 (step 5) every 0.6 epochs (3 steps): 5, 8, 11, 14; until then the weights."""
    weights = list(np.random.default_rng(0).normal(size=16))

    found = averages({"name": "swa", "start_epoch": 1, "every_epochs": 0.6}, weights)

    assert found[:5] == pytest.approx(weights[1:6])
    for step in range(6, 16):
        taken = [weights[at] for at in (5, 8, 11, 14) if at <= step]
        assert found[step - 1] == pytest.approx(np.mean(taken), rel=1e-5)


def test_averages_are_of_the_weights_that_training_has():
    """Step by step beside the parameters, on 8 devices that keep them in parts; while it warms up
    the average keeps 2/11, 3/12, 4/13 and 5/14 of what it was."""
    tables: Any = TABLES | {"averaging": {"name": "ema", "decay": 0.5, "warms_up": True}}
    run = resolve(build(RunConfig, tables | {"layout": {"data": 2, "fsdp": 4}}), 8)
    step, state = build_step(run, build_mesh(run.layout)), init_state(run, build_mesh(run.layout))
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    draw = np.random.default_rng(0)
    for kept in (2 / 11, 3 / 12, 4 / 13, 5 / 14):
        batch = {
            "inputs": draw.integers(0, 256, (8, 8, 8, 1)).astype(np.uint8),
            "targets": draw.integers(0, 4, (8,)).astype(np.int32),
        }
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, _ = step.function(state, placed)
        now = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
        expected = [kept * old + (1 - kept) * new for old, new in zip(expected, now, strict=True)]

    found = jax.tree.leaves(state.average["params"])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-5, atol=1e-7)
    like = jax.tree.leaves(state.params)
    assert [a.sharding for a in found] == [p.sharding for p in like]


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_what_is_evaluated_is_the_average_if_asked(is_evaluated):
    """And the parameters themselves otherwise."""
    run = run_of({"name": "ema", "is_evaluated": is_evaluated})
    mesh = build_mesh(run.layout)
    state = init_state(run, mesh)
    state = replace(state, average=jax.tree.map(lambda leaf: leaf + 1, state.average))

    params, _ = build_evaluation(run, mesh).weights(state)

    expected = state.average["params"] if is_evaluated else state.params
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, expected))


def final_weights(folder: Path) -> list[np.ndarray]:
    """The arrays that a run ended with."""
    tree = trained_weights(resolve(load_config(folder / "run.toml"), 1), folder)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow_except("ema", "schedule-free")
@pytest.mark.parametrize(
    "setup",
    [
        {"averaging": {"name": "ema", "decay": 0.8}},
        {"averaging": {"name": "swa", "start_epoch": 0.8, "every_epochs": 0.4}},
        {"optimizer": {"name": "schedule_free"}},
        {"optimizer": {"name": "sgd", "momentum_form": "rate_inside_corrected"}},
    ],
    ids=["ema", "swa", "schedule-free", "momentum correction"],
)
def test_a_resumed_run_ends_with_the_same_bits(setup, tmp_path):
    """One epoch, then the other two: evaluations and final weights are those of one stretch."""
    config = build(RunConfig, TABLES | setup)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, whole, device_count=1, reporter=Silent())
    first = replace(config, train=replace(config.train, epochs=1))
    train(first, parts, device_count=1, reporter=Silent())
    train(config, parts, device_count=1, resume=True, reporter=Silent())

    tests = [
        [(each.test_loss, each.test_accuracy) for each in RunRecord.load(folder).evaluations]
        for folder in (whole, parts)
    ]
    assert tests[0] == tests[1]
    for ours, theirs in zip(final_weights(whole), final_weights(parts), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "average",
    [
        {"averaging": {"name": "swa", "start_epoch": 1}},
        {"optimizer": {"name": "schedule_free"}},
    ],
    ids=["swa", "schedule_free"],
)
def test_averages_have_batch_norm_statistics_of_their_own(average, tmp_path):
    """Those of the first layer by hand: its convolution of the images of each batch of an epoch,
    by the average that the run ends with. Two runs of a network with BatchNorm are compiled."""
    config = build(RunConfig, CNN | average)
    train(config, tmp_path / "run", device_count=2, reporter=Silent())
    run = resolve(config, 2)
    weights = trained_weights(run, tmp_path / "run")
    kernel = jnp.asarray(weights["params"]["convolutions"][0]["kernel"])
    source = open_source(config.data, "train", seed=0)
    order, moments = np.random.default_rng([0, 0]).permutation(40), []
    for at in range(0, 40, 8):
        images = source.take(order[at : at + 8])["inputs"]
        made = _convolved(normalised(jnp.asarray(images), run.dataset), kernel)
        moments.append([made.mean((0, 1, 2)), made.var((0, 1, 2))])
    mean, var = np.mean(np.asarray(moments), axis=0)

    norm = weights["model_state"]["norms"][0]
    np.testing.assert_allclose(norm["mean"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm["var"], var, rtol=1e-4, atol=1e-5)


def test_statistics_are_of_microbatches_in_which_a_row_counts():
    """As in training, rows i and i + 4 are a microbatch of four, and only rows 0, 1 and 6 count."""
    run = run_of(
        {"name": "swa", "start_epoch": 1},
        model={"name": "cnn", "channels": [4]},
        batch={"global_batch": 8, "microbatches": 4},
        input={"unreadable": "skip"},
    )
    mesh = build_mesh(run.layout)
    evaluation, state = build_evaluation(run, mesh), init_state(run, mesh)
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1)).astype(np.uint8)
    weights = np.asarray([1, 1, 0, 0, 0, 0, 1, 0], np.float32)
    batch = {"inputs": images, "targets": np.zeros(8, np.int32), "weights": weights}
    found = evaluation.statistics(*evaluation.weights(state), batch)["norms"][0]

    kernel = state.params["convolutions"][0]["kernel"]
    made = _convolved(normalised(jnp.asarray(images), run.dataset), kernel)[np.asarray([0, 1, 6])]
    np.testing.assert_allclose(found["mean"], made.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["var"], made.var((1, 2)).mean(0), rtol=1e-4, atol=1e-5)


def _convolved(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        images, kernel, (2, 2), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_a_signal_stops_the_pass_for_statistics(tmp_path, monkeypatch):
    """After its first batch, not after an epoch; and once they are taken at the last step they are
    those of validation, test and weights."""
    config = build(RunConfig, CNN | {"averaging": {"name": "swa", "start_epoch": 1}})
    passes, real = [], Evaluation.__init__

    def counting(self: Evaluation, **fields: Any) -> None:
        statistics = fields["statistics"]

        def counted(*arguments: Any) -> Any:
            passes.append(len(passes))
            if len(passes) == 6 and stops:
                os.kill(os.getpid(), signal.SIGTERM)
            return statistics(*arguments)

        changed: dict[str, Any] = fields | {"statistics": counted}
        real(self, **changed)

    monkeypatch.setattr(Evaluation, "__init__", counting)
    stops = True
    with pytest.raises(Interrupted) as stopped:
        train(config, tmp_path, device_count=1, reporter=Silent())
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(passes) == 6  # an epoch has 5 batches

    stops = False
    train(config, tmp_path, device_count=1, resume=True, reporter=Silent())
    assert len(passes) == 6 + 5 + 5


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"averaging": {"name": "ema", "decay": 1.0}}, r"averaging\.decay=1\.0 is refused"),
        ({"averaging": {"name": "swa", "start_epoch": 1, "every_epochs": 0}}, "it must be above 0"),
        (
            {"averaging": {"name": "swa", "start_epoch": 3}},
            r"averaging\.start_epoch=3\.0 is refused: it must be below train\.epochs=3, such as 2",
        ),
        (
            {"optimizer": {"name": "schedule_free"}, "averaging": {"name": "ema"}},
            "averages already; leave it out",
        ),
        (
            {
                "optimizer": {"name": "schedule_free"},
                "schedule": {"base_learning_rate": 0.1, "decay": "cosine"},
            },
            'use schedule.decay="constant"',
        ),
        ({"loss": {"label_smoothing": 1.0}}, r"loss\.label_smoothing=1\.0 is refused"),
    ],
)
def test_impossible_averages_are_refused(tables, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, TABLES | tables)
