""" "ImageNet in 1 Hour" (Goyal et al. 2017, arXiv 1706.02677), remark by remark, each held against
a computation of its own in NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import scalejax
from scalejax.config.data import SyntheticImagesConfig
from scalejax.config.model import ResNetConfig
from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.optimizers import build_optimizer
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.schedules import learning_rate_schedule
from scalejax.training.step import build_step, init_state

EXAMPLE = Path(scalejax.__file__).parent / "config" / "examples" / "resnet50_goyal2017.toml"
DATA = {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 4}


def run_of(model, *, layout, global_batch=32, devices=8, loss=None, microbatches=1) -> Any:
    """A run with plain gradient steps of 0.5 and a decay of 0.1."""
    tables = {
        "model": model,
        "data": {**DATA, "train_examples": 64, "test_examples": 8},
        "batch": {"global_batch": global_batch, "microbatches": microbatches},
        "optimizer": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.1},
        "schedule": {"base_learning_rate": 0.5},
        "layout": layout,
        "loss": loss or {},
    }
    return resolve(build(RunConfig, tables), devices)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    """Random images and classes."""
    draw = np.random.default_rng(0)
    return {
        "inputs": draw.integers(0, 256, (rows, 8, 8, 1)).astype(np.uint8),
        "targets": draw.integers(0, 4, (rows,)).astype(np.int32),
    }


def one_update(run, batch) -> tuple[float, Any, Any]:
    """The loss, and the parameters before and after an update."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    before = jax.tree.map(np.asarray, state.params)
    placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
    state, metrics = step.function(state, placed)
    return float(metrics["loss"]), before, jax.tree.map(np.asarray, state.params)


def scheduled(warmup: str, steps_per_epoch: int) -> np.ndarray:
    """The published rates at 8192 images, step by step, for 90 epochs."""
    rates, eta, k = [], 0.1, 32
    for step in range(90 * steps_per_epoch):
        epoch = step / steps_per_epoch
        rate = eta * k * 0.1 ** sum(epoch >= boundary for boundary in (30, 60, 80))
        if warmup != "none" and epoch < 5:
            increment = (eta * k - eta) / (5 * steps_per_epoch) if warmup == "gradual" else 0.0
            rate = eta + increment * step
        rates.append(rate)
    return np.asarray(rates)


@pytest.mark.parametrize("warmup", ["gradual", "constant", "none"])
def test_the_schedule_of_8192_images(warmup):
    """0.1 times 32; five epochs from 0.1 by equal increments, at 0.1, or not at all; /10 at 30,
    60 and 80."""
    fields = {"schedule.warmup": warmup, "schedule.warmup_epochs": 0 if warmup == "none" else 5}
    run = resolve(load_config(EXAMPLE, fields), 256)
    schedule = learning_rate_schedule(
        run.config.schedule,
        global_batch=run.split.global_batch,
        steps_per_epoch=run.steps_per_epoch,
        total_steps=run.total_steps,
    )

    assert (run.split.global_batch, run.steps_per_epoch) == (8192, 156)
    np.testing.assert_allclose(
        schedule(np.arange(run.total_steps)), scheduled(warmup, 156), rtol=1e-5
    )


def in_numpy(params, batch, smoothing: float, z_loss: float = 0.0) -> tuple[float, Any]:
    """Loss and parameters after an update of a network of one hidden layer."""
    about = read_facts(SyntheticImagesConfig(**{k: v for k, v in DATA.items() if k != "name"}))  # type: ignore[arg-type]
    x = ((batch["inputs"] / 255.0 - about.pixel_mean) / about.pixel_std).reshape(-1, 64)
    first, last = params["layers"][0], params["layers"][1]
    before = x @ first["kernel"] + first["bias"]
    hidden = np.maximum(before, 0)
    logits = hidden @ last["kernel"] + last["bias"]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = np.eye(4)[batch["targets"]] * (1 - smoothing) + smoothing / 4
    loss = float(-(wanted * np.log(shares)).sum(1).mean())
    log_sum = np.log(np.exp(logits).sum(1, keepdims=True))
    loss += z_loss * float((log_sum**2).mean())
    slope = shares - wanted + 2 * z_loss * log_sum * shares
    slope = slope / len(x)  # of the mean over the whole minibatch of kn
    inner = (slope @ last["kernel"].T) * (before > 0)
    changed = {
        0: (x.T @ inner, inner.sum(0)),
        1: (hidden.T @ slope, slope.sum(0)),
    }
    after = {
        index: {
            # decayed beside the loss, and weights alone
            "kernel": params["layers"][index]["kernel"] * (1 - 0.5 * 0.1) - 0.5 * kernel,
            "bias": params["layers"][index]["bias"] - 0.5 * bias,
        }
        for index, (kernel, bias) in changed.items()
    }
    return loss, after


@pytest.mark.parametrize(
    ("mode", "microbatches", "smoothing", "z_loss"),
    [("jit", 1, 0.0, 0.0), ("jit", 2, 0.1, 0.0), ("shard_map", 1, 0.1, 0.2)],
)
def test_the_loss_is_normalised_by_the_whole_minibatch(mode, microbatches, smoothing, z_loss):
    """Remark 3, on 8 devices; remark 1's decay of weights, and of no bias; smoothed targets, and
    the z-loss of PaLM."""
    run = run_of(
        {"name": "mlp", "hidden": [16]},
        layout={"mode": mode},
        loss={"label_smoothing": smoothing, "z_loss": z_loss},
        microbatches=microbatches,
    )
    batch = batch_of(32)
    loss, before, after = one_update(run, batch)
    expected_loss, expected = in_numpy(before, batch, smoothing, z_loss)

    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for index, layer in expected.items():
        for name, values in layer.items():
            found = after["layers"][index][name]
            np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-6)


