"""The noise scale is that of the gradients that were there, and of the true one where it is known.

Tolerances. A norm sums a few thousand squares in float32 in an order of the layout's own: `RTOL`
allows about a hundred roundings of 6e-8. The two estimates are differences of norms, and are held
to it relative to the larger norm. Against a known covariance the claim is 10 %.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_conformance import GLOBAL_BATCH, batches_of, run_of

from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import Network
from scalejax.training.mesh import build_mesh
from scalejax.training.noise_scale import NoiseAverages, averaged, estimates
from scalejax.training.reporter import Silent
from scalejax.training.step import build_step, forward, init_state
from scalejax.training.train import train

RTOL = 1e-5
SLOW = {
    "all but context": ("gpt", {"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 1}, 4),
    "data x context": ("gpt", {"data": 2, "context": 2, "tensor": 2}, 2),
    "ZeRO 2 x tensor of gpt": ("gpt", {"data": 2, "tensor": 2, "zero_stage": 2}, 2),
    "data x fsdp of gpt": ("gpt", {"data": 2, "fsdp": 4}, 1),
    "fsdp, microbatches": ("gpt", {"data": 1, "fsdp": 4}, 2),
    "data x tensor": ("gpt", {"data": 2, "tensor": 4}, 1),
    "two axes for bert": ("bert_base", {"data": 2, "fsdp": 2, "tensor": 2}, 1),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "data": ("mlp", {"data": 8}, 1),
    "microbatches": ("mlp", {"data": 1}, 4),
    "data, microbatches": ("mlp", {"data": 4}, 2),
    "shard_map": ("mlp", {"data": 4, "mode": "shard_map"}, 2),
    "pmap": ("mlp", {"data": 4, "mode": "pmap"}, 1),
    "BatchNorm, microbatches": ("cnn", {"data": 4}, 2),
    "ZeRO 1": ("mlp", {"data": 8, "zero_stage": 1}, 1),
    "ZeRO 2 x tensor": ("mlp", {"data": 2, "tensor": 2, "zero_stage": 2}, 2),
    "data x fsdp": ("mlp", {"data": 2, "fsdp": 4}, 1),
    "data x pipeline": ("gpt", {"data": 2, "pipeline": 2}, 4),
    **SLOW,
}


def measuring(run: ResolvedRun, decay: float = 0.0) -> ResolvedRun:
    """The same run with its noise scale measured; with decay 0, of each update alone."""
    return resolve(with_fields(run.config, {"train.noise_scale.decay": decay}))


def parts_of(run: ResolvedRun, is_dealt_globally: bool) -> list[np.ndarray]:
    """The rows of the global batch behind each gradient that is compared."""
    rows = np.arange(run.split.global_batch)
    devices = [rows] if is_dealt_globally else np.split(rows, run.layout.data)
    microbatches = 1 if run.layout.pipeline > 1 else run.split.microbatches
    return [rows[turn::microbatches] for rows in devices for turn in range(microbatches)]


@functools.cache
def on_one_device(model: str) -> Any:
    """Gradient of the loss on one device, and the parameters and statistics it is taken at."""
    run = run_of(model, "sgd", {"data": 1})
    state = init_state(run, build_mesh(run.layout))
    return jax.jit(jax.grad(forward(run)[0], has_aux=True)), state.params, state.model_state


def squared_norms(run: ResolvedRun, batch: dict[str, np.ndarray]) -> tuple[float, float, int]:
    """Mean squared norm over the parts, that of their mean, and how many: on one device, part by
    part, in float64."""
    gradient, params, model_state = on_one_device(run.config.model.name)
    flat = []
    for rows in parts_of(run, is_dealt_globally=bool(jax.tree.leaves(model_state))):
        part = {name: values[rows] for name, values in batch.items()}
        leaves = jax.tree.leaves(gradient(params, model_state, part)[0])
        flat.append(np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves]))
    small = float(np.mean([np.sum(each**2) for each in flat]))
    return small, float(np.sum(np.mean(flat, axis=0) ** 2)), len(flat)


@pytest.mark.slow_except("data, microbatches", "pmap", "ZeRO 1", "data x fsdp")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS]
)
def test_every_layout_measures_the_gradients_of_its_parts(name):
    """However parameters and batch are split, the norms are those of whole gradients."""
    model, layout, microbatches = LAYOUTS[name]
    run = measuring(run_of(model, "sgd", layout, microbatches))
    batch = batches_of(run)[0]
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    placed = {key: jax.device_put(batch[key], step.batch[key].sharding) for key in batch}

    state, metrics = step.function(init_state(run, mesh), placed)

    small, big, count = squared_norms(run, batch)
    small_batch = GLOBAL_BATCH / count
    assert float(metrics["gradient_norm"]) == pytest.approx(big**0.5, rel=RTOL)
    assert float(state.noise.variance) == pytest.approx(
        (small - big) / (1 / small_batch - 1 / GLOBAL_BATCH), abs=RTOL * small * GLOBAL_BATCH
    )
    assert float(state.noise.squared_norm) == pytest.approx(
        (GLOBAL_BATCH * big - small_batch * small) / (GLOBAL_BATCH - small_batch),
        abs=RTOL * small,
    )
    assert "small_squared_norm" not in metrics


# --- a quadratic ---

CURVATURE = np.array([0.5, 1.0, 2.0, 4.0])
POINT = np.array([1.0, -0.5, 0.5, 0.25])
CONSTANT = 40.0


class Quadratic(Network):
    """Half the squared distance of a point from an image of 2 x 2, weighted by curvature: the
    loss of a sample of class 1 (plus a constant); that of a sample of class 0 is 0.

    Of two classes, one of which is certain, the cross-entropy is the difference of their logits.
    """

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        self.point = nnx.Param(jnp.asarray(POINT, jnp.float32))

    def __call__(self, inputs, *, is_training):
        """Logits."""
        apart = self.point[...][None] - inputs.reshape(len(inputs), -1)
        loss = 0.5 * jnp.sum(jnp.asarray(CURVATURE, jnp.float32)[None] * apart**2, axis=-1)
        return jnp.stack([loss + CONSTANT, jnp.zeros_like(loss)], axis=-1)


def quadratic(layout: dict[str, Any], microbatches: int, rate: float = 1e-9) -> RunConfig:
    """A run that stays where the noise is known."""
    return build(
        RunConfig,
        {
            "model": {"name": "custom", "path": "test_noise_scale:Quadratic"},
            "data": {
                "name": "synthetic_images",
                "image_size": 2,
                "channels": 1,
                "classes": 2,
                "train_examples": 16384,
                "test_examples": 16,
            },
            "batch": {"global_batch": 64, "microbatches": microbatches},
            "optimizer": {"name": "sgd", "momentum": 0.0},
            "schedule": {"base_learning_rate": rate},
            "layout": layout,
            "train": {"epochs": 4, "log_every_steps": 64, "noise_scale": {"decay": 0.998}},
        },
    )


def true_noise_scale() -> float:
    """S / |G|^2 by hand. A sample's gradient is z H (point - x): z is 0 or 1 alike, and pixels are
    0..255 alike, scaled to mean 0: E g = H point / 2, E |g|^2 = sum H^2 (point^2 + var x) / 2."""
    variance = (256**2 - 1) / 12 / 255**2 / 0.25**2
    mean = 0.5 * CURVATURE * POINT
    mean_square = 0.5 * np.sum(CURVATURE**2 * (POINT**2 + variance))
    return float((mean_square - np.sum(mean**2)) / np.sum(mean**2))


@pytest.mark.slow_except("layout1-8")
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        ({"data": 4}, 1),
        ({"data": 1}, 8),
        pytest.param({"data": 4, "mode": "shard_map"}, 2, marks=pytest.mark.slow),
    ],
)
def test_the_noise_scale_of_a_quadratic_is_known(tmp_path, layout, microbatches):
    """Within 10 % of the truth, over devices as over microbatches."""
    config = quadratic(layout, microbatches)

    record = train(config, tmp_path / "run", device_count=layout["data"], reporter=Silent())

    measured = record.training[-1].noise_scale
    print(measured, true_noise_scale())
    assert measured == pytest.approx(true_noise_scale(), rel=0.1)
    assert "noise scale" in record.statuses[-1].message


def test_a_resumed_run_goes_on_with_its_averages(tmp_path):
    """Two epochs and two more give what four in one go give, to the last bit."""
    fields = {"data.train_examples": 1024, "train.log_every_steps": 4}
    whole = with_fields(quadratic({"data": 4}, 1, rate=1e-3), fields)
    half = with_fields(whole, {"train.epochs": 2})

    straight = train(whole, tmp_path / "whole", device_count=4, reporter=Silent())
    train(half, tmp_path / "parts", device_count=4, reporter=Silent())
    resumed = train(whole, tmp_path / "parts", device_count=4, resume=True, reporter=Silent())

    assert [m.noise_scale for m in resumed.training] == [m.noise_scale for m in straight.training]
    assert len({m.noise_scale for m in straight.training}) > 10


# --- arithmetic, refusals, programs ---


def test_estimates_are_exact_where_norms_are_expected_values():
    """|G_B|^2 is |G|^2 + S / B on average: put in, both come out."""
    squared_norm, variance = 3.0, 50.0

    found = estimates(
        squared_norm + variance / 8,
        squared_norm + variance / 64,
        small_batch=8,
        big_batch=64,
    )

    assert found == pytest.approx((variance, squared_norm))
    assert NoiseAverages(0.0, 0.0).updated(0.9, *found).noise_scale == pytest.approx(50 / 3)


@pytest.mark.parametrize(
    ("model", "layout", "microbatches"),
    [
        ("mlp", {"data": 1}, 1),
        ("mlp", {"data": 1, "fsdp": 8}, 1),
        ("gpt", {"data": 1, "pipeline": 2}, 4),
        ("cnn", {"data": 8}, 1),
    ],
)
def test_a_layout_with_nothing_to_compare_is_refused(model, layout, microbatches):
    """One gradient says nothing about noise."""
    run = run_of(model, "sgd", layout, microbatches)

    with pytest.raises(ConfigError, match=r"train\.noise_scale compares gradients of parts"):
        measuring(run)


class Normalised(Network):
    """A network of a user's own that has BatchNorm."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        self.norm = nnx.BatchNorm(int(np.prod(dataset.input_shape)), rngs=rngs)
        self.layer = nnx.Linear(self.norm.num_features, dataset.classes, rngs=rngs)

    def __call__(self, inputs, *, is_training):
        """Logits."""
        rows = inputs.reshape(len(inputs), -1)
        return self.layer(self.norm(rows, use_running_average=not is_training))


