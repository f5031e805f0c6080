"""A decoder-only transformer, its blocks scanned, and how it is split over a mesh.

Shapes: B batch, S tokens, D hidden, V vocabulary, H heads, K size of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P

from scalejax.data_config import DatasetFacts
from scalejax.layout import FSDP, TENSOR
from scalejax.model_config import AttentionKind, GptConfig
from scalejax.models.attention import causal_attention
from scalejax.models.network import Network, PartitionRules, placed, placed_by_row

INIT_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2018; GPT-2's published code)."""


class Attention(nnx.Module):
    """Causal self-attention; the softmax is in float32."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        head_size = config.hidden // config.heads
        self.kind: AttentionKind = config.attention
        # Heads are a dimension of their own, so that the tensor axis divides them and no more.
        self.qkv = nnx.LinearGeneral(
            config.hidden,
            (3, config.heads, head_size),
            dtype=dtype,
            kernel_init=nnx.initializers.normal(INIT_STD),
            rngs=rngs,
        )
        self.projection = nnx.LinearGeneral(
            (config.heads, head_size),
            config.hidden,
            axis=(-2, -1),
            dtype=dtype,
            kernel_init=_residual_init(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """What every token takes from itself and those before it, [B, S, D]."""
        q_BSHK, k_BSHK, v_BSHK = jnp.unstack(self.qkv(x_BSD), axis=2)
        mixed_BSHK = causal_attention(q_BSHK, k_BSHK, v_BSHK, self.kind)
        return self.projection(mixed_BSHK)


class FeedForward(nnx.Module):
    """Two linear layers, four times as wide between, with GELU (the tanh form of GPT-2)."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        self.up = nnx.Linear(
            config.hidden,
            4 * config.hidden,
            dtype=dtype,
            kernel_init=nnx.initializers.normal(INIT_STD),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            4 * config.hidden,
            config.hidden,
            dtype=dtype,
            kernel_init=_residual_init(config),
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each token by itself, [B, S, D]."""
        return self.down(_gelu(self.up(x_BSD)))


@partial(jax.checkpoint, prevent_cse=False)  # a scan already prevents it
def _gelu(x: jax.Array) -> jax.Array:
    """GELU whose backward pass computes it again from `x`: seven intermediate results of the
    width of `x` would be kept for it otherwise, a quarter of a block's time to write and read."""
    return jax.nn.gelu(x, approximate=True)


class Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a normalised copy of the residual."""

    def __init__(self, config: GptConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _layer_norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after this block, [B, S, D]."""
        x_BSD = x_BSD + self.attention(_normalised(self.attention_norm, x_BSD))
        x_BSD = placed_by_row(x_BSD)
        normalised_BSD = _normalised(self.feed_forward_norm, x_BSD)
        return placed_by_row(x_BSD + self.feed_forward(normalised_BSD))


def _normalised(norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    """`norm` of `x`, whose backward pass computes it again from `x`: it would keep six
    intermediate results otherwise, half of them in float32."""
    structure, params = nnx.split(norm)

    def apply(params: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, params)(x)

    return jax.checkpoint(apply, prevent_cse=False)(params, x)


class Gpt(Network):
    """Embeddings of tokens and places, blocks, and the token embedding again as output layer.

    The parameters of all blocks are stacked on a first dimension, over which one compiled block
    is scanned: program and compile time do not grow with depth.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and its
    code (github.com/openai/gpt-2), without dropout.
    """

    stacked = ("blocks",)

    def __init__(self, config: GptConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat = config.remat

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
        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)
        self.norm = _layer_norm(config, rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [B, S, V] of the token after each of `inputs` [B, S]."""
        # Gathered over fsdp here, once: both ends of the network use the token embedding.
        tokens_VD = placed(self.tokens.embedding.astype(self.dtype), P(TENSOR, None))
        places_SD = placed(self.places.embedding.astype(self.dtype), P(None, None))
        x_BSD = jnp.take(tokens_VD, inputs, axis=0, mode="clip")
        x_BSD = placed_by_row(x_BSD + places_SD[None, : inputs.shape[1]])
        structure, stacked = nnx.split(self.blocks)

        def block(x_BSD: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(structure, layer)(x_BSD), None

        if self.remat == "full":
            block = jax.checkpoint(block, prevent_cse=False)  # a scan already prevents it
        x_BSD, _ = jax.lax.scan(block, x_BSD, stacked)
        # In the compute type, and widened for the loss: so are the products of their gradients.
        logits_BSV = jnp.einsum("bsd,vd->bsv", self.norm(x_BSD), tokens_VD)
        return placed_by_row(logits_BSV).astype(jnp.float32)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Megatron (arXiv 1909.08053): heads, inner width and vocabulary over the tensor axis, so
        that each half of a block needs one sum over it; the hidden width over fsdp."""
        return (
            (r"qkv/kernel$", P(None, FSDP, None, TENSOR, None)),
            (r"qkv/bias$", P(None, None, TENSOR, None)),
            (r"projection/kernel$", P(None, TENSOR, None, FSDP)),
            (r"up/kernel$", P(None, FSDP, TENSOR)),
            (r"up/bias$", P(None, TENSOR)),
            (r"down/kernel$", P(None, TENSOR, FSDP)),
            (r"tokens/embedding$", P(TENSOR, FSDP)),
            (r"places/embedding$", P(None, FSDP)),
        )


def _layer_norm(config: GptConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.hidden, epsilon=1e-5, dtype=jnp.dtype(config.compute_dtype), rngs=rngs
    )


def _residual_init(config: GptConfig) -> Initializer:
    """Smaller for the two layers per block that add to the residual, so that its variance does
    not grow with depth (Radford et al. 2019, section 2.3)."""
    return nnx.initializers.normal(INIT_STD / (2 * config.layers) ** 0.5)
