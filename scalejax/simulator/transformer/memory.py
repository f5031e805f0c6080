"""Closed-form memory of a transformer's step, as XLA assigns it: state, activations, peak.

Left out: fragmentation between buffers, a few per cent. Independent of hardware.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Literal

from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.simulator.program import MemoryUse
from scalejax.simulator.transformer.block import kept_stacks
from scalejax.simulator.transformer.embedding_and_loss import accumulator_elements, base_bytes
from scalejax.simulator.transformer.experts import held_bytes as held_by_experts
from scalejax.simulator.transformer.shape import (
    BlockShard,
    Strategy,
    TransformerShape,
    block_shard,
    expert_parameters_of_device,
    frozen_bytes_of_device,
    matrix_bytes,
    parameters_of_device,
    scatters_in_blocks,
    stage_counts,
    stage_kinds,
    trained_of_device,
    transposes_kept,
    zero_parts,
)

AMPERE_WORKSPACE_BYTES = 4 * 1024**2
"""Workspace that XLA gives to cuBLAS before Hopper (xla/service/gpu, GetCublasWorkspaceSize:
32 MiB from Hopper on)."""
_F32_BYTES = 4
_CACHE_SIZE = 65536  # entries of the caches

Blocks = tuple[tuple[BlockShard, int], ...]
"""For each kind of block, a device's shard of it and the number of such blocks."""


def memory_use(
    shape: TransformerShape, strategy: Strategy, *, workspace_bytes: int = AMPERE_WORKSPACE_BYTES
) -> MemoryUse:
    """Memory of one device; with pipeline parallelism, of the stage that holds most.

    Arguments are parameters, moments and tokens. All else is temporary: matrices and their
    gradients in the compute type, accumulated gradients in float32, the kept activations of the
    microbatches in flight, and the largest of the peaks of loss, backward pass and transposes.
    """
    held = memory_by_zero_stage(shape, [strategy])[strategy.zero_stage]
    state = held.state_bytes(strategy.zero_stage)
    return MemoryUse(
        argument_bytes=state + held.batch_bytes,
        output_bytes=state,
        alias_bytes=state,
        temporary_bytes=workspace_bytes
        + held.temporary_bytes(strategy.zero_stage, strategy.pipeline_chunks),
    )