def test_a_network_of_ones_own_with_batch_norm_is_refused_when_it_is_built():
    """What only the network knows is asked of it, before anything is trained."""
    run = measuring(run_of("mlp", "sgd", {"data": 8}))
    model: dict[str, Any] = {"name": "custom", "path": "test_noise_scale:Normalised"}
    run = resolve(with_fields(run.config, {"model": model}))

    with pytest.raises(ConfigError, match=r'with BatchNorm in layout.mode="shard_map"'):
        build_step(run, build_mesh(run.layout))


def test_a_step_that_measures_nothing_is_compiled_as_before():
    """Neither its state nor its metrics know of a norm."""
    run = run_of("mlp", "sgd", {"data": 8})
    step = build_step(run, build_mesh(run.layout))
    _, metrics = jax.eval_shape(step.function, step.state, step.batch)

    assert step.state.noise is None
    assert set(metrics) == {"loss", "accuracy", "learning_rate"}


def test_one_backward_pass_serves_both():
    """Measuring takes the squares of gradients besides, and no matrix product more."""
    counts = []
    for run in (plain := run_of("mlp", "sgd", {"data": 8}), measuring(plain)):
        step = build_step(run, build_mesh(run.layout))
        counts.append(step.function.lower(step.state, step.batch).as_text().count("dot_general"))

    assert counts[0] == counts[1] > 0


def test_noise_scale_averaged_over_progress_is_the_critical_batch():
    """B_crit = E_min / S_min of a run whose noise scale grows, by the definition of each: steps
    with few samples and with many, integrated numerically, lie on one hyperbola."""
    progress = (np.arange(100_000) + 0.5) / 1000  # S_min = 100 noiseless steps
    scale = 20 + 3 * progress  # so E_min / S_min = 20 + 3 * 50 = 170
    for batch in (10, 170, 5000):
        steps_till = np.cumsum(1 + scale / batch) / 1000
        assert steps_till[-1] == pytest.approx(100 * (1 + 170 / batch), rel=1e-3)
        evenly = np.interp(np.arange(steps_till[-1]), steps_till, scale)

        assert averaged(evenly.tolist(), batch) == pytest.approx(170, rel=0.03)

    assert averaged([None, 30.0], 8) == pytest.approx(30)
    assert averaged([None], 8) is None
