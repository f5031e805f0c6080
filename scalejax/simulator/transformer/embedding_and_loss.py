"""Operations outside the blocks: casts, embeddings, logits, loss, gradient sums, optimizer update.

As in `block`, read off compiled programs and derived from shapes. Independent of hardware.
"""

from dataclasses import dataclass, replace
from typing import Literal

from scalejax.config.parallelism import CONTEXT, DATA, EXPERT, FSDP, PIPELINE, TENSOR, Layout
from scalejax.simulator.program import Loop, Operation
from scalejax.simulator.transformer.block import heads, kept_stacks
from scalejax.simulator.transformer.operations import UPDATE, Writer, combined
from scalejax.simulator.transformer.shape import (
    BlockShard,
    TransformerShape,
    deals_layers,
    devices_of_matrix,
    is_of_experts,
    layers_of_device,
    stage_counts,
    stage_layout,
    trained_of_device,
    transposes_kept,
    zero_parts,
)

_F32, _F32_BYTES = "f32", 4
_VECTOR_UPDATES = 10  # of biases and norms, each in its own fusion


def _writer(prefix: str, shard: BlockShard) -> Writer:
    return Writer(prefix, shard.shape.operand_type, shard.layout)


def _table_elements(shard: BlockShard) -> int:
    """Elements of the token embedding that one device of a tensor group uses."""
    return shard.shape.vocabulary * shard.shape.hidden // shard.layout.tensor


def _norm_elements(shape: TransformerShape) -> int:
    """Elements of the last norm."""
    return shape.hidden * shape.norm_vectors


def _position_elements(shard: BlockShard) -> int:
    shape = shard.shape
    return shape.tokens * shape.hidden if shape.has_learned_positions else 0


