"""GPT-2's decoder-only transformer with scanned blocks, and its partition rules.

Shapes: B batch, S tokens, D hidden, V vocabulary, H heads, K size of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import AttentionKind, DecoderRemat, GptConfig
from scalejax.config.parallelism import FSDP, PIPELINE, TENSOR
from scalejax.models.attention import causal_attention
from scalejax.models.blocks import PreNormBlock, stacked_blocks
from scalejax.models.decoder import TOKENS, CausalNetwork
from scalejax.models.fsdp import linear
from scalejax.models.network import PartitionRules
from scalejax.models.packing import documents
from scalejax.models.remat import kept, kept_without_inner, named
from scalejax.models.sharding import constrained_between, of_own_tokens, sample_tokens

INIT_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2018; GPT-2's published code)."""


QKV, UP = P(FSDP, None, TENSOR, None), P(FSDP, TENSOR)
PROJECTION = DOWN = P((TENSOR, FSDP), None)
PLACES = P(None, FSDP)
"""How matrices are split. Over tensor as in Megatron (arXiv 1909.08053): heads and inner width,
so that each half of a block needs one sum over it. Over fsdp the first dimension, whose parts are
gathered without being transposed; for places the width, as for tokens."""


def block_rules(over_layers: str | None) -> PartitionRules:
    """The rules above for stacked blocks; layers are split over a mesh axis, or not if None."""
    return (
        (r"qkv/kernel$", P(over_layers, *QKV)),
        (r"qkv/bias$", P(over_layers, *QKV[1:])),
        (r"projection/kernel$", P(over_layers, *PROJECTION)),
        (r"up/kernel$", P(over_layers, *UP)),
        (r"up/bias$", P(over_layers, TENSOR)),
        (r"down/kernel$", P(over_layers, *DOWN)),
    )


class Attention(nnx.Module):
    """Causal self-attention; the softmax is in float32."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        head_size = config.hidden // config.heads
        self.query_scale = config.query_scale
        self.kind: AttentionKind = config.attention
        self.remat: DecoderRemat = config.remat
        # Heads are a dimension of their own, so that the tensor axis divides only them.
        self.qkv = nnx.LinearGeneral(
            config.hidden,
            (3, config.heads, head_size),
            dtype=dtype,
            kernel_init=_hidden_init(config),
            rngs=rngs,
        )
        self.projection = nnx.Linear(
            config.hidden,
            config.hidden,
            dtype=dtype,
            kernel_init=_residual_init(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Causal attention of every token, [B, S, D]."""
        qkv_BSNHK = linear(self.qkv, "bsd,dnhk->bsnhk", QKV, x_BSD, self.remat)
        qkv_BSNHK = kept(named(qkv_BSNHK, "qkv_proj"))
        q_BSHK, k_BSHK, v_BSHK = map(constrained_between, jnp.unstack(qkv_BSNHK, axis=2))
        if self.query_scale != 1:
            q_BSHK = q_BSHK * self.query_scale
        mixed_BSHK = causal_attention(q_BSHK, k_BSHK, v_BSHK, self.kind, remat=self.remat)
        mixed_BSHK = constrained_between(mixed_BSHK)
        mixed_BSD = mixed_BSHK.reshape(x_BSD.shape)
        out_BSD = linear(self.projection, "bsf,fd->bsd", PROJECTION, mixed_BSD, self.remat)
        return named(out_BSD, "out_proj")


class FeedForward(nnx.Module):
    """Two linear layers, usually four times as wide in between, with GELU (GPT-2's tanh form)."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        self.remat: DecoderRemat = config.remat
        self.up = nnx.Linear(
            config.hidden,
            config.inner_width,
            dtype=dtype,
            kernel_init=_hidden_init(config),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            config.inner_width,
            config.hidden,
            dtype=dtype,
            kernel_init=_residual_init(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each token, transformed separately, [B, S, D]."""
        inner_BSF = linear(self.up, "bsd,df->bsf", UP, x_BSD, self.remat)
        inner_BSF = kept(named(constrained_between(inner_BSF), "mlpwi"))

        def narrowed(inner_BSF: jax.Array) -> jax.Array:
            return linear(self.down, "bsf,fd->bsd", DOWN, gelu(inner_BSF), self.remat)

        return named(kept_without_inner(narrowed, self.remat)(inner_BSF), "mlpwo")


@partial(jax.checkpoint, prevent_cse=False)  # a scan already prevents it
def gelu(x: jax.Array) -> jax.Array:
    """GELU recomputed from `x` in the backward pass: otherwise seven intermediate results of the
    width of `x` would be saved, a quarter of a block's time to write and read."""
    return jax.nn.gelu(x, approximate=True)


class Block(PreNormBlock):
    """A block of GPT-2."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        self.added_scale = 1 / config.depth_ratio
        self.attention_norm = _layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _layer_norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)


class Gpt(CausalNetwork, names=("gpt",)):
    """A causal network with learned position embeddings.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and its
    code (github.com/openai/gpt-2), without dropout.
    """

    fused = (("qkv", 1),)

    def __init__(self, config: GptConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat: DecoderRemat = config.remat

        def embedding(entries: int) -> nnx.Embed:
            return nnx.Embed(
                entries,
                config.hidden,
                dtype=self.dtype,
                embedding_init=nnx.initializers.normal(INIT_STD),
                rngs=rngs,
            )

        self.tokens = embedding(dataset.classes)
        self.places = embedding(dataset.input_shape[0])
        self.blocks = stacked_blocks(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = _layer_norm(config, rngs)
        self.is_tied = config.tied_embeddings
        self.logit_scale = 1 / config.width_ratio
        if not self.is_tied:
            self.output = embedding(dataset.classes)

    def _positioned(self, x_BSD: jax.Array) -> jax.Array:
        places_SD = self._table(self.places, PLACES)
        if (packed := documents()) is not None:
            return x_BSD + places_SD[packed.positions_BS]
        return x_BSD + of_own_tokens(places_SD[None, : sample_tokens(x_BSD.shape[1])], axis=1)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """The rules above, with the stacked layers sharded over the pipeline axis."""
        return (
            *block_rules(PIPELINE),
            (r"^blocks/", P(PIPELINE)),
            (r"(tokens|output)/embedding$", TOKENS),
            (r"places/embedding$", PLACES),
        )


def _layer_norm(config: GptConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.hidden, epsilon=1e-5, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
    )


def _hidden_init(config: GptConfig) -> Initializer:
    return nnx.initializers.normal(INIT_STD / config.width_ratio**0.5)


def _residual_init(config: GptConfig) -> Initializer:
    """Smaller for the two layers per block that add to the residual, so that its variance does
    not grow with depth (Radford et al. 2019, section 2.3); where these are scaled by depth, as
    small as in the base network."""
    base_layers = config.layers / config.depth_ratio
    return nnx.initializers.normal(INIT_STD / (2 * base_layers * config.width_ratio) ** 0.5)
