"""Rematerialisation: which activations of a block are saved, and which the backward pass
recomputes.

A network marks activations worth saving, and names them; which marks apply depends on
`model.remat`. Knows nothing of what layers compute.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from scalejax.config.model import PRODUCT_NAMES, ActivationName, DecoderRemat, SavedActivations
from scalejax.models.sharding import is_zigzag

_KEPT, _ENTERING = "kept", "entering"
_FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's name of cuDNN's forward kernel, which also returns statistics of the scores."""


def named(activations: jax.Array, name: ActivationName) -> jax.Array:
    """`activations` under a name by which `model.remat` may save or offload them."""
    return checkpoint_name(activations, name)


def kept(activations: jax.Array) -> jax.Array:
    """`activations`, marked to be saved with remat "selective_op"."""
    return checkpoint_name(activations, _KEPT)


def is_recomputed(remat: DecoderRemat) -> bool:
    """Whether the backward pass recomputes whole blocks, but for what the policy saves."""
    return remat not in ("none", "selective")


def recomputed(block: Callable[..., Any], remat: DecoderRemat) -> Callable[..., Any]:
    """`block` with its backward pass recomputing according to `remat`.

    "full": saves only its input. "selective_op": saves its input, activations marked `kept`, and
    results of attention. "selective" is implemented by the blocks themselves. `SavedActivations`
    names what is saved or offloaded.
    """
    if not is_recomputed(remat):
        return block

    def entered(x_BSD: jax.Array, *rest: Any) -> Any:
        return block(named(x_BSD, "decoder_layer_input"), *rest)

    # A scan already prevents common-subexpression elimination.
    again = jax.checkpoint(entered, prevent_cse=False, policy=_policy(remat))

    def marked(x_BSD: jax.Array, *rest: Any) -> Any:
        return again(checkpoint_name(x_BSD, _ENTERING), *rest)

    return marked


def recomputed_with_picks(blocks: Callable[..., Any], remat: DecoderRemat) -> Callable[..., Any]:
    """`blocks`, a sequence that first picks its parameters from several chunks, with the pick
    repeated in the backward pass; each `recomputed` block recomputes as it would alone.

    Otherwise every tick would save its picked parameters. With "none" and "selective" it still
    does, which is most of the memory where a microbatch has fewer tokens than the blocks are wide:
    a policy here would override the recomputation inside selective blocks.
    """
    if not is_recomputed(remat):
        return blocks
    # The policy around blocks replaces their own.
    return jax.checkpoint(blocks, prevent_cse=False, policy=_policy(remat))


def kept_without_inner(
    narrowed: Callable[..., jax.Array], remat: DecoderRemat
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


def _by_name(names: SavedActivations) -> Callable[..., Any]:
    """Policy that saves and offloads activations by name, and saves a block's input unless it is
    offloaded."""
    is_input_away = "decoder_layer_input" in names.offload
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*names.save, *([] if is_input_away else [_ENTERING])],
        names_which_can_be_offloaded=list(names.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    goes_by_blocks = is_zigzag()

    def of_operation(primitive: Any, *values: Any, **params: Any) -> Any:
        # With its statistics, for which the backward pass would otherwise recompute it.
        if primitive.name == _FUSED_ATTENTION and not goes_by_blocks:
            return policy(_naming(), name="context")
        return policy(primitive, *values, **params)

    return of_operation


@cache
def _naming() -> Any:
    """JAX's operation that names a value."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(np.float32(0)).eqns[0].primitive


def _policy(remat: DecoderRemat) -> Callable[..., Any]:
    """Policy of recomputed blocks. Where attention proceeds by blocks, it marks its merged result,
    and the results of single blocks are not saved."""
    if remat == "minimal_offloaded":
        return _by_name(SavedActivations(offload=PRODUCT_NAMES))
    if isinstance(remat, SavedActivations):
        return _by_name(remat)
    if remat == "selective_op" and is_zigzag():
        return jax.checkpoint_policies.save_from_both_policies(_is_entering, _named)
    return _POLICIES[remat]


_POLICIES = {"full": _is_entering, "selective_op": _is_entering_or_kept}
"""Policies of recomputed blocks. Their input is marked outside of them: only a policy around
several blocks sees it; a single block saves it anyway."""
