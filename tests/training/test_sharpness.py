"""The sharpness is the largest eigenvalue of the Hessian that was there, and its threshold is where
SGD stops to converge.

Tolerances. Against dense eigenvalues 1e-3 is asked for; 32 products on some hundred parameters give
1e-6, in float32 with sums in an order of the layout's own.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from test_noise_scale import CURVATURE, quadratic

from scalejax.config.optimizer import AdamWConfig, SgdConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.models import BatchNormScope
from scalejax.training.evaluation import build_evaluation
from scalejax.training.gradients import mean_loss
from scalejax.training.mesh import build_mesh
from scalejax.training.record import figures
from scalejax.training.reporter import Silent
from scalejax.training.setup import train_setup
from scalejax.training.sharpness import (
    build_sharpness,
    largest_eigenvalue,
    preconditioned_threshold,
    stability_threshold,
)
from scalejax.training.state import TrainState
from scalejax.training.step import init_state
from scalejax.training.trackers import tracked_values
from scalejax.training.train import train

RTOL = 1e-3
IMAGES = {
    "name": "synthetic_images",
    "image_size": 4,
    "channels": 1,
    "classes": 3,
    "train_examples": 256,
    "test_examples": 16,
}
MLP = {"name": "mlp", "hidden": [8]}
TOKENS = {
    "name": "synthetic_tokens",
    "vocabulary": 8,
    "tokens": 4,
    "train_examples": 64,
    "test_examples": 8,
}
MIXED = {"name": "mixture", "weights": [1.0, 3.0], "sources": [TOKENS, TOKENS]}
GPT = {"name": "gpt", "layers": 1, "hidden": 4, "heads": 2, "ffn_hidden": 8}


def config_of(model: dict[str, Any], data: dict[str, Any], layout: dict[str, Any]) -> RunConfig:
    """A tiny run that measures its sharpness."""
    return build(
        RunConfig,
        {
            "model": model,
            "data": data,
            "batch": {"global_batch": 16},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.05},
            "layout": layout,
            "train": {"sharpness": {"every_steps": 4, "samples": 32}},
        },
    )


def measured(run: ResolvedRun) -> dict[str, float]:
    """The sharpness of the initial weights."""
    mesh = build_mesh(run.layout)
    return measured_at(run, mesh, init_state(run, mesh))


def measured_at(run: ResolvedRun, mesh: Any, state: TrainState) -> dict[str, float]:
    """The sharpness of a state."""
    program = build_sharpness(run, mesh, state, build_evaluation(run, mesh))
    source = open_source(run.config.data, "train", seed=run.config.seed, augmentation=None)
    return program.measured(state, program.samples(source))


@functools.cache
def dense_hessian(name: str) -> np.ndarray:
    """The Hessian, built row by row on one device, parameters in the order of `ravel_pytree`."""
    model, data = {"mlp": (MLP, IMAGES), "gpt": (GPT, TOKENS)}[name]
    run = resolve(config_of(model, data, {"data": 1}))
    setup, state = train_setup(run), init_state(run, build_mesh(run.layout))
    source = open_source(run.config.data, "train", seed=run.config.seed, augmentation=None)
    batch = source.take(np.random.default_rng(0).permutation(len(source))[:32])
    flat, whole = ravel_pytree(state.params)

    def loss(flat: jax.Array) -> jax.Array:
        return mean_loss(setup, BatchNormScope(), whole(flat), state.model_state, batch)[0]

    hessian = jax.jit(jax.jacrev(jax.grad(loss)))(flat)  # layers of gpt have no forward derivative
    return np.asarray(hessian, np.float64)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mlp, data": (MLP, IMAGES, {"data": 8}),
    "mlp, one device": (MLP, IMAGES, {"data": 1}),
    "mlp, data x fsdp": (MLP, IMAGES, {"data": 2, "fsdp": 4}),
    "mlp, shard_map": (MLP, IMAGES, {"data": 4, "mode": "shard_map"}),
    "gpt, data x fsdp x tensor": (GPT, TOKENS, {"data": 2, "fsdp": 2, "tensor": 2}),
    "gpt, ZeRO 2": (GPT, TOKENS, {"data": 4, "zero_stage": 2}),
}


@pytest.mark.slow_except("mlp, data")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_largest_eigenvalue_of_the_whole_matrix(name):
    """That NumPy has of the Hessian that JAX builds; slow, as each layout is a program."""
    model, data, layout = LAYOUTS[name]
    eigenvalues = np.linalg.eigvalsh(dense_hessian(model["name"]))
    found = measured(resolve(config_of(model, data, layout)))
    print(name, len(eigenvalues), eigenvalues[-3:], eigenvalues[0], found)
    assert found["sharpness"] == pytest.approx(eigenvalues[-1], rel=RTOL)
    nearest = np.abs(eigenvalues - found["sharpness"]).min()
    assert nearest <= found["error"] + 1e-5 * eigenvalues[-1]


def with_moments(state: TrainState, step: int) -> tuple[TrainState, np.ndarray]:
    """A state at `step`, seven updates of AdamW in it, and second moments chosen at random."""
    flat, whole = ravel_pytree(state.params)
    second = np.exp(np.random.default_rng(3).normal(-9, 2, len(flat)))
    old = optax.tree.get(state.opt_state, "ScaleByAdamState")
    nu = whole(jnp.asarray(second, jnp.float32))
    new = optax.tree.set(state.opt_state, nu=nu, count=jnp.asarray(7, old.count.dtype))
    placed = jax.tree.map(
        lambda leaf, was: jax.device_put(leaf, was.sharding), new, state.opt_state
    )
    steps = jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding)
    return replace(state, step=steps, opt_state=placed), second


@pytest.mark.slow_except("mlp, data")
@pytest.mark.parametrize("name", ["mlp, data", "mlp, data x fsdp", "gpt, ZeRO 2"])
def test_with_adamw_the_largest_of_the_preconditioned_matrix_is_found_too(name):
    """NumPy's of P^-1/2 H P^-1/2, with the second moments of seven updates chosen at random and the
    bias corrections by hand; before the first update there is none. Slow, as each is a program."""
    model, data, layout = LAYOUTS[name]
    config = config_of(model, data, layout)
    run = resolve(replace(config, optimizer=AdamWConfig(beta2=0.9, epsilon=1e-3)))
    mesh = build_mesh(run.layout)
    state = init_state(run, mesh)
    later, second = with_moments(state, step=7)

    first, found = measured_at(run, mesh, state), measured_at(run, mesh, later)

    root = np.sqrt((1 - 0.9**7) * (np.sqrt(second / (1 - 0.9**7)) + 1e-3))
    eigenvalues = np.linalg.eigvalsh(dense_hessian(model["name"]) / np.outer(root, root))
    assert found["preconditioned_sharpness"] == pytest.approx(eigenvalues[-1], rel=RTOL)
    assert first.keys() == {"sharpness", "error"}
    assert found["sharpness"] == pytest.approx(first["sharpness"], rel=1e-5)


def test_what_adamw_divides_by_is_of_the_batch_and_of_updates_that_were_made():
    """Twice the reference batch doubles 1 - beta by the rule of the SDE, and epsilon falls by root
    2; of nine steps in float16 two were skipped, and of two of two nothing can be said."""
    config = with_fields(
        config_of({**MLP, "compute_dtype": "float16"}, IMAGES, {"data": 8}),
        {"schedule.scaling": "sde", "schedule.reference_batch": 8},
    )
    run = resolve(replace(config, optimizer=AdamWConfig(beta1=0.8, beta2=0.9, epsilon=1e-3)))
    mesh = build_mesh(run.layout)
    program = build_sharpness(run, mesh, init_state(run, mesh), build_evaluation(run, mesh))
    source = open_source(run.config.data, "train", seed=run.config.seed, augmentation=None)
    state = init_state(run, mesh)
    skipped = replace(state, step=jax.device_put(jnp.asarray(2, jnp.int32), state.step.sharding))
    later, second = with_moments(state, step=9)

    found = program.measured(later, program.samples(source))

    root = np.sqrt((1 - 0.6**7) * (np.sqrt(second / (1 - 0.8**7)) + 1e-3 / 2**0.5))
    eigenvalues = np.linalg.eigvalsh(dense_hessian("mlp") / np.outer(root, root))
    assert found["preconditioned_sharpness"] == pytest.approx(eigenvalues[-1], rel=RTOL)
    assert preconditioned_threshold(program.optimizer, 0.1) == pytest.approx(2 * 1.6 / (0.4 * 0.1))
    assert program.measured(skipped, program.samples(source)).keys() == {"sharpness", "error"}


def test_adamw_converges_below_its_preconditioned_threshold_and_not_above():
    """On a parabola whose curvature is divided by what steps are divided by, by the update."""
    optimizer, rate = AdamWConfig(beta1=0.8), 0.1
    threshold = preconditioned_threshold(optimizer, rate)
    assert threshold is not None
    assert threshold == pytest.approx(2 * 1.8 / (0.2 * 0.1))
    for factor, converges in ((0.98, True), (1.02, False)):
        point, mean = 1.0, 0.0
        for _ in range(3000):
            mean = 0.8 * mean + 0.2 * factor * threshold * point
            point -= rate * mean
        assert (abs(point) < 1e-3) == converges
    assert preconditioned_threshold(optimizer, 0.0) is None
    assert preconditioned_threshold(SgdConfig(), rate) is None


@functools.partial(jax.jit, static_argnums=1)
def of_matrix(matrix: jax.Array, iterations: int) -> tuple[jax.Array, jax.Array]:
    """Lanczos on a matrix of rows."""
    like = jnp.zeros(len(matrix), jnp.float32)
    product = functools.partial(jnp.matmul, matrix, precision="highest")
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return largest_eigenvalue(product, like, where, iterations=iterations, seed=0)


@pytest.mark.parametrize(
    "eigenvalues",
    [
        np.linspace(-50, 10, 40),  # the largest is far from the largest in size
        np.repeat([-3.0, 2.0], 20),  # two vectors span all that is reached
        np.repeat([-2.0, -1.0], 20),  # and what is left of the matrix has no larger value
        np.zeros(40),
    ],
)
def test_the_largest_is_the_largest_by_sign(eigenvalues):
    """Whatever the others are, and of fewer different values than products; and with too few
    products the error says how far it is at most."""
    count = len(eigenvalues)
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(count, count)))[0]
    matrix = jnp.asarray(turned @ np.diag(eigenvalues) @ turned.T, jnp.float32)
    scale = 1e-5 * max(1, np.abs(eigenvalues).max())

    value, error = map(float, of_matrix(matrix, 40))
    early, early_error = map(float, of_matrix(matrix, 6))

    assert value == pytest.approx(eigenvalues[-1], abs=scale)
    assert error <= scale
    assert np.abs(eigenvalues - early).min() <= early_error + scale
    assert early <= eigenvalues[-1] + scale
    if len(set(eigenvalues)) > 6:
        assert early < eigenvalues[-1] - scale
        assert early_error > 100 * scale


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_converges_below_its_threshold_and_not_above(momentum, nesterov):
    """On a parabola, by the update itself."""
    optimizer, rate = SgdConfig(momentum=momentum, nesterov=nesterov), 0.1
    threshold = stability_threshold(optimizer, rate)
    assert threshold is not None
    for factor, converges in ((0.98, True), (1.02, False)):
        point, buffer = 1.0, 0.0
        for _ in range(3000):
            gradient = factor * threshold * point
            buffer = momentum * buffer + gradient
            point -= rate * (gradient + momentum * buffer if nesterov else buffer)
        assert (abs(point) < 1e-3) == converges
    assert stability_threshold(optimizer, 0.0) is None
    assert stability_threshold(AdamWConfig(), rate) is None


@pytest.mark.slow
def test_a_run_measures_the_curvature_it_has_and_a_resumed_one_the_same(tmp_path):
    """Slow, as it trains four times. That of a known quadratic, whose largest is 4 in the samples
    of class 1 and 0 in others; what is trained is the same without it."""
    fields = {"data.train_examples": 512, "train.epochs": 2, "train.log_every_steps": 4}
    without = with_fields(quadratic({"data": 4}, 1, rate=1e-3), fields)
    every = {
        "train.sharpness.every_steps": 4,
        "train.sharpness.samples": 64,
        "train.sharpness.iterations": 8,
    }
    whole = with_fields(without, every)
    half = with_fields(whole, {"train.epochs": 1})

    plain = train(without, tmp_path / "plain", device_count=4, reporter=Silent())
    straight = train(whole, tmp_path / "whole", device_count=4, reporter=Silent())
    train(half, tmp_path / "parts", device_count=4, reporter=Silent())
    train(whole, tmp_path / "parts", device_count=4, resume=True, reporter=Silent())

    source = open_source(whole.data, "train", seed=whole.seed, augmentation=None)
    chosen = np.random.default_rng(0).permutation(512)[:64]
    share = source.take(np.sort(chosen))["targets"].mean()
    assert 0.2 < share < 0.8
    assert [m.step for m in straight.sharpness] == [0, 4, 8, 12, 16]
    for m in straight.sharpness:
        assert m.sharpness == pytest.approx(CURVATURE.max() * share, rel=1e-5)
        assert m.stability_threshold == pytest.approx(2 / 1e-3)
    assert [m.loss for m in straight.training] == [m.loss for m in plain.training]
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert len(figures(tmp_path / "whole")) == len(figures(tmp_path / "plain")) + 5
    tracked = tracked_values(straight.sharpness[0])
    assert tracked["sharpness/sharpness"] == straight.sharpness[0].sharpness


@pytest.mark.slow
def test_a_run_of_adamw_records_the_limit_of_its_own_betas(tmp_path):
    """Slow, as it trains. Twice the reference batch makes 0.8 of a beta1 of 0.9 by the rule of the
    SDE; nothing before the first update."""
    config = replace(config_of(MLP, IMAGES, {"data": 1}), optimizer=AdamWConfig())
    fields = {
        "schedule.scaling": "sde",
        "schedule.reference_batch": 8,
        "data.train_examples": 128,
        "train.epochs": 1,
    }

    run = train(with_fields(config, fields), tmp_path / "run", device_count=1, reporter=Silent())

    first, *later = run.sharpness
    assert (first.step, first.preconditioned_sharpness, first.preconditioned_threshold) == (
        (0, None, None)
    )
    assert [m.step for m in later] == [4, 8]
    for m in later:
        assert m.stability_threshold is None
        assert (m.preconditioned_sharpness or 0) > 0
        limit = m.preconditioned_threshold
        assert limit is None or limit == pytest.approx(2 * 1.8 / (0.2 * m.learning_rate))
    assert later[0].preconditioned_threshold is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train.sharpness.samples": 30}, "multiple of devices that share a batch=8 (nearest"),
        ({"train.sharpness.samples": 264}, "there are 256 training examples; use at most 256"),
        ({"train.sharpness.iterations": 1}, "train.sharpness.iterations=1 is refused"),
        ({"train.sharpness.every_steps": 0}, "train.sharpness.every_steps=0 is refused"),
    ],
)
def test_samples_are_refused_that_are_not_there_or_not_shared(fields, said):
    """By field, value and what is accepted."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(with_fields(config_of(MLP, IMAGES, {"data": 8}), fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layout.pipeline": 2}, "layout.pipeline=2 is refused: train.sharpness"),
        ({"layout.context": 2}, "layout.context=2 is refused: train.sharpness"),
        ({"model.compute_dtype": "mxfp8"}, "scales of 8 bits"),
        ({"data": MIXED}, "data.name='mixture' is refused: train.sharpness"),
    ],
)
def test_the_sharpness_is_refused_where_it_is_not_defined(fields, said):
    """Where layers have one derivative, or other weights than those of float32."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        with_fields(config_of({**GPT, "layers": 2}, TOKENS, {"data": 1}), fields)
