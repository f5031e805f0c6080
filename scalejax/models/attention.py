"""Attention, fused into one kernel or unfused, and the choice between them for a device.

Fused attention is cuDNN's: the scores [B, H, S, S] are never written to memory, neither forward nor
backward (Dao et al. 2022, "FlashAttention", arXiv 2205.14135). Unfused attention is the reference:
separate matrix products and softmax, on any device and in any type.

Shapes: B batch, S query tokens, T key tokens, H heads of queries, G heads of keys and values,
R heads of queries per head of keys and values, K size of a head, J size of a head of values, N
parts of a sequence, each as long as a window W.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # tried with jax 0.10.2, 0.12.0

from scalejax.config.model import (
    AttentionKind,
    DecoderConfig,
    DecoderRemat,
    ModelConfig,
    Remat,
    window_scope,
)
from scalejax.config.parallelism import CONTEXT, ContextStrategy
from scalejax.core.errors import ConfigError, refusal
from scalejax.models.context_attention import (
    attention_over_heads,
    blockwise_attention,
    over_shards,
)
from scalejax.models.packing import documents, same_document
from scalejax.models.remat import kept, named
from scalejax.models.sharding import (
    axis_size,
    constrained_keys,
    constraints,
    is_partly_manual,
    is_zigzag,
    of_all_tokens,
    sample_tokens,
)


def with_resolved_attention(model: ModelConfig, device: Any | None) -> ModelConfig:
    """`model` with attention "auto" resolved to "fused" or "unfused" for `device`.

    Fused attention needs an NVIDIA GPU of compute capability 8.0 or later, 16-bit activations and
    heads of a multiple of 8, at most 128 wide (256 from 9.0 on).

    Args:
        model: any network; only one with attention changes.
        device: a JAX device, real or described; if None, attention is unfused.

    Raises:
        ConfigError: if the config requires fused attention and the device does not have it.
    """
    if not isinstance(model, DecoderConfig) or model.attention == "unfused":
        return model
    lacks = None if device is None else model.lacks_for_fused_attention(_capability(device))
    if device is not None and lacks is None:
        return replace(model, attention="fused")
    if lacks is not None and model.attention == "fused":
        accepted = f'fused attention needs {lacks}; use "auto" or "unfused"'
        raise ConfigError(refusal("model.attention", model.attention, accepted))
    return replace(model, attention="unfused")


def _capability(device: Any) -> tuple[int, int] | None:
    """Compute capability (major, minor) of an NVIDIA GPU; None for other devices."""
    text = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or not text:
        return None
    major, _, minor = str(text).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def causal_attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    kind: AttentionKind,
    *,
    remat: DecoderRemat = "none",
    window: int | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of every token over itself and those before it, [B, S, H, K].

    Both kinds compute the softmax in float32; unfused attention rounds scores to their type first.
    An unresolved "auto" is unfused. Over the context axis it is that of `context_attention`, except
    for unfused attention with "all_gather": queries stay sharded, keys and values of all tokens
    are gathered, and tokens keep their natural order.

    Args:
        q_BSHK: queries.
        k_BSGK: keys, each shared by H / G heads of queries: H is a multiple of G.
        v_BSGK: values; the size of their heads may differ.
        kind: fused or unfused.
        remat: "selective" and "selective_op" save only queries, keys and values for the backward
            pass.
        window: tokens that a token attends to, itself and those just before it; None for all.
            Unfused attention computes a sequence of several windows in parts of that many tokens,
            each of which sees itself and the part before (Beltagy et al. 2020, arXiv 2004.05150,
            section 3): scores are [B, H, S, 2 W].
        sinks_H: one score per head that takes a share of its softmax and adds nothing (gpt-oss,
            arXiv 2508.10925); unfused only.
    """
    strategy, packed = constraints().context_strategy, documents()
    segments_BS = None if packed is None else packed.segment_ids_BS
    if is_zigzag():
        source = "ring" if strategy == "ring" else "all_gather"
        return blockwise_attention(q_BSHK, k_BSGK, v_BSGK, kind, source, segments_BS)
    if window is not None and window >= sample_tokens(q_BSHK.shape[1]):
        window = None
    attend = partial(_unfused, remat, window, sinks_H)
    if axis_size(CONTEXT) > 1 and strategy == "all_to_all":
        attend = partial(_kernel, window) if kind == "fused" else attend
        return attention_over_heads(q_BSHK, k_BSGK, v_BSGK, attend, segments_BS)
    k_BSGK, v_BSGK = constrained_keys(k_BSGK), constrained_keys(v_BSGK)
    if kind == "fused":  # saves no more than queries, keys and values in any case
        return _fused(q_BSHK, k_BSGK, v_BSGK, window, segments_BS)
    return attend(q_BSHK, k_BSGK, v_BSGK, segments_BS)


