"""Top-k sparsification: the largest entries of each layer's gradient are sent with their indices.

Every device receives the entries of all others, in one all-gather for all layers, and adds them in
the order of the devices: in any other order, devices could differ in the last bit.

Source: Lin et al. 2017, arXiv 1712.01887, section 3 (the selection alone, layer by layer; not its
momentum correction, clipping and warmup); Stich et al. 2018, arXiv 1809.07599.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import TopKConfig
from scalejax.config.parallelism import DATA
from scalejax.core.errors import ConfigError, refusal
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.gradient_sync.layers import from_layers, layers_of
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync, compressed

_MOST_ENTRIES = 2**31 - 1
"""Indices are int32."""


@build_gradient_sync.register
def _top_k(config: TopKConfig, *, stacked: tuple[str, ...]) -> GradientSync:
    return compressed(
        lambda weighted, _: synchronised(weighted, config.fraction, stacked), config.error_feedback
    )


def synchronised(
    gradient: PyTree, fraction: float, stacked: tuple[str, ...]
) -> tuple[PyTree, PyTree]:
    """The mean of what all devices sent, and what this one sent.

    Args:
        gradient: of this device, float32.
        fraction: fraction of the entries of each layer that is sent; at least one entry.
        stacked: first parts of the paths of parameters whose first dimension counts layers.

    Raises:
        ConfigError: if indices into the gradient do not fit into 32 bits.
    """
    layers = layers_of(gradient, stacked)
    size = sum(layer.size for layer in layers)
    if size > _MOST_ENTRIES:
        accepted = f"indices of {size} parameters do not fit into 32 bits; use another compression"
        raise ConfigError(refusal("gradient_sync.name", "top_k", accepted))
    places, values = _largest(layers, fraction)
    kept = places.size
    # One all-gather of indices and of the bits of values: each collective has its own latency.
    sent = jnp.concatenate([places, lax.bitcast_convert_type(values, jnp.int32)])
    gathered = lax.all_gather(sent, DATA)

    def added(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        of_one = lax.bitcast_convert_type(one[kept:], jnp.float32)
        return total.at[one[:kept]].add(of_one, unique_indices=True), None

    none = jnp.zeros(size, jnp.float32)
    total, _ = lax.scan(added, none, gathered)
    own = none.at[places].set(values, unique_indices=True)
    return tuple(_shaped(entries, layers, gradient) for entries in (total / len(gathered), own))


def _largest(layers: list[jax.Array], fraction: float) -> tuple[jax.Array, jax.Array]:
    """Indices into all layers concatenated, int32, and values of the largest entries of each."""
    places, values, begin = [], [], 0
    for layer in layers:
        count, entries = layer.shape
        _, found = lax.top_k(jnp.abs(layer), min(entries, max(1, math.ceil(fraction * entries))))
        values.append(jnp.take_along_axis(layer, found, axis=1).reshape(-1))
        first = begin + entries * jnp.arange(count, dtype=jnp.int32)
        places.append((found.astype(jnp.int32) + first[:, None]).reshape(-1))
        begin += layer.size
    return jnp.concatenate(places), jnp.concatenate(values)


def _shaped(entries: jax.Array, layers: list[jax.Array], like: PyTree) -> PyTree:
    ends = [sum(layer.size for layer in layers[: index + 1]) for index in range(len(layers))]
    return from_layers(jnp.split(entries, ends[:-1]), like)
