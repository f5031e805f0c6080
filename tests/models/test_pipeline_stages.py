"""Promises of pipeline stages: the same function, in so many ticks, each stage with its blocks."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from scalejax.config.parallelism import PIPELINE, Layout
from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.models.pipeline import of_dealt_layers, shared_by_stages, through_stages
from scalejax.models.remat import kept, recomputed
from scalejax.models.sharding import ShardingConstraints, constraints, sharding_context
from scalejax.training.mesh import build_mesh, replicated
from scalejax.training.step import build_step

LAYERS, ROWS, TOKENS, WIDTH = 12, 12, 2, 3


def blocks(factors: jax.Array, x_BSD: jax.Array) -> jax.Array:
    """Each block bends what it is given, so that the order of blocks matters."""
    return jax.lax.scan(lambda x, factor: (jnp.sin(factor * x) + x, None), x_BSD, factors)[0]


def with_report(factors: jax.Array, x_BSD: jax.Array) -> tuple[jax.Array, None]:
    """As stages compute them: they have nothing to report."""
    return blocks(factors, x_BSD), None


FACTORS = jnp.linspace(0.5, 1.5, LAYERS)
ACTIVATIONS = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, TOKENS, WIDTH)), jnp.float32)


def staged(stages: int, chunks: int, microbatches: int):
    """The function through stages, on a mesh of so many devices."""
    mesh = build_mesh(Layout(pipeline=stages))
    constraints = ShardingConstraints(microbatches=microbatches, chunks=chunks)

    def function(factors, x_BSD):
        with sharding_context(mesh.abstract_mesh, constraints):
            return through_stages(with_report, factors, x_BSD, stages, "none")[0]

    return function


def total(of):
    """A number that depends on all of what `of` computes, with its gradients."""
    return jax.value_and_grad(lambda f, x: jnp.sum(of(f, x) ** 2), argnums=(0, 1))


@cache
def in_a_row():
    """What blocks in a row compute."""
    return jax.jit(total(blocks))(FACTORS, ACTIVATIONS)


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(2, 1, 1), (4, 1, 6), (2, 3, 2), (4, 3, 12), (5, 1, 4), (8, 1, 3)],
)
def test_stages_compute_what_blocks_in_a_row_do(stages, chunks, microbatches):
    """Values and gradients, whether or not microbatches fill the pipeline, and stages divide the
    12 blocks."""
    function = staged(stages, chunks, microbatches)
    everywhere = replicated(build_mesh(Layout(pipeline=stages)))
    ours = jax.jit(total(function), in_shardings=everywhere)(FACTORS, ACTIVATIONS)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), ours, in_a_row())


@pytest.mark.parametrize("microbatches", [4, 3])
def test_blocks_of_no_stage_are_computed_by_all(microbatches):
    """Each for its share of the microbatches, or for all of those that 2 stages do not divide."""
    mesh = build_mesh(Layout(pipeline=2))

    def function(factors, x_BSD):
        with sharding_context(mesh.abstract_mesh, ShardingConstraints(microbatches=microbatches)):
            return shared_by_stages(with_report, factors, x_BSD)[0]

    found = jax.jit(total(function), in_shardings=replicated(mesh))(FACTORS, ACTIVATIONS)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, in_a_row())


@pytest.mark.parametrize(("chunks", "microbatches", "ticks"), [(1, 6, 6 + 2), (2, 6, 12 + 2)])
def test_a_pipeline_takes_a_tick_per_microbatch_and_chunk_and_the_bubble(
    chunks, microbatches, ticks
):
    """Three stages stand still for two ticks, of a whole stage or of half of one."""
    jaxpr = jax.make_jaxpr(staged(3, chunks, microbatches))(FACTORS, ACTIVATIONS)
    scans = [each for each in jaxpr.eqns if each.primitive.name == "scan"]

    assert [scan.params["length"] for scan in scans] == [ticks]


def products(jaxpr: Any) -> int:
    """Matrix products that a program computes, those of a scan as often as it runs."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "dot_general"
        bodies = [getattr(each, "jaxpr", each) for each in equation.params.values()]
        inner = sum(products(each) for each in bodies if isinstance(each, Jaxpr))
        found += equation.params.get("length", 1) * inner
    return found


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What it needs besides its arguments and results."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("remat", ["full", "selective_op"])
def test_a_tick_keeps_no_copy_of_the_parameters_it_picked(remat):
    """Blocks that are computed again pick theirs again: with chunks a pipeline of many
    microbatches takes little more memory than without, and the same gradients come out."""
    width, microbatches = 64, 32
    matrices = jnp.asarray(np.random.default_rng(1).normal(size=(8, width, width)), jnp.float32)
    x_BSD = jnp.ones((microbatches, 1, width))

    def block(x, matrix):
        return x + jnp.sin(kept(x @ matrix / width)), None

    def through(matrices, x):
        return jax.lax.scan(recomputed(block, remat), x, matrices)

    mesh = build_mesh(Layout(pipeline=2))

    def gradient(chunks: int):
        def loss(matrices):
            with sharding_context(
                mesh.abstract_mesh, ShardingConstraints(microbatches=microbatches, chunks=chunks)
            ):
                return jnp.sum(through_stages(through, matrices, x_BSD, 2, remat)[0] ** 2)

        return jax.grad(loss)

    def compiled(chunks: int):
        jitted = jax.jit(gradient(chunks), in_shardings=replicated(mesh))
        return jitted.lower(matrices).compile()

    whole, chunked = compiled(1), compiled(2)
    held, more = map(temporary_bytes, (whole, chunked))
    picked = matrices.nbytes // 4  # one chunk of one of two stages

    assert more - held < 8 * picked  # where each of 65 ticks kept one
    np.testing.assert_allclose(chunked(matrices), whole(matrices), rtol=2e-5, atol=1e-6)
    forward = 65 * 2  # ticks, and blocks of a chunk; backward twice that
    again = {"full": forward, "selective_op": 0}[remat]
    assert products(jax.make_jaxpr(gradient(2))(matrices).jaxpr) == 3 * forward + again