def goes_by_blocks(strategy: ContextStrategy, kind: AttentionKind) -> bool:
    """Whether attention over context shards proceeds by blocks of keys, in the order of
    `sharding.zigzag_chunks`; unfused attention attends to all gathered keys at once."""
    return strategy == "ring" or (strategy == "all_gather" and kind == "fused")


def full_attention(
    q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, *, remat: Remat
) -> jax.Array:
    """Attention of every token over all tokens, [B, S, H, K]; `remat` as for `causal_attention`."""
    attend = jax.nn.dot_product_attention
    if remat in ("selective", "selective_op"):
        attend = jax.checkpoint(attend, prevent_cse=False)
    return kept(attend(q_BSHK, k_BSHK, v_BSHK))


def _unfused(
    remat: DecoderRemat,
    window: int | None,
    sinks_H: jax.Array | None,
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segments_BS: jax.Array | None,
) -> jax.Array:
    tokens = q_BSHK.shape[1]
    is_packed = segments_BS is not None
    if window is not None and tokens % window == 0 and axis_size(CONTEXT) == 1 and not is_packed:
        attend = partial(_in_parts, window=window, sinks_H=sinks_H)
        attend = jax.named_scope(window_scope(window, 2 * window))(attend)
    elif window is not None or sinks_H is not None or is_packed:
        attend = partial(_masked, segments_BS=segments_BS, window=window, sinks_H=sinks_H)
        if window is not None:  # the FLOP that the model needs are counted by this name
            attend = jax.named_scope(window_scope(window, k_BSGK.shape[1]))(attend)
    else:
        attend = _ungrouped if k_BSGK.shape[2] == q_BSHK.shape[2] else _grouped
    if remat in ("selective", "selective_op"):
        attend = jax.checkpoint(attend, prevent_cse=False)  # a scan already prevents it
    return kept(named(attend(q_BSHK, k_BSGK, v_BSGK), "context"))


def _ungrouped(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> jax.Array:
    scores_BHST = jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK)
    shares_BHST = _shares(scores_BHST, q_BSHK.shape[-1] ** -0.5)
    return jnp.einsum("bhst,bthk->bshk", shares_BHST, v_BSHK)


