"""Parts of a network that learn: the rest stays, costs nothing backward, and rates are exact."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.state import TrainState
from scalejax.training.step import build_step, init_state
from scalejax.xla.cache import _path, case_key
from scalejax.xla.compiled import read_step
from scalejax.xla.job import RunJob
from scalejax.xla.target import target_for

ROWS, UPDATES = 16, 3
MLP = {"name": "mlp", "hidden": [32, 24]}
CNN = {"name": "cnn", "channels": [8, 16]}


def run_of(
    fine_tuning=None, *, model=MLP, optimizer=None, rate=0.1, layout=None, microbatches=1, **tables
):
    """A small run on random images."""
    tables = {
        "model": model,
        "data": {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 8}
        | {"train_examples": ROWS * UPDATES, "test_examples": 10},
        "batch": {"global_batch": ROWS, "microbatches": microbatches},
        "optimizer": optimizer or {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-2},
        "schedule": {"base_learning_rate": rate, "scaling": "none", "warmup": "none"}
        | {"decay": "constant"},
        "layout": layout or {"data": 1},
    } | tables
    if fine_tuning is not None:
        tables["fine_tuning"] = fine_tuning
    return resolve(build(RunConfig, tables))


def trained(run) -> tuple[TrainState, TrainState, list[float]]:
    """The state before and after some updates, in NumPy, and the losses."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    before = jax.tree.map(np.array, state)
    generator, losses = np.random.default_rng(0), []
    for _ in range(UPDATES):
        inputs = generator.integers(0, 256, (ROWS, *run.dataset.input_shape)).astype(np.uint8)
        batch = {"inputs": inputs, "targets": generator.integers(0, 8, ROWS).astype(np.int32)}
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, metrics = step.function(state, placed)
        losses.append(float(metrics["loss"]))
    return before, jax.tree.map(np.array, state), losses


