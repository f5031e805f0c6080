"""Two-bit compression: entries are sent as threshold, 0 or -threshold, 16 in a 32-bit word.

Every device receives the words of all others and adds the decoded values; the sums do not fit into
two bits, so that an all-reduce is impossible.

Source: MXNet's kvstore, `set_gradient_compression({"type": "2bit"})` (apache/incubator-mxnet#8662).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from scalejax.config.gradient_sync import TwoBitConfig
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync, compressed

_PER_WORD = 16
_UP, _DOWN = 1, 2
"""Codes of threshold and -threshold; the code of 0 is 0."""


@build_gradient_sync.register
def _two_bit(config: TwoBitConfig, **_: object) -> GradientSync:
    return compressed(  # the weighted gradient times rows.mean is the sum over rows
        lambda weighted, rows: synchronised(weighted, config.threshold / rows.mean),
        config.error_feedback,
    )


def synchronised(gradient: PyTree, threshold: jax.Array | float) -> tuple[PyTree, PyTree]:
    """The mean of what all devices sent, and what this one sent.

    Args:
        gradient: of this device, float32.
        threshold: smallest magnitude of an entry that is sent, and the magnitude it is sent as.
    """
    entries, shaped = ravel_pytree(gradient)
    codes = jnp.where(entries >= threshold, _UP, jnp.where(entries <= -threshold, _DOWN, 0))
    words = lax.all_gather(_packed(codes), DATA)
    total = _signs(_unpacked(words)).sum(axis=0).reshape(-1)[: entries.size]
    mean = total.astype(jnp.float32) * (threshold / lax.axis_size(DATA))
    return shaped(mean), shaped(_signs(codes).astype(jnp.float32) * threshold)


def _signs(codes: jax.Array) -> jax.Array:
    """1, 0 and -1, int32, of codes."""
    return (codes == _UP).astype(jnp.int32) - (codes == _DOWN).astype(jnp.int32)


def _shifts() -> jax.Array:
    return jnp.arange(0, 2 * _PER_WORD, 2, dtype=jnp.uint32)


def _packed(codes: jax.Array) -> jax.Array:
    """Words, uint32 [entries / 16 rounded up], of codes [entries]."""
    padded = jnp.pad(codes.astype(jnp.uint32), (0, -codes.size % _PER_WORD))
    places = padded.reshape(-1, _PER_WORD) << _shifts()[None]
    return places.sum(axis=1, dtype=jnp.uint32)  # the bits are disjoint: no carry


def _unpacked(words: jax.Array) -> jax.Array:
    """Codes [devices, words, 16] of words [devices, words]."""
    return (words[..., None] >> _shifts()[None, None]) & 3
