"""Pipeline parallelism: blocks in stages that compute different microbatches at the same time.

Every stage is a group of devices along the pipeline axis, and holds some of the blocks. At each
tick all stages compute, each its own microbatch, and then send the result to the next stage: a
collective permute, as the array of states is rolled by one along its first dimension, the stages.
The backward pass runs in reverse. All microbatches go forward before the first goes backward
(GPipe; Huang et al. 2018, arXiv 1811.06965), and a stage saves the input of each until then.

With several chunks the schedule is interleaved: a stage holds that many parts of the network, and a
microbatch passes through all stages once per chunk (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2). Microbatches enter in groups, one for each stage, and groups follow each other without
a gap. The bubble is stages - 1 of the microbatches x chunks + stages - 1 ticks; what stages compute
in it is discarded.

Where stages do not divide the layers, the first ones hold one more than the others. All stages wait
for these at each tick; meanwhile a shorter stage runs a layer of zeros, which adds nothing to the
residual stream. These zeros are not parameters and are not trained.

Layers that differ from the rest, such as dense ones before those with experts, belong to no stage:
all stages compute them, each for its share of the microbatches.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from scalejax.config.model import DecoderRemat
from scalejax.config.parallelism import BATCH_AXES, PIPELINE, stage_layers
from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.models.packing import Documents, documents, packed
from scalejax.models.remat import recomputed_with_picks
from scalejax.models.sharding import axis_size, constrained, constrained_for_head, constraints


def through_stages(
    blocks: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    stacked: Any,
    x_BSD: jax.Array,
    stages: int,
    remat: DecoderRemat,
    *,
    is_reporting: bool = False,
) -> tuple[jax.Array, Any]:
    """The residual stream after all blocks, [B, S, D], and their reports on each microbatch, in
    the order of the network, [microbatches, layers, ...].

    Parameters are stored in the order of the network whatever the chunks, so that checkpoints are
    valid for any layout; with several chunks each step redistributes them to the stages first.

    Args:
        blocks: maps (parameters of some blocks, stacked; residual stream) to the residual stream
            after them, and what each of them reports, stacked. A block adds to the stream; one
            whose parameters are zeros adds nothing.
        stacked: parameters of all blocks, layers first.
        x_BSD: the residual stream before the first block.
        stages: devices along the pipeline axis; with several chunks, stages x chunks divides the
            layers.
        remat: what the backward pass recomputes of each block, as `blocks` implements it.
        is_reporting: whether blocks report something, as those with experts do. Stages are then
            manual, not a dimension over which blocks are mapped: a mapped loop whose length depends
            on the data would copy all results in each iteration.
    """
    chunks, microbatches = constraints().chunks, constraints().microbatches
    counts = stage_layers(jax.tree.leaves(stacked)[0].shape[0], stages)
    dealt = jax.tree.map(lambda leaf: dealt_to_stages(leaf, chunks, counts), stacked)
    rows_MBSD = _by_stage(_split(x_BSD, microbatches), leading=(None,))
    documents_MBS = jax.tree.map(lambda leaf: _split(leaf, microbatches), documents())
    here = jnp.arange(stages)

    def of_stage(layers: Any, x_BSD: jax.Array, of_rows: Documents | None) -> Any:
        with packed(of_rows):
            return blocks(layers, x_BSD)

    if is_reporting:
        every = _at_every_stage(of_stage)
    else:
        every = jax.vmap(of_stage, spmd_axis_name=PIPELINE)

    def at_work(
        dealt: Any, chunk_P: jax.Array, state_PBSD: jax.Array, documents_PBS: Documents | None
    ) -> tuple[jax.Array, Any]:
        return every(_picked(dealt, chunk_P), state_PBSD, documents_PBS)

    def documents_at(time: jax.Array) -> Documents | None:
        """The documents of the microbatch that each stage computes."""
        group_P, place_P = jnp.divmod(jnp.maximum(time - here, 0), stages * chunks)
        which_P = jnp.minimum(group_P * stages + place_P % stages, microbatches - 1)
        return jax.tree.map(lambda leaf: _by_stage(leaf[which_P]), documents_MBS)

    if chunks > 1:
        at_work = recomputed_with_picks(at_work, remat)

    def tick(state_PBSD: jax.Array, time: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        group, place = jnp.divmod(time, stages * chunks)
        entering = jnp.clip(group * stages + place, 0, microbatches - 1)
        handed_PBSD = jnp.roll(state_PBSD, 1, axis=0)
        is_entering = (here == 0) & (place < stages)
        state_PBSD = _either(is_entering, rows_MBSD[entering], handed_PBSD)
        chunk = jnp.maximum(time - here, 0) // stages % chunks
        state_PBSD, report = at_work(dealt, chunk, _by_stage(state_PBSD), documents_at(time))
        state_PBSD = _by_stage(state_PBSD)
        return state_PBSD, (state_PBSD, report)

    empty = _by_stage(jnp.zeros((stages, *rows_MBSD.shape[1:]), x_BSD.dtype))
    ticks = PipelineTicks("gpipe", stages, microbatches, chunks)
    _, (made_TPBSD, reports) = jax.lax.scan(tick, empty, jnp.arange(ticks.work + ticks.idle))
    group, place = np.divmod(np.arange(microbatches), stages)
    entered_MC = (group[:, None] * chunks + np.arange(chunks)) * stages + place[:, None]
    leaving = entered_MC[:, -1] + stages - 1
    # A sum in which only the last stage's term is not 0: the compiler reduce-scatters it.
    is_last = (here == stages - 1)[None, :, None, None, None]
    last_MPBSD = jnp.where(is_last, made_TPBSD[leaving], 0)
    x_BSD = constrained_for_head(_joined(jnp.sum(last_MPBSD, axis=1, dtype=x_BSD.dtype)))

    def of_layers(report_TPL: jax.Array) -> jax.Array:
        # Replicated to all stages first, so that each has all indices below.
        report_TPL = constrained(report_TPL, P())
        report_MCPL = report_TPL[entered_MC[..., None] + np.arange(stages), np.arange(stages)]
        return of_dealt_layers(report_MCPL, counts)

    return x_BSD, jax.tree.map(of_layers, reports)


def _at_every_stage(of_stage: Callable[..., tuple[jax.Array, Any]]) -> Callable[..., Any]:
    """`of_stage` for arrays whose first dimension counts stages."""

    def own(*arguments: Any) -> tuple[jax.Array, Any]:
        made = of_stage(*jax.tree.map(lambda leaf: leaf[0], arguments))
        return jax.tree.map(lambda leaf: leaf[None], made)

    return _over_stages(own, P(PIPELINE), P(PIPELINE))


def _over_stages(own: Callable[..., Any], in_specs: Any, out_specs: P) -> Callable[..., Any]:
    """`own` in a `shard_map` over the stages, which leaves the other axes to the compiler."""
    return jax.shard_map(
        own,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={PIPELINE},
        check_vma=False,
    )


def shared_by_stages(
    blocks: Callable[[Any, jax.Array], tuple[jax.Array, Any]], stacked: Any, x_BSD: jax.Array
) -> tuple[jax.Array, Any]:
    """The residual stream after blocks that belong to no stage, [B, S, D], and their reports on
    each microbatch, [microbatches, layers, ...]: each stage computes its share of the microbatches,
    or all of them where stages do not divide them. Other arguments as for `through_stages`."""

    microbatches = constraints().microbatches
    is_divided = microbatches % axis_size(PIPELINE) == 0

    def by_stage(leaf: jax.Array) -> jax.Array:
        first = PIPELINE if is_divided else None
        return _by_stage(_split(leaf, microbatches), leading=(first,))

    def own(stacked: Any, rows_MBSD: jax.Array, documents_MBS: Documents | None) -> Any:
        def one(given: tuple[jax.Array, Documents | None]) -> tuple[jax.Array, Any]:
            with packed(given[1]):
                return blocks(stacked, given[0])

        return jax.lax.map(one, (rows_MBSD, documents_MBS))

    rows = jax.tree.map(by_stage, (x_BSD, documents()))
    if is_divided:
        own = _over_stages(own, (P(), P(PIPELINE), P(PIPELINE)), P(PIPELINE))
    rows_MBSD, reports = own(stacked, *rows)
    return _joined(_by_stage(rows_MBSD, leading=(None,))), reports


@partial(jax.checkpoint, prevent_cse=False)
def _either(is_entering_P: jax.Array, entering_BSD: jax.Array, handed_PBSD: jax.Array) -> jax.Array:
    """The input of each stage: the entering microbatch, or the output of the previous stage.

    The backward pass saves a flag per stage, not per element.
    """
    return jnp.where(is_entering_P[:, None, None, None], entering_BSD[None], handed_PBSD)


def dealt_to_stages(leaf: jax.Array, chunks: int, counts: tuple[int, ...]) -> jax.Array:
    """[layers, ...] as [chunks, stages, layers of a chunk, ...], sharded over the stages, with
    zeros where a stage has fewer layers than others; `counts` are the layers of each stage."""
    rest, most = leaf.shape[1:], max(counts)
    if min(counts) < most:
        parts, start = [], 0
        for count, stages in _runs(counts):
            part = leaf[start : start + count * stages].reshape(stages, count, *rest)
            parts.append(jnp.pad(part, [(0, 0), (0, most - count), *[(0, 0)] * len(rest)]))
            start += count * stages
        leaf = jnp.concatenate(parts)
        # Before stages take their parts: the gradient is then split into them as a whole, once.
        leaf = constrained(leaf, P(None, None, *(P.UNCONSTRAINED,) * len(rest)))
    elif chunks > 1 and axis_size(PIPELINE) > 1:
        return _exchanged(leaf, chunks)
    leaf = leaf.reshape(chunks, len(counts), -1, *rest)
    return constrained(leaf, P(None, PIPELINE, *(P.UNCONSTRAINED,) * (leaf.ndim - 2)))


def _exchanged(leaf: jax.Array, chunks: int) -> jax.Array:
    """[layers, ...], of which each stage has neighbouring ones, as [chunks, stages, layers of a
    chunk, ...], of which it has those that it computes.

    Each stage sends a chunk at a time, and gets another's. The compiler by itself gathers all
    layers on every device to pick from them, and their gradients likewise, where stages do not
    divide the chunks (9 stages of 7; jax 0.10.2, for GPUs).
    """
    rounds, rest = _rounds(chunks, axis_size(PIPELINE)), leaf.shape[1:]
    in_order, as_dealt = P(PIPELINE), P(None, PIPELINE)

    def moved(own: jax.Array, here: jax.Array, *, is_back: bool) -> jax.Array:
        made = jnp.zeros_like(own)
        for each in rounds:
            pairs, taken, put = (each.back, each.to, each.of) if is_back else each
            sent = jax.lax.dynamic_index_in_dim(own, jnp.asarray(taken)[here])
            got = jax.lax.ppermute(sent, PIPELINE, pairs)
            made = jax.lax.dynamic_update_slice_in_dim(made, got, jnp.asarray(put)[here], 0)
        return made

    def dealt(stage: jax.Array, own: jax.Array) -> jax.Array:
        return moved(own.reshape(chunks, -1, *rest), stage[0], is_back=False)[:, None]

    def back(stage: jax.Array, own: jax.Array) -> jax.Array:
        return moved(own[:, 0], stage[0], is_back=True).reshape(-1, *rest)

    # Its transpose by JAX would make an array of all chunks for each of them, to add them up.
    return jax.custom_derivatives.linear_call(
        lambda stages, leaf: _over_stages(dealt, (P(PIPELINE), in_order), as_dealt)(stages, leaf),
        lambda stages, gradient: _over_stages(back, (P(PIPELINE), as_dealt), in_order)(
            stages, gradient
        ),
        jnp.arange(axis_size(PIPELINE)),
        leaf,
    )


class _Round(NamedTuple):
    """Chunks that stages send at the same time, each one of them and to another stage."""

    pairs: tuple[tuple[int, int], ...]
    """(stage that sends, stage that receives)."""
    of: tuple[int, ...]
    """Which of its neighbouring chunks each stage sends."""
    to: tuple[int, ...]
    """As which of its chunks each stage computes what it receives."""

    @property
    def back(self) -> tuple[tuple[int, int], ...]:
        """The pairs of the way back."""
        return tuple((to, by) for by, to in self.pairs)


@cache
def _rounds(chunks: int, stages: int) -> tuple[_Round, ...]:
    """Rounds after which every stage has its chunks.

    Stage p holds chunks p C to p C + C - 1 of the network, of which stage g modulo S computes chunk
    g. With d the greatest common divisor of C and S, p C modulo S takes each multiple of d for d
    stages, S / d apart; where these send chunks that differ modulo d, no two meet.
    """
    common, found = math.gcd(chunks, stages), []
    for number in range(chunks):
        group, place = divmod(number, common)
        of = [group * common + (place + p // (stages // common)) % common for p in range(stages)]
        sent = [p * chunks + own for p, own in enumerate(of)]
        pairs = tuple((p, chunk % stages) for p, chunk in enumerate(sent))
        to = {chunk % stages: chunk // stages for chunk in sent}
        found.append(_Round(pairs, tuple(of), tuple(to[p] for p in range(stages))))
    return tuple(found)


def _runs(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(layers, stages) of neighbouring stages with equally many layers, in order."""
    return [(count, len(list(stages))) for count, stages in itertools.groupby(counts)]


