"""Attention of a block of queries over a block of keys, in parts that add up to the whole.

A block returns its result with the log-sum-exp of its scores, with which results of the same
queries over other keys are merged (Milakov & Gimelshein 2018, arXiv 1805.02867, algorithm 3; Dao
2023, "FlashAttention-2", arXiv 2307.08691, section 3.1). The gradient of a block uses the merged
result and log-sum-exp, so that the shares of its scores are those of the whole. Blocks are computed
by cuDNN's kernels, which keep no scores, or by plain products and a softmax in float32, on any
device.

Shapes: B batch, S query tokens, T key tokens, H heads of queries, G heads of keys and values, R
heads of queries per head of keys and values, K size of a head.
"""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalejax.config.model import AttentionKind
from scalejax.models.packing import same_document

Segments = tuple[jax.Array, jax.Array]
"""Documents of the queries [B, S] and of the keys [B, T] of a block, int32."""


class BlockResult(NamedTuple):
    """Attention of some queries over some keys."""

    values: jax.Array
    """Weighted means of the values, float32 of shape [B, S, H, K]."""
    log_sums: jax.Array
    """Logarithms of the sums of exponentials of scaled scores, float32 of shape [B, H, S]."""

    def merged(self, other: "BlockResult") -> "BlockResult":
        """Attention of the same queries over the keys of both."""
        log_sums = jnp.logaddexp(self.log_sums, other.log_sums)
        values = sum(
            each.values * _of_token(jnp.exp(each.log_sums - log_sums)) for each in (self, other)
        )
        return BlockResult(values, log_sums)  # type: ignore[arg-type]  sum of arrays


def block_result(
    kind: AttentionKind,
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
) -> BlockResult:
    """Attention of a block of queries over a block of keys.

    A query whose keys all belong to other documents has a log-sum-exp so low that its result has no
    share in a merged one.

    Args:
        kind: fused or unfused.
        q_BSHK: queries.
        k_BTGK: keys, each shared by H / G heads of queries.
        v_BTGK: values.
        is_causal: whether queries see only keys up to their own place; needs as many of both.
        segments: documents of queries and keys; a query sees only its own. None for one document.
    """
    if kind == "fused":
        mask = None if segments is None else same_document(*segments)[:, None]
        out_BSHK, log_sums_BHS = _cudnn().dot_product_attention(
            q_BSHK, k_BTGK, v_BTGK, mask=mask, return_residual=True, **_options(q_BSHK, is_causal)
        )
        return BlockResult(out_BSHK.astype(jnp.float32), log_sums_BHS)
    scores_BGRST = _scores(q_BSHK, k_BTGK, is_causal=is_causal, segments=segments)
    log_sums_BGRS = jax.nn.logsumexp(scores_BGRST, axis=-1)
    shares_BGRST = jnp.exp(scores_BGRST - log_sums_BGRS[..., None]).astype(v_BTGK.dtype)
    values_BSGRK = jnp.einsum(
        "bgrst,btgk->bsgrk", shares_BGRST, v_BTGK, preferred_element_type=jnp.float32
    )
    return BlockResult(values_BSGRK.reshape(q_BSHK.shape), _flat(log_sums_BGRS))


def block_gradients(
    kind: AttentionKind,
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    out_BSHK: jax.Array,
    log_sums_BHS: jax.Array,
    gradient_BSHK: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the queries, keys and values of a block, in their types.

    With shares P = exp(scaled scores - log-sum-exp) and the gradient dO of the result O:
    dV = P' dO, dS = P (dO V' - sum of dO O over K), dQ = dS K and dK = dS' Q, scaled.

    Args:
        kind: fused or unfused.
        q_BSHK: queries.
        k_BTGK: keys of this block.
        v_BTGK: values of this block.
        out_BSHK: result of the queries over the keys of all blocks.
        log_sums_BHS: their log-sum-exp, over all blocks too.
        gradient_BSHK: gradient of that result.
        is_causal: as for `block_result`.
        segments: as for `block_result`.

    Source: Dao 2023, arXiv 2307.08691, algorithm 2.
    """
    how: dict[str, Any] = {"is_causal": is_causal, "segments": segments}
    if kind == "fused":
        return _fused_gradients(
            q_BSHK, k_BTGK, v_BTGK, out_BSHK, log_sums_BHS, gradient_BSHK, **how
        )
    q_BSGRK, d_BSGRK = _grouped(q_BSHK, k_BTGK), _grouped(gradient_BSHK, k_BTGK)
    scores_BGRST = _scores(q_BSHK, k_BTGK, **how)
    log_sums_BGRS = log_sums_BHS.reshape(scores_BGRST.shape[:-1])
    shares_BGRST = jnp.exp(scores_BGRST - log_sums_BGRS[..., None])
    products_BSHK = gradient_BSHK.astype(jnp.float32) * out_BSHK.astype(jnp.float32)
    sums_BGRS = products_BSHK.sum(axis=-1).swapaxes(1, 2).reshape(log_sums_BGRS.shape)
    d_shares_BGRST = jnp.einsum(
        "bsgrk,btgk->bgrst", d_BSGRK, v_BTGK, preferred_element_type=jnp.float32
    )
    d_scores_BGRST = shares_BGRST * (d_shares_BGRST - sums_BGRS[..., None]) * _scale(q_BSHK)
    d_scores_BGRST = d_scores_BGRST.astype(q_BSHK.dtype)
    dq_BSGRK = jnp.einsum("bgrst,btgk->bsgrk", d_scores_BGRST, k_BTGK)
    dk_BTGK = jnp.einsum("bgrst,bsgrk->btgk", d_scores_BGRST, q_BSGRK)
    dv_BTGK = jnp.einsum("bgrst,bsgrk->btgk", shares_BGRST.astype(v_BTGK.dtype), d_BSGRK)
    return dq_BSGRK.reshape(q_BSHK.shape), dk_BTGK, dv_BTGK


def has_fused_blocks() -> bool:
    """Whether this JAX has the kernels of fused blocks, which are private (`jax.nn` rounds the
    log-sum-exp to 16 bits, and gives no gradient of a part); tried with jax 0.10.2 and
    0.12.0.1."""
    names = ("dot_product_attention", _BACKWARD, "MaskType", "AttentionLayout")
    return all(hasattr(_cudnn(), name) for name in names)


_LOWEST = -1e30
"""Score of a key of another document; far from float32's lowest, so that sums stay finite."""
_BACKWARD = "_dot_product_attention_bwd_p_wrapper"


