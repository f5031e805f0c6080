"""Closed-form memory of a transformer's step, as XLA assigns it: state, activations, peak.

Left out: fragmentation between buffers, a few per cent. Knows no hardware.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from scalejax.config.parallelism import Layout
from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.simulator.program import MemoryUse
from scalejax.simulator.transformer.block import kept_stacks
from scalejax.simulator.transformer.embedding_and_loss import accumulator_elements
from scalejax.simulator.transformer.shape import (
    BlockShard,
    Strategy,
    TransformerShape,
    block_shard,
    most_layers,
    parameters_of_device,
)

AMPERE_WORKSPACE_BYTES = 4 * 1024**2
"""Workspace that XLA gives to cuBLAS before Hopper (xla/service/gpu, GetCublasWorkspaceSize:
32 MiB from Hopper on)."""
_F32_BYTES = 4
_CACHE_SIZE = 65536  # entries of the caches


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

    def __init__(self, shard: BlockShard, layout: Layout, microbatches: int, moments: int) -> None:
        """Sum the terms that depend on neither.

        Args:
            shard: a device's shard of a block for one microbatch.
            layout: layout of all devices.
            microbatches: microbatches per update.
            moments: arrays like the parameters that the optimizer keeps.
        """
        shape, layers = shard.shape, most_layers(shard.shape, layout)
        self._data, self._stages, self._moments = layout.data, layout.pipeline, moments
        self._microbatches = microbatches
        self._own = parameters_of_device(shape, layout) * _F32_BYTES
        self._accumulated = accumulator_elements(shape, layout, microbatches) * _F32_BYTES
        self._is_cast = shape.element_bytes != _F32_BYTES
        self._kept = sum(kept_stacks(shard)) * layers
        self._fixed = _fixed_bytes(shard, layers, layout.data > 1 and microbatches > 1)
        self._fixed_scattered = self._fixed
        if layout.data > 1:  # ZeRO 2 sums after each microbatch, not in its backward pass
            apart = replace(shard, layout=replace(shard.layout, data=1))
            self._fixed_scattered = _fixed_bytes(apart, layers, True, layout.pipeline == 1)
        if layout.pipeline > 1:
            self._fixed = self._fixed_scattered = _fixed_bytes_of_stage(shard, layers)
        self.batch_bytes = 8 * shard.samples * microbatches * (shape.tokens // layout.context)
        """Tokens and targets of an update, int32."""

    def state_bytes(self, zero_stage: int) -> int:
        """Bytes of parameters and moments."""
        return (1 + self._moments) * self._own // (self._data if zero_stage else 1)

    def temporary_bytes(self, zero_stage: int, chunks: int) -> int:
        """Peak bytes of everything besides the state and the batch."""
        accumulated = self._accumulated // (self._data if zero_stage == 2 else 1)
        # Cast parameters are in the fixed bytes; others are arguments, unless sharded by ZeRO.
        gathered = self._own if zero_stage and not self._is_cast else 0
        ticks = PipelineTicks("1f1b", self._stages, self._microbatches, chunks)
        fixed = self._fixed_scattered if zero_stage == 2 else self._fixed
        return fixed + accumulated + gathered + int(self._kept * ticks.in_flight)


def memory_by_zero_stage(
    shape: TransformerShape, strategies: Iterable[Strategy]
) -> dict[Literal[0, 1, 2], DeviceMemory]:
    """Memory of a device by ZeRO stage.

    Args:
        shape: the network.
        strategies: strategies that differ in ZeRO stage and chunks only.
    """
    found: dict[Literal[0, 1, 2], DeviceMemory] = {}
    known: dict[BlockShard, DeviceMemory] = {}
    for each in strategies:
        if each.zero_stage not in found:
            shard = block_shard(shape, each)
            if shard not in known:
                known[shard] = DeviceMemory(
                    shard, each.layout, each.split.microbatches, each.moments
                )
            found[each.zero_stage] = known[shard]
    return found


@lru_cache(maxsize=_CACHE_SIZE)
def _fixed_bytes(
    shard: BlockShard, layers: int, is_manual: bool, is_scattered: bool = False
) -> int:
    """Bytes of stacked matrices in the compute type, and the most that loss, transposes or the
    backward pass hold besides them and the kept activations.

    Args:
        shard: a device's shard of a block for one microbatch.
        layers: blocks of the longest stage.
        is_manual: as of `embedding_and_loss.logits`.
        is_scattered: whether ZeRO 2 scatters the gradients of each, beside the product for that of
            the output layer: its operand is held until then.
    """
    shape, layout = shard.shape, shard.layout
    stack = shard.matrix_bytes // layout.fsdp * layers
    gradients = stack // shard.gradient_parts
    cast = 0 if shape.element_bytes == _F32_BYTES else stack
    table, block = _table_bytes(shard), block_bytes(shard)
    logits = shard.rows * shape.vocabulary // layout.tensor * shape.element_bytes
    # The scheduler zeroes gradients before the loss where it waits for collectives meanwhile.
    if shard.is_over_context:  # blocks have latencies to fill then, and the loss only these
        is_early = layout.fsdp > 1 or layout.data > 1 or is_manual
        loss = table * (1 + (layout.tensor > 1 if shape.has_tied_embeddings else is_early))
    elif shape.has_tied_embeddings:
        is_early = layout.tensor == 1 and (layout.fsdp > 1 or shard.is_scattered)
        loss = table * (1 + (layout.tensor > 1))
    else:
        is_early = layout.device_count > 1
        loss = table * (1 + is_early)
    loss += logits + 2 * shard.stream_bytes + (gradients if is_early else 0)
    loss += logits if is_manual else logits * _F32_BYTES // shape.element_bytes
    tables = table if shape.has_tied_embeddings else 2 * table
    backward = gradients + tables + block + (logits if is_scattered else 0)
    transposed = 0
    if shard.sequence_parallel and shard.samples > 1 and shard.recompute in ("none", "selective"):
        transposed = (layers + 1) * shard.stream_bytes + gradients + logits + tables + table
    return cast + max(loss, backward, transposed)


def _fixed_bytes_of_stage(shard: BlockShard, layers: int) -> int:
    """`_fixed_bytes` of a stage of a pipeline: its matrices, what it received from either side and
    sends, and the most that the output layer holds, whose loss is differentiated at once (logits,
    their gradient, and the layer, with fsdp also its gradient), or the backward pass of a block.
    """
    shape, layout = shard.shape, shard.layout
    stack = shard.matrix_bytes // layout.fsdp * layers
    cast = 0 if shape.element_bytes == _F32_BYTES else stack
    logits = shard.rows * shape.vocabulary // layout.tensor * shape.element_bytes
    table, streams = _table_bytes(shard), shard.stream_bytes
    last = 2 * logits + table * (1 + (layout.fsdp > 1)) + streams
    return cast + 3 * streams + max(last, block_bytes(shard))


def _table_bytes(shard: BlockShard) -> int:
    """Bytes of the gathered token embedding in the compute type."""
    shape = shard.shape
    return shape.vocabulary * shape.hidden * shape.element_bytes // shard.layout.tensor


def block_bytes(shard: BlockShard) -> int:
    """Peak bytes of the backward pass of one block besides the stacks.

    A layer of each matrix, with fsdp gathered and with the gradients before they are scattered;
    the input, its norms and the gradient; queries, keys, values and their gradients; the
    feed-forward activations before and after the GELU and their gradient; two arrays of scores.
    """
    matrices = shard.matrix_bytes * (2 if shard.layout.fsdp > 1 else 1)
    streams = 6 * shard.stream_bytes
    scores = 0 if shard.shape.is_fused else 2 * shard.score_bytes
    inner = shard.up_bytes + 2 * shard.inner_bytes
    if shard.recompute in ("selective_op", "full"):
        return matrices + streams + 2 * shard.qkv_bytes + scores + inner
    return shard.matrix_bytes + streams + shard.qkv_bytes + scores + inner