def of_dealt_layers(dealt_MCPL: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    """[microbatches, chunks, stages, layers of a chunk, ...] in the order of the network,
    [microbatches, layers, ...], without the layers that stages do not have."""
    microbatches, _, _, most = dealt_MCPL.shape[:4]
    flat = dealt_MCPL.reshape(microbatches, -1, *dealt_MCPL.shape[4:])
    if min(counts) == max(counts):
        return flat
    places = [stage * most + np.arange(count) for stage, count in enumerate(counts)]
    return flat[:, np.concatenate(places)]


def _picked(dealt: Any, chunk_P: jax.Array) -> Any:
    """The layers that each stage computes in this tick, [stages, layers of a chunk, ...].

    Each stage indexes its own: for the gradient of one indexing for all stages, XLA's partitioner
    makes scatters that its own verifier refuses (jax 0.10.2, for GPUs).

    Args:
        dealt: parameters as `dealt_to_stages` leaves them.
        chunk_P: the chunk of each stage.
    """
    if all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(dealt)):
        return jax.tree.map(lambda leaf: leaf[0], dealt)

    def pick(dealt: Any, chunk: jax.Array) -> Any:
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, chunk[0], keepdims=False), dealt
        )

    return _over_stages(pick, (P(None, PIPELINE), P(PIPELINE)), P(PIPELINE))(dealt, chunk_P)


def _by_stage(activations: jax.Array, leading: tuple[str | None, ...] = (PIPELINE,)) -> jax.Array:
    """Activations of each stage sharded over the pipeline axis, rows over the batch axes."""
    rest = (P.UNCONSTRAINED,) * (activations.ndim - len(leading) - 1)
    return constrained(activations, P(*leading, BATCH_AXES, *rest))


def _split(rows: jax.Array, microbatches: int) -> jax.Array:
    """Rows split round-robin, so that each stays on its device: [microbatches, rows, S, ...]."""
    return rows.reshape(-1, microbatches, *rows.shape[1:]).swapaxes(0, 1)


def _joined(rows_MBSD: jax.Array) -> jax.Array:
    """The inverse of `_split`."""
    rows = rows_MBSD.swapaxes(0, 1)
    return rows.reshape(-1, *rows.shape[2:])
