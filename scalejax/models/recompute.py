"""What a block keeps for its backward pass, and what it computes again.

A network marks what is worth keeping; which marks count depends on `model.remat`. Knows nothing
of what layers do.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from scalejax.model_config import Remat

_KEPT = "kept"
_FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's name of cuDNN's forward kernel, which gives statistics of the scores besides."""


def kept(activations: jax.Array) -> jax.Array:
    """`activations`, marked to be kept where blocks are computed again but for some operations."""
    return checkpoint_name(activations, _KEPT)


def recomputed(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`block`, a whole one, whose backward pass computes again what `remat` says.

    "full": all but its input. "per_op": all but its input, what is marked `kept`, and what fused
    attention gives. Of "selective" blocks see to themselves.
    """
    if remat == "full":
        return jax.checkpoint(block, prevent_cse=False)  # a scan already prevents it
    if remat == "per_op":
        return jax.checkpoint(block, prevent_cse=False, policy=_is_kept)
    return block


def kept_without_inner(
    narrowed: Callable[..., jax.Array], remat: Remat
) -> Callable[..., jax.Array]:
    """`narrowed`, the activation function and the linear layer after it; recomputed selectively,
    it keeps for its backward pass what it reads, and not what the function makes of that."""
    if remat != "selective":
        return narrowed
    return jax.checkpoint(narrowed, prevent_cse=False)  # a scan already prevents it


_named = jax.checkpoint_policies.save_only_these_names(_KEPT)


def _is_kept(primitive: Any, *values: Any, **params: Any) -> bool:
    """Whether the result of an operation is kept, as `jax.checkpoint` asks."""
    return primitive.name == _FUSED_ATTENTION or _named(primitive, *values, **params)
