"""How a gradient becomes an update: four Optax chains, with masks by the paths of parameters.

Knows paths and which parameters are stacked over layers; nothing of networks.

Where the learning rate enters. `sgd` multiplies it in after the momentum buffer (Goyal et al.
2017, equation 9, arXiv 1706.02677), so a warmup needs no momentum correction. `lars` multiplies
it in before, as its authors and `optax.lars` do (Goyal's equation 10): while the rate changes,
the buffer still holds steps of earlier rates, and after a rise updates lag by about
1 / (1 - momentum) steps. scalejax leaves that as published.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.tree_util import tree_map_with_path

from scalejax.models import parameter_path
from scalejax.schedules import Schedule
from scalejax.training_config import (
    AdamWConfig,
    LambConfig,
    LarsConfig,
    OptimizerConfig,
    SgdConfig,
)

DECAYED = ("kernel", "embedding")
"""Last parts of the paths of weights; all other parameters are biases and normalisation."""

Mask = Callable[[Any], Any]
"""From a tree of parameters to the tree that says which of them are meant."""


def build_optimizer(
    config: OptimizerConfig, schedule: Schedule, *, stacked: tuple[str, ...]
) -> optax.GradientTransformation:
    """The Optax transformation that `config` names; its updates are added to the parameters.

    Args:
        config: which optimizer, and its numbers.
        schedule: the learning rate by step.
        stacked: `Network.stacked`; in LARS and LAMB each layer in there has its own trust ratio.
    """
    mask = _everything if config.decays_norm_and_bias else _weights
    rate = optax.scale_by_learning_rate(schedule)
    match config:
        case SgdConfig():
            return optax.chain(
                optax.add_decayed_weights(config.weight_decay, mask),
                optax.trace(config.momentum, config.nesterov)
                if config.momentum
                else optax.identity(),
                rate,
            )
        case AdamWConfig():
            return optax.chain(
                optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
                optax.add_decayed_weights(config.weight_decay, mask),
                rate,
            )
        case LarsConfig():
            return optax.chain(
                optax.add_decayed_weights(config.weight_decay, mask),
                optax.masked(_scale_by_layer(stacked, config.trust_coefficient), mask),
                rate,
                optax.trace(config.momentum, config.nesterov),
            )
        case LambConfig():
            return optax.chain(
                optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
                optax.add_decayed_weights(config.weight_decay, mask),
                optax.masked(_scale_by_layer(stacked, 1.0), mask),
                rate,
            )


def _weights(params: Any) -> Any:
    """True for kernels and embeddings, by the last part of the path."""
    return tree_map_with_path(
        lambda path, _: parameter_path(path).rpartition("/")[2] in DECAYED, params
    )


def _everything(params: Any) -> Any:
    return jax.tree.map(lambda _: True, params)


def _scale_by_layer(
    stacked: tuple[str, ...], trust_coefficient: float
) -> optax.GradientTransformation:
    """`optax.scale_by_trust_ratio`, each layer of a stacked parameter by itself."""
    whole = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient)

    def scale(update: jax.Array, param: jax.Array) -> jax.Array:
        scaled, _ = whole.update(update, optax.EmptyState(), param)
        return scaled  # type: ignore[return-value]  an array is a tree of one leaf

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        def of_leaf(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
            is_stacked = parameter_path(path).partition("/")[0] in stacked
            return (jax.vmap(scale) if is_stacked else scale)(update, param)

        return tree_map_with_path(of_leaf, updates, params), state

    return optax.GradientTransformation(whole.init, update)
