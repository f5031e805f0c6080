"""Llama's decoder-only transformer with scanned blocks, and its partition rules.

Shapes: B batch, S tokens, D hidden, V vocabulary, H heads of queries, G heads of keys and values,
N heads of queries for each of those and the two, K size of a head, F width between linear layers.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import AttentionKind, LlamaConfig, Remat
from scalejax.config.parallelism import FSDP, PIPELINE, TENSOR
from scalejax.models.attention import causal_attention
from scalejax.models.blocks import PreNormBlock, stacked_blocks
from scalejax.models.decoder import TOKENS, CausalNetwork
from scalejax.models.fsdp import adapted, linear, multiplied
from scalejax.models.network import PartitionRules
from scalejax.models.remat import kept, kept_without_inner
from scalejax.models.sharding import constrained_between, in_token_order

INIT_STD = 0.02
"""Standard deviation of initial weights (`initializer_range` of the published checkpoints'
configs)."""


QKV = P(FSDP, TENSOR, None, None)
PROJECTION = DOWN = P((TENSOR, FSDP), None)
GATED = P(FSDP, None, TENSOR)
"""How matrices are split: as those of gpt, heads of queries with their head of keys and values."""


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, several heads of queries for each of keys and
    values (Ainslie et al. 2023, arXiv 2305.13245); the softmax is in float32."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.kind: AttentionKind = config.attention
        self.remat: Remat = config.remat
        self.theta = config.rope_theta
        head_size = config.hidden // config.heads
        # One matrix, so that gradients of its operand are summed over tensor once. Heads that
        # read the same keys are a dimension, so that the tensor axis divides them and no more.
        per_pair = config.heads // config.kv_heads
        self.qkv = _layer(config, config.hidden, (config.kv_heads, per_pair + 2, head_size), rngs)
        self.projection = _layer(config, config.hidden, (config.hidden,), rngs, _residual(config))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Causal attention of every token, [B, S, D]."""
        qkv_BSGNK = kept(linear(self.qkv, "bsd,dgnk->bsgnk", QKV, x_BSD, self.remat))
        batch, tokens, _, _, size = qkv_BSGNK.shape
        q_BSHK = qkv_BSGNK[:, :, :, :-2].reshape(batch, tokens, -1, size)
        every = (q_BSHK, qkv_BSGNK[:, :, :, -2], qkv_BSGNK[:, :, :, -1])
        q_BSHK, k_BSGK, v_BSGK = map(constrained_between, every)
        q_BSHK, k_BSGK = (_rotated(heads, self.theta) for heads in (q_BSHK, k_BSGK))
        mixed_BSHK = causal_attention(q_BSHK, k_BSGK, v_BSGK, self.kind, remat=self.remat)
        mixed_BSHK = constrained_between(mixed_BSHK)
        mixed_BSD = mixed_BSHK.reshape(x_BSD.shape)
        return linear(self.projection, "bsf,fd->bsd", PROJECTION, mixed_BSD, self.remat)


