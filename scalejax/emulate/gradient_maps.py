"""What becomes of gradients on their way: compressed by their worker, or combined by Adasum.

On trees of arrays, leaf by leaf; knows no workers. Sources: MXNet's kvstore,
`set_gradient_compression` (two_bit); Horovod's `Compression.fp16`; Stich et al. 2018, arXiv
1809.07599, algorithm 1 (top_k with memory); Maleki et al. 2020, arXiv 2006.02924 (Adasum).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def compressed(
    method: str, number: float, gradient: PyTree, residual: PyTree | None
) -> tuple[PyTree, PyTree]:
    """What arrives of `gradient` and what was left of those before, and what is left now.

    Args:
        method: fp16; two_bit: `number`, 0 or -`number`; top_k: that part of a leaf's entries, those
            of the largest size, at least one if it has any.
        number: of the method; it is fixed, as a program depends on it.
        gradient: float32.
        residual: what was left; None for nothing.
    """
    if residual is not None:
        gradient = jax.tree.map(jnp.add, gradient, residual)
    ways = {
        "fp16": lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype),
        "two_bit": partial(_signed, threshold=number),
        "top_k": partial(_largest, fraction=number),
    }
    sent = jax.tree.map(ways[method], gradient)
    return sent, jax.tree.map(jnp.subtract, gradient, sent)


def kept_entries(entries: int, fraction: float) -> int:
    """How many of them top_k sends."""
    return min(entries, max(1, math.ceil(fraction * entries)))


def adasum(several: Sequence[PyTree]) -> PyTree:
    """One gradient of a power of two of them: of neighbours, of neighbouring pairs, and so on."""
    while len(several) > 1:
        pairs = zip(several[::2], several[1::2], strict=True)
        several = [jax.tree.map(_of_pair, left, right) for left, right in pairs]
    return several[0]


def _signed(leaf: jax.Array, threshold: float) -> jax.Array:
    return jnp.where(leaf >= threshold, threshold, jnp.where(leaf <= -threshold, -threshold, 0.0))


def _largest(leaf: jax.Array, fraction: float) -> jax.Array:
    entries = leaf.reshape(-1)
    _, places = jax.lax.top_k(jnp.abs(entries), kept_entries(entries.size, fraction))
    return jnp.zeros_like(entries).at[places].set(entries[places]).reshape(leaf.shape)


def _of_pair(left: jax.Array, right: jax.Array) -> jax.Array:
    product = jnp.vdot(left, right)
    shares = [
        jnp.where(norm > 0, 1 - product / (2 * jnp.where(norm > 0, norm, 1.0)), 1.0)
        for norm in (jnp.vdot(left, left), jnp.vdot(right, right))
    ]
    return shares[0] * left + shares[1] * right
