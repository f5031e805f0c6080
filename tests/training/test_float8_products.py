"""Linear layers in 8-bit floating point: what is rounded, by hand, and that all layouts train it.

What they come to on a real text is in `experiments/fp8_training`.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.models.float8 import quantised, restored
from scalejax.models.fsdp import multiplied
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state
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


def run_of(recipe, layout, microbatches=1, remat="none") -> ResolvedRun:
    """A small llama on random tokens."""
    tables = {
        "model": {"name": "llama", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4}
        | {"remat": remat, "compute_dtype": recipe},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
        "batch": {"global_batch": 16, "microbatches": microbatches},
        "optimizer": {"name": "adamw", "epsilon": 1e-3},
        "schedule": {"base_learning_rate": 0.01, "scaling": "none", "decay": "constant"},
        "layout": layout,
    }
    return resolve(build(RunConfig, tables))


def losses_of(run: ResolvedRun) -> list[float]:
    """Of three updates with the same rows."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
    losses = []
    for _ in range(3):
        state, metrics = step.function(state, placed)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow_except("float8-layout0-1-none")  # compiles two steps: 8 s
@pytest.mark.parametrize(
    ("recipe", "layout", "microbatches", "remat"),
    [
        ("float8", {"data": 1, "fsdp": 2, "tensor": 2}, 1, "none"),
        # not tensor=2 too: XLA's CPU compiler aborts on bfloat16 over tensor where data is manual
        # ("Invalid binary instruction opcode copy", in AllReducePromotion, jax 0.10.2)
        ("float8", {"data": 2, "pipeline": 2}, 4, "selective_op"),
        ("float8_blockwise", {"data": 2, "tensor": 2}, 1, "full"),
        ("mxfp8", {"data": 1, "fsdp": 4}, 1, "none"),
    ],
)
def test_a_layout_trains_float8_as_one_device_does(recipe, layout, microbatches, remat):
    """The largest value is that of all shards, or of the rows of a device of the data axis.

    Sums in another order round bfloat16 differently, by 0.4 %, and that to 8 bits by 6 %, at a few
    of the values: losses agree to a fiftieth of what the updates change.
    """
    ours = losses_of(run_of(recipe, layout, microbatches, remat))
    theirs = losses_of(run_of(recipe, {"data": 1}))

    assert theirs[0] > theirs[1] > theirs[2]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=(theirs[0] - theirs[2]) / 50)


@pytest.mark.slow  # compiles a step for a GPU: 15 s
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs the compiler for NVIDIA GPUs")
def test_the_compiler_for_gpus_makes_products_of_8_bits():
    """Of the four matrices of a block, one forward and two backward; all else stays as it was."""
    run, made = run_of("float8", {"data": 2, "fsdp": 2, "tensor": 2}), list[Compiled]()
    job = RunJob(run=run, target=target_for(load_cluster("dgx-h100"), 8, "cuda"))
    run_jobs([job], lambda _, compiled: made.append(compiled))

    walked = [(item, times) for item, times in made[0].program.walk() if item.kind == "matmul"]
    counts = {"f8e4m3fn": 0, "f8e5m2": 0}
    for item, times in walked:
        if item.dtype in counts:
            counts[item.dtype] += times
    assert sum(counts.values()) == 2 * 4 * 3
