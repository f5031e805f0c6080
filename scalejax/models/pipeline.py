"""Blocks in the stages of a pipeline, which work on microbatches at the same time.

Every stage is a group of devices along the pipeline axis, and holds some of the blocks. At each
tick all stages compute, each its own microbatch, and then hand on what they made: a collective
permute, for the compiler sees an array whose first dimension, the stages, is rolled by one. The
backward pass is the same in reverse. All microbatches go forward before the first comes back
(GPipe; Huang et al. 2018, arXiv 1811.06965), and a stage keeps the input of each until then.

With several chunks a stage holds as many parts of the network, with those of other stages
between them, and a microbatch passes through all stages once per chunk (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2): microbatches enter in groups, one for each stage, and a group
follows the one before it without a gap. Stages stand still for stages - 1 ticks of the
microbatches x chunks + stages - 1; what they compute then is thrown away.

Where stages do not divide the layers, the first ones hold one more than the others. All wait for
those at each tick; meanwhile a short stage puts what it was given through a layer of zeros, which
adds nothing to the residual stream. Nothing is trained there: a layer of zeros is nobody's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scalejax.config.model import Remat
from scalejax.config.parallelism import BATCH_AXES, PIPELINE, stage_layers
from scalejax.models.remat import recomputed_with_picks
from scalejax.models.sharding import constraints, placed, placed_for_head


def through_stages(
    blocks: Callable[[Any, jax.Array], jax.Array],
    stacked: Any,
    x_BSD: jax.Array,
    stages: int,
    remat: Remat,
) -> jax.Array:
    """The residual stream after all blocks, [B, S, D].

    Parameters are kept in the order of the network whatever the chunks, so that saved ones mean
    the same for any layout; with several chunks each step deals them out to the stages first.

    Args:
        blocks: maps (parameters of some blocks, stacked; residual stream) to what they make of it.
            A block adds to the stream; one whose parameters are zeros adds nothing.
        stacked: parameters of all blocks, layers first.
        x_BSD: the residual stream before the first block.
        stages: devices along the pipeline axis; times the chunks, where there are several, they
            divide the layers.
        remat: what the backward pass computes again of each block, as `blocks` has it done.
    """
    chunks, microbatches = constraints().chunks, constraints().microbatches
    dealt = jax.tree.map(lambda leaf: _dealt(leaf, chunks, stages), stacked)
    rows_MBSD = _by_stage(_split(x_BSD, microbatches), leading=(None,))
    here = jnp.arange(stages)

    every = jax.vmap(blocks, spmd_axis_name=PIPELINE)

    def at_work(dealt: Any, chunk_P: jax.Array, state_PBSD: jax.Array) -> jax.Array:
        return every(_picked(dealt, chunk_P), state_PBSD)

    if chunks > 1:
        at_work = recomputed_with_picks(at_work, remat)

    def tick(state_PBSD: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        group, place = jnp.divmod(time, stages * chunks)
        entering = jnp.clip(group * stages + place, 0, microbatches - 1)
        handed_PBSD = jnp.roll(state_PBSD, 1, axis=0)
        is_entering = (here == 0) & (place < stages)
        state_PBSD = _either(is_entering, rows_MBSD[entering], handed_PBSD)
        chunk = jnp.maximum(time - here, 0) // stages % chunks
        state_PBSD = _by_stage(at_work(dealt, chunk, _by_stage(state_PBSD)))
        return state_PBSD, state_PBSD

    empty = _by_stage(jnp.zeros((stages, *rows_MBSD.shape[1:]), x_BSD.dtype))
    _, made_TPBSD = jax.lax.scan(tick, empty, jnp.arange(microbatches * chunks + stages - 1))
    group, place = np.divmod(np.arange(microbatches), stages)
    leaving = (group * chunks + chunks - 1) * stages + place + stages - 1
    # A sum of which all terms but the last stage's are 0: the compiler scatters it at once.
    is_last = (here == stages - 1)[None, :, None, None, None]
    last_MPBSD = jnp.where(is_last, made_TPBSD[leaving], 0)
    return placed_for_head(_joined(jnp.sum(last_MPBSD, axis=1, dtype=x_BSD.dtype)))


@partial(jax.checkpoint, prevent_cse=False)
def _either(is_entering_P: jax.Array, entering_BSD: jax.Array, handed_PBSD: jax.Array) -> jax.Array:
    """What each stage takes: where a microbatch enters, that one, else what it was handed.

    What is kept for the backward pass is a flag for each stage, not for each of its elements.
    """
    return jnp.where(is_entering_P[:, None, None, None], entering_BSD[None], handed_PBSD)


def _dealt(leaf: jax.Array, chunks: int, stages: int) -> jax.Array:
    """[layers, ...] as [chunks, stages, layers of a chunk, ...], held by the stages; zeros where
    a stage has a layer less than others."""
    layers, *rest = leaf.shape
    if layers % stages:
        counts = stage_layers(layers, stages)
        long = counts.count(most := counts[0])
        first, last = jnp.split(leaf, [long * most])
        last = last.reshape(stages - long, most - 1, *rest)
        last = jnp.pad(last, [(0, 0), (0, 1), *[(0, 0)] * len(rest)])
        leaf = jnp.concatenate([first.reshape(long, most, *rest), last])
        # Before stages take theirs: its gradient is then put in parts again as a whole, once.
        leaf = placed(leaf, P(None, None, *(P.UNCONSTRAINED,) * len(rest)))
    leaf = leaf.reshape(chunks, stages, -1, *rest)
    return placed(leaf, P(None, PIPELINE, *(P.UNCONSTRAINED,) * (leaf.ndim - 2)))


def _picked(dealt: Any, chunk_P: jax.Array) -> Any:
    """The layers that each stage computes now, [stages, layers of a chunk, ...].

    Each stage picks for itself: XLA's partitioner makes scatters that its own verifier refuses of
    the gradient of one pick for all (jax 0.10.2, for GPUs).

    Args:
        dealt: parameters as `_dealt` leaves them.
        chunk_P: the chunk of each stage.
    """
    if all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(dealt)):
        return jax.tree.map(lambda leaf: leaf[0], dealt)

    def pick(dealt: Any, chunk: jax.Array) -> Any:
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chunk[0], keepdims=False), dealt
        )

    return jax.shard_map(
        pick,
        in_specs=(P(None, PIPELINE), P(PIPELINE)),
        out_specs=P(PIPELINE),
        axis_names={PIPELINE},
        check_vma=False,
    )(dealt, chunk_P)


def _by_stage(activations: jax.Array, leading: tuple[str | None, ...] = (PIPELINE,)) -> jax.Array:
    """Activations of each stage where that stage is, rows over the axes that divide the batch."""
    rest = (P.UNCONSTRAINED,) * (activations.ndim - len(leading) - 1)
    return placed(activations, P(*leading, BATCH_AXES, *rest))


def _split(x_BSD: jax.Array, microbatches: int) -> jax.Array:
    """Rows dealt out in turn, so that each stays on its device: [microbatches, rows, S, D]."""
    return x_BSD.reshape(-1, microbatches, *x_BSD.shape[1:]).swapaxes(0, 1)


def _joined(rows_MBSD: jax.Array) -> jax.Array:
    """What `_split` took apart."""
    rows = rows_MBSD.swapaxes(0, 1)
    return rows.reshape(-1, *rows.shape[2:])
