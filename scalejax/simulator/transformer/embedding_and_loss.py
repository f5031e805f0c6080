"""What a step does outside its blocks: casts, embeddings, logits and loss, sums, the update.

As in `block`, read off compiled programs and derived from shapes. Left out: fusions of scalars.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from scalejax.config.parallelism import DATA, FSDP, PIPELINE, TENSOR, Layout
from scalejax.simulator.program import Operation
from scalejax.simulator.transformer.block import kept_bytes
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import (
    Part,
    TransformerShape,
    is_uneven,
    most_layers,
    parameters_of_device,
    stage_layout,
    sum_axes,
)

_KEPT = 65536
_COMBINED_BYTES = 30 * 1024**2
"""Buffers up to this size are put together for one all-reduce, which copies them (XLA,
xla/service/gpu/gpu_compiler.cc, kDefaultAllReduceCombineThreshold)."""
_F32, _F32_BYTES = "f32", 4
_MATRICES = ("qkv", "projection", "up", "down")
_VECTOR_UPDATES = 10  # of biases and norms, each a fusion of its own


def _writer(prefix: str, part: Part) -> Writer:
    return Writer(prefix, part.shape.operand_type, part.layout)


def _table_elements(part: Part) -> int:
    """Of the token embedding, as one device of a tensor group uses it."""
    return part.shape.vocabulary * part.shape.hidden // part.layout.tensor


def _place_elements(part: Part) -> int:
    shape = part.shape
    return shape.tokens * shape.hidden if shape.has_learned_positions else 0


@lru_cache(maxsize=_KEPT)
def embedding(part: Part, layers: int, is_gathered: bool) -> tuple[Operation, ...]:
    """What comes before the blocks: matrices cast to the compute type, tokens looked up.

    Args:
        part: of the microbatch.
        layers: blocks of the stage.
        is_gathered: whether the step has cast them already, to gather them from the parts that
            ZeRO keeps.
    """
    write, fsdp, used = _writer("embedding", part), part.layout.fsdp, part.shape.element_bytes
    own = part.matrix_bytes // fsdp * layers
    if used != _F32_BYTES and not is_gathered:
        for name, size in zip(_MATRICES, part.matrices, strict=True):
            one = size // fsdp * layers
            write.fusion(f"{name}.cast", one * _F32_BYTES // used, one)
        table = _table_elements(part) // fsdp
        write.fusion("tokens.cast", table * _F32_BYTES, table * used)
    tables = (_table_elements(part) + _place_elements(part)) * used
    if fsdp > 1 and part.shape.has_learned_positions:
        write.fusion("places.cast", tables // fsdp // 4, tables // fsdp // 8)
    write.start("gather_tables", "all_gather", tables, (FSDP,), buffers=2)
    write.fusion("gradients.zero", 0, own)
    write.fusion("kept.zero", 0, layers * kept_bytes(part))
    write.wait("gather_tables")
    stream = part.stream_bytes
    write.fusion("lookup", stream + _place_elements(part) * used, stream)
    if part.layout.tensor > 1:
        kind = "reduce_scatter" if part.sequence_parallel else "all_reduce"
        write.collective("lookup.sum", kind, stream, (TENSOR,))
        write.fusion("places.add", stream + _place_elements(part) * used, stream)
    return write.done()


@lru_cache(maxsize=_KEPT)
def logits(part: Part) -> tuple[Operation, ...]:
    """What comes between the passes over the blocks: norm, logits, loss, and its gradient."""
    write, shape, rows = _writer("logits", part), part.shape, part.rows
    tensor, stream = part.layout.tensor, part.kept_stream_bytes
    width = shape.vocabulary // tensor
    size = rows * width * shape.element_bytes
    wide = rows * width * _F32_BYTES
    write.fusion("norm.statistics", stream, rows * 8)
    write.fusion("norm.apply", stream, stream)
    if part.sequence_parallel:
        write.collective("gather_tokens", "all_gather", part.stream_bytes, (TENSOR,))
    write.matmul("product", (1, rows, width, shape.hidden))
    write.fusion("largest", size, rows * 8)
    # The likeliest token, for the accuracy: a value and an index from every part.
    write.collective("largest.gather", "all_gather", rows * 8 * tensor, (TENSOR,))
    write.fusion("sum", size, rows * _F32_BYTES)
    write.collective("sum.sum", "all_reduce", rows * 8, (TENSOR,))
    write.fusion("loss.gradient", size, wide)
    if shape.element_bytes != _F32_BYTES:
        write.fusion("loss.gradient.cast", wide, size)
    write.matmul("input_gradient", (1, rows, shape.hidden, width))
    kind = "reduce_scatter" if part.sequence_parallel else "all_reduce"
    write.start("input_gradient.sum", kind, part.stream_bytes, (TENSOR,))
    write.matmul("tokens.gradient", (1, width, shape.hidden, rows))
    write.wait("input_gradient.sum")
    write.fusion("norm.gradient.statistics", 2 * stream, 2 * stream)
    write.fusion("norm.gradient", 2 * stream, stream)
    write.fusion("norm.scale.gradient", 2 * stream, shape.hidden * _F32_BYTES)
    return write.done()


@lru_cache(maxsize=_KEPT)
def embedding_gradient(part: Part, layers: int, is_accumulated: bool) -> tuple[Operation, ...]:
    """What comes after the blocks: the embedding's gradient, sums, and gradients accumulated.

    Args:
        part: of the microbatch; its layout says over which devices all of this is summed.
        layers: blocks of the stage.
        is_accumulated: whether gradients are added up in float32 over microbatches.
    """
    write, shape, layout = _writer("embedding.gradient", part), part.shape, part.layout
    used = shape.element_bytes
    if part.recompute != "full" and not shape.is_fused:
        for name in ("queries", "keys", "values"):
            write.copy(f"{name}.transpose", layers * part.head_bytes)
    if part.sequence_parallel:
        write.collective("lookup.gather", "all_gather", part.stream_bytes, (TENSOR,))
    write.copy("tokens.scatter", part.stream_bytes)
    _sum_tables(write, part, layers)
    if is_accumulated:
        own = part.matrix_bytes // layout.fsdp // used * layers
        own += (_table_elements(part) + _place_elements(part)) // layout.fsdp
        write.fusion("accumulate", own * (_F32_BYTES + used), own * _F32_BYTES)
        for index in range(_VECTOR_UPDATES):
            write.copy(f"accumulate.{index}", layers * shape.hidden * _F32_BYTES)
    return write.done()


def _sum_tables(write: Writer, part: Part, layers: int) -> None:
    """Sums of the gradients that no block has summed: of embeddings, biases and norms."""
    layout, along = part.layout, sum_axes(part.layout)
    both = (*along, FSDP)
    used = part.shape.element_bytes
    norms = (layers * part.norm_elements + part.norm_elements // 2) * _F32_BYTES + 8
    biases = layers * part.small_elements * used
    table, places = _table_elements(part) * used, _place_elements(part) * used
    write.start("sum.norms", "all_reduce", norms, both)
    if layout.fsdp == 1:
        kind = "reduce_scatter" if part.is_scattered else "all_reduce"
        write.start("sum", kind, table + places + biases, along)
    elif not along:
        # Its two uses are scattered apart where tensor divides the table.
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


@lru_cache(maxsize=_KEPT)
def zeros(shape: TransformerShape, own: int, dealt: Layout | None = None) -> tuple[Operation, ...]:
    """What comes before the first microbatch: somewhere to add `own` gradients up in.

    Args:
        shape: the network.
        own: gradients of a device.
        dealt: all devices, where the stages of a pipeline take their blocks first.
    """
    write = Writer("accumulator", _F32, dealt or Layout())
    if dealt is not None:
        _deal(write, shape, dealt)
    write.copy("zero", own * _F32_BYTES)
    for index in range(_VECTOR_UPDATES):
        write.copy(f"zero.{index}", shape.hidden * _F32_BYTES)
    return write.done()


def _deal(write: Writer, shape: TransformerShape, layout: Layout) -> None:
    """Matrices from where stages keep a part of each to where they are blocks of one stage, or
    their gradients back; what a stage takes is as large as that of the longest."""
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
    """Gradients that a device adds up over microbatches; 0 where there is a single one."""
    if microbatches == 1 and layout.pipeline == 1:
        return 0
    return parameters_of_device(shape, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """All that the end of a step depends on."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """All devices."""
    zero_stage: Literal[0, 1, 2]
    """What the data axis keeps in parts."""
    microbatches: int
    """Of an update."""
    moments: Literal[0, 1, 2]
    """Arrays that the optimizer keeps."""
    is_accumulated: bool
    """Whether gradients were added up in float32."""
    is_summed_once: bool
    """Whether they are not summed over the batch yet."""


@lru_cache(maxsize=_KEPT)
def update(end: Update) -> tuple[Operation, ...]:
    """What comes after the last microbatch: the sum over the batch, and the optimizer."""
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
        _deal(back, shape, whole)
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
    """Parameters of the next step, gathered from their parts; cast first, and so travelling in
    the compute type but for a few vectors. (The step gathers before it uses them: equally long.)
    """
    if used_bytes != _F32_BYTES:
        for name, count in counts.items():
            write.fusion(f"{name}.cast", count // parts * _F32_BYTES, count // parts * used_bytes)
    payload = sum(counts.values()) * used_bytes
    write.start("gather", "all_gather", payload, (DATA,), buffers=16)
    write.wait("gather")


def _sum_once(write: Writer, end: Update, own: int, stacks: list[int]) -> None:
    """The sum of accumulated gradients; small ones copied together before, apart after."""
    along = sum_axes(end.layout)
    if not along:
        return
    large = sum(size for size in stacks if size > _COMBINED_BYTES)
    combined = max(0, own * _F32_BYTES - large)
    if end.zero_stage and DATA in along:
        # Stage 2 scatters those of every microbatch: written as one exchange of so many buffers.
        times = end.microbatches if end.zero_stage == 2 and end.layout.pipeline == 1 else 1
        payload = times * own * _F32_BYTES
        write.start("scatter", "reduce_scatter", payload, along, dtype=_F32, buffers=times)
        write.wait("scatter")
        return
    write.copy("sum.concatenate", combined)
    write.start("sum", "all_reduce", own * _F32_BYTES + 8, along, dtype=_F32)
    write.wait("sum")
    write.copy("sum.slice", combined)
