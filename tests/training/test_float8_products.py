"""Linear layers in 8-bit floating point: what is rounded, by hand, and that all layouts train it.

What they come to on a real text is in `experiments/fp8_training`.
"""

import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.loader.loader import Batches
from scalejax.hardware import load_cluster
from scalejax.models.float8 import (
    AMAX_HISTORY,
    SCALES,
    for_each_use,
    initial_history,
    quantised,
    quantised_by,
    restored,
    scales_of,
    with_amaxes,
)
from scalejax.models.fsdp import multiplied
from scalejax.training.evaluation import trained_weights
from scalejax.training.mesh import build_mesh
from scalejax.training.record import RunRecord, figures
from scalejax.training.signals import Interrupted
from scalejax.training.state import TrainState
from scalejax.training.step import build_step, init_state
from scalejax.training.train import train
from scalejax.xla import has_cuda_compiler
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.target import target_for
from scalejax.xla.worker_pool import run_jobs

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(matrix: np.ndarray, dtype: type, tile: tuple[int, int] | None = None) -> np.ndarray:
    """`matrix` in 8 bits, with a power of two as the scale of each `tile` of it, or of all."""
    height, width = tile or matrix.shape
    found = np.empty_like(matrix)
    for row in range(0, matrix.shape[0], height):
        for column in range(0, matrix.shape[1], width):
            place = (slice(row, row + height), slice(column, column + width))
            top = float(ml_dtypes.finfo(dtype).max)
            scale = 2.0 ** np.ceil(np.log2(np.abs(matrix[place]).max() / top))
            found[place] = (matrix[place] / scale).astype(dtype).astype(np.float64) * scale
    return found


