"""Sophia: steps along a momentum over a diagonal estimate of curvature, each entry clipped.

Knows gradients and estimates; nothing of losses: the caller samples labels and passes in their
gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from scalejax.config.optimizer import CURVATURE, SophiaConfig


class SophiaState(NamedTuple):
    """State of the parameters: two trees of arrays like them."""

    mu: Any
    """Mean of gradients."""
    curvature: Any
    """Mean of estimates of the diagonal of the Gauss-Newton matrix, from `refreshed`."""


def scale_by_sophia(config: SophiaConfig) -> optax.GradientTransformation:
    """clip(m / max(gamma h, epsilon), 1) for the mean m of gradients and the mean h of estimates.

    Source: Liu et al. 2023, arXiv 2305.14342, algorithm 3, lines 6 and 13.
    """

    def init(params: Any) -> SophiaState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return SophiaState(zeros, jax.tree.map(jnp.copy, zeros))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SophiaState]:
        mu = jax.tree.map(
            lambda mean, new: config.beta1 * mean + (1 - config.beta1) * new, state.mu, updates
        )

        def step(mean: jax.Array, curvature: jax.Array) -> jax.Array:
            scale = jnp.maximum(config.gamma * curvature, config.epsilon)
            return jnp.clip(mean / scale, -1, 1)

        return jax.tree.map(step, mu, state.curvature), SophiaState(mu, state.curvature)

    return optax.GradientTransformation(init, update)


def refreshed(
    config: SophiaConfig,
    opt_state: Any,
    step: jax.Array,
    of_sampled_labels: Callable[[], tuple[Any, Any]],
) -> Any:
    """The optimizer's state, with a new estimate averaged into its curvature in the first of every
    `refresh_every_steps` updates.

    The estimate is Gauss-Newton-Bartlett's: B g * g, for the gradient g of the mean cross-entropy
    of B labels that are sampled from the network's own logits (Liu et al. 2023, algorithm 2).

    Args:
        config: the optimizer.
        opt_state: its state, before an update.
        step: updates made before.
        of_sampled_labels: g and B.
    """

    def estimated(curvature: Any) -> Any:
        gradient, labels = of_sampled_labels()
        return jax.tree.map(
            lambda mean, new: config.beta2 * mean + (1 - config.beta2) * (labels * new**2),
            curvature,
            gradient,
        )

    with jax.named_scope(CURVATURE):
        curvature = lax.cond(
            step % config.refresh_every_steps == 0,
            estimated,
            lambda curvature: curvature,
            optax.tree.get(opt_state, "curvature"),
        )
    return optax.tree.set(opt_state, curvature=curvature)
