"""Operations outside the blocks: casts, embeddings, logits, loss, gradient sums, optimizer update.

As in `block`, read off compiled programs and derived from shapes. Left out: fusions of scalars.
Knows no hardware.
"""

from dataclasses import dataclass
from typing import Literal

from scalejax.config.parallelism import DATA, FSDP, PIPELINE, TENSOR, Layout
from scalejax.simulator.program import Operation
from scalejax.simulator.transformer.block import kept_bytes
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import (
    BlockShard,
    TransformerShape,
    is_uneven,
    most_layers,
    parameters_of_device,
    stage_layout,
    sum_axes,
)

_COMBINED_BYTES = 30 * 1024**2
"""Buffers up to this size are combined into one all-reduce, which copies them (XLA,
xla/service/gpu/gpu_compiler.cc, kDefaultAllReduceCombineThreshold)."""
_F32, _F32_BYTES = "f32", 4
_MATRICES = ("qkv", "projection", "up", "down")
_VECTOR_UPDATES = 10  # of biases and norms, each a fusion of its own


def _writer(prefix: str, shard: BlockShard) -> Writer:
    return Writer(prefix, shard.shape.operand_type, shard.layout)


def _table_elements(shard: BlockShard) -> int:
    """Elements of the token embedding that one device of a tensor group uses."""
    return shard.shape.vocabulary * shard.shape.hidden // shard.layout.tensor


def _position_elements(shard: BlockShard) -> int:
    shape = shard.shape
    return shape.tokens * shape.hidden if shape.has_learned_positions else 0