def embedding(
    blocks: tuple[tuple[BlockShard, int], ...],
    is_gathered: bool,
    is_repeated: bool,
    gathered: "Update | None" = None,
) -> tuple[Operation | Loop, ...]:
    """Operations before the blocks: matrices cast to the compute type, embedding lookup.

    Stages of a pipeline cast their matrices once, before all microbatches (`start_of_stage`), and
    add to gradients in place.

    Args:
        blocks: for each kind of block, a device's shard of it for one microbatch, and the number of
            such blocks in the stage.
        is_gathered: whether the step has already cast the matrices, to gather them from ZeRO's
            shards.
        is_repeated: whether the operations are in a loop over microbatches.
        gathered: the update whose parameters are gathered here, while buffers are zeroed, rather
            than at its end; None if there is none.
    """
    shard = blocks[-1][0]
    write, fsdp, used = _writer("embedding", shard), shard.layout.fsdp, shard.shape.element_bytes
    if gathered is not None:
        _start_gather(write, gathered)
    own = _trained_bytes(blocks)
    kept_bytes = base_bytes(shard.shape)
    is_cast = used != kept_bytes and not is_gathered
    is_read = shard.shape.has_tied_embeddings or not shard.is_of_stage  # by a stage with logits
    if (is_cast and is_read) or (fsdp > 1 and used == kept_bytes):  # a copy that is gathered
        table = _table_elements(shard) // fsdp
        write.fusion("tokens.cast", table * kept_bytes, table * used)
    tables = (_table_elements(shard) + _position_elements(shard)) * used
    if fsdp > 1 and shard.shape.has_learned_positions:
        write.fusion("places.cast", tables // fsdp // 4, tables // fsdp // 8)
    write.start("gather_tables", "all_gather", tables, (FSDP,), buffers=2)
    stream, places = shard.stream_bytes, _position_elements(shard) * used
    if shard.layout.tensor > 1:
        write.wait("gather_tables")
        write.fusion("lookup", stream, stream)
        kind = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
        write.start("lookup.sum", kind, stream, (TENSOR,))
    if not shard.is_of_stage:
        _cast_matrices(write, blocks, is_gathered=is_gathered)
        write.fusion("gradients.zero", 0, own)
    stacks = [] if shard.is_of_stage else _kept_bytes(blocks)
    write.fusion("kept.zero", 0, sum(set(stacks) if is_repeated else stacks))
    if is_repeated:  # zeros of one size are shared, and copied before each microbatch
        for index, size in enumerate(sorted(stacks)):
            if size in sorted(stacks)[:index]:
                write.copy(f"kept.copy.{index}", size)
    if gathered is not None:
        _wait_for_gather(write, gathered)
    if shard.layout.tensor > 1:
        write.wait("lookup.sum")
        if shard.shape.has_learned_positions:
            kept = shard.kept_stream_bytes
            write.fusion("places.add", kept + places, kept)
    else:
        write.wait("gather_tables")
        write.fusion("lookup", stream + places, stream)
    return write.done()


def _kept_bytes(blocks: tuple[tuple[BlockShard, int], ...]) -> list[int]:
    """Bytes of the stacks of what the blocks of a stage keep of a microbatch."""
    return [count * size for each, count in blocks for size in kept_stacks(each)]


def base_bytes(shape: TransformerShape) -> int:
    """Bytes of an element of a matrix as it is stored."""
    return _F32_BYTES if shape.adapters is None else shape.adapters.base_bytes


def _trained_bytes(blocks: tuple[tuple[BlockShard, int], ...]) -> int:
    """Bytes of what is trained in the blocks of a stage, in the compute type."""
    return sum(sum(each.trained.values()) // each.layout.fsdp * count for each, count in blocks)


def _cast_matrices(
    write: Writer, blocks: tuple[tuple[BlockShard, int], ...], *, is_gathered: bool
) -> None:
    """Cast the matrices and adapters of some blocks to the compute type, from their stored shards;
    `is_gathered` as for `embedding`."""
    shape = blocks[-1][0].shape
    used, kept_bytes = shape.element_bytes, base_bytes(shape)
    if used != kept_bytes and not is_gathered:
        for each, count in blocks:
            kind = "dense." if each.shape.is_first else ""
            for name, size in each.matrices.items():
                one = size // each.layout.fsdp * count
                write.fusion(f"{kind}{name}.cast", one * kept_bytes // used, one)
    if shape.adapters is not None and used != _F32_BYTES:
        shard, layers = blocks[-1]
        for name, size in shard.trained.items():
            one = size // shard.layout.fsdp * layers
            write.fusion(f"{name}.cast", one * _F32_BYTES // used, one)


def logits(
    shard: BlockShard, is_manual: bool, is_scattered: bool, is_gathered: bool = False
) -> tuple[Operation | Loop, ...]:
    """Operations between the passes over the blocks: norm, logits, loss, and its gradient.

    Args:
        shard: a device's shard of a block for one microbatch.
        is_manual: whether a sum picks the logit of the target, whose gradient XLA fuses; otherwise
            it is scattered into a float32 gradient.
        is_scattered: whether the gradient of the output layer is left to `embedding_gradient`.
        is_gathered: whether the layer was gathered from ZeRO's shards in the compute type.
    """
    write, shape, rows = _writer("logits", shard), shard.shape, shard.rows
    tensor, stream = shard.layout.tensor, shard.kept_stream_bytes
    width = shape.vocabulary // tensor
    size = rows * width * shape.element_bytes
    wide = rows * width * _F32_BYTES
    statistics = stream // shape.hidden // shape.element_bytes * 8
    write.fusion("norm.statistics", stream, statistics)
    write.copy("norm.root", statistics)
    write.fusion("norm.apply", stream, stream)
    if not shape.has_tied_embeddings and shape.element_bytes != _F32_BYTES:
        fsdp, kept_bytes = shard.layout.fsdp, base_bytes(shape)
        table = _table_elements(shard) // fsdp
        if (kept_bytes != shape.element_bytes and not is_gathered) or fsdp > 1:
            write.fusion("output.cast", table * kept_bytes, table * shape.element_bytes)
        write.collective("output.gather", "all_gather", table * fsdp * shape.element_bytes, (FSDP,))
    if shard.sequence_parallel:
        write.collective("gather_tokens", "all_gather", shard.stream_bytes, (TENSOR,))
        if shard.samples > 1:
            write.copy("transpose_tokens", shard.stream_bytes)
    write.matmul("product", (1, rows, width, shape.hidden))
    write.fusion("largest", size, rows * 8)
    # The argmax token, for the accuracy: a value and an index from every shard.
    write.collective("largest.gather", "all_gather", rows * 8 * tensor, (TENSOR,))
    write.fusion("sum", size, rows * _F32_BYTES)
    write.collective("sum.sum", "all_reduce", rows * 8, (TENSOR,))
    write.scalars("loss", 12 if tensor > 1 else 8)
    if is_manual or shape.element_bytes == _F32_BYTES:
        write.fusion("loss.gradient", size, size)
    else:
        write.fusion("loss.gradient", size, wide)
        write.fusion("loss.gradient.cast", wide, size)
    sums_output = sums_output_alone(shard, is_manual=is_manual)
    if sums_output:
        _table_gradient(write, shard)
        size = _table_elements(shard) * shape.element_bytes
        write.start("tokens.gradient.sum", "all_reduce", size, (CONTEXT,))
    write.matmul("input_gradient", (1, rows, shape.hidden, width))
    kind = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
    if shard.sequence_parallel and shard.samples > 1:
        write.copy("input_gradient.transpose_tokens", shard.stream_bytes)
    write.start("input_gradient.sum", kind, shard.stream_bytes, (TENSOR,))
    if not is_scattered and not sums_output and shape.adapters is None:
        _table_gradient(write, shard)
    write.wait("tokens.gradient.sum")
    write.wait("input_gradient.sum")
    write.fusion("norm.gradient.statistics", 2 * stream, statistics)
    write.copy("norm.gradient.mean", statistics)
    write.fusion("norm.gradient", 2 * stream, stream)
    if shape.adapters is None:
        write.copy("norm.scale.gradient", shape.hidden * _F32_BYTES)
    return write.done()


def sums_output_alone(shard: BlockShard, *, is_manual: bool) -> bool:
    """Whether, of two embeddings, only the output layer's gradient is summed over context, right
    away; for the other the gradients of tokens are gathered."""
    shape = shard.shape
    is_explicit = is_manual and not shard.is_of_stage and shard.layout.fsdp == 1
    is_twofold = not shape.has_tied_embeddings and shape.adapters is None
    return is_explicit and is_twofold and shard.layout.context > 1


def _table_gradient(write: Writer, shard: BlockShard) -> None:
    """The gradient of the output layer, which overlaps with sums in flight."""
    width = shard.shape.vocabulary // shard.layout.tensor
    sides = (1, width, shard.shape.hidden, shard.rows)
    # A stage adds it to its sum in the product, unless fsdp scatters it first.
    in_place = shard.is_of_stage and shard.layout.fsdp == 1
    write.matmul("tokens.gradient", sides, is_accumulated=in_place)


def blocks_of_embedding_gradient(
    blocks: tuple[tuple[BlockShard, int], ...],
) -> tuple[tuple[BlockShard, int], ...]:
    """`blocks` without what `embedding_gradient` does not depend on: strategies that differ only in
    that share its operations."""
    shard = blocks[-1][0]
    if not shard.shape.is_fused or transposes_kept(shard):
        return blocks
    return tuple(
        (replace(each, recompute="full", strategy="all_gather"), count) for each, count in blocks
    )


def embedding_gradient(
    blocks: tuple[tuple[BlockShard, int], ...],
    is_accumulated: bool,
    scattered_over: int,
    tables_of_stage: int | None = None,
    is_manual: bool = False,
) -> tuple[Operation | Loop, ...]:
    """Operations after the blocks: the embedding's gradient, gradient sums and accumulation.

    Args:
        blocks: for each kind of block, a device's shard of it for one microbatch, whose layout says
            over which devices gradients are summed, and the number of such blocks in the stage.
        is_accumulated: whether gradients are accumulated in float32 over microbatches.
        scattered_over: devices along data over which ZeRO 2 scatters the gradients of every
            microbatch; else 1.
        tables_of_stage: number of whole embeddings whose gradients a pipeline stage sums, that of
            the output layer on the last; None without stages.
        is_manual: as for `logits`.
    """
    shard, layers = blocks[-1][0], sum(count for _, count in blocks)
    write, shape, layout = _writer("embedding.gradient", shard), shard.shape, shard.layout
    used = shape.element_bytes
    own = _trained_bytes(blocks) // used
    tables = (_table_elements(shard) + _position_elements(shard)) // layout.fsdp
    whole = replace(layout, data=scattered_over) if scattered_over > 1 else layout
    if scattered_over > 1:
        write.fusion("wide", own * used, own * _F32_BYTES)
        size = own * _F32_BYTES
        write.start("scatter_blocks", "reduce_scatter", size, (DATA,), buffers=4, layout=whole)
    if shard.recompute != "full" and not shape.is_fused:
        for name, size in heads(shard, parts=shard.layout.context):
            write.copy(f"{name}.transpose", layers * size)
    if transposes_kept(shard):
        for index, name in enumerate(("qkv", "up")):  # of kept norms, as they were gathered
            if shape.trains(name):
                write.copy(f"normalised.{index}.transpose", layers * shard.stream_bytes)
    if shape.adapters is not None:
        if is_accumulated:
            write.fusion("accumulate", own * (_F32_BYTES + used), own * _F32_BYTES)
        return write.done()
    if shard.sequence_parallel:
        write.collective("lookup.gather", "all_gather", shard.stream_bytes, (TENSOR,))
    gathers_tokens = sums_output_alone(shard, is_manual=is_manual)
    if gathers_tokens:
        size = shard.stream_bytes * layout.context
        write.collective("tokens.gather", "all_gather", size, (CONTEXT,))
        write.copy("tokens.scatter", size)
    else:
        if scattered_over > 1:
            _table_gradient(write, shard)
        write.copy("tokens.scatter", shard.stream_bytes)
    if not is_accumulated and scattered_over == 1:
        return write.done()
    if tables_of_stage != 0 and not gathers_tokens:
        _start_table_sums(write, shard, tables_of_stage)
        _add_table_sums(write, shard)
    if scattered_over > 1:
        both = tables if shape.has_tied_embeddings else 2 * tables
        write.fusion("wide.tables", both * used, both * _F32_BYTES)
        size = both * _F32_BYTES
        write.start("scatter_tables", "reduce_scatter", size, (DATA,), layout=whole)
        write.wait("scatter_blocks")
        write.wait("scatter_tables")
    if not is_accumulated:
        return write.done()
    if tables_of_stage is not None:  # the sums of blocks are added to in their backward passes
        own, tables = 0, tables_of_stage * tables if layout.fsdp > 1 else 0
    kept = _F32_BYTES if scattered_over > 1 else used
    if shard.is_scattered:
        own = sum(
            size // used // each.gradient_parts(name) * count
            for each, count in blocks
            for name, size in each.matrices.items()
        )
        tables //= zero_parts(layout)
    if size := (own + tables) // scattered_over:
        write.fusion("accumulate", size * (_F32_BYTES + kept), size * _F32_BYTES)
    write.scalars("accumulate.vectors", _VECTOR_UPDATES)
    return write.done()


def _start_table_sums(write: Writer, shard: BlockShard, tables: int | None = None) -> None:
    """Start the sums of the gradients of the embeddings, of all or of `tables` of them, and of the
    last norm."""
    layout, along = shard.layout, shard.sum_axes
    both = (*along, FSDP)
    used = shard.shape.element_bytes
    table, places = _table_elements(shard) * used, _position_elements(shard) * used
    # If tensor shards the table, the gradients of its two uses are summed separately.
    is_twofold = not shard.shape.has_tied_embeddings
    write.start("sum.norms", "all_reduce", _norm_elements(shard.shape) * _F32_BYTES + 8, both)
    if layout.fsdp == 1:
        kind = "reduce_scatter" if shard.is_scattered else "all_reduce"
        write.start("sum", kind, (tables or 1 + is_twofold) * table + places, along)
    elif not along:
        uses = 2 if layout.tensor > 1 or is_twofold else 1
        uses = tables or uses
        write.start("scatter", "reduce_scatter", uses * table + places, (FSDP,), buffers=3)
    elif layout.tensor == 1:
        write.start("scatter", "reduce_scatter", (tables or 2) * table + places, (FSDP,), buffers=3)
    else:
        write.start("scatter", "reduce_scatter", table, (FSDP,))
        write.start("sum", "all_reduce", table + places, both)


def _add_table_sums(write: Writer, shard: BlockShard) -> None:
    """Wait for what `_start_table_sums` started, and sum the parts over the batch."""
    layout, along = shard.layout, shard.sum_axes
    write.wait("scatter")
    if layout.fsdp > 1 and along:
        places = _position_elements(shard) if layout.tensor == 1 else 0
        size = (_table_elements(shard) + places) * shard.shape.element_bytes
        write.start("sum.parts", "all_reduce", size // layout.fsdp, along)
    for name in ("sum.norms", "sum", "sum.parts"):
        write.wait(name)


def zeros(
    shape: TransformerShape, own: int, dealt: Layout | None = None
) -> tuple[Operation | Loop, ...]:
    """Operations before the first microbatch: zeroed accumulators for `own` gradients.

    Args:
        shape: the network.
        own: number of gradients of a device.
        dealt: layout of all devices, if unequal pipeline stages first redistribute blocks.
    """
    write = Writer("accumulator", _F32, dealt or Layout())
    if dealt is not None:
        _redistribute_blocks(write, shape, dealt)
    write.copy("zero", own * _F32_BYTES)
    write.scalars("zero.vectors", _VECTOR_UPDATES)
    return write.done()


def start_of_stage(
    shape: TransformerShape,
    own: int,
    layout: Layout,
    blocks: tuple[tuple[BlockShard, int], ...],
    is_gathered: bool,
    in_flight: float,
) -> tuple[Operation | Loop, ...]:
    """`zeros` for the sums of a pipeline stage and for what it keeps of microbatches, and its
    matrices in the compute type.

    Args:
        shape: the network.
        own: number of gradients of a device.
        layout: layout of all devices.
        blocks: for each kind of block, a device's shard of it for one microbatch, and the number of
            such blocks in the stage.
        is_gathered: as for `embedding`.
        in_flight: microbatches whose activations are kept at once.
    """
    write = Writer("stage", shape.operand_type, layout)
    write.fusion("kept.zero", 0, int(sum(_kept_bytes(blocks)) * in_flight))
    _cast_matrices(write, blocks, is_gathered=is_gathered)
    return (*write.operations, *zeros(shape, own, layout if deals_layers(shape, layout) else None))


def exchanged_chunks(
    shape: TransformerShape, layout: Layout, chunks: int
) -> tuple[Operation | Loop, ...]:
    """Layers that stages with several chunks send to the stages that compute them, a chunk of each
    matrix at a time, and their gradients back in float32."""
    made: list[Operation | Loop] = []
    for name, is_back in (("chunks", False), ("chunks.back", True)):
        write = Writer(name, _F32 if is_back else shape.operand_type, layout)
        element_bytes = _F32_BYTES if is_back else shape.element_bytes
        for matrix, count in _matrix_counts(shape, layout, is_trained=is_back).items():
            payload = count * element_bytes // chunks
            for index in range(chunks):
                write.copy(f"{matrix}.{index}.take", payload)
                write.collective(f"{matrix}.{index}", "collective_permute", payload, (PIPELINE,))
                write.copy(f"{matrix}.{index}.put", payload)
        made += write.operations
    return tuple(made)


def _matrix_counts(shape: TransformerShape, whole: Layout, *, is_trained: bool) -> dict[str, int]:
    """Elements of each matrix that a device has in all its blocks, or of what is trained there."""
    counts: dict[str, int] = {}
    layout = stage_layout(whole)
    for kind, layers in shape.kinds:
        for name, size in (kind.trained if is_trained else kind.matrices).items():
            parts = devices_of_matrix(name, layout) * layout.fsdp
            count = int(size // parts * layers_of_device(shape, layers, whole))
            counts[name] = counts.get(name, 0) + count
    return counts


def _redistribute_blocks(write: Writer, shape: TransformerShape, layout: Layout) -> None:
    """All-to-all that redistributes stored shards of all blocks into whole blocks per stage, or
    their gradients back; every stage's payload is that of the longest."""
    layers, parts = max(stage_counts(shape, layout)), layout.tensor * layout.fsdp
    for name, size in shape.matrices.items():
        payload = layers * size * shape.element_bytes // parts
        payload //= layout.expert if is_of_experts(name) else 1
        write.copy(f"{name}.deal.transpose", payload)
        write.collective(f"{name}.deal", "all_to_all", payload, (PIPELINE,))
    vectors = 2 * shape.norm_vectors + (4 if shape.has_biases else 0)
    for index in range(vectors):
        payload = layers * shape.hidden * _F32_BYTES
        write.collective(f"vectors.deal.{index}", "all_to_all", payload, (PIPELINE,))


def accumulator_elements(shape: TransformerShape, layout: Layout, microbatches: int) -> int:
    """Gradients that a device accumulates over microbatches; 0 with a single one, unless they are
    summed in float32 regardless."""
    if microbatches == 1 and layout.pipeline == 1 and not shape.sums_gradients_once:
        return 0
    return trained_of_device(shape, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Inputs of the optimizer update of a step."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """Layout of all devices."""
    zero_stage: Literal[0, 1, 2]
    """ZeRO stage of the data axis."""
    moments: Literal[0, 1, 2]
    """Arrays of the parameters' size that the optimizer keeps."""
    is_accumulated: bool
    """Whether gradients were accumulated in float32."""
    is_summed_once: bool
    """Whether gradients are summed over the batch in the update rather than per block."""
    tables: BlockShard | None
    """Shard of a block of the stage, if the gradients of embeddings are summed in the update; None
    if they are summed for every microbatch."""
    gathers_last: bool = True
    """Whether parameters are gathered from ZeRO's shards at the end rather than by `embedding`."""

    @property
    def counts(self) -> dict[str, int]:
        """Trained parameters of a device by matrix; those in no matrix are in "tables"."""
        counts = _matrix_counts(self.shape, self.layout, is_trained=True)
        own = trained_of_device(self.shape, self.layout)
        return {**counts, "tables": max(0, own - sum(counts.values()))}

    @property
    def parts(self) -> dict[str, int]:
        """Number of ZeRO shards of each of `counts`."""
        layout = stage_layout(self.layout)
        return {
            name: zero_parts(layout, of_experts=is_of_experts(name)) if self.zero_stage else 1
            for name in self.counts
        }


def update(end: Update) -> tuple[Operation | Loop, ...]:
    """Operations after the last microbatch: gradient sum over the batch, optimizer update."""
    shape, whole = end.shape, end.layout
    layout = stage_layout(whole)
    write = Writer(UPDATE, shape.operand_type, layout)
    counts, parts_of = end.counts, end.parts
    gradient_bytes = _F32_BYTES if end.is_accumulated else shape.element_bytes
    if deals_layers(shape, whole):
        back = Writer(UPDATE, _F32, whole)
        _redistribute_blocks(back, shape, whole)
        write.operations += back.operations
    if whole.pipeline > 1:
        _sum_stages(write, end, counts)
    summed = _start_sums(write, end, counts) if end.is_accumulated and end.is_summed_once else {}
    if end.tables is not None and shape.adapters is None:
        _start_table_sums(write, end.tables)
    state = (1 + end.moments) * _F32_BYTES
    for name, count in counts.items():
        parts = parts_of[name]
        write.wait(f"sum.{name}.of_stage")
        write.wait(f"sum.{name}")
        if name in summed:
            write.copy(f"sum.{name}.slice", summed[name])
        if name == "tables" and end.tables is not None and shape.adapters is None:
            _add_table_sums(write, end.tables)
        if shape.compute_dtype == "float16":  # whether every gradient is finite
            write.fusion(f"{name}.finite", count // parts * gradient_bytes, 0)
        write.fusion(name, count // parts * (state + gradient_bytes), count // parts * state)
    write.scalars("vectors", _VECTOR_UPDATES)
    if end.zero_stage and shape.adapters is None and end.gathers_last:
        _start_gather(write, end)
        _wait_for_gather(write, end)
    return write.done()


def _start_gather(write: Writer, end: Update) -> None:
    """Start the all-gather of the updated parameters from ZeRO's shards, cast to the compute type
    first except for a few vectors.

    The trainer gathers at the start of the next step; if nothing overlaps with it there, the closed
    form places it at the end, which takes as long.
    """
    counts, used_bytes = end.counts, end.shape.element_bytes
    if used_bytes != _F32_BYTES:
        for name, count in counts.items():
            own = count // end.parts[name]
            write.fusion(f"{name}.cast", own * _F32_BYTES, own * used_bytes)
    experts = sum(count for name, count in counts.items() if is_of_experts(name))
    rest = (sum(counts.values()) - experts) * used_bytes
    for name, payload, axes, buffers in (
        ("gather", rest, (DATA, EXPERT, CONTEXT), 16),
        ("gather.experts", experts * used_bytes, (DATA, CONTEXT), 2),
    ):
        layout = stage_layout(end.layout)
        write.start(name, "all_gather", payload, axes, buffers=buffers, layout=layout)


def _wait_for_gather(write: Writer, end: Update) -> None:
    """Wait for the gathered parameters; the compiler of 0.10 then transposes the stacks of
    matrices, whose shards divide their last dimension."""
    write.wait("gather")
    write.wait("gather.experts")
    if end.shape.compiler == "0.10" and end.layout.pipeline == 1:
        stacks = sum(count for name, count in end.counts.items() if name != "tables")
        write.copy("gather.transpose", stacks * end.shape.element_bytes)


def _sum_stages(write: Writer, end: Update, counts: dict[str, int]) -> None:
    """Start the sums of gradients over experts and context, and, for what all stages hold, over
    stages as well."""
    layout = end.layout
    sizes = {name: count * _F32_BYTES for name, count in counts.items()}
    shared = () if end.shape.stages_apart else (PIPELINE,)
    ends = (*shared, EXPERT, CONTEXT)
    for axes, wanted in (
        (ends, lambda name: name == "tables"),
        ((EXPERT, CONTEXT), lambda name: name != "tables" and not is_of_experts(name)),
        ((CONTEXT,), is_of_experts),
    ):
        for group in combined((name, size) for name, size in sizes.items() if wanted(name)):
            payload, name = sum(sizes[each] for each in group), f"sum.{group[0]}.of_stage"
            write.start(name, "all_reduce", payload, axes, dtype=_F32, layout=layout)


def _start_sums(write: Writer, end: Update, counts: dict[str, int]) -> dict[str, int]:
    """Start the sums of accumulated gradients over the batch, as XLA combines them; each is named
    after its first member, before whose update it is waited for.

    Returns:
        Bytes of the sums with several members, to be sliced once they are complete, by that name.
    """
    # Over context they are already summed: in each microbatch, or once by stages.
    along = (DATA,) if end.layout.data > 1 else ()
    summed = dict[str, int]()
    sizes = {name: count * _F32_BYTES for name, count in counts.items()}
    if not along:
        return summed
    if end.zero_stage and DATA in along:
        for name, size in sizes.items():
            write.wait(f"sum.{name}.of_stage")
            write.start(f"sum.{name}", "reduce_scatter", size, along, dtype=_F32)
        return summed
    for group in combined(sizes.items()):
        payload = sum(sizes[name] for name in group)
        for name in group:
            write.wait(f"sum.{name}.of_stage")
        if len(group) > 1:
            write.copy(f"sum.{group[0]}.concatenate", payload)
            summed[group[0]] = payload
        write.start(f"sum.{group[0]}", "all_reduce", payload, along, dtype=_F32)
    return summed