@pytest.mark.parametrize(
    ("recipe", "gradient_type", "rows", "squares"),
    [
        ("float8", E5M2, None, None),
        ("float8_blockwise", E4M3, (1, 128), (128, 128)),
        ("mxfp8", E4M3, (1, 32), (1, 32)),
    ],
)
def test_products_are_of_rounded_operands(recipe, gradient_type, rows, squares):
    """All three of a layer, each with both operands rounded along its own sum: by hand."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(150, 80)) * np.exp2(generator.integers(-9, 9, (150, 1)))
    w, g = generator.normal(size=(80, 140)), generator.normal(size=(150, 140))
    given = [jnp.asarray(each.reshape(shape), jnp.float32) for each, shape in (
        (x, (3, 50, 80)), (w, (80, 7, 20)), (g, (3, 50, 7, 20))
    )]  # fmt: skip
    x, w, g = (np.asarray(each, np.float64) for each in given)
    x, w, g = x.reshape(150, 80), w.reshape(80, 140), g.reshape(150, 140)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiplied(w, "bsd,dnf->bsnf", P(None, None, None), x, "none", recipe)

    @jax.jit
    def products(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        result, pull = jax.vjp(layer, x, w)
        return result, *pull(g)

    by_hand = (
        rounded(x, E4M3, rows) @ rounded(w.T, E4M3, squares).T,
        rounded(g, gradient_type, rows) @ rounded(w, E4M3, squares).T,
        rounded(x.T, E4M3, rows) @ rounded(g.T, gradient_type, rows).T,
    )
    for ours, theirs in zip(products(*given), by_hand, strict=True):
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_the_least_power_of_two_that_suffices(dtype):
    """Of any number: nothing is 0 / 0 where it would be below the least normal number, and what is
    not finite is not hidden."""
    top = float(ml_dtypes.finfo(dtype).max)
    largest = np.ldexp(np.float32(1), np.arange(-107, 128))
    largest = np.concatenate([largest, np.nextafter(top * largest[:200], np.float32(np.inf))])
    both = np.stack([largest, -largest / 4], axis=1)

    narrow = jax.jit(lambda rows: quantised(rows, dtype, axes=(1,)))(both)

    by_hand = np.exp2(np.ceil(np.log2(largest.astype(np.float64) / top)))
    np.testing.assert_array_equal(narrow.scale[:, 0], np.maximum(by_hand, 2.0**-126))
    made = restored(narrow, jnp.float32)
    np.testing.assert_allclose(made, both, rtol=2.0**-3, atol=0)
    for tiny in ([1e-34, 5e-35, 0], [1e-38, 0, 0], [0, 0, 0]):
        row = jnp.array(tiny, jnp.bfloat16)
        made = restored(quantised(row, dtype), jnp.bfloat16)
        np.testing.assert_allclose(
            *(np.float64(each) for each in (made, row)), atol=2e-38, rtol=0.1
        )
    for broken in (np.inf, np.nan):
        row = jnp.array([broken, 1], jnp.bfloat16)
        assert not jnp.isfinite(restored(quantised(row, dtype), jnp.bfloat16)).any()


def test_delayed_scales_are_of_the_largest_of_the_last_steps():
    """By hand, a history of two: input and matrix in e4m3 (448), gradient in e5m2 (57,344); zeros
    and what is not finite leave a scale."""
    statistics = {"layer": initial_history((1,), steps=2), "load": jnp.zeros(3)}
    np.testing.assert_array_equal(statistics["layer"][SCALES], [[1, 1, 1]])
    steps = [
        ([448, 449, 57344 / 8], [1, 2, 1 / 8]),
        ([1, 0, 57345 / 8], [1, 2, 1 / 4]),
        ([7, 0, 1e-30], [1 / 64, 2, 1 / 4]),
        ([np.inf, 3.5, np.nan], [1 / 64, 1 / 128, 1 / 4]),
        ([896, 1, 1], [1 / 64, 1 / 128, 1 / 4]),
        ([0, 0, 0], [2, 1 / 256, 2**-15]),
    ]
    for largest, by_hand in steps:
        amaxes = {"layer": {SCALES: jnp.asarray([largest]), AMAX_HISTORY: None}, "load": None}
        statistics = with_amaxes(statistics, amaxes)
        np.testing.assert_array_equal(statistics["layer"][SCALES], [by_hand])
    np.testing.assert_array_equal(statistics["layer"][AMAX_HISTORY][0, 0], [0, 896])
    np.testing.assert_array_equal(statistics["load"], np.zeros(3))


def test_a_delayed_scale_clips_and_hides_nothing():
    """Twice 448 at the scale of 1 becomes 448; what is not finite stays so."""
    row = jnp.array([896, -900, 1, np.inf, np.nan], jnp.float32)

    made = restored(quantised_by(row, E4M3, jnp.float32(1)), jnp.float32)

    np.testing.assert_array_equal(made[:3], [448, -448, 1])
    assert not jnp.isfinite(made[3:]).any()


def test_the_gradient_of_scales_is_the_largest_values():
    """Of input, matrix and gradient, in this order, and the larger where two products share the
    scales; the products are of operands at the scales given: by hand."""
    generator = np.random.default_rng(0)
    x, w, g = (jnp.asarray(generator.normal(size=(8, 8)), jnp.float32) for _ in range(3))
    scales = jnp.asarray([1 / 8, 1 / 16, 1 / 4], jnp.float32)

    def layer(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> jax.Array:
        own = P(None, None)
        return multiplied(w, "td,df->tf", own, x, "none", "float8_delayed", scales)

    result, pull = jax.vjp(layer, x, w, scales)
    of_x, of_w, amaxes = pull(g)

    def at(matrix: jax.Array, index: int, dtype: type) -> np.ndarray:
        scale = float(scales[index])
        return (np.asarray(matrix) / scale).astype(dtype).astype(np.float64) * scale

    by_hand = at(x, 0, E4M3), at(w, 1, E4M3), at(g, 2, E5M2)
    np.testing.assert_allclose(result, by_hand[0] @ by_hand[1], atol=1e-5)
    np.testing.assert_allclose(of_x, by_hand[2] @ by_hand[1].T, atol=1e-5)
    np.testing.assert_allclose(of_w, by_hand[0].T @ by_hand[2], atol=1e-5)
    np.testing.assert_array_equal(amaxes, [np.abs(each).max() for each in (x, w, g)])

    def twice(scales: jax.Array) -> jax.Array:
        first, second = for_each_use(scales, 2)
        return jnp.sum(layer(x, w, first) + layer(3 * x, w / 3, second))

    largest = np.abs(x).max(), np.abs(w).max(), 1
    np.testing.assert_allclose(jax.grad(twice)(scales), (3 * largest[0], *largest[1:]))


def run_of(recipe, layout, microbatches=1, remat="none") -> ResolvedRun:
    """A small llama on random tokens, with a history of three steps."""
    tables = {
        "model": {"name": "llama", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4}
        | {"remat": remat, "compute_dtype": recipe, "amax_history_length": 3},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
        "batch": {"global_batch": 16, "microbatches": microbatches},
        "optimizer": {"name": "adamw", "epsilon": 1e-3},
        "schedule": {"base_learning_rate": 0.01, "scaling": "none", "decay": "constant"},
        "layout": layout,
    }
    return resolve(build(RunConfig, tables))


def trained(run: ResolvedRun) -> tuple[list[float], TrainState]:
    """The losses of three updates with the same rows, and the state after them."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
    losses = []
    for _ in range(3):
        state, metrics = step.function(state, placed)
        losses.append(float(metrics["loss"]))
    return losses, state


