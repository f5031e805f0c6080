"""How devices along the data axis bring their gradients together: one file for each way.

Each is a pair of functions that run on one device inside `shard_map`: what it keeps of its own
between steps, and from its gradient the one that all devices go on with. Knows trees of arrays;
no networks, no optimizers and no config beyond its own.

`local_sgd` brings parameters together in place of gradients, and so has an update of its own.
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
    """From the gradients of the devices to one."""

    init: Callable[[PyTree], PyTree]
    """From the parameters that learn to what each device keeps at first; None if nothing."""
    combine: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    """From a device's gradient and what it kept to the gradient of all and what it keeps."""


def gradient_exchange(
    config: GradientSyncConfig | None, *, stacked: tuple[str, ...], per_device_batch: int
) -> GradientSync:
    """The exchange of gradients that `config` names.

    Args:
        config: which; None, and one of parameters, for the mean of gradients.
        stacked: `Network.stacked`: parts whose first dimension counts layers.
        per_device_batch: samples whose mean gradient a device has.
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
