"""A number for each array of a tree, by which arrays that were read are known to be those written.

Storage formats keep checksums of their indices, not of the numbers themselves: a bit that turned
on disk would be trained on. Knows trees of arrays; no files.
"""

from typing import Any

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B1  # odd, and its multiples are spread: 2**32 over the golden ratio, Knuth 6.4


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of each array of `tree`, by its path: the same on whatever mesh it lies.

    The sum over elements of (bits + 1) * (odd number of the position), modulo 2**32: whole numbers,
    so that the order of addition does not count. One element that changes always changes it; any
    other damage goes unseen once in 2**32. A pass over the tree on the devices; every process must
    call it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {path: int(each) for path, each in zip(paths, sums, strict=True)}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [checksum(array) for array in arrays]


def checksum(array: jax.Array) -> jax.Array:
    """That of one array, as a program computes it: uint32 []."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = min(array.dtype.itemsize, 4)  # wider numbers become two words each
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * width}").astype(jnp.uint32)
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += index * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    odd = (position * jnp.uint32(2) + jnp.uint32(1)) * jnp.uint32(_GOLDEN)
    return jnp.sum((bits + jnp.uint32(1)) * odd, dtype=jnp.uint32)
