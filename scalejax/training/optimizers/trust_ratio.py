"""Layer-wise trust ratios: the norm of a layer's update relative to its weights (LARS, LAMB).

Knows norms, and which parameters are stacked over layers; nothing of momentum and rates. Norms
are of whole arrays, however they are sharded, so this must be traced outside of `shard_map`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from scalejax.models import parameter_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The trust ratio of a layer, which multiplies its update u of weights w.

    coefficient min(|w|, bound) / (|u| + decay |w|), at most `clip`; 1 where either norm is 0. With
    a decay, u + decay w is scaled.
    """

    coefficient: float = 1.0
    """Trust coefficient: step size relative to the norm of the weights."""
    decay: float | None = None
    """Weight decay that is added to the update here, and its norm to that of the update (You et
    al. 2017, algorithm 1, arXiv 1708.03888); None if the update already includes it."""
    weight_norm_bound: float | None = None
    """Upper bound on the norm of weights: phi of You et al. 2019, arXiv 1904.00962."""
    clip: float | None = None
    """Largest ratio."""

    def scaled(self, update: jax.Array, param: jax.Array) -> jax.Array:
        """`update` of one layer, multiplied by its trust ratio."""
        if self == Ratio(coefficient=self.coefficient):
            whole = optax.scale_by_trust_ratio(trust_coefficient=self.coefficient)
            scaled, _ = whole.update(update, optax.EmptyState(), param)
            return scaled  # type: ignore[return-value]  an array is a tree of one leaf
        weight_norm, update_norm = jnp.linalg.norm(param), jnp.linalg.norm(update)
        is_zero = (weight_norm == 0) | (update_norm == 0)
        bounded = weight_norm
        if self.weight_norm_bound is not None:
            bounded = jnp.minimum(weight_norm, self.weight_norm_bound)
        if self.decay is not None:
            update = update + self.decay * param
            update_norm = update_norm + self.decay * weight_norm
        ratio = jnp.where(
            is_zero, 1.0, self.coefficient * bounded / jnp.where(is_zero, 1.0, update_norm)
        )
        return update * (ratio if self.clip is None else jnp.minimum(ratio, self.clip))


def scale_by_layer(ratio: Ratio, stacked: tuple[str, ...]) -> optax.GradientTransformation:
    """Transformation that multiplies each layer by its trust ratio, also within stacked parameters.

    Args:
        ratio: the trust ratio.
        stacked: first parts of the paths of parameters whose first dimension counts layers.
    """

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        def of_leaf(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
            is_stacked = parameter_path(path).partition("/")[0] in stacked
            return (jax.vmap(ratio.scaled) if is_stacked else ratio.scaled)(update, param)

        return tree_map_with_path(of_leaf, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)
