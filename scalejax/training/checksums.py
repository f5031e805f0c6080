"""Checksums of arrays, by which restored arrays are verified and replicas are compared.

Knows arrays; no files and no processes.
"""

from typing import Any

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B1  # odd, and its multiples are spread: 2**32 over the golden ratio, Knuth 6.4


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of each array of `tree`, by its path; independent of its sharding.

    The sum over elements of (bits + 1) * (odd number of the position), modulo 2**32: integers, so
    that the order of addition does not matter. A change of one element always changes it; any
    other damage is missed with probability 2**-32. One pass over the tree on the devices; every
    process must call it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {path: int(each) for path, each in zip(paths, sums, strict=True)}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    # If optimizer state is offloaded, its checksums are computed on the device too.
    return [checksum(jax.device_put(array, jax.memory.Space.Device)) for array in arrays]


def checksum(array: jax.Array) -> jax.Array:
    """The checksum of one array, uint32 []; for use in traced code."""
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