def _cudnn() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _options(q_BSHK: jax.Array, is_causal: bool) -> dict[str, Any]:
    """Scale and mask of cuDNN's kernels."""
    masks = _cudnn().MaskType
    return {
        "scale": _scale(q_BSHK),
        "mask_type": masks.CAUSAL if is_causal else masks.NO_MASK,
    }


def _fused_gradients(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    out_BSHK: jax.Array,
    log_sums_BHS: jax.Array,
    gradient_BSHK: jax.Array,
    *,
    is_causal: bool,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """cuDNN's gradient of a block, bound as by JAX's own rule, but with the log-sum-exp and the
    result over all blocks."""
    cudnn, bias = _cudnn(), jnp.zeros(0, q_BSHK.dtype)
    none = bias
    if segments is not None:
        mask = same_document(*segments)[:, None]
        bias = cudnn.combine_bias_and_mask(None, mask, q_BSHK.dtype)
    # A function of scores, a parameter that JAX has since 0.12 and older versions refuse.
    newer = {"score_mod": None} if _takes_score_mod(cudnn) else {}
    dq, dk, dv = getattr(cudnn, _BACKWARD).bind(
        q_BSHK,
        k_BTGK,
        v_BTGK,
        bias,
        *(none,) * 6,  # lengths, offsets and page tables
        log_sums_BHS,
        out_BSHK,
        gradient_BSHK,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(segments is not None, False),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **newer,
        **_options(q_BSHK, is_causal),
    )
    return dq, dk, dv


def _takes_score_mod(cudnn: Any) -> bool:
    return "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters


def _scores(
    q_BSHK: jax.Array, k_BTGK: jax.Array, *, is_causal: bool, segments: Segments | None
) -> jax.Array:
    """Scaled and masked scores, float32 of shape [B, G, R, S, T]."""
    scores_BGRST = jnp.einsum(
        "bsgrk,btgk->bgrst",
        _grouped(q_BSHK, k_BTGK),
        k_BTGK,
        preferred_element_type=jnp.float32,
    ) * _scale(q_BSHK)
    if segments is not None:  # finite: a query may have none of these keys
        is_own_BST = same_document(*segments)
        scores_BGRST = jnp.where(is_own_BST[:, None, None], scores_BGRST, _LOWEST)
    if not is_causal:
        return scores_BGRST
    is_seen = jnp.tril(jnp.ones(scores_BGRST.shape[-2:], bool))
    return jnp.where(is_seen, scores_BGRST, -jnp.inf)


def _grouped(heads_BSHK: jax.Array, k_BTGK: jax.Array) -> jax.Array:
    """Heads of queries by the head of keys that they read, [B, S, G, R, K]."""
    batch, tokens, _, size = heads_BSHK.shape
    return heads_BSHK.reshape(batch, tokens, k_BTGK.shape[2], -1, size)


def _flat(each_BGRS: jax.Array) -> jax.Array:
    batch, groups, shared, tokens = each_BGRS.shape
    return each_BGRS.reshape(batch, groups * shared, tokens)


def _of_token(each_BHS: jax.Array) -> jax.Array:
    """Factors in the layout of values, [B, S, H, 1]."""
    return each_BHS.swapaxes(1, 2)[..., None]


def _scale(q_BSHK: jax.Array) -> float:
    return q_BSHK.shape[-1] ** -0.5
