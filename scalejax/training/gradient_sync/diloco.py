"""The outer update of local SGD: the devices' reduced parameters, or a DiLoCo step towards them.

    d = w - reduced,  v = momentum v + d,  w' = w - rate (d + momentum v)

for the last average w; with rate 1 and momentum 0, w' is what the devices' parameters reduce to:
their mean, or w plus Adasum of their moves from it.

Source: Douillard et al. 2023, algorithm 1, with Nesterov momentum, arXiv 2311.08105.
"""

import jax
import optax

from scalejax.config.gradient_sync import LocalSgdConfig
from scalejax.training.gradient_sync.device_rows import PyTree


def initial_outer(config: LocalSgdConfig, params: PyTree) -> PyTree:
    """The last average and the outer optimizer's state; None if they are not kept."""
    if not config.keeps_last_average:
        return None
    return {"params": params, "opt_state": _optimizer(config).init(params)}


def outer_step(config: LocalSgdConfig, reduced: PyTree, outer: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters that all devices continue with, and the new outer state.

    Args:
        config: rate and momentum of the outer optimizer.
        reduced: what the parameters of all devices reduce to.
        outer: outer state of the last average, as from `initial_outer`.
    """
    if outer is None:
        return reduced, None
    outer_gradient = jax.tree.map(lambda last, new: last - new, outer["params"], reduced)
    updates, opt_state = _optimizer(config).update(outer_gradient, outer["opt_state"])
    params = optax.apply_updates(outer["params"], updates)
    return params, {"params": params, "opt_state": opt_state}


def _optimizer(config: LocalSgdConfig) -> optax.GradientTransformation:
    momentum = config.outer_momentum or None
    return optax.sgd(config.outer_learning_rate, momentum, nesterov=momentum is not None)
