"""Gradient synchronisation along the data axis, one module for each method.

Each method is a pair of functions that run per device inside `shard_map`: the initial state of a
device, and the map from its local gradient and state to the synchronised gradient and new state.
Knows trees of arrays; no networks, no optimizers and no config beyond its own.

`local_sgd` averages parameters in place of gradients, and so has an update of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import (
    AdasumConfig,
    Fp16Config,
    GradientSyncConfig,
    LocalSgdConfig,
    TopKConfig,
    TwoBitConfig,
)
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync import adasum, fp16, top_k, two_bit
from scalejax.training.gradient_sync.error_feedback import with_error_feedback

PyTree = Any
"""Nested dicts and dataclasses of arrays, as JAX means it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """A method to combine the gradients of all devices into one."""

    init: Callable[[PyTree], PyTree]
    """Maps the trainable parameters to the initial state of a device; None if it has none."""
    combine: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    """Maps a device's gradient and state to the synchronised gradient and the new state."""


def build_gradient_sync(
    config: GradientSyncConfig | None, *, stacked: tuple[str, ...], per_device_batch: int
) -> GradientSync:
    """The gradient synchronisation that `config` names.

    Args:
        config: the method; None and local SGD give the mean of the gradients.
        stacked: `Network.stacked`: parts whose first dimension counts layers.
        per_device_batch: samples per device, over which its gradient is a mean.
    """
    match config:
        case None | LocalSgdConfig():
            return _stateless(lambda gradient: lax.pmean(gradient, DATA))
        case AdasumConfig():
            return _stateless(lambda gradient: adasum.combined(gradient, stacked))
        case Fp16Config():
            gradient_sync = fp16.synchronised
        case TwoBitConfig():
            gradient_sync = partial(
                two_bit.synchronised, threshold=config.threshold / per_device_batch
            )
        case TopKConfig():
            gradient_sync = partial(top_k.synchronised, fraction=config.fraction, stacked=stacked)
    if config.error_feedback:
        return GradientSync(
            init=partial(jax.tree.map, jnp.zeros_like),
            combine=with_error_feedback(gradient_sync),
        )
    return _stateless(lambda gradient: gradient_sync(gradient)[0])


def _stateless(combine: Callable[[PyTree], PyTree]) -> GradientSync:
    return GradientSync(
        init=lambda params: None, combine=lambda gradient, _: (combine(gradient), None)
    )
