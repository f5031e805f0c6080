"""A transformer by its dimensions, and a way to spread its training: plain numbers, no network.

Knows how many elements each matrix has and what of them one device holds; no operations.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from scalejax.config.model import ELEMENT_BYTES, CostedType
from scalejax.config.parallelism import CONTEXT, DATA, BatchSplit, Layout
from scalejax.core.errors import ConfigError, refusal, require_at_least, require_multiple

_KEPT = 65536  # what a search meets again
_OPERAND_TYPES: dict[CostedType, str] = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8": "bf16",
}  # fmt: skip

Recompute = Literal["none", "selective", "selective_op", "full"]
"""What the backward pass of a block computes again: nothing; the scores of unfused attention;
besides them norms, the projection (unless tensor sums it) and of a gated block the product that
is gated; or all but the input of the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a decoder-only transformer of equal blocks."""

    layers: int
    """Blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values, which several heads of queries share if there are fewer."""
    ffn_hidden: int
    """Width inside the feed-forward layer."""
    vocabulary: int
    """Values of a token."""
    tokens: int
    """Tokens of a sample."""
    is_gated: bool = False
    """Whether blocks are those of Llama: SwiGLU, RMSNorm and no biases, in place of those of
    GPT: GELU, LayerNorm and biases."""
    has_tied_embeddings: bool = True
    """Whether the token embedding is the output layer as well."""
    has_learned_positions: bool = True
    """Whether positions are an embedding; if not, queries and keys are rotated."""
    is_fused: bool = True
    """Whether attention is one kernel that keeps no scores."""
    compute_dtype: CostedType = "bfloat16"
    """Element type of activations and products; parameters and their moments are float32."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary", "tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_multiple("hidden", self.hidden, self.heads, "heads")
        require_multiple("heads", self.heads, self.kv_heads, "kv_heads")

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.compute_dtype]

    @property
    def operand_type(self) -> str:
        """XLA's name of the type of operands, where they are not cast to fp8."""
        return _OPERAND_TYPES[self.compute_dtype]

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        """Columns of the matrix that makes queries, keys and values."""
        return self.hidden + 2 * self.kv_heads * self.head_size

    @property
    def up_width(self) -> int:
        """Columns of the matrices into the feed-forward layer."""
        return self.ffn_hidden * (2 if self.is_gated else 1)

    @property
    def matrices(self) -> tuple[int, int, int, int]:
        """Elements of the matrices of a block: queries to values, projection, up, down."""
        return (
            self.hidden * self.qkv_width,
            self.hidden * self.hidden,
            self.hidden * self.up_width,
            self.ffn_hidden * self.hidden,
        )

    @property
    def parameters(self) -> int:
        """Parameters of the network."""
        norm = (1 if self.is_gated else 2) * self.hidden
        biases = 0 if self.is_gated else self.qkv_width + self.up_width + 2 * self.hidden
        places = self.tokens * self.hidden if self.has_learned_positions else 0
        tables = self.vocabulary * self.hidden * (1 if self.has_tied_embeddings else 2)
        return self.layers * (sum(self.matrices) + biases + 2 * norm) + tables + places + norm

    def model_flop(self, global_batch: int) -> int:
        """FLOP of an update over all devices, recompute not counted: three times the forward pass,
        all of the square of scores included though half of it is masked."""
        per_token = self.layers * (sum(self.matrices) + 2 * self.tokens * self.hidden)
        per_token += self.hidden * self.vocabulary
        return 3 * 2 * per_token * global_batch * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to spread the training of a transformer over devices and in time.

    Stages of a pipeline take microbatches one forward, one backward (1F1B).
    """

    split: BatchSplit
    """Devices along each axis, the global batch, and its microbatches."""
    recompute: Recompute = "none"
    """What the backward pass computes again."""
    zero_stage: Literal[0, 1, 2] = 0
    """What the data axis keeps in parts, as `LayoutConfig.zero_stage`."""
    sequence_parallel: bool = False
    """Whether the tensor axis divides the tokens between the layers that it divides."""
    pipeline_chunks: int = 1
    """Parts of the blocks of a stage, interleaved."""
    moments: Literal[0, 1, 2] = 2
    """Arrays like the parameters that the optimizer keeps: 2 of Adam, 1 of momentum."""

    def __post_init__(self) -> None:
        require_at_least("pipeline_chunks", self.pipeline_chunks, 1)
        if self.sequence_parallel and self.layout.tensor == 1:
            raise ConfigError(refusal("sequence_parallel", True, "it needs tensor above 1"))
        if self.pipeline_chunks > 1:
            require_at_least("pipeline", self.layout.pipeline, 2)
            require_multiple(
                "microbatches", self.split.microbatches, self.layout.pipeline, "pipeline"
            )

    @property
    def layout(self) -> Layout:
        """Devices along each axis."""
        return self.split.layout

    def require_fits(self, shape: TransformerShape) -> None:
        """Refuse axes that do not divide `shape` evenly.

        Raises:
            ConfigError: naming the axis.
        """
        layout = self.layout
        require_at_least("layers", shape.layers, layout.pipeline)
        if self.pipeline_chunks > 1:
            stages = layout.pipeline * self.pipeline_chunks
            require_multiple("layers", shape.layers, stages, "pipeline*chunks")
        for name in ("heads", "kv_heads", "ffn_hidden", "vocabulary"):
            require_multiple(name, getattr(shape, name), layout.tensor, "tensor")
        require_multiple("hidden", shape.hidden, layout.tensor * layout.fsdp, "tensor*fsdp")
        parts = layout.context * (layout.tensor if self.sequence_parallel else 1)
        require_multiple("tokens", shape.tokens, parts, "the parts of a sample")
        if self.zero_stage:
            require_multiple("hidden", shape.hidden, layout.data * layout.fsdp, "data*fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one device does with one microbatch of one block, and all that this depends on."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """The devices of one stage; along data one, where gradients are summed after the last
    microbatch."""
    samples: int
    """Samples of a microbatch."""
    recompute: Recompute
    """What the backward pass computes again."""
    sequence_parallel: bool
    """Whether the tensor axis divides tokens between layers."""
    is_scattered: bool
    """Whether each device along data keeps its part of the gradients' sum, and no more."""

    @property
    def gradient_parts(self) -> int:
        """Parts into which the data axis divides the gradients of a block."""
        return self.layout.data if self.is_scattered else 1

    @property
    def rows(self) -> int:
        """Tokens of a microbatch that the device takes through matrices."""
        return self.samples * self.shape.tokens // self.layout.context

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream of those tokens."""
        return self.rows * self.shape.hidden * self.shape.element_bytes

    @property
    def kept_stream_bytes(self) -> int:
        """Of it, what the device holds between layers."""
        return self.stream_bytes // (self.layout.tensor if self.sequence_parallel else 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of the queries of the heads of this device."""
        return self.stream_bytes // self.layout.tensor

    @property
    def qkv_bytes(self) -> int:
        """Bytes of their queries, keys and values."""
        shape = self.shape
        return self.rows * shape.qkv_width * shape.element_bytes // self.layout.tensor

    @property
    def inner_bytes(self) -> int:
        """Bytes of the part of the feed-forward layer's inside."""
        shape = self.shape
        return self.rows * shape.ffn_hidden * shape.element_bytes // self.layout.tensor

    @property
    def up_bytes(self) -> int:
        """Bytes of what the matrices into it result in."""
        return self.inner_bytes * (2 if self.shape.is_gated else 1)

    @property
    def score_batch(self) -> int:
        """Samples times heads of this device."""
        return self.samples * self.shape.heads // self.layout.tensor

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores of unfused attention."""
        queries = self.shape.tokens // self.layout.context
        return self.score_batch * queries * self.shape.tokens * self.shape.element_bytes

    @property
    def matrices(self) -> tuple[int, int, int, int]:
        """Bytes of the block's matrices where they are used, in the compute type."""
        used = self.shape.element_bytes
        qkv, projection, up, down = (each * used for each in self.shape.matrices)
        tensor = self.layout.tensor
        return qkv // tensor, projection // tensor, up // tensor, down // tensor

    @property
    def matrix_bytes(self) -> int:
        """Of all of them."""
        return sum(self.matrices)

    @property
    def small_elements(self) -> int:
        """Elements of the block's biases, as one device of a tensor group holds them."""
        shape, tensor = self.shape, self.layout.tensor
        if shape.is_gated:
            return 0
        return (shape.qkv_width + shape.up_width) // tensor + 2 * shape.hidden

    @property
    def norm_elements(self) -> int:
        """Elements of the scales and offsets of its two norms."""
        return (2 if self.shape.is_gated else 4) * self.shape.hidden


