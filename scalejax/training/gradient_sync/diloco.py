"""The outer update of local SGD: the mean of the devices' parameters, or a DiLoCo step towards it.

    d = w - mean,  v = momentum v + d,  w' = w - rate (d + momentum v)

for the last average w; with rate 1 and momentum 0, w' is the mean.

Source: Douillard et al. 2023, algorithm 1, with Nesterov momentum, arXiv 2311.08105.
"""

from typing import Any

import jax
import optax

from scalejax.config.gradient_sync import LocalSgdConfig

PyTree = Any


def initial_outer(config: LocalSgdConfig, params: PyTree) -> PyTree:
    """The outer parameters and the outer optimizer's state; None without an outer optimizer."""
    if not config.has_outer_optimizer:
        return None
    return {"params": params, "opt_state": _optimizer(config).init(params)}


def outer_step(config: LocalSgdConfig, mean: PyTree, outer: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters that all devices continue with, and the new outer state.

    Args:
        config: rate and momentum of the outer optimizer.
        mean: mean of the parameters of all devices.
        outer: outer state of the last average, as of `initial_outer`.
    """
    if outer is None:
        return mean, None
    outer_gradient = jax.tree.map(lambda last, new: last - new, outer["params"], mean)
    updates, opt_state = _optimizer(config).update(outer_gradient, outer["opt_state"])
    params = optax.apply_updates(outer["params"], updates)
    return params, {"params": params, "opt_state": opt_state}


def _optimizer(config: LocalSgdConfig) -> optax.GradientTransformation:
    momentum = config.outer_momentum or None
    return optax.sgd(config.outer_learning_rate, momentum, nesterov=momentum is not None)
