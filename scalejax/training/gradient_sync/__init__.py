"""Gradient synchronisation along the data axis, one module for each method.

Each method is a pair of functions that run per device inside `shard_map`: the initial state of a
device, and the map from its local gradient, the rows that this is the mean over, and its state to
the synchronised gradient and new state. Knows trees of arrays; no networks, no optimizers and no
config beyond its own.

What rows that do not count (padding, unreadable ones) mean to a method: the mean, and what
compressed methods compress, is of gradients weighted by their devices' rows. Adasum combines
gradients as they are, each the step that its device would make alone; 0 adds nothing to it.

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
from scalejax.training.gradient_sync.device_rows import DeviceRows
from scalejax.training.gradient_sync.error_feedback import with_error_feedback

PyTree = Any
"""Nested dicts and dataclasses of arrays, as JAX means it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """A method to combine the gradients of all devices into one."""

    init: Callable[[PyTree], PyTree]
    """Maps the trainable parameters to the initial state of a device; None if it has none."""
    combine: Callable[[PyTree, DeviceRows, PyTree], tuple[PyTree, PyTree]]
    """Maps a device's gradient, the mean over its rows that count; these rows; and its state to the
    synchronised gradient and the new state."""


def build_gradient_sync(
    config: GradientSyncConfig | None, *, stacked: tuple[str, ...]
) -> GradientSync:
    """The gradient synchronisation that `config` names.

    Args:
        config: the method; None and local SGD give the mean of the gradients.
        stacked: `Network.stacked`: parts whose first dimension counts layers.
    """
    match config:
        case None | LocalSgdConfig():
            return _stateless(lambda gradient, rows: lax.pmean(rows.weighted(gradient), DATA))
        case AdasumConfig():
            return _stateless(lambda gradient, _: adasum.combined(gradient, stacked))
        case Fp16Config() | TwoBitConfig() | TopKConfig():
            return _compressed(config, stacked)


def _compressed(
    config: Fp16Config | TwoBitConfig | TopKConfig, stacked: tuple[str, ...]
) -> GradientSync:
    """Compression of gradients weighted by their devices' rows: each in its share of the mean.

    A memory is so in units of the update too, and what it keeps of a batch with many rows counts
    for as much when it is sent with one of few.
    """

    def synchronised(weighted: PyTree, rows: DeviceRows) -> tuple[PyTree, PyTree]:
        match config:
            case Fp16Config():
                return fp16.synchronised(weighted)
            case TwoBitConfig():  # of the weighted gradient times rows.mean: of the sum over rows
                return two_bit.synchronised(weighted, config.threshold / rows.mean)
            case TopKConfig():
                return top_k.synchronised(weighted, config.fraction, stacked)

    if not config.error_feedback:
        return _stateless(lambda gradient, rows: synchronised(rows.weighted(gradient), rows)[0])

    def combine(gradient: PyTree, rows: DeviceRows, memory: PyTree) -> tuple[PyTree, PyTree]:
        with_memory = with_error_feedback(lambda whole: synchronised(whole, rows))
        return with_memory(rows.weighted(gradient), memory)

    return GradientSync(init=partial(jax.tree.map, jnp.zeros_like), combine=combine)


def _stateless(combine: Callable[[PyTree, DeviceRows], PyTree]) -> GradientSync:
    return GradientSync(
        init=lambda params: None,
        combine=lambda gradient, rows, _: (combine(gradient, rows), None),
    )