def histories(state: TrainState) -> list[np.ndarray]:
    """Those of all layers, [layers, 3, steps]."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.model_state)
    return [np.asarray(leaf) for path, leaf in leaves if AMAX_HISTORY in str(path[-1])]


@pytest.mark.slow_except("float8_delayed-layout4-1-none")  # compiles two steps: 8 s
@pytest.mark.parametrize(
    ("recipe", "layout", "microbatches", "remat"),
    [
        ("float8", {"data": 1, "fsdp": 2, "tensor": 2}, 1, "none"),
        # not tensor=2 too: XLA's CPU compiler aborts on bfloat16 over tensor where data is manual
        # ("Invalid binary instruction opcode copy", in AllReducePromotion, jax 0.10.2)
        ("float8", {"data": 2, "pipeline": 2}, 4, "selective_op"),
        ("float8_blockwise", {"data": 2, "tensor": 2}, 1, "full"),
        ("mxfp8", {"data": 1, "fsdp": 4}, 1, "none"),
        ("float8_delayed", {"data": 1, "fsdp": 2, "tensor": 2}, 1, "none"),
        ("float8_delayed", {"data": 4, "zero_stage": 2}, 2, "none"),
        ("float8_delayed", {"data": 4, "mode": "shard_map"}, 2, "selective_op"),
        *(
            ("float8_delayed", {"data": 2, "pipeline": 2, "pipeline_schedule": name}, 4, remat)
            for name, remat in (("1f1b", "selective_op"), ("zb_h1", "none"))
        ),
        (
            "float8_delayed",
            {"data": 2, "context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
            2,
            "none",
        ),
    ],
)
def test_a_layout_trains_float8_as_one_device_does(recipe, layout, microbatches, remat):
    """The largest value is that of all shards, or of the rows of a device of the data axis.

    Sums in another order round bfloat16 differently, by 0.4 %, and that to 8 bits by 6 %, at a few
    of the values: losses agree to a fiftieth of what the updates change.
    """
    ours, state = trained(run_of(recipe, layout, microbatches, remat))
    theirs, like = trained(run_of(recipe, {"data": 1}))

    assert theirs[0] > theirs[1] > theirs[2]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=(theirs[0] - theirs[2]) / 50)
    # Of delayed scaling the largest values are those of all rows and devices. In the first step,
    # the last of a history, they differ by rounding; a mean over devices is 21 to 38 % smaller for
    # the input of one layer or other. Later ones follow parameters that part: 9 % was seen.
    # Gradients are of the mean loss of a microbatch of a device, and came there in e5m2, whose
    # neighbours are 25 % apart.
    is_scheduled = "pipeline_schedule" in layout
    is_by_device = microbatches > 1
    parts = (1 if is_scheduled else microbatches) * (layout["data"] if is_by_device else 1)
    parts *= layout.get("context", 1) if is_scheduled else 1
    assert (len(histories(state)) > 0) == (recipe == "float8_delayed")
    for own, whole in zip(histories(state), histories(like), strict=True):
        assert own.min() > 0
        np.testing.assert_allclose(own[:, :2, -1], whole[:, :2, -1], rtol=0.02)
        np.testing.assert_allclose(own[:, :2], whole[:, :2], rtol=0.2)
        np.testing.assert_allclose(own[:, 2] / parts, whole[:, 2], rtol=0.4)


@pytest.mark.slow  # compiles a run three times: 40 s
def test_a_resumed_run_goes_on_with_its_history(tmp_path, monkeypatch):
    """Histories and scales are of the checkpoint: losses are those of a run that nothing happened
    to, and so are the histories after it."""
    tables = {
        "model": {"name": "gpt", "layers": 2, "hidden": 32, "heads": 2}
        | {"compute_dtype": "float8_delayed", "amax_history_length": 4},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32}
        | {"train_examples": 64, "test_examples": 16},
        "batch": {"global_batch": 16},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.01, "scaling": "none", "decay": "constant"},
        "layout": {"data": 2, "fsdp": 2},
        "train": {"epochs": 2, "log_every_steps": 1, "checkpoint_every_steps": 3},
    }
    config, take = build(RunConfig, tables), Batches.next_beside
    taken, stop_step = 0, 5

    def take_or_stop(self, is_busy):
        nonlocal taken
        taken += 1
        if taken == stop_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, is_busy)

    folder = tmp_path / "parted"
    train(config, tmp_path / "whole")
    monkeypatch.setattr(Batches, "next_beside", take_or_stop)
    with pytest.raises(Interrupted):
        train(config, folder)
    stopped_at = RunRecord.load(folder).statuses[-1].step
    train(config, folder, resume=True)

    assert 3 <= stopped_at < 8
    assert figures(folder) == figures(tmp_path / "whole")
    run = resolve(config, 4)
    ends = [trained_weights(run, each)["model_state"] for each in (folder, tmp_path / "whole")]
    assert len(jax.tree.leaves(ends[0])) == 2 * 4
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow  # compiles a step: 5 s
def test_averaged_weights_have_the_present_scales():
    """A mean from 1 on would be 0.97 after three updates, where those of matrices are 2^-13."""
    run = run_of("float8_delayed", {"data": 1})
    averaging = {"name": "ema", "decay": 0.99}
    run = resolve(with_fields(run.config, {"averaging": averaging}))

    _, state = trained(run)

    found, present = (scales_of(each) for each in (state.average["model_state"], state.model_state))
    assert max(float(leaf[:, 1].max()) for leaf in jax.tree.leaves(present)) < 2**-10
    jax.tree.map(np.testing.assert_array_equal, found, present)


def test_delayed_scaling_is_refused_where_histories_would_part():
    """GPipe's microbatches would be summed; the fix is named."""
    run = run_of("float8_delayed", {"data": 1, "pipeline": 2}, 4)

    with pytest.raises(ConfigError, match=r"pipeline_schedule='gpipe' is refused.*\"1f1b\""):
        init_state(run, build_mesh(run.layout))


@pytest.mark.slow  # compiles a step for a GPU: 15 s
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs the compiler for NVIDIA GPUs")
@pytest.mark.parametrize("recipe", ["float8", "float8_delayed"])
def test_the_compiler_for_gpus_makes_products_of_8_bits(recipe):
    """Of the four matrices of a block, one forward and two backward; all else stays as it was."""
    run, made = run_of(recipe, {"data": 2, "fsdp": 2, "tensor": 2}), list[Compiled]()
    job = RunJob(run=run, target=target_for(load_cluster("dgx-h100"), 8, "cuda"))
    run_jobs([job], lambda _, compiled: made.append(compiled))

    walked = [(item, times) for item, times in made[0].program.walk() if item.kind == "matmul"]
    counts = {"f8e4m3fn": 0, "f8e5m2": 0}
    for item, times in walked:
        if item.dtype in counts:
            counts[item.dtype] += times
    assert sum(counts.values()) == 2 * 4 * 3
