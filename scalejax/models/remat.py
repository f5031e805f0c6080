"""What a block keeps for its backward pass, and what it computes again.

A network marks what is worth keeping; which marks count depends on `model.remat`. Knows nothing
of what layers do.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from scalejax.config.model import Remat

_KEPT, _ENTERING = "kept", "entering"
_FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's name of cuDNN's forward kernel, which gives statistics of the scores besides."""


def kept(activations: jax.Array) -> jax.Array:
    """`activations`, marked to be kept where blocks are computed again but for some operations."""
    return checkpoint_name(activations, _KEPT)


def recomputed(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`block`, a whole one, whose backward pass computes again what `remat` says.

    "full": all but its input. "selective_op": all but its input, what is marked `kept`, and what
    fused attention gives. Of "selective" blocks see to themselves.
    """
    if remat not in _POLICIES:
        return block
    # A scan already prevents that common subexpressions are joined.
    again = jax.checkpoint(block, prevent_cse=False, policy=_POLICIES[remat])

    def marked(x_BSD: jax.Array, *rest: Any) -> Any:
        return again(checkpoint_name(x_BSD, _ENTERING), *rest)

    return marked


def recomputed_with_picks(blocks: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`blocks`, several in a row which first pick their parameters out of more, and pick them again
    in the backward pass; of each `recomputed` block that pass computes again what it would.

    Else what was picked is kept, each time anew. With "none" and "selective" it is still, which is
    most of the memory where a microbatch has fewer tokens than the blocks are wide: a policy here
    would undo what selective blocks see to themselves.
    """
    if remat not in _POLICIES:
        return blocks
    # The policy around blocks stands in place of their own.
    return jax.checkpoint(blocks, prevent_cse=False, policy=_POLICIES[remat])


def kept_without_inner(
    narrowed: Callable[..., jax.Array], remat: Remat
) -> Callable[..., jax.Array]:
    """`narrowed`, the activation function and the linear layer after it; recomputed selectively,
    it keeps for its backward pass what it reads, and not what the function makes of that."""
    if remat != "selective":
        return narrowed
    return jax.checkpoint(narrowed, prevent_cse=False)  # a scan already prevents it


_named = jax.checkpoint_policies.save_only_these_names(_KEPT)
_is_entering = jax.checkpoint_policies.save_only_these_names(_ENTERING)


def _is_kept(primitive: Any, *values: Any, **params: Any) -> bool:
    """Whether the result of an operation is kept, as `jax.checkpoint` asks."""
    return primitive.name == _FUSED_ATTENTION or _named(primitive, *values, **params)


def _is_entering_or_kept(primitive: Any, *values: Any, **params: Any) -> bool:
    return _is_entering(primitive, *values, **params) or _is_kept(primitive, *values, **params)


_POLICIES = {"full": _is_entering, "selective_op": _is_entering_or_kept}
"""What is kept of blocks that are computed again. Their input is marked outside of them: only a
policy around several sees it, a single one keeps it anyway."""
