"""What turns the direction of a step by the gradient: caution, and the gradient before.

Knows gradients and steps; nothing of rates. Counts and norms are of whole layers, however they are
sharded, so this must be traced outside of `shard_map`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from scalejax.models import parameter_path


def cautious(
    inner: optax.GradientTransformation, stacked: tuple[str, ...]
) -> optax.GradientTransformation:
    """`inner`, whose steps have no entries that point against the gradient; the others of a layer
    of d entries, of which n are left, are multiplied by d / (n + 1).

    Source: Liang et al. 2024, "Cautious Optimizers", arXiv 2411.16085, algorithm 1.
    """

    def of_layer(step: jax.Array, gradient: jax.Array) -> jax.Array:
        is_kept = step * gradient >= 0
        return jnp.where(is_kept, step, 0) * (step.size / (jnp.sum(is_kept) + 1))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        steps, state = inner.update(updates, state, params)

        def of_leaf(path: tuple[Any, ...], step: jax.Array, gradient: jax.Array) -> jax.Array:
            is_stacked = parameter_path(path).partition("/")[0] in stacked
            return (jax.vmap(of_layer) if is_stacked else of_layer)(step, gradient)

        return tree_map_with_path(of_leaf, steps, updates), state

    return optax.GradientTransformation(inner.init, update)


class _LastGradient(NamedTuple):
    updates_made: jax.Array
    last: Any


def corrected_by_the_last(share: float) -> optax.GradientTransformation:
    """g + share (g - g of the update before), and g in the first.

    Source: Yuan et al. 2024, "MARS", arXiv 2411.10438, equation 2.10 with the batch before.
    """

    def init(params: Any) -> _LastGradient:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return _LastGradient(jnp.zeros((), jnp.int32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _LastGradient]:
        own = jnp.where(state.updates_made > 0, share, 0.0)
        corrected = jax.tree.map(lambda new, old: new + own * (new - old), updates, state.last)
        return corrected, _LastGradient(state.updates_made + 1, updates)

    return optax.GradientTransformation(init, update)