def embedding(shard: BlockShard, layers: int, is_gathered: bool) -> tuple[Operation, ...]:
    """Operations before the blocks: matrices cast to the compute type, embedding lookup.

    Args:
        shard: a device's shard of a block for one microbatch.
        layers: blocks of the stage.
        is_gathered: whether the step has cast the matrices already, to gather them from ZeRO's
            shards.
    """
    write, fsdp, used = _writer("embedding", shard), shard.layout.fsdp, shard.shape.element_bytes
    own = shard.matrix_bytes // fsdp * layers
    if used != _F32_BYTES and not is_gathered:
        for name, size in zip(_MATRICES, shard.matrices, strict=True):
            one = size // fsdp * layers
            write.fusion(f"{name}.cast", one * _F32_BYTES // used, one)
        table = _table_elements(shard) // fsdp
        write.fusion("tokens.cast", table * _F32_BYTES, table * used)
    tables = (_table_elements(shard) + _position_elements(shard)) * used
    if fsdp > 1 and shard.shape.has_learned_positions:
        write.fusion("places.cast", tables // fsdp // 4, tables // fsdp // 8)
    write.start("gather_tables", "all_gather", tables, (FSDP,), buffers=2)
    write.fusion("gradients.zero", 0, own)
    write.fusion("kept.zero", 0, layers * kept_bytes(shard))
    write.wait("gather_tables")
    stream = shard.stream_bytes
    write.fusion("lookup", stream + _position_elements(shard) * used, stream)
    if shard.layout.tensor > 1:
        kind = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
        write.collective("lookup.sum", kind, stream, (TENSOR,))
        write.fusion("places.add", stream + _position_elements(shard) * used, stream)
    return write.done()


def logits(shard: BlockShard) -> tuple[Operation, ...]:
    """Operations between the passes over the blocks: norm, logits, loss, and its gradient."""
    write, shape, rows = _writer("logits", shard), shard.shape, shard.rows
    tensor, stream = shard.layout.tensor, shard.kept_stream_bytes
    width = shape.vocabulary // tensor
    size = rows * width * shape.element_bytes
    wide = rows * width * _F32_BYTES
    write.fusion("norm.statistics", stream, rows * 8)
    write.fusion("norm.apply", stream, stream)
    if shard.sequence_parallel:
        write.collective("gather_tokens", "all_gather", shard.stream_bytes, (TENSOR,))
    write.matmul("product", (1, rows, width, shape.hidden))
    write.fusion("largest", size, rows * 8)
    # The argmax token, for the accuracy: a value and an index from every shard.
    write.collective("largest.gather", "all_gather", rows * 8 * tensor, (TENSOR,))
    write.fusion("sum", size, rows * _F32_BYTES)
    write.collective("sum.sum", "all_reduce", rows * 8, (TENSOR,))
    write.fusion("loss.gradient", size, wide)
    if shape.element_bytes != _F32_BYTES:
        write.fusion("loss.gradient.cast", wide, size)
    write.matmul("input_gradient", (1, rows, shape.hidden, width))
    kind = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
    write.start("input_gradient.sum", kind, shard.stream_bytes, (TENSOR,))
    write.matmul("tokens.gradient", (1, width, shape.hidden, rows))
    write.wait("input_gradient.sum")
    write.fusion("norm.gradient.statistics", 2 * stream, 2 * stream)
    write.fusion("norm.gradient", 2 * stream, stream)
    write.fusion("norm.scale.gradient", 2 * stream, shape.hidden * _F32_BYTES)
    return write.done()


def embedding_gradient(
    shard: BlockShard, layers: int, is_accumulated: bool
) -> tuple[Operation, ...]:
    """Operations after the blocks: the embedding's gradient, gradient sums and accumulation.

    Args:
        shard: a device's shard of a block for one microbatch; its layout says over which devices
            gradients are summed.
        layers: blocks of the stage.
        is_accumulated: whether gradients are accumulated in float32 over microbatches.
    """
    write, shape, layout = _writer("embedding.gradient", shard), shard.shape, shard.layout
    used = shape.element_bytes
    if shard.recompute != "full" and not shape.is_fused:
        for name in ("queries", "keys", "values"):
            write.copy(f"{name}.transpose", layers * shard.head_bytes)
    if shard.sequence_parallel:
        write.collective("lookup.gather", "all_gather", shard.stream_bytes, (TENSOR,))
    write.copy("tokens.scatter", shard.stream_bytes)
    _sum_tables(write, shard, layers)
    if is_accumulated:
        own = shard.matrix_bytes // layout.fsdp // used * layers
        own += (_table_elements(shard) + _position_elements(shard)) // layout.fsdp
        write.fusion("accumulate", own * (_F32_BYTES + used), own * _F32_BYTES)
        for index in range(_VECTOR_UPDATES):
            write.copy(f"accumulate.{index}", layers * shape.hidden * _F32_BYTES)
    return write.done()


def _sum_tables(write: Writer, shard: BlockShard, layers: int) -> None:
    """Sums of the gradients of embeddings, biases and norms, which no block has summed."""
    layout, along = shard.layout, sum_axes(shard.layout)
    both = (*along, FSDP)
    used = shard.shape.element_bytes
    norms = (layers * shard.norm_elements + shard.norm_elements // 2) * _F32_BYTES + 8
    biases = layers * shard.small_elements * used
    table, places = _table_elements(shard) * used, _position_elements(shard) * used
    write.start("sum.norms", "all_reduce", norms, both)
    if layout.fsdp == 1:
        kind = "reduce_scatter" if shard.is_scattered else "all_reduce"
        write.start("sum", kind, table + places + biases, along)
    elif not along:
        # The gradients of its two uses are scattered separately where tensor shards the table.
        uses = 2 if layout.tensor > 1 else 1
        write.start("scatter", "reduce_scatter", uses * table + places, (FSDP,), buffers=3)
        write.start("sum", "all_reduce", biases, both)
    elif layout.tensor == 1:
        write.start("scatter", "reduce_scatter", 2 * table + places, (FSDP,), buffers=3)
        write.wait("scatter")
        write.start("sum", "all_reduce", biases, both)
        write.start("sum.parts", "all_reduce", (table + places) // layout.fsdp, along)
    else:
        write.start("scatter", "reduce_scatter", table, (FSDP,))
        write.wait("scatter")
        write.start("sum", "all_reduce", table + places + biases, both)
        write.start("sum.parts", "all_reduce", table // layout.fsdp, along)
    for name in ("sum.norms", "scatter", "sum", "sum.parts"):
        if not any(each.name.endswith(f"{name}.done") for each in write.operations):
            write.wait(name)


def zeros(shape: TransformerShape, own: int, dealt: Layout | None = None) -> tuple[Operation, ...]:
    """Operations before the first microbatch: zeroed accumulators for `own` gradients.

    Args:
        shape: the network.
        own: number of gradients of a device.
        dealt: layout of all devices, where unequal pipeline stages first redistribute blocks.
    """
    write = Writer("accumulator", _F32, dealt or Layout())
    if dealt is not None:
        _redistribute_blocks(write, shape, dealt)
    write.copy("zero", own * _F32_BYTES)
    for index in range(_VECTOR_UPDATES):
        write.copy(f"zero.{index}", shape.hidden * _F32_BYTES)
    return write.done()


def _redistribute_blocks(write: Writer, shape: TransformerShape, layout: Layout) -> None:
    """All-to-all that redistributes stored shards of all blocks into whole blocks per stage, or
    their gradients back; each stage's payload is that of the longest."""
    layers, parts = most_layers(shape, layout), layout.tensor * layout.fsdp
    for name, size in zip(_MATRICES, shape.matrices, strict=True):
        payload = layers * size * shape.element_bytes // parts
        write.copy(f"{name}.deal.transpose", payload)
        write.collective(f"{name}.deal", "all_to_all", payload, (PIPELINE,))
    vectors = 2 if shape.is_gated else 8
    for index in range(vectors):
        payload = layers * shape.hidden * _F32_BYTES
        write.collective(f"vectors.deal.{index}", "all_to_all", payload, (PIPELINE,))


def accumulator_elements(shape: TransformerShape, layout: Layout, microbatches: int) -> int:
    """Gradients that a device accumulates over microbatches; 0 with a single microbatch."""
    if microbatches == 1 and layout.pipeline == 1:
        return 0
    return parameters_of_device(shape, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Inputs of the optimizer update of a step."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """Layout of all devices."""
    zero_stage: Literal[0, 1, 2]
    """ZeRO stage of the data axis."""
    microbatches: int
    """Microbatches per update."""
    moments: Literal[0, 1, 2]
    """Arrays like the parameters that the optimizer keeps."""
    is_accumulated: bool
    """Whether gradients were accumulated in float32."""
    is_summed_once: bool
    """Whether gradients are summed over the batch in the update, not per block."""


def update(end: Update) -> tuple[Operation, ...]:
    """Operations after the last microbatch: gradient sum over the batch, optimizer update."""
    shape, whole = end.shape, end.layout
    layout = stage_layout(whole)
    write = Writer("update", shape.operand_type, layout)
    own = parameters_of_device(shape, whole)
    counts = {
        name: size // layout.tensor // layout.fsdp * shape.layers // whole.pipeline
        for name, size in zip(_MATRICES, shape.matrices, strict=True)
    }
    gradient_bytes = _F32_BYTES if end.is_accumulated else shape.element_bytes
    if is_uneven(shape, whole):
        back = Writer("update", _F32, whole)
        _redistribute_blocks(back, shape, whole)
        write.operations += back.operations
    if end.is_accumulated and end.is_summed_once:
        _sum_once(write, end, own, [count * _F32_BYTES for count in counts.values()])
    counts["tables"] = max(0, own - sum(counts.values()))
    parts = layout.data if end.zero_stage else 1
    state = (1 + end.moments) * _F32_BYTES
    if shape.compute_dtype == "float16":  # whether every gradient is finite
        write.fusion("finite", own // parts * gradient_bytes, 0)
    for name, count in counts.items():
        write.fusion(name, count // parts * (state + gradient_bytes), count // parts * state)
    for index in range(_VECTOR_UPDATES):
        size = shape.layers * shape.hidden * _F32_BYTES // whole.pipeline
        write.copy(f"vectors.{index}", size)
    if end.zero_stage:
        _gather(write, shape.element_bytes, counts, parts)
    return write.done()


def _gather(write: Writer, used_bytes: int, counts: dict[str, int], parts: int) -> None:
    """All-gather of the updated parameters from ZeRO's shards, cast to the compute type first
    except for a few vectors. (The trainer gathers at the start of the next step: equally long.)
    """
    if used_bytes != _F32_BYTES:
        for name, count in counts.items():
            write.fusion(f"{name}.cast", count // parts * _F32_BYTES, count // parts * used_bytes)
    payload = sum(counts.values()) * used_bytes
    write.start("gather", "all_gather", payload, (DATA,), buffers=16)
    write.wait("gather")


def _sum_once(write: Writer, end: Update, own: int, stacks: list[int]) -> None:
    """Sum of accumulated gradients over the batch; small ones are combined in a buffer."""
    along = sum_axes(end.layout)
    if not along:
        return
    large = sum(size for size in stacks if size > _COMBINED_BYTES)
    combined = max(0, own * _F32_BYTES - large)
    if end.zero_stage and DATA in along:
        # Stage 2 scatters those of every microbatch: one collective of that many buffers here.
        times = end.microbatches if end.zero_stage == 2 and end.layout.pipeline == 1 else 1
        payload = times * own * _F32_BYTES
        write.start("scatter", "reduce_scatter", payload, along, dtype=_F32, buffers=times)
        write.wait("scatter")
        return
    write.copy("sum.concatenate", combined)
    write.start("sum", "all_reduce", own * _F32_BYTES + 8, along, dtype=_F32)
    write.wait("sum")
    write.copy("sum.slice", combined)
