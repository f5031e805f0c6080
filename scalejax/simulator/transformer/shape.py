"""Dimensions of a transformer, its parallelism strategy, and the sizes of each device's shard.

Knows the elements of each matrix and the shard that one device holds; no operations, no network.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from scalejax.config.model import ELEMENT_BYTES, NARROW_TYPES, CostedType
from scalejax.config.parallelism import CONTEXT, DATA, BatchSplit, ContextStrategy, Layout
from scalejax.config.pipeline_schedule import PipelineSchedule
from scalejax.core.errors import ConfigError, refusal, require_at_least, require_multiple

_CACHE_SIZE = 65536  # entries of the caches
_OPERAND_TYPES: dict[CostedType, str] = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", **dict.fromkeys(NARROW_TYPES, "bf16"),
}  # fmt: skip

Recompute = Literal["none", "selective", "selective_op", "full"]
"""Recompute in the backward pass of a block: nothing; the scores of unfused attention; scores,
norms, the projection (unless tensor sums it) and the gated up projection; or all but the input of
the block."""


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
    """Heads of keys and values; fewer than `heads` is grouped-query attention."""
    ffn_hidden: int
    """Width inside the feed-forward layer."""
    vocabulary: int
    """Size of the vocabulary."""
    tokens: int
    """Tokens of a sample."""
    is_gated: bool = False
    """Whether blocks are those of Llama: SwiGLU, RMSNorm and no biases, in place of those of
    GPT: GELU, LayerNorm and biases."""
    has_tied_embeddings: bool = True
    """Whether the token embedding is the output layer as well."""
    has_learned_positions: bool = True
    """Whether positions are an embedding; if not, rotary (RoPE)."""
    is_fused: bool = True
    """Whether attention is one fused kernel that keeps no scores."""
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
        """XLA's name for the type of operands before any cast to fp8."""
        return _OPERAND_TYPES[self.compute_dtype]

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        """Columns of the matrix that computes queries, keys and values."""
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
    """Parallelism, microbatches and recompute of a transformer's training step.

    Pipeline stages run 1F1B.
    """

    split: BatchSplit
    """Devices along each axis, the global batch, and its microbatches."""
    recompute: Recompute = "none"
    """Recompute in the backward pass."""
    zero_stage: Literal[0, 1, 2] = 0
    """ZeRO stage of the data axis, as `LayoutConfig.zero_stage`."""
    sequence_parallel: bool = False
    """Whether tokens are sharded over the tensor axis between tensor-parallel layers."""
    pipeline_chunks: int = 1
    """Interleaved chunks per pipeline stage."""
    context_strategy: ContextStrategy = "all_gather"
    """How attention sees tokens of other context shards, as `LayoutConfig.context_strategy`."""
    moments: Literal[0, 1, 2] = 2
    """Arrays like the parameters that the optimizer keeps: 2 for Adam, 1 for momentum."""

    def __post_init__(self) -> None:
        require_at_least("pipeline_chunks", self.pipeline_chunks, 1)
        if self.sequence_parallel and self.layout.tensor == 1:
            raise ConfigError(refusal("sequence_parallel", True, "it needs tensor above 1"))
        if self.layout.context == 1 and self.context_strategy != "all_gather":
            accepted = "it needs context above 1"
            raise ConfigError(refusal("context_strategy", self.context_strategy, accepted))
        if self.layout.pipeline > 1 and self.context_strategy == "ring":
            accepted = "in 1F1B there is none, as for layout.pipeline_schedule; use all_gather"
            raise ConfigError(refusal("context_strategy", "ring", accepted))
        if self.pipeline_chunks > 1:
            require_at_least("pipeline", self.layout.pipeline, 2)
            require_multiple(
                "microbatches", self.split.microbatches, self.layout.pipeline, "pipeline"
            )

    @property
    def layout(self) -> Layout:
        """Devices along each axis."""
        return self.split.layout

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """Schedule of the stages as a run file names it: 1F1B where there are several."""
        return "1f1b" if self.layout.pipeline > 1 else "gpipe"

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
        if self.context_strategy != "all_gather":
            if not shape.is_fused:
                accepted = "the closed form knows it of fused attention; use all_gather"
                raise ConfigError(refusal("context_strategy", self.context_strategy, accepted))
            if self.context_strategy == "ring":
                require_multiple("tokens", shape.tokens, 2 * layout.context, "2*context")
            else:
                divisor = layout.tensor * layout.context
                require_multiple("heads", shape.heads, divisor, "tensor*context")
                if layout.context % (shape.kv_heads // layout.tensor):
                    require_multiple("kv_heads", shape.kv_heads, divisor, "tensor*context")
        if self.zero_stage:
            require_multiple("hidden", shape.hidden, layout.data * layout.fsdp, "data*fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShard:
    """One device's shard of a block for one microbatch, with its sizes in bytes."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """The devices of one stage; one along data, where gradients are summed after the last
    microbatch."""
    samples: int
    """Samples of a microbatch."""
    recompute: Recompute
    """Recompute in the backward pass."""
    sequence_parallel: bool
    """Whether tokens are sharded over the tensor axis between layers."""
    strategy: ContextStrategy
    """How attention sees tokens of other context shards."""
    is_scattered: bool
    """Whether each device along data keeps only its shard of the summed gradients."""

    @property
    def gradient_parts(self) -> int:
        """Shards of the gradients of a block along the data axis."""
        return self.layout.data if self.is_scattered else 1

    @property
    def rows(self) -> int:
        """Tokens of a microbatch that the device multiplies by matrices."""
        return self.samples * self.shape.tokens // self.layout.context

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream of `rows` tokens."""
        return self.rows * self.shape.hidden * self.shape.element_bytes

    @property
    def kept_stream_bytes(self) -> int:
        """Bytes of the residual stream that the device holds between layers."""
        return self.stream_bytes // (self.layout.tensor if self.sequence_parallel else 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of the queries of this device's heads."""
        return self.stream_bytes // self.layout.tensor

    @property
    def qkv_bytes(self) -> int:
        """Bytes of the queries, keys and values of this device's heads."""
        shape = self.shape
        return self.rows * shape.qkv_width * shape.element_bytes // self.layout.tensor

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of this device's heads and tokens; values are as many."""
        return (self.qkv_bytes - self.head_bytes) // 2

    @property
    def sent_key_bytes(self) -> int:
        """The same, or of keys for every device, if attention over heads has fewer heads of
        keys."""
        heads = self.shape.kv_heads // self.layout.tensor
        if not self.is_over_context or self.strategy != "all_to_all":
            return self.key_bytes
        return self.key_bytes * max(1, self.layout.context // heads)

    @property
    def statistics_bytes(self) -> int:
        """Bytes of what fused attention keeps of each row of scores, float32."""
        return self.score_batch * self.shape.tokens // self.layout.context * 4

    @property
    def is_over_context(self) -> bool:
        """Whether fused attention goes by blocks or over heads, as context shards tokens."""
        return self.shape.is_fused and self.layout.context > 1

    @property
    def inner_bytes(self) -> int:
        """Bytes of this device's hidden activations of the feed-forward layer."""
        shape = self.shape
        return self.rows * shape.ffn_hidden * shape.element_bytes // self.layout.tensor

    @property
    def up_bytes(self) -> int:
        """Bytes of the result of this device's up projection."""
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
        """Bytes of all matrices of the block, in the compute type."""
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
        """Elements of the scales and offsets of the block's two norms."""
        return (2 if self.shape.is_gated else 4) * self.shape.hidden


@dataclass(frozen=True, slots=True)
class SlowestStage:
    """The slowest pipeline stage, on which the others wait."""

    layers: int
    """Blocks of the stage."""
    has_logits: bool
    """Whether it is the last stage, which also computes logits."""


def slowest_stage(shape: TransformerShape, strategy: Strategy) -> SlowestStage:
    """The stage with most FLOP: the last, unless it holds one block fewer and logits take less
    than a block (as in the trainer, the first stages hold the remainder of the blocks)."""
    least, rest = divmod(shape.layers, strategy.layout.pipeline)
    passes = 4 if strategy.recompute == "full" else 3
    block = passes * (sum(shape.matrices) + 2 * shape.tokens * shape.hidden)
    if rest and block > 3 * shape.hidden * shape.vocabulary:
        return SlowestStage(least + 1, False)
    return SlowestStage(least, True)


def most_layers(shape: TransformerShape, layout: Layout) -> int:
    """Blocks of the longest stage."""
    return -(-shape.layers // layout.pipeline)


def is_uneven(shape: TransformerShape, layout: Layout) -> bool:
    """Whether some stages hold a block more than others."""
    return shape.layers % layout.pipeline > 0


def sums_once(shape: TransformerShape, strategy: Strategy) -> bool:
    """Whether gradients are summed over the batch once, after the last microbatch, in float32.

    Otherwise, with a single microbatch, each block's gradients are summed in its backward pass, in
    the compute type. With ZeRO 2 those of every microbatch are summed after it, in float32. A
    pipeline sums once.
    """
    return strategy.layout.pipeline > 1 or strategy.split.microbatches > 1


def is_data_manual(strategy: Strategy) -> bool:
    """Whether the step is traced in a `shard_map` over data, to sum gradients explicitly."""
    is_explicit = strategy.split.microbatches > 1 or strategy.zero_stage == 2
    return strategy.layout.data > 1 and is_explicit


def scatters_each(strategy: Strategy) -> bool:
    """Whether the gradients of every microbatch are reduce-scattered over data (ZeRO 2)."""
    return (
        strategy.zero_stage == 2
        and strategy.layout.pipeline == 1
        and strategy.split.microbatches > 1
    )


@lru_cache(maxsize=_CACHE_SIZE)
def stage_layout(layout: Layout) -> Layout:
    """Layout of the devices of one stage."""
    return replace(layout, pipeline=1)


@lru_cache(maxsize=_CACHE_SIZE)
def sum_axes(layout: Layout) -> tuple[str, ...]:
    """Axes of more than one device along which parameters are replicated and gradients summed."""
    return tuple(axis for axis in (DATA, CONTEXT) if getattr(layout, axis) > 1)


def block_shard(shape: TransformerShape, strategy: Strategy) -> BlockShard:
    """One device's shard of a block for one microbatch."""
    layout, is_summed_once = strategy.layout, sums_once(shape, strategy)
    return _block_shard(
        shape,
        layout,
        strategy.split.microbatch,
        strategy.recompute,
        strategy.sequence_parallel,
        strategy.context_strategy,
        is_summed_once,
        # As compiled; with fsdp and context gradients are summed by other collectives.
        strategy.zero_stage == 1
        and not is_summed_once
        and layout.data > 1
        and layout.fsdp == layout.context == 1,
    )


def table_shard(shape: TransformerShape, strategy: Strategy) -> BlockShard | None:
    """Any shard of a block, where the gradients of the embeddings are summed once, with a single
    microbatch; else None."""
    layout = strategy.layout
    if sums_once(shape, strategy):
        return None
    is_scattered = strategy.zero_stage == 1 and layout.data > 1
    is_scattered = is_scattered and layout.fsdp == layout.context == 1
    return _block_shard(shape, layout, 1, "none", False, "all_gather", False, is_scattered)


@lru_cache(maxsize=_CACHE_SIZE)
def _block_shard(
    shape: TransformerShape,
    layout: Layout,
    samples: int,
    recompute: Recompute,
    sequence_parallel: bool,
    context_strategy: ContextStrategy,
    is_summed_once: bool,
    is_scattered: bool,
) -> BlockShard:
    # As in the trainer: by blocks, which gathered keys need, there are two chunks of each shard.
    has_chunks = context_strategy != "all_gather" or shape.tokens % (2 * layout.context) == 0
    is_fused = shape.is_fused and (layout.context == 1 or has_chunks)
    return BlockShard(
        shape=replace(shape, is_fused=is_fused),
        layout=replace(layout, pipeline=1, data=1 if is_summed_once else layout.data),
        samples=samples,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        strategy=context_strategy,
        is_scattered=is_scattered,
    )


@lru_cache(maxsize=_CACHE_SIZE)
def parameters_of_device(shape: TransformerShape, layout: Layout) -> int:
    """Parameters that one device stores: of the blocks of its stage and of the embeddings.

    Every stage stores an equal share of the blocks, even where it computes fewer. Arrays that
    `models.gpt` shards are divided by tensor and fsdp; norms, and the biases after a sum over
    tensor, are replicated. The token embedding and the output layer count on every stage, which all
    hold them, though the first alone looks up in the one and the last multiplies by the other.
    """
    parts = layout.tensor * layout.fsdp
    shard = _block_shard(shape, layout, 1, "none", False, "all_gather", True, False)
    block = sum(shape.matrices) // parts + shard.small_elements + shard.norm_elements
    blocks = shape.layers * block // layout.pipeline
    tables = shape.vocabulary * shape.hidden // parts
    if not shape.has_tied_embeddings:
        tables *= 2
    places = shape.tokens * shape.hidden // layout.fsdp if shape.has_learned_positions else 0
    return blocks + tables + places + shard.norm_elements // 2
