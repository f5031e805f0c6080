"""What becomes of gradients on their way: compressed by their worker, or combined by Adasum.

On trees of arrays, layer by layer; knows no workers. Sources: MXNet's kvstore,
`set_gradient_compression` (two_bit); Horovod's `Compression.fp16`; Stich et al. 2018, arXiv
1809.07599, algorithm 1 (top_k with memory); Maleki et al. 2020, arXiv 2006.02924 (Adasum).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.exchange.layers import from_layers, layers_of

PyTree = Any


def compressed(
    method: str,
    number: float,
    gradient: PyTree,
    residual: PyTree | None,
    stacked: tuple[str, ...] = (),
) -> tuple[PyTree, PyTree]:
    """What arrives of `gradient` and what was left of those before, and what is left now.

    Args:
        method: fp16; two_bit: `number`, 0 or -`number`; top_k: that part of a layer's entries,
            those of the largest size, at least one if it has any.
        number: of the method; it is fixed, as a program depends on it.
        gradient: float32.
        residual: what was left; None for nothing.
        stacked: first parts of the paths of parameters whose first dimension counts layers.
    """
    if residual is not None:
        gradient = jax.tree.map(jnp.add, gradient, residual)
    ways = {
        "fp16": lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype),
        "two_bit": partial(_signed, threshold=number),
        "top_k": partial(_largest, fraction=number),
    }
    layers = [ways[method](layer) for layer in layers_of(gradient, stacked)]
    sent = from_layers(layers, gradient)
    return sent, jax.tree.map(jnp.subtract, gradient, sent)


def kept_entries(entries: int, fraction: float) -> int:
    """How many of them top_k sends."""
    return min(entries, max(1, math.ceil(fraction * entries)))


def adasum(several: Sequence[PyTree], stacked: tuple[str, ...] = ()) -> PyTree:
    """One gradient of a power of two of them: of neighbours, of neighbouring pairs, and so on;
    each layer by itself, `stacked` as in `compressed`."""
    split = [layers_of(gradient, stacked) for gradient in several]
    while len(split) > 1:
        pairs = zip(split[::2], split[1::2], strict=True)
        split = [list(map(_of_pair, left, right)) for left, right in pairs]
    return from_layers(split[0], several[0])


def _signed(layers: jax.Array, threshold: float) -> jax.Array:
    small = jnp.where(layers <= -threshold, -threshold, 0.0)
    return jnp.where(layers >= threshold, threshold, small)


def _largest(layers: jax.Array, fraction: float) -> jax.Array:
    """Of each layer of [layers, entries]."""
    _, places = jax.lax.top_k(jnp.abs(layers), kept_entries(layers.shape[1], fraction))
    values = jnp.take_along_axis(layers, places, axis=1)
    return jnp.put_along_axis(jnp.zeros_like(layers), places, values, axis=1, inplace=False)


def _of_pair(left: jax.Array, right: jax.Array) -> jax.Array:
    """Of [layers, entries]."""
    product = jnp.vecdot(left, right)[:, None]
    shares = [
        jnp.where(norm > 0, 1 - product / (2 * jnp.where(norm > 0, norm, 1.0)), 1.0)
        for norm in (jnp.vecdot(left, left)[:, None], jnp.vecdot(right, right)[:, None])
    ]
    return shares[0] * left + shares[1] * right