def _masked(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGJ: jax.Array,
    *,
    segments_BS: jax.Array | None,
    window: int | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Attention of every token over its window and document, by masking the scores of all."""
    queries, keys = q_BSHK.shape[1], k_BSGK.shape[1]
    is_seen_BST = _seen(queries, keys, window)[None]
    if segments_BS is not None:
        of_keys_BT = segments_BS if queries == keys else of_all_tokens(segments_BS)
        is_seen_BST = is_seen_BST & same_document(segments_BS, of_keys_BT)
    return _attended(q_BSHK, k_BSGK, v_BSGJ, is_seen_BST, sinks_H)


def _seen(queries: int, keys: int, window: int | None) -> jax.Array:
    """Whether a query sees a key by their places, bool [S, T]."""
    behind_ST = _places(queries, keys)[:, None] - jnp.arange(keys)[None, :]
    return (behind_ST >= 0) & (behind_ST < (window or keys))


def _places(queries: int, keys: int) -> jax.Array:
    """Places of queries among keys; where keys are of all tokens of a sample and queries of one
    device along context, tokens are in their natural order."""
    place = jnp.arange(queries)
    return place if queries == keys else place + jax.lax.axis_index(CONTEXT) * queries


def _in_parts(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGJ: jax.Array,
    *,
    window: int,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Attention of every token over its window, with scores over two parts of the sequence."""

    def parts(heads: jax.Array) -> jax.Array:
        return heads.reshape(heads.shape[0], -1, window, *heads.shape[2:])

    def seen(heads: jax.Array) -> jax.Array:
        here = parts(heads)
        before = jnp.pad(here[:, :-1], ((0, 0), (1, 0), *(((0, 0),) * 3)))
        return jnp.concatenate([before, here], axis=2)

    place = jnp.arange(window)
    behind_WT = window + place[:, None] - jnp.arange(2 * window)[None, :]
    is_seen_WT = (behind_WT >= 0) & (behind_WT < window)
    # Nothing comes before the first part.
    is_first_N = jnp.arange(q_BSHK.shape[1] // window) == 0
    is_before_T = jnp.arange(2 * window) < window
    is_seen_NWT = is_seen_WT[None] & ~(is_first_N[:, None] & is_before_T[None, :])[:, None]
    mixed = jax.vmap(_attended, in_axes=(1, 1, 1, 0, None), out_axes=1)(
        parts(q_BSHK), seen(k_BSGK), seen(v_BSGJ), is_seen_NWT[:, None], sinks_H
    )
    return mixed.reshape(*q_BSHK.shape[:3], v_BSGJ.shape[-1])


def _attended(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGJ: jax.Array,
    is_seen_BST: jax.Array,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Values mixed by the softmax, in float32, of masked scores and of sinks if there are any."""
    batch, tokens, heads, size = q_BSHK.shape
    groups = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(batch, tokens, groups, heads // groups, size)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK).astype(jnp.float32)
    hidden_BST = jnp.where(is_seen_BST, 0.0, jnp.finfo(jnp.float32).min)
    scores_BGRST = scores_BGRST * size**-0.5 + hidden_BST[:, None, None]
    if sinks_H is None:
        shares_BGRST = jax.nn.softmax(scores_BGRST, axis=-1)
    else:
        sinks_GR11 = sinks_H.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        largest = jnp.maximum(jnp.max(scores_BGRST, axis=-1, keepdims=True), sinks_GR11)
        largest = jax.lax.stop_gradient(largest)
        powers = jnp.exp(scores_BGRST - largest)
        total = jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sinks_GR11 - largest)
        shares_BGRST = powers / total
    mixed = jnp.einsum("bgrst,btgj->bsgrj", shares_BGRST.astype(v_BTGJ.dtype), v_BTGJ)
    return mixed.reshape(batch, tokens, heads, -1)


def _fused(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    window: int | None,
    segments_BS: jax.Array | None,
) -> jax.Array:
    """Attention by cuDNN's kernel; in a `shard_map` over rows and heads if another axis is manual
    or documents are masked, which JAX's own partitioning of the kernel does not support."""
    kernel = partial(_kernel, window)
    if not is_partly_manual() and segments_BS is None:
        return kernel(q_BSHK, k_BSGK, v_BSGK, None)
    return over_shards(kernel)(q_BSHK, k_BSGK, v_BSGK, segments_BS)


def _kernel(
    window: int | None,
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGJ: jax.Array,
    segments_BS: jax.Array | None,
) -> jax.Array:
    """cuDNN's causal attention of whole samples, each token over its window.

    With several documents, a mask [B, 1, S, S] in the type of the scores is added to them. It
    includes the window, which the kernel does not support alongside a mask: the products of all
    pairs of causal tokens are computed. cuDNN also accepts the lengths of documents, and skips what
    is between them, but needs the largest number of documents of any example, which a run does not
    know.
    """
    if segments_BS is not None:
        tokens = q_BSHK.shape[1]
        is_seen_BST = same_document(segments_BS, segments_BS) & _seen(tokens, tokens, window)[None]
        bias_B1ST = cudnn.combine_bias_and_mask(None, is_seen_BST[:, None], q_BSHK.dtype)
        none = jnp.zeros(0, q_BSHK.dtype)
        # JAX's public function would make the kernel write a gradient as large as the mask.
        return cudnn._dot_product_attention(
            q_BSHK,
            k_BSGK,
            v_BSGJ,
            bias_B1ST,
            *(none,) * 6,  # lengths, offsets and page tables
            q_BSHK.shape[-1] ** -0.5,
            42,  # seed, unused: no dropout
            0.0,
            (True, False),
            cudnn.MaskType.CAUSAL,
            cudnn.AttentionLayout.BTNH.value,
            None,  # window
            cudnn.check_cudnn_version(),
            False,  # log-sum-exp
        )
    if q_BSHK.shape[-1] == v_BSGJ.shape[-1]:
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        if window is not None:
            attend = partial(attend, local_window_size=(window - 1, 0))
        return attend(q_BSHK, k_BSGK, v_BSGJ)
    # From Hopper on cuDNN accepts heads of values of another size; the function above does not.
    return cudnn.dot_product_attention(  # type: ignore[return-value]  one of them
        q_BSHK,
        k_BSGK,
        v_BSGJ,
        scale=q_BSHK.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.CAUSAL,
        sliding_window_length=window,
    )


def _grouped(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """Grouped-query attention without copies of keys and values."""
    batch, tokens, heads, size = q_BSHK.shape
    groups = k_BSGK.shape[2]
    q_BSGRK = q_BSHK.reshape(batch, tokens, groups, heads // groups, size)
    scores_BGRST = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BSGK)
    scores_BHST = scores_BGRST.reshape(batch, heads, *scores_BGRST.shape[3:])
    shares_BHST = _shares(scores_BHST, size**-0.5)
    shares_BGRST = shares_BHST.reshape(scores_BGRST.shape)
    return jnp.einsum("bgrst,btgk->bsgrk", shares_BGRST, v_BSGK).reshape(q_BSHK.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _causal_softmax(scores_BHST: jax.Array, scale: float) -> jax.Array:
    """The causally masked softmax of scaled scores; computed in float32, returned in their type.

    Only the result is saved for the backward pass. By default JAX would save two arrays of all
    scores in float32, whose memory traffic limits unfused attention.
    """
    scaled_BHST = scores_BHST.astype(jnp.float32) * scale + _causal_bias(*scores_BHST.shape[-2:])
    return jax.nn.softmax(scaled_BHST, axis=-1).astype(scores_BHST.dtype)


def _softmax_forward(scores_BHST: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    shares_BHST = _shares(scores_BHST, scale)
    return shares_BHST, shares_BHST


def _softmax_backward(
    scale: float, shares_BHST: jax.Array, gradient_BHST: jax.Array
) -> tuple[jax.Array]:
    """d scores = scale shares (d shares - sum of shares d shares)."""
    shares, gradient = shares_BHST.astype(jnp.float32), gradient_BHST.astype(jnp.float32)
    mean = jnp.sum(shares * gradient, axis=-1, keepdims=True)
    return ((scale * shares * (gradient - mean)).astype(shares_BHST.dtype),)


_causal_softmax.defvjp(_softmax_forward, _softmax_backward)


def _shares(scores_BHST: jax.Array, scale: float) -> jax.Array:
    return _causal_softmax(scores_BHST, scale)  # type: ignore[return-value]  custom_vjp forgets it


def _causal_bias(queries: int, keys: int) -> jax.Array:
    """Bias [1, 1, S, T]: 0 for a token and those before it, the lowest float for those after.

    Added, not selected by a mask: XLA would hoist the broadcast mask out of the scan at the full
    size [B, H, S, S], and every block would read it.
    """
    is_seen = _places(queries, keys)[:, None] >= jnp.arange(keys)[None, :]
    return jnp.where(is_seen, 0.0, jnp.finfo(jnp.float32).min)[None, None]
