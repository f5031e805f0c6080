"""Llama's decoder-only transformer with scanned blocks, the variants of current decoders, and the
partition rules.

Shapes: B batch, S tokens, D hidden, V vocabulary, H heads of queries, G heads of keys and values,
N heads of queries per head of keys and values, plus these two, K size of a head, J size of a head
of values, L width of a latent, F width between linear layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import AttentionKind, DecoderRemat, LlamaConfig, MlaConfig
from scalejax.config.moe import MoeConfig
from scalejax.config.parallelism import FSDP, PIPELINE, TENSOR
from scalejax.models.attention import causal_attention
from scalejax.models.blocks import (
    PreNormBlock,
    stacked_blocks,
    through_blocks,
    through_reporting_blocks,
    with_added,
)
from scalejax.models.decoder import JOIN, TOKENS, CausalNetwork
from scalejax.models.float8 import for_each_use
from scalejax.models.fsdp import adapted, linear, multiplied, recipe_of, scales_of_layer
from scalejax.models.moe import (
    PARTITION_RULES,
    MoeFeedForward,
    RouterReport,
    Routers,
    load_of_all,
    with_later_layers,
)
from scalejax.models.network import PartitionRules
from scalejax.models.normalization import normalised
from scalejax.models.packing import documents
from scalejax.models.remat import kept, kept_without_inner, named
from scalejax.models.sharding import (
    constrained_between,
    constrained_for_layer,
    of_own_tokens,
    sample_tokens,
)

INIT_STD = 0.02
"""Standard deviation of initial weights (`initializer_range` of the published checkpoints'
configs)."""


QKV = P(FSDP, TENSOR, None, None)
PROJECTION = DOWN = P((TENSOR, FSDP), None)
GATED = P(FSDP, None, TENSOR)
UP = P(FSDP, TENSOR)
LATENT, OF_LATENT = P(FSDP, None), P(FSDP, TENSOR, None)
"""How matrices are split: as in gpt, heads of queries together with their head of keys and values;
latents are whole on every device of the tensor axis, the heads made of them are not."""


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, several heads of queries for each of keys and
    values (Ainslie et al. 2023, arXiv 2305.13245); the softmax is in float32."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.kind: AttentionKind = config.attention
        self.remat: DecoderRemat = config.remat
        block = config.block
        self.window = block.window(0)
        self.theta = config.rope_theta
        self.local_theta = block.local_rope_theta or config.rope_theta
        head_size = config.head_size
        self.rotated = round(head_size * block.rope_fraction)
        self.query_scale = config.query_scale
        self.norms_every_head = block.qk_norm == "head"
        # One matrix, so that gradients of its operand are summed over tensor once. Heads are
        # grouped by the keys that they read, so that the tensor axis divides only the groups.
        per_pair = config.heads // config.kv_heads
        self.qkv = _layer(
            config,
            config.hidden,
            (config.kv_heads, per_pair + 2, head_size),
            rngs,
            use_bias=block.qkv_bias,
        )
        width = config.heads * head_size
        self.projection = _layer(config, width, (config.hidden,), rngs, _residual(config))
        if block.qk_norm != "none":
            counts = (1, 1) if self.norms_every_head else (config.heads, config.kv_heads)
            self.q_norm, self.k_norm = (
                _rms_norm(config, rngs, width=count * head_size) for count in counts
            )
        if block.attention_sinks:
            init = nnx.initializers.normal(INIT_STD)
            self.sinks = nnx.Param(init(rngs.params(), (config.heads,), jnp.float32))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Causal attention of every token, [B, S, D]."""
        qkv_BSGNK = linear(self.qkv, "bsd,dgnk->bsgnk", QKV, x_BSD, self.remat)
        qkv_BSGNK = kept(named(qkv_BSGNK, "qkv_proj"))
        batch, tokens, _, _, size = qkv_BSGNK.shape
        q_BSHK = qkv_BSGNK[:, :, :, :-2].reshape(batch, tokens, -1, size)
        every = (q_BSHK, qkv_BSGNK[:, :, :, -2], qkv_BSGNK[:, :, :, -1])
        q_BSHK, k_BSGK, v_BSGK = map(constrained_between, every)
        if hasattr(self, "q_norm"):
            q_BSHK = self._normalised(self.q_norm, q_BSHK)
            k_BSGK = self._normalised(self.k_norm, k_BSGK)
        theta = self.theta if self.window is None else self.local_theta
        q_BSHK, k_BSGK = (_rotated(heads, theta, self.rotated) for heads in (q_BSHK, k_BSGK))
        if self.query_scale != 1:
            q_BSHK = q_BSHK * self.query_scale
        mixed_BSHK = causal_attention(
            q_BSHK,
            k_BSGK,
            v_BSGK,
            self.kind,
            remat=self.remat,
            window=self.window,
            sinks_H=self.sinks[...] if hasattr(self, "sinks") else None,
        )
        mixed_BSHK = constrained_between(mixed_BSHK)
        mixed_BSF = mixed_BSHK.reshape(batch, tokens, -1)
        out_BSD = linear(self.projection, "bsf,fd->bsd", PROJECTION, mixed_BSF, self.remat)
        return named(out_BSD, "out_proj")

    def _normalised(self, norm: nnx.RMSNorm, heads_BSHK: jax.Array) -> jax.Array:
        """Normalised queries or keys: each head separately, or all of a token together."""
        if self.norms_every_head:
            return normalised(norm, heads_BSHK)
        flat_BSF = heads_BSHK.reshape(*heads_BSHK.shape[:2], -1)
        return normalised(norm, flat_BSF).reshape(heads_BSHK.shape)


