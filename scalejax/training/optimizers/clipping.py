"""Clipping of a gradient by its norm: of all of it, or of each block of a network.

Knows norms, and which parameters are stacked over layers; nothing of optimizers. Norms are of whole
arrays, however they are sharded, so this must be traced outside of `shard_map`, but for devices
that each train parameters of their own.
"""

from typing import Any

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
        stacked: `Network.stacked`: each layer in there is a block.
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
    squares: dict[str, jax.Array] = {}

    def block_of(path: tuple[Any, ...]) -> str:
        return parameter_path(path).partition("/")[0]

    def counted(path: tuple[Any, ...], leaf: jax.Array) -> None:
        axes = tuple(range(1 if block_of(path) in stacked else 0, leaf.ndim))
        own = jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=axes)
        squares[block_of(path)] = squares.get(block_of(path), jnp.zeros_like(own)) + own

    tree_map_with_path(counted, gradient)

    def clipped(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        norm = jnp.sqrt(squares[block_of(path)])
        factor = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1), 1)
        return leaf * factor.reshape(*factor.shape, *[1] * (leaf.ndim - factor.ndim))

    return tree_map_with_path(clipped, gradient)
