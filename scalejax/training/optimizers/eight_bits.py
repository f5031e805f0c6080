"""Moments of an optimizer in 8 bits, in blocks that each have a scale.

Knows arrays and codes; nothing of what an optimizer does with its moments, which it sees in
float32.

Source: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
"""Largest number of entries, along the last dimension of an array, with one scale. Blocks of the
paper are 2048 entries (256 in current bitsandbytes) of the flattened array; along a dimension, a
sharded array is coded where it lies."""
SMALLEST = 4096
"""Arrays of fewer entries stay in float32 (`min_8bit_size` of bitsandbytes)."""


class InBlocks(NamedTuple):
    """Trees like the parameters."""

    codes: Any
    """uint8, of the shape of the parameter; or the array itself in float32, if it is small."""
    scales: Any
    """float32, largest absolute entry of each block; a single 0 for a small array."""


def dynamic_codes(*, is_signed: bool) -> np.ndarray:
    """The 256 numbers of dynamic tree quantization in order, float32: 0, 1, and for each of seven
    powers of ten twice as many steps as for the one before, with signs or twice as fine.

    Source: Dettmers 2016, arXiv 1511.04561; Dettmers et al. 2021, section 2.2, as in bitsandbytes.
    """
    found = [0.0, 1.0]
    for power in range(7):
        edges = np.linspace(0.1, 1, 2 ** (power + (not is_signed)) + 1)
        steps = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*steps, *(-steps if is_signed else ())]
    return np.sort(np.asarray(found, np.float32))


def kept_in_8_bits(
    inner: optax.GradientTransformation, moments: dict[str, bool]
) -> optax.GradientTransformation:
    """`inner`, which reads and writes moments in float32, with these kept in 8 bits between
    updates.

    Args:
        inner: a transformation whose state is a NamedTuple of trees like the parameters.
        moments: names of its moments, and whether they have signs.
    """

    def coded(state: Any) -> Any:
        made = {name: _coded(getattr(state, name), signed) for name, signed in moments.items()}
        return state._replace(**made)

    def read(state: Any) -> Any:
        made = {name: _read(getattr(state, name), signed) for name, signed in moments.items()}
        return state._replace(**made)

    def init(params: Any) -> Any:
        return coded(inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, read(state), params)
        return updates, coded(state)

    return optax.GradientTransformation(init, update)


def _coded(tree: Any, is_signed: bool) -> InBlocks:
    codes = dynamic_codes(is_signed=is_signed)
    middles = jnp.asarray((codes[:-1] + codes[1:]) / 2)

    def scales_of(leaf: jax.Array) -> jax.Array:
        if leaf.size < SMALLEST:
            return jnp.zeros((1,), jnp.float32)
        return jnp.abs(_in_blocks(leaf)).max(axis=-1)

    def codes_of(leaf: jax.Array, scales: jax.Array) -> jax.Array:
        if leaf.size < SMALLEST:
            return leaf
        shares = _in_blocks(leaf) / jnp.where(scales > 0, scales, 1)[..., None]
        nearest = jnp.searchsorted(middles, shares, method="scan_unrolled").astype(jnp.uint8)
        if not is_signed:  # a second moment of 0 with a nonzero first: an unbounded step
            nearest = jnp.where(shares > 0, jnp.maximum(nearest, 1), nearest)
        return _without_blocks(nearest, leaf.shape)

    scales = jax.tree.map(scales_of, tree)
    return InBlocks(jax.tree.map(codes_of, tree, scales), scales)


def _read(kept: InBlocks, is_signed: bool) -> Any:
    values = jnp.asarray(dynamic_codes(is_signed=is_signed))

    def of_leaf(codes: jax.Array, scales: jax.Array) -> jax.Array:
        if codes.size < SMALLEST:
            return codes
        return _without_blocks(values[_in_blocks(codes)] * scales[..., None], codes.shape)

    return jax.tree.map(of_leaf, kept.codes, kept.scales)


def _in_blocks(leaf: jax.Array) -> jax.Array:
    """[..., blocks, entries], the last block filled up with zeros."""
    *lead, last = leaf.shape
    size = min(BLOCK, last)
    blocks = -(-last // size)
    padded = jnp.pad(leaf, [*[(0, 0)] * len(lead), (0, blocks * size - last)])
    return padded.reshape(*lead, blocks, size)


def _without_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]