def _rotated(heads_BSHK: jax.Array, theta: float) -> jax.Array:
    """Heads with rotary position embedding, whose products depend on relative positions.

    Element i of the first half of a head and element i of the second are rotated together, by
    position x theta^(-2i / K), in float32.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2; the pairs as in Hugging Face's
    transformers (those of the paper, and of Llama's own code, are neighbours: the same network
    with the columns of its matrices in another order).
    """
    tokens, size = heads_BSHK.shape[1], heads_BSHK.shape[3]
    places_S = in_token_order(jnp.arange(tokens, dtype=jnp.float32), axis=0)
    turns_K = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles_SK = places_S[:, None] * turns_K[None, :]
    cos, sin = (each[None, :, None, :] for each in (jnp.cos(angles_SK), jnp.sin(angles_SK)))
    one, other = jnp.split(heads_BSHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return turned.astype(heads_BSHK.dtype)


class FeedForward(nnx.Module):
    """Two linear layers whose product, one of them through SiLU, goes through a third
    (Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.remat: Remat = config.remat
        self.gated = _layer(config, config.hidden, (2, config.ffn_hidden), rngs)
        self.down = _layer(config, config.ffn_hidden, (config.hidden,), rngs, _residual(config))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each token by itself, [B, S, D]."""
        gate_BSF, up_BSF = map(constrained_between, self._gate_and_up(x_BSD))
        gate_BSF = kept(gate_BSF)

        def narrowed(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
            return linear(self.down, "bsf,fd->bsd", DOWN, _swiglu(gate_BSF, up_BSF), self.remat)

        return kept_without_inner(narrowed, self.remat)(gate_BSF, up_BSF)

    def _gate_and_up(self, x_BSD: jax.Array) -> Sequence[jax.Array]:
        """Gate and up projections, each [B, S, F], in one product unless one is recomputed."""
        if self.remat != "selective_op":
            gated_BSNF = linear(self.gated, "bsd,dnf->bsnf", GATED, x_BSD, self.remat)
            return jnp.unstack(gated_BSNF, axis=2)
        kernels_DF = jnp.unstack(self.gated.kernel[...], axis=1)
        columns = P(FSDP, TENSOR)
        parts_BSF = [
            multiplied(each, "bsd,df->bsf", columns, x_BSD, "selective_op") for each in kernels_DF
        ]
        adaptation_BSNF = adapted(self.gated, "bsd,dnf->bsnf", GATED, x_BSD, "selective_op")
        if adaptation_BSNF is None:
            return parts_BSF
        added_BSF = jnp.unstack(adaptation_BSNF, axis=2)
        return [part + added for part, added in zip(parts_BSF, added_BSF, strict=True)]


@partial(jax.checkpoint, prevent_cse=False)  # a scan already prevents it
def _swiglu(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
    """The gate through SiLU, times the other; computed again in the backward pass."""
    return jax.nn.silu(gate_BSF) * up_BSF


class Block(PreNormBlock):
    """One of its blocks."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _rms_norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)


class Llama(CausalNetwork, names=("llama",)):
    """A causal network whose blocks encode positions.

    Left out: the scaled angles with which Llama 3.1 extends its context beyond that of training
    (a table of K / 2 numbers, no work).

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
    """

    def __init__(self, config: LlamaConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat: Remat = config.remat
        self.is_tied = config.tied_embeddings

        def embedding() -> nnx.Embed:
            init = nnx.initializers.normal(INIT_STD)
            return nnx.Embed(dataset.classes, config.hidden, embedding_init=init, rngs=rngs)

        self.tokens = embedding()
        self.blocks = stacked_blocks(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)
        self.norm = _rms_norm(config, rngs)
        if not self.is_tied:
            self.output = embedding()

    @staticmethod
    def partition_rules() -> PartitionRules:
        """The rules above, with the stacked layers sharded over the pipeline axis."""
        return (
            (r"qkv/kernel$", P(PIPELINE, *QKV)),
            (r"projection/kernel$", P(PIPELINE, *PROJECTION)),
            (r"gated/kernel$", P(PIPELINE, *GATED)),
            (r"down/kernel$", P(PIPELINE, *DOWN)),
            (r"^blocks/", P(PIPELINE)),
            (r"(tokens|output)/embedding$", TOKENS),
        )


def _layer(
    config: LlamaConfig,
    inputs: int,
    outputs: tuple[int, ...],
    rngs: nnx.Rngs,
    init: Initializer | None = None,
) -> nnx.LinearGeneral:
    """A linear layer without a bias."""
    return nnx.LinearGeneral(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(config.compute_dtype),
        kernel_init=init or nnx.initializers.normal(INIT_STD),
        rngs=rngs,
    )


def _rms_norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    dtype = jnp.dtype(config.compute_dtype)
    return nnx.RMSNorm(config.hidden, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)


def _residual(config: LlamaConfig) -> Initializer:
    """Initialiser as gpt's, smaller for the two layers per block that add to the residual."""
    return nnx.initializers.normal(INIT_STD / (2 * config.layers) ** 0.5)
