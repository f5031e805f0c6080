"""Rematerialisation: which activations of a block are saved, and which the backward pass
recomputes.

A network marks activations worth saving; which marks apply depends on `model.remat`. Knows nothing
of what layers compute.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from scalejax.config.model import Remat
from scalejax.models.sharding import is_zigzag

_KEPT, _ENTERING = "kept", "entering"
_FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's name of cuDNN's forward kernel, which also returns statistics of the scores."""


def kept(activations: jax.Array) -> jax.Array:
    """`activations`, marked to be saved with remat "selective_op"."""
    return checkpoint_name(activations, _KEPT)


def recomputed(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`block` with its backward pass recomputing according to `remat`.

    "full": saves only its input. "selective_op": saves its input, activations marked `kept`, and
    results of attention. "selective" is implemented by the blocks themselves.
    """
    if remat not in _POLICIES:
        return block
    # A scan already prevents common-subexpression elimination.
    again = jax.checkpoint(block, prevent_cse=False, policy=_policy(remat))

    def marked(x_BSD: jax.Array, *rest: Any) -> Any:
        return again(checkpoint_name(x_BSD, _ENTERING), *rest)

    return marked


def recomputed_with_picks(blocks: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`blocks`, a sequence that first picks its parameters from more chunks, with the picking
    redone in the backward pass; each `recomputed` block recomputes as by itself.

    Otherwise every tick would save its picked parameters. With "none" and "selective" it still
    does, which is most of the memory where a microbatch has fewer tokens than the blocks are wide:
    a policy here would override the recomputation inside selective blocks.
    """
    if remat not in _POLICIES:
        return blocks
    # The policy around blocks stands in place of their own.
    return jax.checkpoint(blocks, prevent_cse=False, policy=_policy(remat))


def kept_without_inner(
    narrowed: Callable[..., jax.Array], remat: Remat
) -> Callable[..., jax.Array]:
    """`narrowed`, the activation function and the linear layer after it; with selective
    recomputation it saves the function's input for the backward pass, not its output."""
    if remat != "selective":
        return narrowed
    return jax.checkpoint(narrowed, prevent_cse=False)  # a scan already prevents it


_named = jax.checkpoint_policies.save_only_these_names(_KEPT)
_is_entering = jax.checkpoint_policies.save_only_these_names(_ENTERING)


def _is_kept(primitive: Any, *values: Any, **params: Any) -> bool:
    """Policy of `jax.checkpoint`: whether the result of an operation is saved."""
    return primitive.name == _FUSED_ATTENTION or _named(primitive, *values, **params)


def _is_entering_or_kept(primitive: Any, *values: Any, **params: Any) -> bool:
    return _is_entering(primitive, *values, **params) or _is_kept(primitive, *values, **params)


def _policy(remat: Remat) -> Callable[..., Any]:
    """Policy of recomputed blocks. Where attention goes by blocks, it marks its merged result, and
    no block's own is saved."""
    if remat == "selective_op" and is_zigzag():
        return jax.checkpoint_policies.save_from_both_policies(_is_entering, _named)
    return _POLICIES[remat]


_POLICIES = {"full": _is_entering, "selective_op": _is_entering_or_kept}
"""Policies of recomputed blocks. Their input is marked outside of them: only a policy around
several blocks sees it; a single block saves it anyway."""