class LatentAttention(nnx.Module):
    """Causal self-attention whose keys and values are computed from one latent per token.

    c = RMSNorm(x W_dkv) [B, S, L]; from it every head computes a key without position and a value.
    A key also has a rotated part, x W_kr, which is the same for all heads. Queries are computed
    from a latent of their own, or from the residual stream.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1 and appendix C.
    """

    def __init__(self, config: LlamaConfig, mla: MlaConfig, *, rngs: nnx.Rngs):
        self.kind: AttentionKind = config.attention
        self.remat: DecoderRemat = config.remat
        self.window = config.block.window(0)
        self.theta = config.rope_theta
        self.local_theta = config.block.local_rope_theta or config.rope_theta
        self.rotated, self.heads = mla.rope_head_size, config.heads
        self.latent = mla.kv_lora_rank
        keys_and_values = mla.nope_head_size + mla.value_head_size
        if mla.q_lora_rank is None:
            self.q = _layer(config, config.hidden, (config.heads, config.head_size), rngs)
        else:
            self.q_down = _layer(config, config.hidden, (mla.q_lora_rank,), rngs)
            self.q_norm = _rms_norm(config, rngs, width=mla.q_lora_rank)
            self.q_up = _layer(config, mla.q_lora_rank, (config.heads, config.head_size), rngs)
        self.kv_down = _layer(config, config.hidden, (self.latent + self.rotated,), rngs)
        self.kv_norm = _rms_norm(config, rngs, width=self.latent)
        self.kv_up = _layer(config, self.latent, (config.heads, keys_and_values), rngs)
        width = config.heads * mla.value_head_size
        self.projection = _layer(config, width, (config.hidden,), rngs, _residual(config))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Causal attention of every token, [B, S, D]."""
        batch, tokens, _ = x_BSD.shape
        theta = self.theta if self.window is None else self.local_theta
        q_BSHK = constrained_between(self._queries(x_BSD))
        both_BSL = linear(self.kv_down, "bsd,dl->bsl", LATENT, x_BSD, self.remat)
        both_BSL = kept(named(both_BSL, "kv_wa_proj"))
        latent_BSL = normalised(self.kv_norm, both_BSL[..., : self.latent])
        place_BS1K = _rotated(both_BSL[:, :, None, self.latent :], theta, self.rotated)
        kv_BSHK = linear(self.kv_up, "bsl,lhk->bshk", OF_LATENT, latent_BSL, self.remat)
        kv_BSHK = named(constrained_between(kv_BSHK), "qkv_proj")
        bare = q_BSHK.shape[-1] - self.rotated
        place_BSHK = jnp.broadcast_to(place_BS1K, (batch, tokens, self.heads, self.rotated))
        k_BSHK = jnp.concatenate([kv_BSHK[..., :bare], place_BSHK], axis=-1)
        turned_BSHK = _rotated(q_BSHK[..., bare:], theta, self.rotated)
        q_BSHK = jnp.concatenate([q_BSHK[..., :bare], turned_BSHK], axis=-1)
        v_BSHJ = kv_BSHK[..., bare:]
        mixed_BSHJ = causal_attention(
            q_BSHK, k_BSHK, v_BSHJ, self.kind, remat=self.remat, window=self.window
        )
        mixed_BSF = constrained_between(mixed_BSHJ).reshape(batch, tokens, -1)
        out_BSD = linear(self.projection, "bsf,fd->bsd", PROJECTION, mixed_BSF, self.remat)
        return named(out_BSD, "out_proj")

    def _queries(self, x_BSD: jax.Array) -> jax.Array:
        """Queries of all heads, [B, S, H, K], not rotated yet."""
        if hasattr(self, "q"):
            q_BSHK = linear(self.q, "bsd,dhk->bshk", OF_LATENT, x_BSD, self.remat)
            return kept(named(q_BSHK, "qkv_proj"))
        latent_BSL = linear(self.q_down, "bsd,dl->bsl", LATENT, x_BSD, self.remat)
        latent_BSL = kept(named(latent_BSL, "query_wa_proj"))
        latent_BSL = normalised(self.q_norm, latent_BSL)
        q_BSHK = linear(self.q_up, "bsl,lhk->bshk", OF_LATENT, latent_BSL, self.remat)
        return named(q_BSHK, "qkv_proj")


def _rotated(heads_BSHK: jax.Array, theta: float, rotated: int) -> jax.Array:
    """Heads with rotary position embedding, whose products depend on relative positions.

    Element i of the first half of a head and element i of the second are rotated together, by
    position x theta^(-2i / K), in float32. If a head has more than `rotated` entries, the first
    `rotated` are rotated as a head of that size, and the others are not.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2; the pairs as in Hugging Face's
    transformers (those of the paper, and of Llama's own code, are neighbours: the same network
    with the columns of its matrices in another order).
    """
    if rotated < heads_BSHK.shape[3]:
        turned = _rotated(heads_BSHK[..., :rotated], theta, rotated)
        return jnp.concatenate([turned, heads_BSHK[..., rotated:]], axis=-1)
    tokens, size = heads_BSHK.shape[1], heads_BSHK.shape[3]
    turns_K = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if (packed := documents()) is None:
        places_S = of_own_tokens(jnp.arange(sample_tokens(tokens), dtype=jnp.float32), axis=0)
        angles_SK = places_S[:, None] * turns_K[None, :]
        cos, sin = (each[None, :, None, :] for each in (jnp.cos(angles_SK), jnp.sin(angles_SK)))
    else:
        places_BS = packed.positions_BS.astype(jnp.float32)
        angles_BSK = places_BS[..., None] * turns_K[None, None, :]
        cos, sin = (each[:, :, None, :] for each in (jnp.cos(angles_BSK), jnp.sin(angles_BSK)))
    one, other = jnp.split(heads_BSHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return turned.astype(heads_BSHK.dtype)


class FeedForward(nnx.Module):
    """Two parallel linear layers, one with an activation function, whose product goes through a
    third (Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.remat: DecoderRemat = config.remat
        self.activated = _GATED_ACTIVATIONS[config.block.activation]
        self.gated = _layer(config, config.hidden, (2, config.ffn_hidden), rngs)
        self.down = _layer(config, config.ffn_hidden, (config.hidden,), rngs, _residual(config))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each token, transformed separately, [B, S, D]."""
        gate_BSF, up_BSF = map(constrained_between, self._gate_and_up(x_BSD))
        gate_BSF = kept(gate_BSF)

        def narrowed(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
            inner_BSF = self.activated(gate_BSF, up_BSF)
            return linear(self.down, "bsf,fd->bsd", DOWN, inner_BSF, self.remat)

        return named(kept_without_inner(narrowed, self.remat)(gate_BSF, up_BSF), "mlpwo")

    def _gate_and_up(self, x_BSD: jax.Array) -> Sequence[jax.Array]:
        """Gate and up projections, each [B, S, F], in one product unless one is recomputed."""
        if self.remat != "selective_op":
            gated_BSNF = linear(self.gated, "bsd,dnf->bsnf", GATED, x_BSD, self.remat)
            gated_BSNF = named(gated_BSNF, "mlpwi")
            return jnp.unstack(gated_BSNF, axis=2)
        kernels_DF = jnp.unstack(self.gated.kernel[...], axis=1)
        columns = P(FSDP, TENSOR)
        recipe, scales = recipe_of(self.gated), scales_of_layer(self.gated)
        parts_BSF = [
            multiplied(each, "bsd,df->bsf", columns, x_BSD, "selective_op", recipe, own)
            for each, own in zip(kernels_DF, for_each_use(scales, len(kernels_DF)), strict=True)
        ]
        adaptation_BSNF = adapted(self.gated, "bsd,dnf->bsnf", GATED, x_BSD, "selective_op")
        if adaptation_BSNF is None:
            return parts_BSF
        added_BSF = jnp.unstack(adaptation_BSNF, axis=2)
        return [part + added for part, added in zip(parts_BSF, added_BSF, strict=True)]


@partial(jax.checkpoint, prevent_cse=False)  # a scan already prevents it
def _swiglu(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
    """SiLU of the gate, times the other; recomputed in the backward pass."""
    return jax.nn.silu(gate_BSF) * up_BSF


@partial(jax.checkpoint, prevent_cse=False)
def _geglu(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
    """GELU (tanh form) of the gate, times the other; recomputed in the backward pass."""
    return jax.nn.gelu(gate_BSF, approximate=True) * up_BSF


@partial(jax.checkpoint, prevent_cse=False)
def _gated_squared_relu(gate_BSF: jax.Array, up_BSF: jax.Array) -> jax.Array:
    """The squared ReLU of the gate, times the other; recomputed in the backward pass."""
    return jnp.square(jax.nn.relu(gate_BSF)) * up_BSF


_GATED_ACTIVATIONS = {"silu": _swiglu, "gelu": _geglu, "squared_relu": _gated_squared_relu}


@partial(jax.checkpoint, prevent_cse=False)
def _silu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x)


@partial(jax.checkpoint, prevent_cse=False)
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@partial(jax.checkpoint, prevent_cse=False)
def _squared_relu(x: jax.Array) -> jax.Array:
    """The square of ReLU (So et al. 2021, "Primer", arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "squared_relu": _squared_relu}


class UngatedFeedForward(nnx.Module):
    """Two linear layers with the activation function between them."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.remat: DecoderRemat = config.remat
        self.activated = _ACTIVATIONS[config.block.activation]
        self.up = _layer(config, config.hidden, (config.ffn_hidden,), rngs)
        self.down = _layer(config, config.ffn_hidden, (config.hidden,), rngs, _residual(config))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Each token, transformed separately, [B, S, D]."""
        up_BSF = linear(self.up, "bsd,df->bsf", UP, x_BSD, self.remat)
        up_BSF = kept(named(constrained_between(up_BSF), "mlpwi"))

        def narrowed(up_BSF: jax.Array) -> jax.Array:
            return linear(self.down, "bsf,fd->bsd", DOWN, self.activated(up_BSF), self.remat)

        return named(kept_without_inner(narrowed, self.remat)(up_BSF), "mlpwo")


class Block(PreNormBlock):
    """A block of Llama."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.added_scale = 1 / config.depth_ratio
        self.attention_norm = _norm(config, rngs)
        if config.mla is None:
            self.attention = Attention(config, rngs=rngs)
        else:
            self.attention = LatentAttention(config, config.mla, rngs=rngs)
        self.feed_forward_norm = _norm(config, rngs)
        layer = FeedForward if config.block.is_gated else UngatedFeedForward
        self.feed_forward = layer(config, rngs=rngs)
        if config.block.post_norms:
            self.attention_post_norm = _norm(config, rngs)
            self.feed_forward_post_norm = _norm(config, rngs)

    def at_place(self, place: int) -> "Block":
        """This block as the layer at `place` in the period of local and global ones."""
        cast(Attention | LatentAttention, self.attention).window = self.config.block.window(place)
        return self


class RoutedBlock(Block):
    """A block whose feed-forward layer is a mixture of experts."""

    def __init__(self, config: LlamaConfig, moe: MoeConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.feed_forward = MoeFeedForward(config, moe, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, RouterReport]:  # type: ignore[override]
        """The residual stream after this block, [B, S, D], and what its router reports."""
        normalised_BSD = constrained_for_layer(normalised(self.attention_norm, x_BSD))
        made_BSD = self.attention(normalised_BSD)  # type: ignore[operator]
        x_BSD = with_added(x_BSD, made_BSD, self.attention_post_norm)
        made_BSD, report = self.feed_forward(normalised(self.feed_forward_norm, x_BSD))
        return with_added(x_BSD, made_BSD, self.feed_forward_post_norm), report


class Llama(CausalNetwork, names=("llama",)):
    """A causal network whose blocks encode positions, and may have experts.

    Left out: the scaled angles with which Llama 3.1 extends its context beyond that of training
    (a table of K / 2 numbers, no work).

    Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3.
    """

    stacked = ("blocks", "dense_blocks", "mtp_blocks")
    fused = (("gated", 1),)

    def __init__(self, config: LlamaConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.dtype = jnp.dtype(config.compute_dtype)
        self.remat: DecoderRemat = config.remat
        self.is_tied = config.tied_embeddings
        self.period = config.block.period
        self.logit_scale = 1 / config.width_ratio
        self.embedding_scale = config.hidden**0.5 if config.scaled_embeddings else None

        def embedding() -> nnx.Embed:
            init = nnx.initializers.normal(INIT_STD)
            return nnx.Embed(dataset.classes, config.hidden, embedding_init=init, rngs=rngs)

        def dense(count: int) -> Block:
            return stacked_blocks(lambda rngs: Block(config, rngs=rngs), count, rngs)

        self.tokens = embedding()

        def routed(count: int, moe: MoeConfig) -> RoutedBlock:
            return stacked_blocks(lambda rngs: RoutedBlock(config, moe, rngs=rngs), count, rngs)

        self.moe = moe = config.moe
        self.first = 0 if moe is None else moe.dense_layers
        self.before_mtp = config.layers
        self.total = config.layers + (config.mtp is not None)
        if moe is None:
            self.blocks = dense(config.layers)
        else:
            if moe.dense_layers:
                self.dense_blocks = dense(moe.dense_layers)
            self.blocks = routed(config.layers - moe.dense_layers, moe)
        self.norm = _norm(config, rngs)
        if not self.is_tied:
            self.output = embedding()
        if config.mtp is not None:
            self.mtp_norms = nnx.List([_norm(config, rngs) for _ in range(2)])
            self.mtp_join = _layer(config, 2 * config.hidden, (config.hidden,), rngs)
            self.mtp_blocks = dense(1) if moe is None else routed(1, moe)
            self.mtp_norm = _norm(config, rngs)

    def _positioned(self, x_BSD: jax.Array) -> jax.Array:
        """Embedded tokens, scaled if the config says so; blocks encode positions."""
        return x_BSD if self.embedding_scale is None else x_BSD * self.embedding_scale

    def through_first_blocks(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after the dense blocks before those with experts."""
        if self.moe is None or not self.moe.dense_layers:
            return x_BSD
        return through_blocks(
            self.dense_blocks,
            x_BSD,
            dtype=self.dtype,
            remat=self.remat,
            period=self.period,
            is_staged=False,
            total=self.total,
        )

    def through_blocks(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after all blocks; what routers report is kept in `routers`."""
        if self.moe is None:
            return super().through_blocks(x_BSD)
        x_BSD, reports = through_reporting_blocks(
            self.blocks,
            x_BSD,
            dtype=self.dtype,
            remat=self.remat,
            period=self.period,
            first=self.first,
            total=self.total,
        )
        self.routers = Routers(reports)
        _count_loads(self.blocks, self.moe, reports)
        return x_BSD

    def through_mtp_block(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after the block of multi-token prediction; the report of its router
        follows those of the other blocks, if these have been computed."""
        if self.moe is None:
            return super().through_mtp_block(x_BSD)
        x_BSD, reports = through_reporting_blocks(
            self.mtp_blocks,
            x_BSD,
            dtype=self.dtype,
            remat=self.remat,
            is_staged=False,
            first=self.before_mtp,
            total=self.total,
        )
        before = getattr(self, "routers", None)
        _count_loads(self.mtp_blocks, self.moe, reports)
        if before is not None:
            reports = with_later_layers(before.get_value(), reports)
        self.routers = Routers(reports)
        return x_BSD

    @staticmethod
    def partition_rules() -> PartitionRules:
        """The rules above, with the stacked layers sharded over the pipeline axis."""
        return (
            *PARTITION_RULES,
            (r"qkv/kernel$", P(PIPELINE, *QKV)),
            (r"qkv/bias$", P(PIPELINE, *QKV[1:])),
            (r"attention/(q|q_up|kv_up)/kernel$", P(PIPELINE, *OF_LATENT)),
            (r"attention/(q_down|kv_down)/kernel$", P(PIPELINE, *LATENT)),
            (r"attention/sinks$", P(PIPELINE, TENSOR)),
            (r"projection/kernel$", P(PIPELINE, *PROJECTION)),
            (r"gated/kernel$", P(PIPELINE, *GATED)),
            (r"up/kernel$", P(PIPELINE, *UP)),
            (r"down/kernel$", P(PIPELINE, *DOWN)),
            (r"^(dense_|mtp_)?blocks/", P(PIPELINE)),
            (r"mtp_join/kernel$", JOIN),
            (r"(tokens|output)/embedding$", TOKENS),
        )


def _count_loads(blocks: nnx.Module, moe: MoeConfig, reports: RouterReport) -> None:
    """Add the loads of a forward pass to those of the step, if its state counts them."""
    if moe.counts_loads:
        load = blocks.feed_forward.load  # type: ignore[attr-defined]  of a RoutedBlock
        load[...] = load[...] + load_of_all(reports)


def _layer(
    config: LlamaConfig,
    inputs: int,
    outputs: tuple[int, ...],
    rngs: nnx.Rngs,
    init: Initializer | None = None,
    *,
    use_bias: bool = False,
) -> nnx.LinearGeneral:
    """A linear layer, without a bias unless it is requested."""
    return nnx.LinearGeneral(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=jnp.dtype(config.compute_dtype),
        kernel_init=init or nnx.initializers.normal(INIT_STD / config.width_ratio**0.5),
        rngs=rngs,
    )


def _norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """The norm of the residual stream."""
    if config.block.norm == "rms":
        return _rms_norm(config, rngs)
    dtype = jnp.dtype(config.compute_dtype)
    return nnx.LayerNorm(config.hidden, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)


def _rms_norm(config: LlamaConfig, rngs: nnx.Rngs, width: int | None = None) -> nnx.RMSNorm:
    """RMSNorm over the residual stream, or over `width` entries."""
    dtype = jnp.dtype(config.compute_dtype)
    features = width or config.hidden
    return nnx.RMSNorm(features, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)


def _residual(config: LlamaConfig) -> Initializer:
    """Initialiser as in gpt: smaller for the two layers per block that add to the residual."""
    base_layers = config.layers / config.depth_ratio
    return nnx.initializers.normal(INIT_STD / (2 * base_layers * config.width_ratio) ** 0.5)
