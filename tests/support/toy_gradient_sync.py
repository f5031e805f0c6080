"""A gradient synchronisation in one module: the majority of the signs of all devices (Bernstein et
al. 2018, arXiv 1802.04434, algorithm 3)."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import GradientSyncConfig
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync, stateless


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityConfig(GradientSyncConfig):
    """The sign that most devices have."""

    is_lossy = True
    name: Literal["majority"]
    """Selects this method."""
    magnitude: float = 1.0
    """Magnitude of what is applied."""


@build_gradient_sync.register
def _majority(config: MajorityConfig, **_: object) -> GradientSync:
    def vote(leaf: jax.Array) -> jax.Array:
        return config.magnitude * jnp.sign(lax.psum(jnp.sign(leaf), DATA))

    return stateless(lambda gradient, _: jax.tree.map(vote, gradient))
