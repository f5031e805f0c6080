"""ViT, a bidirectional transformer over patches of an image, and its partition rules.

Shapes: B batch, N patches, S patches and the class token, F numbers of a patch or width between
linear layers, D hidden, C classes, H heads, K size of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import Remat, VitConfig
from scalejax.config.parallelism import FSDP
from scalejax.models.attention import full_attention
from scalejax.models.blocks import stacked_blocks, through_blocks
from scalejax.models.dropout import dropped
from scalejax.models.fsdp import gathered, linear
from scalejax.models.gpt import DOWN, PLACES, PROJECTION, QKV, UP, block_rules, gelu
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import normalised
from scalejax.models.remat import kept
from scalejax.models.sharding import constrained_by_row

INIT = nnx.initializers.xavier_uniform()
"""Initialiser of block matrices (google-research/vision_transformer, models_vit.py)."""
QKV_INIT = nnx.initializers.variance_scaling(2.0, "fan_avg", "uniform")
"""Initialiser of queries, keys and values, one matrix here and three in the published code."""
PLACES_INIT = nnx.initializers.normal(0.02)
"""Initialiser of position embeddings (google-research/vision_transformer, models_vit.py)."""
EPSILON = 1e-6
"""Added to a variance before its root (Flax's default, which the published code uses)."""

PATCHES = P(FSDP, None)
"""How the first matrix is split; the others are split as in gpt."""


class Attention(nnx.Module):
    """Self-attention of every patch over all of them; the softmax is in float32."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        dtype, hidden = jnp.dtype(config.compute_dtype), config.hidden
        self.remat: Remat = config.remat
        # Heads are a dimension of their own, so that the tensor axis divides only them.
        shape = (3, config.heads, hidden // config.heads)
        self.qkv = nnx.LinearGeneral(hidden, shape, dtype=dtype, kernel_init=QKV_INIT, rngs=rngs)
        self.projection = nnx.Linear(hidden, hidden, dtype=dtype, kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Attention of every place over all of them, [B, S, D]."""
        qkv_BSNHK = kept(linear(self.qkv, "bsd,dnhk->bsnhk", QKV, x_BSD, self.remat))
        q_BSHK, k_BSHK, v_BSHK = jnp.unstack(qkv_BSNHK, axis=2)
        mixed_BSHK = full_attention(q_BSHK, k_BSHK, v_BSHK, remat=self.remat)
        mixed_BSD = mixed_BSHK.reshape(x_BSD.shape)
        return linear(self.projection, "bsf,fd->bsd", PROJECTION, mixed_BSD, self.remat)


class FeedForward(nnx.Module):
    """Two linear layers with GELU (the tanh form, which the published code uses)."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.remat: Remat = config.remat
        layer = partial(
            nnx.Linear, dtype=jnp.dtype(config.compute_dtype), kernel_init=INIT, rngs=rngs
        )
        self.up = layer(config.hidden, config.inner_width)
        self.down = layer(config.inner_width, config.hidden)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each place, transformed separately, [B, S, D]."""
        inner_BSF = gelu(kept(linear(self.up, "bsd,df->bsf", UP, x_BSD, self.remat)))
        return linear(self.down, "bsf,fd->bsd", DOWN, inner_BSF, self.remat)


class Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a normalised copy of the residual."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _layer_norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after this block, [B, S, D]."""
        mixed_BSD = self.attention(normalised(self.attention_norm, x_BSD))
        x_BSD = constrained_by_row(x_BSD + dropped(mixed_BSD))
        fed_BSD = self.feed_forward(normalised(self.feed_forward_norm, x_BSD))
        return constrained_by_row(x_BSD + dropped(fed_BSD))


class Vit(Network, names=("vit",)):
    """A class token followed by patches, blocks, and the classes from that token.

    The published convolution over patches is a product here: its window is its stride.

    Source: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv 2010.11929, and its
    code (github.com/google-research/vision_transformer), without dropout and as fine-tuned: one
    layer from the class token to the classes.
    """

    stacked = ("blocks",)
    fused = (("qkv", 1),)

    def __init__(self, config: VitConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat: Remat = config.remat
        self.patch = config.patch
        height, width, channels = dataset.input_shape
        places = height // config.patch * (width // config.patch) + 1
        numbers, hidden, dtype = config.patch**2 * channels, config.hidden, self.dtype
        self.patches = nnx.Linear(numbers, hidden, dtype=dtype, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.class_token = nnx.Embed(1, hidden, embedding_init=zeros, rngs=rngs)
        self.places = nnx.Embed(places, hidden, embedding_init=PLACES_INIT, rngs=rngs)
        self.blocks = stacked_blocks(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = _layer_norm(config, rngs)
        classes = dataset.classes
        self.head = nnx.Linear(hidden, classes, dtype=dtype, kernel_init=zeros, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [B, C] of the class of each of `inputs` [B, height, width, channels]."""
        cut_BNF = self._cut(inputs.astype(self.dtype))
        # Gathered once: the backward pass ends at this product.
        x_BND = linear(self.patches, "bsf,fd->bsd", PATCHES, cut_BNF, "full")
        class_1D = self.class_token.embedding[...].astype(self.dtype)
        class_B1D = jnp.broadcast_to(class_1D[None], (len(inputs), *class_1D.shape))
        places_SD = gathered(self.places.embedding[...].astype(self.dtype), PLACES)
        x_BSD = jnp.concatenate([class_B1D, x_BND], axis=1) + places_SD[None]
        x_BSD = dropped(constrained_by_row(x_BSD))
        x_BSD = through_blocks(self.blocks, x_BSD, dtype=self.dtype, remat=self.remat)
        return constrained_by_row(self.head(self.norm(x_BSD[:, 0]))).astype(jnp.float32)

    def _cut(self, images: jax.Array) -> jax.Array:
        """The patches of images, row by row, each with its pixels row by row, [B, N, F]."""
        batch, height, width, channels = images.shape
        side = self.patch
        grid = images.reshape(batch, height // side, side, width // side, side, channels)
        return grid.swapaxes(2, 3).reshape(batch, -1, side * side * channels)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """The rules above, with a dimension for the stacked layers; the head, which processes few
        rows, is replicated."""
        return (
            *block_rules(None),
            (r"patches/kernel$", PATCHES),
            (r"places/embedding$", PLACES),
        )


def _layer_norm(config: VitConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    dtype = jnp.dtype(config.compute_dtype)
    return nnx.LayerNorm(config.hidden, epsilon=EPSILON, dtype=dtype, rngs=rngs)
