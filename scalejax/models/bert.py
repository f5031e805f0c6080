"""BERT, a bidirectional transformer for masked language modelling, and its partition rules.

Shapes: B batch, S tokens, P masked places, D hidden, V vocabulary, H heads, K size of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import SEPARATOR_TOKEN, DatasetFacts
from scalejax.config.model import BertConfig, Remat
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.attention import full_attention
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import normalised
from scalejax.models.remat import kept, recomputed
from scalejax.models.sharding import constrained, constrained_by_row

INIT = nnx.initializers.truncated_normal(0.02)
"""Initialiser of weights: deviation 0.02, truncated at two (google-research/bert, modeling.py)."""
EPSILON = 1e-12
"""Added to a variance before its root (google-research/bert, modeling.py)."""
SEGMENTS = 2
"""Segments: before and after the first separator."""


class Attention(nnx.Module):
    """Self-attention of every token over all tokens; the softmax is in float32."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        _, hidden, heads = config.size
        self.remat: Remat = config.remat
        # Heads are a dimension of their own, so that the tensor axis divides only them.
        self.qkv = nnx.LinearGeneral(
            hidden, (3, heads, hidden // heads), dtype=dtype, kernel_init=INIT, rngs=rngs
        )
        self.projection = nnx.LinearGeneral(
            (heads, hidden // heads),
            hidden,
            axis=(-2, -1),
            dtype=dtype,
            kernel_init=INIT,
            rngs=rngs,
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Attention of every token over all tokens, [B, S, D]."""
        q_BSHK, k_BSHK, v_BSHK = jnp.unstack(kept(self.qkv(x_BSD)), axis=2)
        return self.projection(full_attention(q_BSHK, k_BSHK, v_BSHK, remat=self.remat))


class Block(nnx.Module):
    """Attention, then two linear layers with GELU, each added to its input and normalised."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        _, hidden, _ = config.size
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.up = nnx.Linear(hidden, 4 * hidden, dtype=dtype, kernel_init=INIT, rngs=rngs)
        self.down = nnx.Linear(4 * hidden, hidden, dtype=dtype, kernel_init=INIT, rngs=rngs)
        self.feed_forward_norm = _layer_norm(config, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The tokens after this block, [B, S, D]."""
        summed_BSD = constrained_by_row(x_BSD + self.attention(x_BSD))
        x_BSD = normalised(self.attention_norm, summed_BSD)
        summed_BSD = constrained_by_row(x_BSD + self.down(_gelu(kept(self.up(x_BSD)))))
        return normalised(self.feed_forward_norm, summed_BSD)


class MaskedWordHead(nnx.Module):
    """Maps a masked place to the embedding of its word: a linear layer, GELU, a normalisation."""

    def __init__(self, config: BertConfig, vocabulary: int, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        _, hidden, _ = config.size
        self.transform = nnx.Linear(hidden, hidden, dtype=dtype, kernel_init=INIT, rngs=rngs)
        self.norm = _layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros((vocabulary,), jnp.float32))

    def __call__(self, x_BPD: jax.Array, words_VD: jax.Array) -> jax.Array:
        """Logits [B, P, V], float32, by the token embedding `words_VD`."""
        x_BPD = self.norm(_gelu(self.transform(x_BPD)))
        logits_BPV = constrained_by_row(jnp.einsum("bpd,vd->bpv", x_BPD, words_VD))
        return logits_BPV.astype(jnp.float32) + self.bias[None, None]


class Bert(Network, names=("bert_base", "bert_large")):
    """Embeddings of tokens, places and segments; blocks; the words at the masked places.

    The parameters of all blocks are stacked on a first dimension, over which one compiled block
    is scanned: program and compile time do not grow with depth.

    Left out: dropout (element-wise, fused where there is something to fuse with; 1 to 3 % of a
    step), the mask of padding (every place holds a token), and the next-sentence task with its
    pooler (one row per example: 0.01 % of the FLOP, 0.5 % of the gradient's bytes).

    Source: Devlin et al. 2018, arXiv 1810.04805, and its code (github.com/google-research/bert).
    """

    stacked = ("blocks",)
    fused = (("qkv", 1),)

    def __init__(self, config: BertConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat: Remat = config.remat
        layers, hidden, _ = config.size

        def embedding(entries: int) -> nnx.Embed:
            return nnx.Embed(entries, hidden, dtype=self.dtype, embedding_init=INIT, rngs=rngs)

        self.tokens = embedding(dataset.classes)
        self.places = embedding(config.max_tokens)
        self.segments = embedding(SEGMENTS)
        self.norm = _layer_norm(config, rngs)
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)
        self.head = MaskedWordHead(config, dataset.classes, rngs=rngs)

    def __call__(  # type: ignore[override]  its data alone has `places`
        self, inputs: jax.Array, *, places: jax.Array, is_training: bool
    ) -> jax.Array:
        """Logits [B, P, V] of the words that `inputs` [B, S] hides at `places` [B, P]."""
        # Gathered over fsdp here, once: both ends of the network use the token embedding.
        words_VD = constrained(self.tokens.embedding.astype(self.dtype), P(TENSOR, None))
        x_BSD = self.norm(self._embedded(inputs, words_VD))
        structure, stacked = nnx.split(self.blocks)

        def block(x_BSD: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(structure, layer)(x_BSD), None

        block = recomputed(block, self.remat)
        x_BSD, _ = jax.lax.scan(block, x_BSD, stacked)
        x_BPD = jnp.take_along_axis(x_BSD, places[:, :, None], axis=1, mode="clip")
        return self.head(constrained_by_row(x_BPD), words_VD)

    def _embedded(self, inputs: jax.Array, words_VD: jax.Array) -> jax.Array:
        """The sum of the three embeddings, [B, S, D]."""
        places_SD = constrained(self.places.embedding.astype(self.dtype), P(None, None))
        segments_2D = constrained(self.segments.embedding.astype(self.dtype), P(None, None))
        separators_BS = (inputs == SEPARATOR_TOKEN).astype(jnp.int32)
        # A separator ends its segment: only what comes after it is in the second.
        is_second_BS = separators_BS.cumsum(axis=1) > separators_BS
        x_BSD = jnp.take(words_VD, inputs, axis=0, mode="clip")
        x_BSD = x_BSD + places_SD[None, : inputs.shape[1]]
        segment_BSD = jnp.where(
            is_second_BS[:, :, None], segments_2D[None, 1:], segments_2D[None, :1]
        )
        return constrained_by_row(x_BSD + segment_BSD)

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
            (r"(places|segments)/embedding$", P(None, FSDP)),
            (r"transform/kernel$", P(FSDP, None)),
            (r"head/bias$", P(TENSOR)),
        )


@partial(jax.checkpoint, prevent_cse=False)  # a scan already prevents it
def _gelu(x: jax.Array) -> jax.Array:
    """GELU by the error function, as in BERT; recomputed from `x` in the backward pass: otherwise
    a scan would keep several intermediate results of the width of `x`."""
    return jax.nn.gelu(x, approximate=False)


def _layer_norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    _, hidden, _ = config.size
    return nnx.LayerNorm(hidden, epsilon=EPSILON, dtype=jnp.dtype(config.compute_dtype), rngs=rngs)
