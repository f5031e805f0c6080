"""A method of gradient synchronisation: a pair of functions, which each method registers.

Both run per device inside `shard_map`: the initial state of a device, and the map from its local
gradient, the rows that this is the mean over, and its state to the synchronised gradient and new
state. Knows trees of arrays; no networks, no optimizers and no config beyond its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import GradientSyncConfig, LocalSgdConfig
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync.device_rows import DeviceRows, PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """A method to combine the gradients of all devices into one."""

    init: Callable[[PyTree], PyTree]
    """Maps the trainable parameters to the initial state of a device; None if it has none."""
    combine: Callable[[PyTree, DeviceRows, PyTree], tuple[PyTree, PyTree]]
    """Maps a device's gradient, the mean over its rows that count; these rows; and its state to the
    synchronised gradient and the new state."""


@singledispatch
def build_gradient_sync(
    config: GradientSyncConfig | None, *, stacked: tuple[str, ...]
) -> GradientSync:
    """The gradient synchronisation that `config` names; each method registers its own, by the class
    of its config.

    Args:
        config: the method; None and local SGD give the mean of the gradients.
        stacked: `Network.stacked`: parts whose first dimension counts layers.
    """
    raise NotImplementedError(f"build_gradient_sync is not registered for {type(config).__name__}")


@build_gradient_sync.register
def _mean(config: LocalSgdConfig | None, **_: object) -> GradientSync:
    return stateless(lambda gradient, rows: lax.pmean(rows.weighted(gradient), DATA))


def stateless(combine: Callable[[PyTree, DeviceRows], PyTree]) -> GradientSync:
    """A stateless method: `combine` maps a gradient and its rows to the synchronised one."""
    return GradientSync(
        init=lambda params: None,
        combine=lambda gradient, rows, _: (combine(gradient, rows), None),
    )


def compressed(
    synchronised: Callable[[PyTree, DeviceRows], tuple[PyTree, PyTree]], error_feedback: bool
) -> GradientSync:
    """Compression of gradients weighted by their devices' rows: each is scaled to its share of the
    mean.

    With error feedback the compression error of a gradient is added to the next one,

        p = g + e,  sent = C(p),  e' = p - sent

    on each device, for its gradient g, its memory e and the compression C; the synchronised
    gradient is the mean of what all devices sent. Nothing is lost, only delayed. The memory is in
    units of the update too: what it keeps from a batch with many rows counts for as much when it is
    sent with a batch of few.

    Args:
        synchronised: maps a device's weighted gradient and its rows to the mean of what all devices
            sent, and what this device sent.
        error_feedback: whether devices have such a memory.

    Source: Stich et al. 2018, algorithm 1, arXiv 1809.07599 (applied to steps, with the learning
        rate; here to gradients, as in MXNet, for any optimizer); Karimireddy et al. 2019, arXiv
        1901.09847.
    """
    if not error_feedback:
        return stateless(lambda gradient, rows: synchronised(rows.weighted(gradient), rows)[0])

    def combine(gradient: PyTree, rows: DeviceRows, memory: PyTree) -> tuple[PyTree, PyTree]:
        whole = jax.tree.map(jnp.add, rows.weighted(gradient), memory)
        mean, sent = synchronised(whole, rows)
        return mean, jax.tree.map(jnp.subtract, whole, sent)

    return GradientSync(init=partial(jax.tree.map, jnp.zeros_like), combine=combine)
