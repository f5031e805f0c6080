"""Rates and epsilons of a parametrization (muP, CompleteP) by parameter.

Knows how much wider and deeper a network is than its base, and paths of parameters; nothing of the
network itself, whose initial weights and multipliers are set in `models`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.tree_util import tree_map_with_path

from scalejax.models import parameter_path
from scalejax.training.optimizers.matrices import HiddenMatrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Parametrization:
    """The size of a network relative to its base."""

    width: float
    """Width over that of the base."""
    depth: float
    """Layers over those of the base; 1 if rates are to carry over to other widths only."""


def parametrized(
    size: Parametrization | None, inner: optax.GradientTransformation, hidden: HiddenMatrices
) -> optax.GradientTransformation:
    """`inner`, whose steps have entries of size 1 before rate and decay, with epsilon divided by
    width (in blocks by width x depth) and the steps of hidden matrices divided by width.

    Weight decay that comes after it has the rate of the schedule: the rate is divided by width and
    the decay multiplied by it, which cancel. Epsilon is scaled through the gradients: Adam's step
    for c g with e is its step for g with e / c.

    Source: Dey et al. 2025, arXiv 2505.01618, table 1 with alpha = 1.
    """
    if size is None:
        return inner

    def scaled(tree: Any, factor: Callable[[tuple[Any, ...], Any], float]) -> Any:
        def of_leaf(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            by = factor(path, leaf)
            return leaf if by == 1 else leaf * by

        return tree_map_with_path(of_leaf, tree)

    def over_epsilon(path: tuple[Any, ...], _: Any) -> float:
        is_in_block = parameter_path(path).partition("/")[0] in hidden.stacked
        return size.width * (size.depth if is_in_block else 1.0)

    def rate(path: tuple[Any, ...], leaf: Any) -> float:
        return 1.0 if hidden.axes(path, leaf) is None else 1 / size.width

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        steps, state = inner.update(scaled(updates, over_epsilon), state, params)
        return scaled(steps, rate), state

    return optax.GradientTransformation(inner.init, update)