@dataclass(frozen=True, slots=True)
class Pace:
    """The stage that a pipeline waits for."""

    layers: int
    """Its blocks."""
    has_logits: bool
    """Whether it is the last, which computes logits besides."""


def pace(shape: TransformerShape, strategy: Strategy) -> Pace:
    """The stage of most FLOP: the last, unless it holds a block less and logits take less than
    one (first stages hold what stages do not divide, as the trainer has it)."""
    least, rest = divmod(shape.layers, strategy.layout.pipeline)
    passes = 4 if strategy.recompute == "full" else 3
    block = passes * (sum(shape.matrices) + 2 * shape.tokens * shape.hidden)
    if rest and block > 3 * shape.hidden * shape.vocabulary:
        return Pace(least + 1, False)
    return Pace(least, True)


def most_layers(shape: TransformerShape, layout: Layout) -> int:
    """Blocks of a stage that holds most."""
    return -(-shape.layers // layout.pipeline)


def is_uneven(shape: TransformerShape, layout: Layout) -> bool:
    """Whether some stages hold a block more than others."""
    return shape.layers % layout.pipeline > 0


def sums_once(shape: TransformerShape, strategy: Strategy) -> bool:
    """Whether gradients are summed over the batch once, after the last microbatch, in float32.

    Else each block's are, in the compute type, in the backward pass of a single one; and with
    ZeRO 2 those of every microbatch are, in float32, after it. A pipeline sums once.
    """
    return strategy.layout.pipeline > 1 or strategy.split.microbatches > 1


@lru_cache(maxsize=_KEPT)
def stage_layout(layout: Layout) -> Layout:
    """The devices of one stage."""
    return replace(layout, pipeline=1)


@lru_cache(maxsize=_KEPT)
def sum_axes(layout: Layout) -> tuple[str, ...]:
    """Axes of more than one device along which parameters are whole and gradients summed."""
    return tuple(axis for axis in (DATA, CONTEXT) if getattr(layout, axis) > 1)


def part_of(shape: TransformerShape, strategy: Strategy) -> Part:
    """What one microbatch of one block comes to on one device."""
    layout, is_summed_once = strategy.layout, sums_once(shape, strategy)
    return _part(
        shape,
        layout,
        strategy.split.microbatch,
        strategy.recompute,
        strategy.sequence_parallel,
        is_summed_once,
        # As the compiler has it; with fsdp and context it sums in other ways.
        strategy.zero_stage == 1
        and not is_summed_once
        and layout.data > 1
        and layout.fsdp == layout.context == 1,
    )


@lru_cache(maxsize=_KEPT)
def _part(
    shape: TransformerShape,
    layout: Layout,
    samples: int,
    recompute: Recompute,
    sequence_parallel: bool,
    is_summed_once: bool,
    is_scattered: bool,
) -> Part:
    # As the trainer has it: fused attention wants the queries of all tokens.
    is_fused = shape.is_fused and layout.context == 1
    return Part(
        shape=replace(shape, is_fused=is_fused),
        layout=replace(layout, pipeline=1, data=1 if is_summed_once else layout.data),
        samples=samples,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        is_scattered=is_scattered,
    )


@lru_cache(maxsize=_KEPT)
def parameters_of_device(shape: TransformerShape, layout: Layout) -> int:
    """Parameters that one device holds, of the blocks of its stage and of the embeddings.

    Of blocks each stage keeps as much as the others even where it computes fewer of them.
    What `models.gpt` splits is divided by tensor and fsdp; norms, and the biases after a sum over
    tensor, are whole. The token embedding counts on every stage: the first looks up in it and the
    last multiplies by it.
    """
    parts = layout.tensor * layout.fsdp
    part = _part(shape, layout, 1, "none", False, True, False)
    block = sum(shape.matrices) // parts + part.small_elements + part.norm_elements
    blocks = shape.layers * block // layout.pipeline
    tables = shape.vocabulary * shape.hidden // parts
    if not shape.has_tied_embeddings and layout.pipeline == 1:
        tables *= 2
    places = shape.tokens * shape.hidden // layout.fsdp if shape.has_learned_positions else 0
    return blocks + tables + places + part.norm_elements // 2