def assert_close(ours, theirs, rtol=1e-5):
    """Two trees of parameters, to rounding."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * np.abs(other).max())


def test_only_what_is_named_learns_and_nothing_is_kept_for_the_rest():
    """ "layers/2" is the last layer; no gradient, no momentum and no decay touch the others."""
    before, after, _ = trained(run_of({"trainable": ["layers/2"]}))

    for index in (0, 1):
        for name, value in before.params["layers"][index].items():
            np.testing.assert_array_equal(after.params["layers"][index][name], value)
    assert np.abs(after.params["layers"][2]["kernel"] - before.params["layers"][2]["kernel"]).max()
    kept = [leaf for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert sorted(leaf.shape for leaf in kept) == [(8,), (24, 8)]


def test_what_learns_learns_as_it_does_by_hand():
    """The last layer is a softmax regression on what the others make of the images."""
    run = run_of({"trainable": ["layers/2"]}, optimizer={"name": "sgd", "momentum": 0.0})
    before, after, losses = trained(run)
    generator, dataset = np.random.default_rng(0), run.dataset
    layers = [
        {k: v.astype(np.float64) for k, v in x.items()} for x in before.params["layers"].values()
    ]
    for loss in losses:
        hidden = generator.integers(0, 256, (ROWS, *dataset.input_shape)).astype(np.uint8)
        hidden = (hidden / 255 - dataset.pixel_mean) / dataset.pixel_std
        hidden = hidden.reshape(ROWS, -1)
        targets = generator.integers(0, 8, ROWS)
        for layer in layers[:2]:
            hidden = np.maximum(hidden @ layer["kernel"] + layer["bias"], 0)
        logits = hidden @ layers[2]["kernel"] + layers[2]["bias"]
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert loss == pytest.approx(-np.log(shares[np.arange(ROWS), targets]).mean(), rel=1e-5)
        error = (shares - np.eye(8)[targets]) / ROWS
        layers[2]["kernel"] -= 0.1 * hidden.T @ error
        layers[2]["bias"] -= 0.1 * error.sum(0)

    assert_close(after.params["layers"][2], layers[2])


PART = {"trainable": ["layers/1", "layers/2"], "rate_factors": {"layers/1": 0.5}}


@functools.cache
def part_on_one_device() -> tuple[TrainState, TrainState, list[float]]:
    """`trained` of a run in which `PART` learns."""
    return trained(run_of(PART))


@pytest.mark.slow_except("layout1-1", "layout2-2")
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        ({"data": 8}, 2),
        ({"data": 8, "mode": "shard_map"}, 1),
        ({"data": 4, "zero_stage": 2}, 2),
        ({"data": 1, "fsdp": 4}, 1),
        ({"data": 2, "tensor": 2}, 2),
    ],
)
def test_every_layout_trains_the_same_part(layout, microbatches):
    """As one device does."""
    _, ours, losses = trained(run_of(PART, layout=layout, microbatches=microbatches))
    _, theirs, expected = part_on_one_device()

    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(ours.params, theirs.params)


@pytest.mark.slow_except("optimizer0", "optimizer1", "optimizer3")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-2},
        {"name": "sgd", "momentum": 0.9, "momentum_form": "rate_inside"},
        {"name": "adamw", "weight_decay": 1e-2},
        {"name": "adagrad", "initial_accumulator": 0.1},
        {"name": "lars", "trust_coefficient": 0.01},
        {"name": "lamb", "variant": "nvlamb"},
    ],
)
def test_a_factor_is_a_learning_rate_of_its_own(optimizer):
    """With all parts at a quarter, the run is that with a quarter of the rate."""
    quarter = {"rate_factors": {"layers": 0.25}}
    _, ours, losses = trained(run_of(quarter, optimizer=optimizer, rate=0.04))
    _, theirs, expected = trained(run_of(optimizer=optimizer, rate=0.01))

    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_close(ours.params, theirs.params, rtol=1e-6)


def test_the_longest_name_counts_and_names_are_taken_whole():
    """A factor of one layer beats that of all, and others have the rate itself."""
    sgd = {"name": "sgd", "momentum": 0.0}
    factors = {"rate_factors": {"layers": 0.5, "layers/1/bias": 2.0}}
    plain_before, plain, _ = trained(run_of(optimizer=sgd, train={"epochs": 1}))
    run = run_of(factors, optimizer=sgd)
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (ROWS, *run.dataset.input_shape)).astype(np.uint8)
    batch = {"inputs": inputs, "targets": generator.integers(0, 8, ROWS).astype(np.int32)}
    placed = jax.tree.map(lambda rows, like: jax.device_put(rows, like.sharding), batch, step.batch)
    slow, _ = step.function(state, placed)
    unscaled = build_step(run_of(optimizer=sgd), mesh)
    full, _ = unscaled.function(init_state(run_of(optimizer=sgd), mesh), placed)

    for index, name, factor in ((0, "kernel", 0.5), (1, "kernel", 0.5), (1, "bias", 2.0)):
        begin = plain_before.params["layers"][index][name]
        moved, expected = (each.params["layers"][index][name] - begin for each in (slow, full))
        np.testing.assert_allclose(moved, factor * expected, rtol=1e-3, atol=1e-7)
    assert plain.step == UPDATES


def test_batch_norm_that_does_not_learn_is_that_of_evaluation():
    """Its running statistics stay, and the loss of training is that of evaluation."""
    last = {"trainable": ["head"]}
    run = run_of(last, model=CNN)
    before, after, losses = trained(run)
    mesh = build_mesh(run.layout)
    evaluation, generator = build_evaluation(run, mesh), np.random.default_rng(0)
    batch = {
        "inputs": generator.integers(0, 256, (ROWS, *run.dataset.input_shape)).astype(np.uint8),
        "targets": generator.integers(0, 8, ROWS).astype(np.int32),
        "mask": np.ones(ROWS, np.float32),
    }
    sums = evaluation.function(before.params, before.model_state, batch)

    for ours, theirs in zip(
        jax.tree.leaves(after.model_state), jax.tree.leaves(before.model_state), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert losses[0] == pytest.approx(float(sums["loss_sum"]) / ROWS, rel=1e-5)


@pytest.mark.parametrize("learning", [["head"], ["head", "norms/1"]])
def test_frozen_batch_norm_of_an_average_keeps_its_statistics(learning):
    """Those of others are taken anew, after layers that are normalised by the frozen ones."""
    swa = {"name": "swa", "start_epoch": 0}
    run = run_of({"trainable": learning}, model=CNN, averaging=swa)
    mesh = build_mesh(run.layout)
    evaluation, state = build_evaluation(run, mesh), init_state(run, mesh)
    if learning == ["head"]:
        assert evaluation.statistics is None
        return
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 8, 1)).astype(np.uint8)
    batch = {"inputs": images, "targets": np.zeros(ROWS, np.int32)}
    params, model_state = evaluation.weights(state)
    frozen, other = evaluation.statistics(params, model_state, batch)["norms"].values()

    np.testing.assert_array_equal(frozen["mean"], np.zeros(8))
    np.testing.assert_array_equal(frozen["var"], np.ones(8))
    assert (np.abs(other["mean"]) > 1e-3).all()
    assert (np.abs(other["var"] - 1) > 1e-3).all()


def test_what_is_frozen_costs_no_backward_pass():
    """FLOP of the compiled step and of its model, by hand: products forward, one backward."""
    run = run_of({"trainable": ["layers/2"]})
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)
    forward = 2 * ROWS * (64 * 32 + 32 * 24 + 24 * 8)
    gradient_of_kernel = 2 * ROWS * 24 * 8

    products = sum(item.flop * times for item, times in program.walk() if item.kind == "matmul")
    assert program.model_flop == forward + gradient_of_kernel
    assert products == forward + gradient_of_kernel


@pytest.mark.slow  # compiles several networks
def test_what_is_computed_again_is_no_work_of_the_model():
    """FLOP of the model by hand, whatever the backward pass computes again: the blocks three times
    their forward pass, the head, whose kernel stays, twice its own."""
    gpt = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 2, "attention": "unfused"}
    tokens = {"name": "synthetic_tokens", "tokens": 16, "vocabulary": 64}
    tokens |= {"train_examples": ROWS * UPDATES, "test_examples": 10}
    block = 2 * ROWS * 16 * 12 * 32**2 + 2 * 2 * ROWS * 16**2 * 32
    head = 2 * ROWS * 16 * 32 * 64

    for remat in ("none", "selective_op", "full"):
        run = run_of({"trainable": ["blocks"]}, model=gpt | {"remat": remat}, data=tokens)
        mesh = build_mesh(run.layout)
        step = build_step(run, mesh)
        program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)
        assert program.model_flop == 3 * 2 * block + 2 * head


def test_the_average_of_schedule_free_is_of_what_learns():
    """Evaluated parameters: the others are as they were."""
    run = run_of({"trainable": ["layers/2"]}, optimizer={"name": "schedule_free"})
    before, after, _ = trained(run)
    params, _ = build_evaluation(run, build_mesh(run.layout)).weights(after)

    np.testing.assert_array_equal(
        params["layers"][0]["kernel"], before.params["layers"][0]["kernel"]
    )
    assert np.abs(params["layers"][2]["kernel"] - before.params["layers"][2]["kernel"]).max() > 0


@pytest.mark.parametrize(
    ("fine_tuning", "message"),
    [
        ({}, r"fine_tuning\.trainable=\[\] .*name parts"),
        ({"rate_factors": {"head": 0.0}}, r"fine_tuning\.rate_factors\.head=0\.0 .*above 0"),
        ({"trainable": ["head"]}, r"fine_tuning\.trainable='head' .*one of layers"),
        ({"trainable": ["layers/7"]}, r"fine_tuning\.trainable='layers/7' .*layers/0/bias"),
        (
            {"trainable": ["layers/2"], "rate_factors": {"layers/0": 0.1}},
            r"fine_tuning\.rate_factors='layers/0' .*all of it is frozen",
        ),
    ],
)
def test_parts_that_are_none_are_refused(fine_tuning, message):
    """Before anything is computed, naming what there is."""

    def build_it():
        run = run_of(fine_tuning)
        return build_step(run, build_mesh(run.layout))

    with pytest.raises(ConfigError, match=message):
        build_it()


def test_rates_that_an_average_would_not_know_are_refused():
    """Schedule-free weighs its average by the one rate."""
    with pytest.raises(ConfigError, match=r"fine_tuning\.rate_factors=.*averages by one rate"):
        run_of({"rate_factors": {"layers": 0.1}}, optimizer={"name": "schedule_free"})


def test_without_fine_tuning_nothing_changes():
    """Naming every part is naming none."""
    everything = run_of({"trainable": ["layers"]})
    nothing = resolve(replace(everything.config, fine_tuning=None))

    assert_close(trained(everything)[1].params, trained(nothing)[1].params, rtol=0)


def test_a_program_is_remembered_with_what_learns_of_it():
    """A prediction with parts that stay does not take the program of one where all learns."""
    target = target_for(load_cluster("dgx-h100"), 1, "cpu")
    runs = run_of(), run_of({"trainable": ["layers/2"]}), run_of({"trainable": ["layers/1"]})

    jobs = [RunJob(target=target, run=run) for run in runs]

    assert len({_path(Path(), job) for job in jobs}) == 3
    assert len({case_key(job) for job in jobs}) == 3
