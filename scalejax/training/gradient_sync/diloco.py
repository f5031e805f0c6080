"""What follows from an average of the devices' parameters: their mean, or a step towards it.

    d = w - mean,  v = momentum v + d,  w' = w - rate (d + momentum v)

for the last average w; rate 1 and momentum 0 make it the mean.

Source: Douillard et al. 2023, algorithm 1, with Nesterov momentum, arXiv 2311.08105.
"""

from typing import Any

import jax
import optax

from scalejax.config.gradient_sync import LocalSgdConfig

PyTree = Any


def initial_outer(config: LocalSgdConfig, params: PyTree) -> PyTree:
    """The last average, and the state of what steps from it; None if the mean is all there is."""
    if not config.has_outer_optimizer:
        return None
    return {"params": params, "opt_state": _optimizer(config).init(params)}


def after_average(config: LocalSgdConfig, mean: PyTree, outer: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters that all devices go on with, and what `initial_outer` made, after a step.

    Args:
        config: rate and momentum.
        mean: of the parameters of all devices.
        outer: as of the last average.
    """
    if outer is None:
        return mean, None
    way = jax.tree.map(lambda last, new: last - new, outer["params"], mean)
    updates, opt_state = _optimizer(config).update(way, outer["opt_state"])
    params = optax.apply_updates(outer["params"], updates)
    return params, {"params": params, "opt_state": opt_state}


def _optimizer(config: LocalSgdConfig) -> optax.GradientTransformation:
    momentum = config.outer_momentum or None
    return optax.sgd(config.outer_learning_rate, momentum, nesterov=momentum is not None)