@pytest.mark.parametrize("layers", [4, 3])
def test_a_stage_holds_its_share_of_the_blocks(layers):
    """Parameters and Adam's moments of the blocks are divided by the stages, those whose layers
    are not in another dimension; embeddings not."""
    step, stages = step_of_gpt(layers)
    for tree in (step.state.params, step.state.opt_state):
        paths = jax.tree_util.tree_leaves_with_path(tree)
        of_blocks = [leaf for path, leaf in paths if "blocks" in jax.tree_util.keystr(path)]
        assert of_blocks
        for leaf in of_blocks:
            held = math.prod(leaf.sharding.shard_shape(leaf.shape))
            assert held == leaf.size // stages
            if layers == 4:
                assert leaf.sharding.spec[0] == PIPELINE


def step_of_gpt(layers: int):
    """The step of a transformer of so many blocks in two stages."""
    tables = {
        "model": {"name": "gpt", "layers": layers, "hidden": 16, "heads": 2},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 16},
        "batch": {"global_batch": 8, "microbatches": 2},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 1, "pipeline": 2},
    }
    run = resolve(build(RunConfig, tables))
    return build_step(run, build_mesh(run.layout)), 2


def test_an_arrangement_ends_with_its_context():
    """Networks that are built afterwards know nothing of it."""
    with sharding_context(build_mesh(Layout()).abstract_mesh, ShardingConstraints(chunks=2)):
        assert constraints().chunks == 2

    assert constraints() == ShardingConstraints()


def test_reports_are_in_the_order_of_the_network():
    """Of 2 stages with 2 chunks of one layer each, and with 2 layers and 1, of which none is one
    that a stage lacks."""
    in_chunks = of_dealt_layers(jnp.array([[[[0], [1]], [[2], [3]]]]), (2, 2))
    unlike = of_dealt_layers(jnp.array([[[[0, 1], [2, -1]]]]), (2, 1))

    assert in_chunks.tolist() == [[0, 1, 2, 3]]
    assert unlike.tolist() == [[0, 1, 2]]