def test_evaluation_has_plain_targets():
    """Smoothing is of training alone."""
    run = run_of(
        {"name": "mlp", "hidden": [16]}, layout={}, loss={"label_smoothing": 0.1}, devices=1
    )
    mesh, batch = build_mesh(run.layout), batch_of(32)
    evaluation, state = build_evaluation(run, mesh), init_state(run, mesh)
    sums = evaluation.function(
        *evaluation.weights(state), batch | {"mask": np.ones(32, np.float32)}
    )

    expected, _ = in_numpy(jax.tree.map(np.asarray, state.params), batch, 0.0)
    assert float(sums["loss_sum"]) / 32 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("devices", [2, 8])
def test_batch_norm_keeps_its_n_while_devices_change(devices):
    """n = 4 on any number of devices: the loss is the mean of those of the groups of 4, each
    computed as a minibatch of its own (section 2.3)."""
    model, batch = {"name": "cnn", "channels": [8]}, batch_of(32)
    layout = {"data": devices, "bn_scope": "local", "bn_group_size": 4}

    loss, *_ = one_update(run_of(model, layout=layout, devices=devices), batch)

    assert loss == pytest.approx(of_groups_alone(4), rel=1e-5)


@functools.cache
def of_groups_alone(size: int) -> float:
    """The mean loss of the parts of the batch, each a minibatch of its own on one device."""
    run = run_of({"name": "cnn", "channels": [8]}, layout={}, global_batch=size, devices=1)
    mesh, batch, losses = build_mesh(run.layout), batch_of(32), []
    step = build_step(run, mesh)
    for at in range(0, 32, size):
        part = {name: jnp.asarray(rows[at : at + size]) for name, rows in batch.items()}
        _, metrics = step.function(init_state(run, mesh), part)
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses))


def test_a_group_of_batch_norm_may_span_devices():
    """n = 16 over devices with 4 samples each: four devices share statistics."""
    layout = {"bn_scope": "local", "bn_group_size": 16}

    loss, *_ = one_update(run_of({"name": "cnn", "channels": [8]}, layout=layout), batch_of(32))

    assert loss == pytest.approx(of_groups_alone(16), rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"bn_group_size": 12}, r"divide the 4 samples .* or be a multiple of them"),
        ({"bn_group_size": 8, "mode": "shard_map"}, 'statistics of several need layout.mode="jit"'),
        ({"bn_running": "in_turn", "mode": "shard_map"}, 'it needs layout.mode="jit"'),
    ],
)
def test_impossible_groups_are_refused(layout, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        run_of({"name": "cnn"}, layout={"bn_scope": "local", **layout})


@pytest.fixture(scope="module")
def resnet_params() -> Any:
    """Initial parameters of ResNet-18."""
    return params_of(ResNetConfig(name="resnet18"))


def params_of(config: ResNetConfig) -> Any:
    """Initial parameters of a ResNet for small images."""
    data = read_facts(SyntheticImagesConfig(image_size=32, channels=3, classes=10))

    network = build_network(config, data, bn=BatchNormScope(), rngs=nnx.Rngs(0))
    return nnx.to_pure_dict(nnx.state(network, nnx.Param))


def scales(params: Any) -> dict[str, float]:
    """The one value of the scale of each BatchNorm, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    found = {path: np.unique(leaf) for path, leaf in paths.items() if path.endswith("norm/scale")}
    assert all(len(values) == 1 for values in found.values())
    return {path: float(values[0]) for path, values in found.items()}


@pytest.mark.slow
def test_the_last_batch_norm_of_each_residual_block_starts_at_zero(resnet_params):
    """gamma = 0 in 8 of the 20, the second of each block; 1 in all others (section 5.1)."""
    found = scales(resnet_params)
    zero = {path for path, value in found.items() if value == 0}

    assert len(found) == 20
    assert zero == {f"blocks/{block}/units/1/norm/scale" for block in range(8)}
    assert all(found[path] == 1 for path in found.keys() - zero)


@pytest.mark.slow
def test_gamma_can_start_at_one():
    """The paper's ablation (table 2b)."""
    found = scales(params_of(ResNetConfig(name="resnet18", zero_gamma=False)))

    assert set(found.values()) == {1.0}


@pytest.mark.slow
def test_batch_norm_and_biases_are_not_decayed(resnet_params):
    """Without a gradient, 20 convolutions and the last layer shrink, and nothing else moves."""
    config = load_config(EXAMPLE).optimizer
    optimizer = build_optimizer(config, lambda _: jnp.asarray(1.0), hidden=HiddenMatrices(()))
    zeros = jax.tree.map(jnp.zeros_like, resnet_params)
    updates, _ = optimizer.update(zeros, optimizer.init(resnet_params), resnet_params)

    leaves, _ = jax.tree_util.tree_flatten_with_path(updates)
    moved = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if leaf.any()
    ]
    assert len(moved) == 21
    assert all(path.endswith("/kernel") for path in moved)
