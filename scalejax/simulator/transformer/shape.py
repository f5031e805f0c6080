"""Dimensions of a transformer, its parallelism strategy, and the sizes of each device's shard.

Describes the elements of each matrix and the shard that one device holds; no operations or network.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from scalejax.config.model import ELEMENT_BYTES, NARROW_TYPES, CostedType, MlaConfig
from scalejax.config.moe import MoeConfig
from scalejax.config.parallelism import (
    CONTEXT,
    DATA,
    EXPERT,
    BatchSplit,
    ContextStrategy,
    Layout,
    balanced_layers,
    stage_layers,
)
from scalejax.config.pipeline_schedule import PipelineSchedule
from scalejax.core.errors import ConfigError, refusal, require_at_least, require_multiple
from scalejax.simulator.transforms.pipeline import FLOP_OF_SENT_BYTE

_CACHE_SIZE = 65536  # entries of the caches
_F32_BYTES = 4
_OPERAND_TYPES: dict[CostedType, str] = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", **dict.fromkeys(NARROW_TYPES, "bf16"),
}  # fmt: skip

_WIDE_BITS = 16
_BITS: dict[CostedType, int] = {each: 4 if "4" in each else 8 for each in NARROW_TYPES}
ENDS = 2
"""Embedding and loss, which count as one layer each in pipelines dealt `with_ends`."""

Compiler = Literal["0.10", "0.12"]
"""XLA of jaxlib 0.10 and 0.11, or of 0.12. That of 0.12 reads matrices and kept activations in
their stacks in the product; masks scores of grouped queries and normalises them in one fusion; sums
the gradients of a block's matrices over fsdp, or over the batch with tensor, all at once, before
the last input gradient, and without overlap; gathers the last matrix of a pass late; and zeroes
gradients after the loss."""


def compiler_of(jaxlib: str) -> Compiler:
    """The XLA of a version of jaxlib, such as "0.10.2"."""
    major, minor = map(int, jaxlib.split(".")[:2])
    return "0.12" if (major, minor) >= (0, 12) else "0.10"


Recompute = Literal["none", "selective", "selective_op", "full"]
"""Recompute in the backward pass of a block: nothing; the scores of unfused attention; scores,
norms, the projection (unless tensor sums it) and the gated up projection; or all but the input of
the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters (LoRA) of matrices of every block; all else is frozen."""

    rank: int
    """Columns of A [in, rank] and rows of B [rank, out]."""
    matrices: tuple[str, ...]
    """The adapted matrices, by their names in `TransformerShape.matrices`."""
    base_bytes: int
    """Bytes of an element of the frozen matrices and embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a decoder-only transformer, whose blocks are equal except for the first
    ones, which may have no experts."""

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
    """Whether blocks are those of Llama (SwiGLU, RMSNorm and no biases) rather than those of GPT
    (GELU, LayerNorm and biases)."""
    is_plain: bool = False
    """Whether blocks are those of Nemotron-4: squared ReLU without a gate, and LayerNorm, but no
    biases."""
    has_tied_embeddings: bool = True
    """Whether the token embedding is also the output layer."""
    has_learned_positions: bool = True
    """Whether positions are an embedding; if not, they are rotary (RoPE)."""
    is_fused: bool = True
    """Whether attention is one fused kernel that keeps no scores."""
    scores_share: float = 1.0
    """Share of the scores of causal attention that windows leave to its kernel, averaged over
    layers."""
    compute_dtype: CostedType = "bfloat16"
    """Element type of activations and products; parameters and their moments are float32."""
    head_width: int | None = None
    """Width of a head; if None, `hidden / heads`."""
    normalises_heads: bool = False
    """Whether queries and keys of every head go through a norm (QK-norm)."""
    latent: MlaConfig | None = None
    """Ranks and head sizes of latent attention; None for ordinary keys and values."""
    experts: MoeConfig | None = None
    """Experts that replace the feed-forward layers after the first dense ones; None if there are
    none."""
    is_first: bool = False
    """Whether its blocks are the first, dense ones of a network with experts."""
    adapters: Adapters | None = None
    """Adapters, which alone are trained; None if the whole network is."""
    compiler: Compiler = "0.10"
    """The XLA that schedules and fuses the step."""
    sums_gradients_once: bool = False
    """Whether gradients are summed over data once a step in float32 even with a single microbatch,
    where XLA sums them block by block."""
    flat_state: bool = False
    """Whether ZeRO shards the state as one padded array, as Megatron-Core's distributed optimizer
    does, so that no dimension must be a multiple of the devices; otherwise matrix by matrix."""
    stages_apart: bool = False
    """Whether only the first pipeline stage holds the token embedding and only the last the output
    layer; otherwise all stages hold both, as in the trainer."""
    layers_of_stages: Literal["equal", "by_weight", "with_ends"] = "equal"
    """How stages share the layers: equally; by weights with the output layer (`balanced_layers`),
    as in nanotron; or equally with embedding and loss as one layer each (Megatron-LM's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split)."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocabulary", "tokens"):
            require_at_least(name, getattr(self, name), 1)
        if self.head_width is None and self.latent is None:
            require_multiple("hidden", self.hidden, self.heads, "heads")
        require_multiple("heads", self.heads, self.kv_heads, "kv_heads")

    def __hash__(self) -> int:
        """Hash of the fields in which the few shapes of a search differ."""
        return hash((self.layers, self.hidden, self.is_first, self.is_fused))

    @property
    def expert_count(self) -> int:
        """Routed experts of a block; 1 without experts, which no axis divides."""
        return 1 if self.experts is None else self.experts.experts

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.compute_dtype]

    @property
    def operand_type(self) -> str:
        """XLA's name for the type of operands before any cast to fp8."""
        return _OPERAND_TYPES[self.compute_dtype]

    @property
    def operand_share(self) -> float:
        """Bits of the operands of a block's products over those of logits; the rate of the products
        grows as they shrink."""
        return _BITS.get(self.compute_dtype, _WIDE_BITS) / _WIDE_BITS

    @property
    def head_size(self) -> int:
        """Width of a head."""
        if self.latent is not None:
            return self.latent.nope_head_size + self.latent.rope_head_size
        return self.head_width or self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """Width of a value of a head."""
        return self.head_size if self.latent is None else self.latent.value_head_size

    @property
    def has_biases(self) -> bool:
        """Whether linear layers have biases."""
        return not self.is_gated and not self.is_plain

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm: the scale, and the offset of a LayerNorm."""
        return 1 if self.is_gated else 2

    @property
    def query_width(self) -> int:
        """Columns of all queries."""
        return self.heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Columns of queries, keys and values of all heads, which one matrix computes except in
        latent attention."""
        return self.query_width + self.kv_heads * (self.head_size + self.value_size)

    @property
    def up_width(self) -> int:
        """Columns of the matrices into the feed-forward layer."""
        return self.ffn_hidden * (2 if self.is_gated else 1)

    @property
    def kinds(self) -> tuple[tuple["TransformerShape", int], ...]:
        """(network of these blocks alone, their number) of each kind of block, in order."""
        if self.experts is None or not self.experts.dense_layers:
            return ((self, self.layers),)
        return _kinds(self)

    @property
    def matrices(self) -> dict[str, int]:
        """Elements of the matrices of a block of the last kind, by name; those of all experts
        together. Routers are not included: they are replicated."""
        hidden, mla, moe = self.hidden, self.latent, self.experts
        if mla is None:
            found = {"qkv": hidden * self.qkv_width}
        else:
            queries, rank = self.query_width, mla.q_lora_rank
            found = {"q": hidden * queries}
            if rank is not None:
                found = {"q_down": hidden * rank, "q_up": rank * queries}
            found["kv_down"] = hidden * (mla.kv_lora_rank + mla.rope_head_size)
            made = self.heads * (mla.nope_head_size + mla.value_head_size)
            found["kv_up"] = mla.kv_lora_rank * made
        found["projection"] = self.heads * self.value_size * hidden
        if moe is None:
            return {**found, "up": hidden * self.up_width, "down": self.ffn_hidden * hidden}
        one = hidden * moe.expert_hidden
        found |= {"experts.up": 2 * moe.experts * one, "experts.down": moe.experts * one}
        if moe.shared_experts:
            found |= {"shared.up": 2 * moe.shared_experts * one}
            found |= {"shared.down": moe.shared_experts * one}
        return found

    def trains(self, name: str) -> bool:
        """Whether a matrix, or its adapters, are trained."""
        return self.adapters is None or name in self.adapters.matrices

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of the matrices of a dense block that may have adapters."""
        return {
            "qkv": (self.hidden, self.qkv_width),
            "projection": (self.heads * self.value_size, self.hidden),
            "up": (self.hidden, self.up_width),
            "down": (self.ffn_hidden, self.hidden),
        }

    @property
    def trained(self) -> dict[str, int]:
        """Elements of the arrays of a block whose gradients are computed, except vectors, by name:
        its matrices, or the A and the B of its adapters."""
        if self.adapters is None:
            return self.matrices
        rank, found = self.adapters.rank, dict[str, int]()
        for name in self.adapters.matrices:
            inputs, outputs = self.sides[name]
            found |= {f"{name}.a": inputs * rank, f"{name}.b": rank * outputs}
        return found

    @property
    def active_matrices(self) -> int:
        """Elements of the matrices of a block that a token passes through."""
        moe = self.experts
        if moe is None:
            return sum(self.matrices.values())
        routed = 3 * self.hidden * moe.expert_hidden * (moe.experts - moe.experts_per_token)
        return sum(self.matrices.values()) - routed + self.router_elements

    @property
    def router_elements(self) -> int:
        """Elements of the router of a block."""
        return 0 if self.experts is None else self.hidden * self.experts.experts

    @property
    def norm_elements(self) -> int:
        """Elements of the scales and offsets of the norms of a block: those of the stream, heads
        and latents."""
        found = 2 * self.norm_vectors * self.hidden
        if self.normalises_heads:
            found += 2 * self.head_size
        if self.latent is not None:
            found += self.latent.kv_lora_rank + (self.latent.q_lora_rank or 0)
        return found

    @property
    def parameters(self) -> int:
        """Parameters of the network."""
        norm = self.norm_vectors * self.hidden
        biases = self.qkv_width + self.up_width + 2 * self.hidden if self.has_biases else 0
        places = self.tokens * self.hidden if self.has_learned_positions else 0
        tables = self.vocabulary * self.hidden * (1 if self.has_tied_embeddings else 2)
        blocks = sum(
            count * (sum(kind.matrices.values()) + kind.router_elements + kind.norm_elements)
            for kind, count in self.kinds
        )
        return blocks + self.layers * biases + tables + places + norm

    def model_flop(self, global_batch: int) -> int:
        """FLOP of an update over all devices, recompute not counted: three times the forward pass,
        including the whole square of scores though half of it is masked."""
        scores = self.tokens * self.heads * (self.head_size + self.value_size)
        per_token = sum(count * (kind.active_matrices + scores) for kind, count in self.kinds)
        per_token += self.hidden * self.vocabulary
        if self.adapters is None:
            return 3 * 2 * per_token * global_batch * self.tokens
        # Frozen matrices have no gradient; scores have those of both operands.
        adapted = self.layers * sum(self.trained.values())
        passes = 2 * per_token + self.layers * scores + 3 * adapted
        return 2 * passes * global_batch * self.tokens

    def state_bytes(self, moments: int) -> int:
        """Bytes of parameters and moments over all devices: float32, frozen ones as their base."""
        adapters = self.adapters
        if adapters is None:
            return _F32_BYTES * self.parameters * (1 + moments)
        vectors = self.layers * self.norm_elements + self.hidden
        base = adapters.base_bytes * (self.parameters - vectors) + _F32_BYTES * vectors
        return base + _F32_BYTES * self.layers * sum(self.trained.values()) * (1 + moments)


@lru_cache(maxsize=_CACHE_SIZE)
def _kinds(shape: TransformerShape) -> tuple[tuple[TransformerShape, int], ...]:
    assert shape.experts is not None  # noqa: S101  with dense blocks before others
    dense, rest = shape.experts.dense_layers, replace(shape.experts, dense_layers=0)
    return (
        (replace(shape, experts=None, is_first=True), dense),
        (replace(shape, experts=rest), shape.layers - dense),
    )


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
    """Arrays of the parameters' size that the optimizer keeps: 2 for Adam, 1 for momentum."""

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
        """Schedule of the stages as a run file names it: 1F1B if there are several."""
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
            ends = ENDS if shape.layers_of_stages == "with_ends" else 0
            require_multiple("layers", shape.kinds[-1][1] + ends, stages, "pipeline*chunks")
        for name in ("heads", "kv_heads", "ffn_hidden", "vocabulary"):
            require_multiple(name, getattr(shape, name), layout.tensor, "tensor")
        require_multiple("hidden", shape.hidden, layout.tensor * layout.fsdp, "tensor*fsdp")
        if shape.experts is not None:
            require_multiple("experts", shape.experts.experts, layout.expert, "expert")
            require_multiple("expert_hidden", shape.experts.expert_hidden, layout.tensor, "tensor")
        elif layout.expert > 1:
            raise ConfigError(
                refusal("layout.expert", layout.expert, "1 of a network without experts")
            )
        if shape.adapters is not None:
            self._require_fits_adapters(shape)
        if shape.latent is not None and layout.context > 1:
            accepted = "the closed form knows latent attention of whole samples; use 1"
            raise ConfigError(refusal("layout.context", layout.context, accepted))
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
        if self.zero_stage and not shape.flat_state:
            divisor = zero_parts(layout) * layout.fsdp
            axes = f"{layout.batch_axes}*context" if layout.context > 1 else layout.batch_axes
            require_multiple("hidden", shape.hidden, divisor, f"{axes}")

    def _require_fits_adapters(self, shape: TransformerShape) -> None:
        """Refuse what the closed form does not support with frozen matrices."""
        if self.recompute == "selective_op":
            accepted = "the closed form knows adapters with none, selective and full"
            raise ConfigError(refusal("model.remat", self.recompute, accepted))
        if self.zero_stage and zero_parts(self.layout) > 1:
            accepted = "the closed form knows adapters without ZeRO; use 0"
            raise ConfigError(refusal("layout.zero_stage", self.zero_stage, accepted))
        if is_uneven(shape, self.layout):
            accepted = "the closed form knows adapters in stages of as many layers each"
            raise ConfigError(refusal("layout.pipeline", self.layout.pipeline, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShard:
    """One device's shard of a block for one microbatch, with its sizes in bytes."""

    shape: TransformerShape
    """The network."""
    layout: Layout
    """The devices of one stage; one along data if gradients are summed after the last
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
    is_of_stage: bool = False
    """Whether it belongs to a pipeline, whose devices sum gradients over expert and context once,
    after all microbatches."""
    is_sliced: bool = False
    """Whether products read copies of their matrices, which the compiler of 0.12 otherwise reads in
    their stacks: matrices that stages gathered from ZeRO's shards have another dimension order."""

    def __hash__(self) -> int:
        """Hash of the fields in which the shards of a search differ, quicker than a hash of all."""
        layout = self.layout
        return hash(
            (
                self.shape.is_first,
                layout.data,
                layout.fsdp,
                layout.expert,
                layout.tensor,
                layout.context,
                self.samples,
                self.recompute,
                self.sequence_parallel,
                self.strategy,
                self.is_scattered,
            )
        )

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes over which the gradients of all but experts are summed for each microbatch."""
        return () if self.is_of_stage else sum_axes(self.layout)

    @property
    def expert_sum_axes(self) -> tuple[str, ...]:
        """The same axes for the gradients of experts."""
        return () if self.is_of_stage else sum_axes(self.layout, of_experts=True)

    def gradient_parts(self, name: str) -> int:
        """Shards of the gradient of a matrix along the axes over which ZeRO shards it."""
        return zero_parts(self.layout, of_experts=is_of_experts(name)) if self.is_scattered else 1

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
        shape = self.shape
        return self.rows * shape.query_width * shape.element_bytes // self.layout.tensor

    @property
    def mixed_bytes(self) -> int:
        """Bytes of the weighted values of this device's heads."""
        return self.head_bytes * self.shape.value_size // self.shape.head_size

    @property
    def qkv_bytes(self) -> int:
        """Bytes of the queries, keys and values of this device's heads."""
        shape = self.shape
        return self.rows * shape.qkv_width * shape.element_bytes // self.layout.tensor

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of this device's heads and tokens; values have as many."""
        return (self.qkv_bytes - self.head_bytes) // 2

    @property
    def sent_key_bytes(self) -> int:
        """`key_bytes`, or bytes of keys for every device if attention over heads has fewer key
        heads than devices."""
        heads = self.shape.kv_heads // self.layout.tensor
        if not self.is_over_context or self.strategy != "all_to_all":
            return self.key_bytes
        return self.key_bytes * max(1, self.layout.context // heads)

    @property
    def statistics_bytes(self) -> int:
        """Bytes of what fused attention keeps for each row of scores, float32."""
        return self.score_batch * self.shape.tokens // self.layout.context * 4

    @property
    def is_over_context(self) -> bool:
        """Whether fused attention runs by blocks or over heads, because context shards tokens."""
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
    def matrices(self) -> dict[str, int]:
        """Bytes of the block's matrices where they are used, in the compute type."""
        return _matrix_bytes(self.shape, self.layout)[0]

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices of the block, in the compute type."""
        return matrix_bytes(self.shape, self.layout)

    @property
    def trained(self) -> dict[str, int]:
        """Bytes of what is trained in the block where it is used, in the compute type, by name."""
        return _trained_bytes(self.shape, self.layout)

    @property
    def small_elements(self) -> int:
        """Elements of the block's biases that one device of a tensor group holds."""
        shape, tensor = self.shape, self.layout.tensor
        if not shape.has_biases:
            return 0
        return (shape.qkv_width + shape.up_width) // tensor + 2 * shape.hidden

    @property
    def norm_elements(self) -> int:
        """Elements of the scales and offsets of the block's two norms."""
        return self.shape.norm_elements


def transposes_kept(shard: BlockShard) -> bool:
    """Whether the kept inputs of products, of all blocks at once, are transposed after the backward
    pass to put tokens first, as they were gathered."""
    is_kept = shard.recompute in ("none", "selective")
    is_gathered = shard.sequence_parallel and shard.samples > 1
    return is_gathered and is_kept and shard.shape.compiler == "0.10"


ROWS_DIVIDED = ("projection", "down")
"""Matrices whose rows are divided over tensor; other matrices have their columns divided."""
_WHOLE_ON_TENSOR = (
    "q_down", "kv_down", "qkv.a", "up.a", *(f"{name}.b" for name in ROWS_DIVIDED),
)  # fmt: skip


def devices_of_matrix(name: str, layout: Layout) -> int:
    """Devices that share the elements of a matrix where it is used: those along tensor, and for
    experts also those along the expert axis."""
    tensor = 1 if name in _WHOLE_ON_TENSOR else layout.tensor
    return tensor * (layout.expert if is_of_experts(name) else 1)


@lru_cache(maxsize=_CACHE_SIZE)
def _matrix_bytes(shape: TransformerShape, layout: Layout) -> tuple[dict[str, int], int]:
    """Bytes of each matrix of a block where it is used, and of all."""
    found = {
        name: size * shape.element_bytes // devices_of_matrix(name, layout)
        for name, size in shape.matrices.items()
    }
    return found, sum(found.values())


@lru_cache(maxsize=_CACHE_SIZE)
def _trained_bytes(shape: TransformerShape, layout: Layout) -> dict[str, int]:
    return {
        name: size * shape.element_bytes // devices_of_matrix(name, layout)
        for name, size in shape.trained.items()
    }


def matrix_bytes(shape: TransformerShape, layout: Layout) -> int:
    """Bytes of all matrices of a block where they are used, in the compute type."""
    return _matrix_bytes(shape, layout)[1]


def is_of_experts(name: str) -> bool:
    """Whether a matrix belongs to routed experts."""
    return name.startswith("experts.")


def zero_parts(layout: Layout, *, of_experts: bool = False) -> int:
    """Devices over which ZeRO shards a parameter: those along data and context, and, except for
    expert parameters, along expert."""
    return layout.data * layout.context * (1 if of_experts else layout.expert)


@dataclass(frozen=True, slots=True)
class SlowestStage:
    """The slowest pipeline stage, for which the others wait."""

    layers: int
    """Blocks of the stage, of the last kind."""
    has_logits: bool
    """Whether it is the last stage, which also computes logits."""


_GATHERS_AND_SCATTERS = 5
"""Times that a layer of experts gathers or scatters the tokens of its devices, if the backward pass
gathers them again."""


def slowest_stage(shape: TransformerShape, strategy: Strategy) -> SlowestStage:
    """The stage with most to compute and to send: the last, unless it holds fewer blocks than
    others and logits take less than these, or it holds none (as in the trainer, the first stages
    hold the remainder of the blocks). Dense blocks before others take no longer than those with
    experts, and the first stage has correspondingly fewer of the latter."""
    layout = strategy.layout
    counts = stage_counts(shape, layout)
    fewer = max(counts) - counts[-1]
    passes = 4 if strategy.recompute == "full" else 3
    scores = shape.tokens * shape.heads * (shape.head_size + shape.value_size)
    block = passes * (shape.active_matrices * shape.operand_share + scores)
    if layout.expert > 1:  # in products of two FLOP, shared by devices along tensor
        sent = _GATHERS_AND_SCATTERS * layout.expert * shape.hidden * shape.element_bytes
        block += sent * FLOP_OF_SENT_BYTE / 2 * layout.tensor
    is_last = counts[-1] > 0 and fewer * block <= 3 * shape.hidden * shape.vocabulary
    return SlowestStage(counts[-1] if is_last else max(counts), is_last)


@lru_cache(maxsize=_CACHE_SIZE)
def stage_counts(shape: TransformerShape, layout: Layout) -> tuple[int, ...]:
    """Blocks of each pipeline stage, of the last kind."""
    if shape.layers_of_stages == "by_weight" and layout.pipeline > 1:
        output = shape.vocabulary * shape.hidden
        return balanced_layers(shape.layers, layout.pipeline, sum(shape.matrices.values()), output)
    if shape.layers_of_stages == "with_ends" and layout.pipeline > 1:
        first, *others, last = stage_layers(shape.layers + ENDS, layout.pipeline)
        return (first - 1, *others, last - 1)
    if shape.experts is None:
        return stage_layers(shape.layers, layout.pipeline)
    return shape.experts.layers_of_stages(shape.layers, layout.pipeline, chunks=1, period=1)


def is_uneven(shape: TransformerShape, layout: Layout) -> bool:
    """Whether some stages hold more blocks than others."""
    return len(set(stage_counts(shape, layout))) > 1


def sums_once(shape: TransformerShape, strategy: Strategy) -> bool:
    """Whether gradients are summed over data once, after the last microbatch, in float32.

    Otherwise, with a single microbatch or one device along data, each block's gradients are summed
    in its backward pass, in the compute type. With ZeRO 2 the gradients of every microbatch are
    summed after it, in float32. A pipeline sums once.
    """
    is_explicit = is_data_manual(strategy) or shape.sums_gradients_once
    return strategy.layout.pipeline > 1 or (strategy.layout.data > 1 and is_explicit)


def scatters_in_blocks(shape: TransformerShape, strategy: Strategy) -> bool:
    """Whether ZeRO scatters each block's gradients in its backward pass: over data in stage 1 only,
    if they are not summed once; over just context and experts in stage 2 as well. With fsdp other
    collectives sum them, as compiled."""
    layout = strategy.layout
    return (
        strategy.zero_stage > 0
        and (strategy.zero_stage == 1 or layout.data == 1)
        and not sums_once(shape, strategy)
        and zero_parts(layout) > 1
        and layout.fsdp == 1
    )


def is_data_manual(strategy: Strategy) -> bool:
    """Whether the step is traced in a `shard_map` over data, to sum gradients explicitly."""
    is_explicit = strategy.split.microbatches > 1 or strategy.zero_stage == 2
    return strategy.layout.data > 1 and is_explicit


def scatters_each(strategy: Strategy) -> bool:
    """Whether the gradients of every microbatch are reduce-scattered over data (ZeRO 2)."""
    return strategy.zero_stage == 2 and strategy.layout.pipeline == 1 and strategy.layout.data > 1


@lru_cache(maxsize=_CACHE_SIZE)
def stage_layout(layout: Layout) -> Layout:
    """Layout of the devices of one stage."""
    return replace(layout, pipeline=1)


@lru_cache(maxsize=_CACHE_SIZE)
def sum_axes(layout: Layout, *, of_experts: bool = False) -> tuple[str, ...]:
    """Axes of more than one device along which parameters are replicated and gradients summed; for
    experts without their own axis, which shards them."""
    axes = (DATA, CONTEXT) if of_experts else (DATA, EXPERT, CONTEXT)
    return tuple(axis for axis in axes if getattr(layout, axis) > 1)


def deals_layers(shape: TransformerShape, layout: Layout) -> bool:
    """Whether stages that hold equal shares of the layers compute unequal ones, which are dealt to
    them in every step."""
    return is_uneven(shape, layout) and not shape.stages_apart


def layers_of_device(shape: TransformerShape, layers: int, layout: Layout) -> Fraction:
    """Layers out of `layers` that a device holds: an equal share, or those of the longest stage."""
    if shape.layers_of_stages == "equal":
        return Fraction(layers, layout.pipeline)
    return Fraction(max(stage_counts(shape, layout)))


def stage_kinds(
    shape: TransformerShape, layers: int, stages: int
) -> tuple[tuple[TransformerShape, int], ...]:
    """(network of these blocks alone, their number) of each kind of block in a stage of `layers`
    blocks of the last kind; with several stages, without the first dense ones."""
    return shape.kinds if stages == 1 else ((shape.kinds[-1][0], layers),)


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
        scatters_in_blocks(shape, strategy),
        shape.compiler == "0.12" and layout.pipeline > 1 and strategy.zero_stage > 0,
    )


def logits_shard(shape: TransformerShape, strategy: Strategy) -> BlockShard:
    """The shard of a block without what logits do not depend on: strategies that differ only in
    that share their operations."""
    layout, samples = strategy.layout, strategy.split.microbatch
    parallel = strategy.sequence_parallel
    return _block_shard(shape, layout, samples, "none", parallel, "all_gather", True, False)


def table_shard(shape: TransformerShape, strategy: Strategy) -> BlockShard | None:
    """Any shard of a block, if the gradients of the embeddings are summed once, with a single
    microbatch; else None."""
    layout = strategy.layout
    if layout.pipeline > 1 or strategy.split.microbatches > 1 or shape.sums_gradients_once:
        return None
    if scatters_each(strategy):
        return None
    is_scattered = scatters_in_blocks(shape, strategy)
    return _block_shard(shape, layout, 1, "none", False, "all_gather", False, is_scattered)


@lru_cache(maxsize=_CACHE_SIZE)
def _shard_layout(layout: Layout, is_summed_once: bool) -> Layout:
    """Layout of the devices of one stage; one along data if gradients are summed once."""
    return replace(layout, pipeline=1, data=1 if is_summed_once else layout.data)


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
    is_sliced: bool = False,
) -> BlockShard:
    # As in the trainer: by blocks, which gathered keys need, there are two chunks of each shard.
    has_chunks = context_strategy != "all_gather" or shape.tokens % (2 * layout.context) == 0
    is_fused = shape.is_fused and (layout.context == 1 or has_chunks)
    return BlockShard(
        shape=shape if is_fused == shape.is_fused else replace(shape, is_fused=is_fused),
        layout=_shard_layout(layout, is_summed_once),
        samples=samples,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        strategy=context_strategy,
        is_scattered=is_scattered,
        is_of_stage=layout.pipeline > 1,
        is_sliced=is_sliced,
    )


@lru_cache(maxsize=_CACHE_SIZE)
def expert_parameters_of_device(shape: TransformerShape, layout: Layout) -> int:
    """Parameters of routed experts that one device stores."""
    return sum(
        size // layout.fsdp // devices_of_matrix(name, layout) * count // layout.pipeline
        for kind, count in shape.kinds
        for name, size in kind.matrices.items()
        if is_of_experts(name)
    )


@lru_cache(maxsize=_CACHE_SIZE)
def parameters_of_device(shape: TransformerShape, layout: Layout) -> int:
    """Parameters that one device stores: of the blocks of its stage and of the embeddings.

    Every stage stores an equal share of the blocks, even if it computes fewer. Arrays that
    `models.gpt` shards are divided by tensor and fsdp; norms, and the biases after a sum over
    tensor, are replicated. The token embedding and the output layer count on every stage: all hold
    them, though only the first looks up in the one and only the last multiplies by the other.
    """
    parts = layout.tensor * layout.fsdp
    blocks = 0
    for kind, count in shape.kinds:
        shard = _block_shard(kind, layout, 1, "none", False, "all_gather", True, False)
        block = sum(
            size // layout.fsdp // devices_of_matrix(name, layout)
            for name, size in kind.matrices.items()
        )
        block += shard.small_elements + shard.norm_elements + kind.router_elements
        blocks += int(layers_of_device(shape, count, layout) * block)
    tables = shape.vocabulary * shape.hidden // parts
    if not shape.has_tied_embeddings and not (shape.stages_apart and layout.pipeline > 1):
        tables *= 2
    places = shape.tokens * shape.hidden // layout.fsdp if shape.has_learned_positions else 0
    return blocks + tables + places + shape.hidden * shape.norm_vectors


@lru_cache(maxsize=_CACHE_SIZE)
def trained_of_device(shape: TransformerShape, layout: Layout) -> int:
    """The parameters that one device stores and trains."""
    if shape.adapters is None:
        return parameters_of_device(shape, layout)
    block = sum(
        size // layout.fsdp // devices_of_matrix(name, layout)
        for name, size in shape.trained.items()
    )
    return shape.layers * block // layout.pipeline


@lru_cache(maxsize=_CACHE_SIZE)
def frozen_bytes_of_device(shape: TransformerShape, layout: Layout) -> int:
    """Bytes of the parameters that one device stores and does not train; vectors in float32."""
    if shape.adapters is None:
        return 0
    vectors = shape.layers * shape.norm_elements // layout.pipeline + shape.hidden
    matrices = parameters_of_device(shape, layout) - vectors
    return matrices * shape.adapters.base_bytes + vectors * _F32_BYTES