class DeviceMemory:
    """Memory of a device as a function of ZeRO stage and pipeline chunks."""

    def __init__(
        self,
        shape: TransformerShape,
        blocks: Blocks,
        first: Blocks,
        layout: Layout,
        microbatches: int,
        moments: int,
    ) -> None:
        """Sum the terms that depend on neither.

        Args:
            shape: the network.
            blocks: for each kind of block, a device's shard of it for one microbatch, and the
                number of such blocks in the longest stage.
            first: the same for the dense blocks that only the first of several stages computes.
            layout: layout of all devices.
            microbatches: microbatches per update.
            moments: arrays of the parameters' size that the optimizer keeps.
        """
        shard = blocks[-1][0]
        self._layout, self._stages, self._moments = layout, layout.pipeline, moments
        self._microbatches = microbatches
        self._compiler = shape.compiler
        self._own = trained_of_device(shape, layout) * _F32_BYTES
        self._frozen = frozen_bytes_of_device(shape, layout)
        self._used = parameters_of_device(shape, layout) * shape.element_bytes
        self._of_experts = expert_parameters_of_device(shape, layout) * _F32_BYTES
        self._accumulated = accumulator_elements(shape, layout, microbatches) * _F32_BYTES
        self._is_scattered = shard.is_scattered
        self._is_cast = shape.element_bytes != _F32_BYTES
        self._kept = sum(sum(kept_stacks(each)) * count for each, count in blocks)
        self._gathered_table = 0
        self._blocks = blocks
        if layout.pipeline > 1:
            self._fixed = _fixed_bytes_of_stage(blocks, first)
            self._of_blocks = _F32_BYTES * sum(
                sum(each.trained.values()) // each.layout.fsdp // shape.element_bytes * count
                for each, count in blocks
            )
            self._accumulated += _gradients_beyond_share(shape, blocks, first, layout)
            if shape.adapters is None:
                self._gathered_table = self._is_cast * _table_bytes(shape, layout)
        else:
            self._fixed = _fixed_bytes(blocks, layout.data > 1 and microbatches > 1)
        self.batch_bytes = _batch_bytes(shape, layout, shard.samples * microbatches)
        """Tokens and targets of an update, int32."""

    def state_bytes(self, zero_stage: int) -> int:
        """Bytes of parameters and moments."""
        own = self._sharded(self._own) if zero_stage else self._own
        return (1 + self._moments) * own + self._frozen

    def _sharded(self, size: int) -> int:
        return _sharded(self._layout, size, self._of_experts)

    @cached_property
    def _fixed_scattered(self) -> int:
        """The fixed bytes of ZeRO 2, which sums after each microbatch's backward pass."""
        layout = self._layout
        if layout.data == 1 or layout.pipeline > 1:
            return self._fixed
        apart = tuple(
            (replace(each, layout=replace(each.layout, data=1)), count)
            for each, count in self._blocks
        )
        return _fixed_bytes(apart, True, True)

    def temporary_bytes(self, zero_stage: int, chunks: int) -> int:
        """Peak bytes of everything except the state and the batch."""
        is_sharded = self._is_scattered or (zero_stage == 2 and self._stages == 1)
        accumulated = self._sharded(self._accumulated) if is_sharded else self._accumulated
        if zero_stage == 2 and self._stages > 1:
            accumulated //= self._layout.data
        # Cast parameters are in the fixed bytes; others are arguments, unless sharded by ZeRO.
        gathered = self._own if zero_stage and not self._is_cast else 0
        gathered += self._gathered_table if zero_stage else 0
        ticks = PipelineTicks("1f1b", self._stages, self._microbatches, chunks)
        fixed = self._fixed_scattered if zero_stage == 2 else self._fixed
        peak = fixed + accumulated + gathered + int(self._kept * ticks.in_flight)
        if chunks > 1:
            return max(peak, self._return_bytes(zero_stage, accumulated))
        return max(peak, self._scatter_bytes(accumulated)) if zero_stage == 2 else peak

    def _return_bytes(self, zero_stage: int, accumulated: int) -> int:
        """Bytes while the gradients of chunks return to their stages, in float32: all of them,
        those of blocks once more, and, with the compiler of 0.10, the shards of these that are
        scattered over data meanwhile."""
        blocks = self._of_blocks * accumulated // self._accumulated
        is_scattered = zero_stage > 0 and self._compiler == "0.10"
        shards = self._sharded(self._of_blocks) if is_scattered else 0
        return accumulated + blocks + shards

    def _scatter_bytes(self, accumulated: int) -> int:
        """Bytes while ZeRO 2 scatters all gradients over data, in float32: these and their shards;
        between microbatches also parameters in the compute type and accumulated gradients, whose
        shards are over context and experts as well."""
        if self._layout.data == 1 or self._stages > 1:
            return 0
        between = self._used + accumulated if accumulated else 0
        return self._own + self._own // self._layout.data + between


