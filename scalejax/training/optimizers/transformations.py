"""Transformations of gradients and steps around an optimizer: clipping, caution, the last gradient.

Knows gradients, steps, and which parameters are stacked over layers; nothing of rates. Norms and
counts are of whole arrays, however they are sharded, so this must be traced outside of `shard_map`,
unless devices each train their own parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from scalejax.config.optimizer import ClippingConfig
from scalejax.models import parameter_path


def with_clipping(
    config: ClippingConfig | None, inner: optax.GradientTransformation, stacked: tuple[str, ...]
) -> optax.GradientTransformation:
    """`inner`, with its own state, for gradients that are clipped first.

    Args:
        config: how; if None, gradients are left as they are.
        inner: an optimizer.
        stacked: `Network.stacked`: each layer in these is a block.
    """
    if config is None:
        return inner
    max_norm, is_global = config.max_norm, config.scope == "global"

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        if is_global:
            updates, _ = optax.clip_by_global_norm(max_norm).update(updates, optax.EmptyState())
        else:
            updates = _clipped_by_block(updates, max_norm, stacked)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def _clipped_by_block(gradient: Any, max_norm: float, stacked: tuple[str, ...]) -> Any:
    """`gradient` in which no block has a norm above `max_norm`."""
    squares = _squares_by(_block_of, gradient, stacked)

    def clipped(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        norm = jnp.sqrt(squares[_block_of(path)])
        factor = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        return leaf * factor.reshape(*factor.shape, *[1] * (leaf.ndim - factor.ndim))

    return tree_map_with_path(clipped, gradient)


def squared_layer_norms(gradient: Any, stacked: tuple[str, ...]) -> dict[str, jax.Array]:
    """Squared norm of each layer's gradient, by the layer's name: a number, or [layers] for stacked
    layers. A layer is a block, or one of several numbered blocks ("blocks/3")."""

    def layer_of(path: tuple[Any, ...]) -> str:
        block, *parts = parameter_path(path).split("/")
        is_numbered = len(parts) > 1 and parts[0].isdecimal() and block not in stacked
        return f"{block}/{parts[0]}" if is_numbered else block

    return _squares_by(layer_of, gradient, stacked)


def _block_of(path: tuple[Any, ...]) -> str:
    return parameter_path(path).partition("/")[0]


def _squares_by(
    name_of: Callable[[tuple[Any, ...]], str], gradient: Any, stacked: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Sum of squares of the leaves of each name, [layers] where they are stacked."""
    squares: dict[str, jax.Array] = {}

    def counted(path: tuple[Any, ...], leaf: jax.Array) -> None:
        axes = tuple(range(1 if _block_of(path) in stacked else 0, leaf.ndim))
        own = jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=axes)
        squares[name_of(path)] = squares.get(name_of(path), jnp.zeros_like(own)) + own

    tree_map_with_path(counted, gradient)
    return squares


def cautious(
    inner: optax.GradientTransformation, stacked: tuple[str, ...]
) -> optax.GradientTransformation:
    """`inner`, with the entries of its steps that point against the gradient set to 0; the n
    entries left of a layer's d are multiplied by d / (n + 1).

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
    """g + share (g - g of the previous update), and g in the first update.

    Source: Yuan et al. 2024, "MARS", arXiv 2411.10438, equation 2.10 with the previous batch.
    """

    def init(params: Any) -> _LastGradient:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return _LastGradient(jnp.zeros((), jnp.int32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _LastGradient]:
        own = jnp.where(state.updates_made > 0, share, 0.0)
        corrected = jax.tree.map(lambda new, old: new + own * (new - old), updates, state.last)
        return corrected, _LastGradient(state.updates_made + 1, updates)

    return optax.GradientTransformation(init, update)
