"""Weight averages over a run: exponential (EMA) and uniform (SWA), one update at a time.

A pure elementwise function of the step and two trees: an average is sharded as its parameters
are. Knows no networks and no meshes.
"""

from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.config.run import ResolvedRun
from scalejax.config.training import AveragingConfig, EmaConfig, SwaConfig


def averaged(run: ResolvedRun, step: jax.Array, average: Any, weights: Any) -> Any:
    """The average after an update.

    EMA after update t: decay average + (1 - decay) weights. SWA over updates at S, S + E, S + 2 E,
    ...: the mean of the weights after each; until S the weights themselves.

    Args:
        run: the run, with its averaging config and steps per epoch.
        step: updates made, this one included.
        average: before the update.
        weights: after the update, a tree of the same structure.

    Source: Polyak & Juditsky 1992, SIAM J. Control Optim. 30(4), for EMA in its usual form;
        Izmailov et al. 2018, algorithm 1, arXiv 1803.05407.
    """
    config = run.config.averaging
    if config is None:
        return None
    share = share_of(config, run, step)
    return jax.tree.map(lambda mean, new: mean + share * (new - mean), average, weights)


@singledispatch
def share_of(config: AveragingConfig, run: ResolvedRun, step: jax.Array) -> jax.Array:
    """Share of the weights in the average after an update; each average registers its own."""
    raise NotImplementedError(f"share_of is not registered for {type(config).__name__}")


@share_of.register
def _ema(config: EmaConfig, run: ResolvedRun, step: jax.Array) -> jax.Array:
    decay = jnp.asarray(config.decay, jnp.float32)
    if config.warms_up:
        decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return 1 - decay


@share_of.register
def _swa(config: SwaConfig, run: ResolvedRun, step: jax.Array) -> jax.Array:
    start = round(config.start_epoch * run.steps_per_epoch)
    every = max(round(config.every_epochs * run.steps_per_epoch), 1)
    since = jnp.maximum(step - start, 0)
    return jnp.where(since % every == 0, 1 / (since // every + 1), 0.0)