def _batch_bytes(shape: TransformerShape, layout: Layout, samples: int) -> int:
    """Bytes of the tokens and targets of that many samples, int32."""
    return 8 * samples * (shape.tokens // layout.context)


def _sharded(layout: Layout, size: int, of_experts: int) -> int:
    """Bytes of an array of `size` for the parameters, including those of experts, sharded by
    ZeRO."""
    experts = min(size, of_experts)
    return (size - experts) // zero_parts(layout) + experts // zero_parts(layout, of_experts=True)


def least_bytes(
    shape: TransformerShape,
    split: BatchSplit,
    *,
    sequence_parallel: bool,
    zero_stage: Literal[0, 1, 2],
    moments: int,
) -> int:
    """Lower bound of the memory of every strategy that trains in full, whatever its recompute,
    attention and chunks.

    Counts state, batch, matrices in the compute type, accumulated gradients, logits with their
    gradient, and the input of every block, each at most as large as in `DeviceMemory`. Lets
    searches exclude strategies without computing the rest.
    """
    layout, microbatches = split.layout, split.microbatches
    own, of_experts, cast, table, blocks = _least_of_layout(shape, layout)
    state = _sharded(layout, own, of_experts) if zero_stage else own
    accumulated = accumulator_elements(shape, layout, microbatches) * _F32_BYTES
    if layout.pipeline == 1 and zero_stage:
        accumulated = _sharded(layout, accumulated, of_experts)
    elif zero_stage == 2:
        accumulated //= layout.data
    samples = split.microbatch
    rows = samples * shape.tokens // layout.context
    stream = rows * shape.hidden * shape.element_bytes
    kept = stream // (layout.tensor if sequence_parallel else 1)
    kept *= blocks * min(microbatches, layout.pipeline)
    logits = rows * shape.vocabulary // layout.tensor * shape.element_bytes
    batch = _batch_bytes(shape, layout, samples * microbatches)
    return batch + (1 + moments) * state + cast + table + 2 * logits + accumulated + stream + kept


@lru_cache(maxsize=_CACHE_SIZE)
def _least_of_layout(shape: TransformerShape, layout: Layout) -> tuple[int, int, int, int, int]:
    """Bytes of parameters, of expert parameters, of cast matrices and of the cast token embedding;
    and the blocks of the longest stage."""
    kinds = stage_kinds(shape, max(stage_counts(shape, layout)), layout.pipeline)
    before = shape.kinds[:-1] if layout.pipeline > 1 else ()
    cast = sum(
        matrix_bytes(kind, layout) // layout.fsdp * count for kind, count in (*kinds, *before)
    )
    return (
        parameters_of_device(shape, layout) * _F32_BYTES,
        expert_parameters_of_device(shape, layout) * _F32_BYTES,
        cast if _casts(shape) else 0,
        _table_bytes(shape, layout) if _casts(shape) else 0,
        sum(count for _, count in kinds),
    )


def memory_by_zero_stage(
    shape: TransformerShape, strategies: Iterable[Strategy]
) -> dict[Literal[0, 1, 2], DeviceMemory]:
    """Memory of a device by ZeRO stage.

    Args:
        shape: the network.
        strategies: strategies that differ in ZeRO stage and chunks only.
    """
    found: dict[Literal[0, 1, 2], DeviceMemory] = {}
    known: dict[bool, DeviceMemory] = {}
    for each in strategies:
        if each.zero_stage not in found:
            # Nothing else in a block's shard depends on the ZeRO stage.
            is_scattered = scatters_in_blocks(shape, each)
            if is_scattered not in known:
                known[is_scattered] = _device_memory(shape, each)
            found[each.zero_stage] = known[is_scattered]
    return found


def _device_memory(shape: TransformerShape, strategy: Strategy) -> DeviceMemory:
    layout = strategy.layout
    kinds = stage_kinds(shape, max(stage_counts(shape, layout)), layout.pipeline)
    before = shape.kinds[:-1] if layout.pipeline > 1 else ()
    blocks, first = (
        tuple((block_shard(kind, strategy), count) for kind, count in some)
        for some in (kinds, before)
    )
    return DeviceMemory(shape, blocks, first, layout, strategy.split.microbatches, strategy.moments)


@lru_cache(maxsize=_CACHE_SIZE)
def _fixed_bytes(blocks: Blocks, is_manual: bool, is_scattered: bool = False) -> int:
    """Bytes of stacked matrices in the compute type, and the most that loss, transposes or the
    backward pass hold in addition to them and the kept activations.

    Args:
        blocks: as for `DeviceMemory`.
        is_manual: as for `embedding_and_loss.logits`.
        is_scattered: whether ZeRO 2 scatters the gradients of each microbatch during the product
            for the output layer's gradient, whose operand is held until then.
    """
    shard, layers = blocks[-1][0], sum(count for _, count in blocks)
    shape, layout = shard.shape, shard.layout
    stack = _stack_bytes(blocks)
    gradients = sum(
        size // each.layout.fsdp // each.gradient_parts(name) * count
        for each, count in blocks
        for name, size in each.trained.items()
    )
    cast = stack if _casts(shape) else 0
    block = max(block_bytes(each) for each, _ in blocks)
    # The table of a frozen base in the compute type is used where it is stored.
    table = _table_bytes(shape, layout) if _casts(shape) or layout.fsdp > 1 else 0
    if shape.adapters is not None:
        cast += gradients
    logits = shard.rows * shape.vocabulary // layout.tensor * shape.element_bytes
    # The scheduler zeroes gradients before the loss if it waits for collectives meanwhile.
    if shard.is_over_context:  # blocks then have latencies to fill, and the loss only these
        is_early = layout.fsdp > 1 or layout.data > 1 or is_manual or shard.is_scattered
        loss = table * (1 + (layout.tensor > 1 if shape.has_tied_embeddings else is_early))
    elif shape.has_tied_embeddings:
        is_early = layout.tensor == 1 and (layout.fsdp > 1 or shard.is_scattered)
        loss = table * (1 + (layout.tensor > 1))
    else:
        is_early = layout.device_count > 1
        loss = table * (1 + is_early)
    if shape.compiler == "0.12" or shape.adapters is not None:  # zeroes them after it
        is_early, loss = False, table
    # What the gradient of the output layer reads is not held if there is no such gradient.
    streams = 2 * shard.stream_bytes if shape.adapters is None else shard.kept_stream_bytes
    loss += logits + streams + (gradients if is_early else 0)
    loss += logits if is_manual else logits * _F32_BYTES // shape.element_bytes
    tables = table if shape.has_tied_embeddings else 2 * table
    if shape.adapters is not None:  # have no gradients; the one for the backward pass is gathered
        tables = 0
    backward = gradients + tables + block + (logits if is_scattered else 0)
    transposed = 0
    if transposes_kept(shard):
        transposed = (layers + 1) * shard.stream_bytes + gradients + logits + tables + table
    return cast + max(loss, backward, transposed)


def _casts(shape: TransformerShape) -> bool:
    """Whether matrices are stored in another type than that of their products."""
    is_stored = shape.element_bytes == base_bytes(shape)
    return shape.element_bytes != _F32_BYTES and not is_stored


def _stack_bytes(blocks: Blocks) -> int:
    """Bytes of the stacked matrices of a stage in the compute type."""
    return sum(each.matrix_bytes // each.layout.fsdp * count for each, count in blocks)


def _fixed_bytes_of_stage(blocks: Blocks, first: Blocks) -> int:
    """`_fixed_bytes` of a pipeline stage: its matrices and those of the dense blocks of the first
    stage, which every stage holds; what it received from either side and sends; and the largest of:
    the output layer, whose loss is differentiated at once (logits, their gradient, and the layer;
    with fsdp also its gradient and another table, the embedding); the backward pass of a block; and
    that of the dense blocks, whose gradients are stacked. Both passes include the sums of a layer's
    largest matrix.
    """
    shard = blocks[-1][0]
    shape, layout = shard.shape, shard.layout
    stack, dense = _stack_bytes(blocks), _stack_bytes(first)
    cast = stack + dense if _casts(shape) else 0
    logits = shard.rows * shape.vocabulary // layout.tensor * shape.element_bytes
    table, streams = _table_bytes(shape, layout), shard.stream_bytes
    held = int(layout.fsdp > 1)
    if _casts(shape) or shape.adapters is None:
        held *= 1 if shape.has_tied_embeddings or shape.adapters is not None else 2
        held += 1
    last = 2 * logits + table * held + streams
    kept = sum(sum(kept_stacks(each)) * count for each, count in first)
    passes = [block_bytes(each) + _summed_bytes(each) for each, _ in blocks]
    passes += [dense + kept + block_bytes(each) + _summed_bytes(each) for each, _ in first]
    return cast + 3 * streams + max(last, *passes)


def _summed_bytes(shard: BlockShard) -> int:
    """Bytes of the float32 sums of the gradient of a layer's largest matrix, out of their stack."""
    largest = max(shard.trained.values()) // shard.layout.fsdp
    return largest * _F32_BYTES // shard.shape.element_bytes


def _gradients_beyond_share(
    shape: TransformerShape, blocks: Blocks, first: Blocks, layout: Layout
) -> int:
    """Bytes of a stage's accumulated gradients beyond those of an equal share of all blocks: for
    the blocks that shorter stages are padded with, and for the dense ones of the first stage."""
    counts = [count for _, count in shape.kinds]
    shares = ((each, count) for (each, _), count in zip((*first, *blocks), counts, strict=True))
    share = _stack_bytes(tuple(shares)) // layout.pipeline
    beyond = _stack_bytes(first) + _stack_bytes(blocks) - share
    return beyond * _F32_BYTES // shape.element_bytes


def _table_bytes(shape: TransformerShape, layout: Layout) -> int:
    """Bytes of the gathered token embedding in the compute type."""
    return shape.vocabulary * shape.hidden * shape.element_bytes // layout.tensor


def block_bytes(shard: BlockShard) -> int:
    """Peak bytes of the backward pass of one block, excluding the stacks.

    A layer of each matrix, with fsdp gathered and with the gradients before they are scattered;
    the input, its norms and the gradient; queries, keys, values and their gradients; the
    feed-forward activations before and after the GELU and their gradient; two arrays of scores.
    """
    has_gradients = shard.layout.fsdp > 1 and shard.shape.adapters is None
    matrices = shard.matrix_bytes * (2 if has_gradients else 1)
    streams = 6 * shard.stream_bytes
    scores = 0 if shard.shape.is_fused else 2 * shard.score_bytes
    if shard.shape.experts is not None:
        return matrices + streams + 2 * shard.qkv_bytes + scores + held_by_experts(shard)
    inner = shard.up_bytes + 2 * shard.inner_bytes
    if shard.recompute in ("selective_op", "full"):
        return matrices + streams + 2 * shard.qkv_bytes + scores + inner
    return shard.matrix_bytes + streams + shard.qkv_bytes + scores + inner
