"""Adasum: combines gradients pairwise in a tree over devices, separately for each layer.

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,

which is a + b for orthogonal gradients and (a + b) / 2 for equal ones.

Recursive vector halving: in level l of log2(devices), devices 2^l apart swap halves of their
entries and combine the halves they then both have; an all-gather follows. Each device sends about
as much as in a ring all-reduce, not the whole gradient in every level. Each holds a part of the
products a.b, |a|^2 and |b|^2; their sums over the 2^(l + 1) devices of both sides are three numbers
per layer.

Adasum(a, 0) is a: a device without a row that counts, whose gradient is 0, adds nothing. All others
count alike, however many rows they have: each gradient is that of a step of sequential SGD, which
is as long for a small batch as for a large one.

Source: Maleki et al. 2020, arXiv 2006.02924, sections 3 and 4 (algorithm AdasumRVH); separately for
each layer, as there and in Horovod.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import AdasumConfig
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.gradient_sync.layers import from_layers, layers_of
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync, stateless


@build_gradient_sync.register
def _adasum(config: AdasumConfig, *, stacked: tuple[str, ...]) -> GradientSync:
    return stateless(lambda gradient, _: combined(gradient, stacked))


class _Block(NamedTuple):
    """Columns of the matrix of all layers that belong to one parameter."""

    layers: int
    """Layers in the block."""
    entries: int
    """Entries of one layer."""
    width: int
    """Columns of one layer: its entries over the devices, rounded up."""


def combined(gradient: PyTree, stacked: tuple[str, ...]) -> PyTree:
    """Adasum of the gradients of all devices, whose number must be a power of two.

    Args:
        gradient: of this device, float32.
        stacked: first parts of the paths of parameters whose first dimension counts layers.
    """
    devices, rank = lax.axis_size(DATA), lax.axis_index(DATA)
    layers = layers_of(gradient, stacked)
    shapes = [layer.shape for layer in layers]
    blocks = [_Block(count, size, -(-size // devices)) for count, size in shapes]
    held = jnp.concatenate(
        [_rows(layer, block, devices) for layer, block in zip(layers, blocks, strict=True)], axis=1
    )
    level = 1
    while level < devices:
        held = _combined_with_partner(held, blocks, level, devices, rank)
        level *= 2
    rows = lax.all_gather(held, DATA, tiled=True)
    rows = rows[jnp.array([_reversed_bits(row, devices) for row in range(devices)])]
    return from_layers(_layers(rows, blocks), gradient)


def _rows(layer: jax.Array, block: _Block, devices: int) -> jax.Array:
    """A parameter, [layers, entries], with a row for each device: [devices, columns]."""
    padded = jnp.pad(layer, ((0, 0), (0, block.width * devices - block.entries)))
    return padded.reshape(block.layers, devices, block.width).swapaxes(0, 1).reshape(devices, -1)


def _layers(rows: jax.Array, blocks: list[_Block]) -> list[jax.Array]:
    """The inverse of `_rows` for each block: [layers, entries]."""
    layers = []
    for columns, block in zip(_columns(rows, blocks), blocks, strict=True):
        split = columns.reshape(len(rows), block.layers, block.width).swapaxes(0, 1)
        layers.append(split.reshape(block.layers, -1)[:, : block.entries])
    return layers


def _columns(rows: jax.Array, blocks: list[_Block]) -> list[jax.Array]:
    ends, end = [], 0
    for block in blocks:
        end += block.layers * block.width
        ends.append(end)
    return jnp.split(rows, ends[:-1], axis=1)


def _combined_with_partner(
    held: jax.Array, blocks: list[_Block], level: int, devices: int, rank: jax.Array
) -> jax.Array:
    """Half of this device's rows, combined with those of its partner, `level` devices apart."""
    half, is_right = len(held) // 2, (rank // level) % 2
    own = lax.dynamic_slice_in_dim(held, is_right * half, half)
    sent = lax.dynamic_slice_in_dim(held, (1 - is_right) * half, half)
    pairs = [(device, device ^ level) for device in range(devices)]
    received = lax.ppermute(sent, DATA, pairs)
    left = jnp.where(is_right == 0, own, received)
    right = jnp.where(is_right == 0, received, own)
    sides = ((left, right), (left, left), (right, right))
    products = jnp.stack([_products(one, other, blocks) for one, other in sides])
    both = 2 * level
    groups = [list(range(first, first + both)) for first in range(0, devices, both)]
    product, left_norm, right_norm = lax.psum(products, DATA, axis_index_groups=groups)
    left_factor = _per_column(_coefficient(product, left_norm), blocks)
    right_factor = _per_column(_coefficient(product, right_norm), blocks)
    return left_factor * left + right_factor * right


def pairwise(several: Sequence[PyTree], stacked: tuple[str, ...] = ()) -> PyTree:
    """Adasum of gradients that are all on this device; their number must be a power of two."""
    split = [layers_of(gradient, stacked) for gradient in several]
    while len(split) > 1:
        pairs = zip(split[::2], split[1::2], strict=True)
        split = [list(map(_of_pair, left, right)) for left, right in pairs]
    return from_layers(split[0], several[0])


def _of_pair(left: jax.Array, right: jax.Array) -> jax.Array:
    """Adasum of two gradients of a parameter, [layers, entries]."""
    product = jnp.vecdot(left, right)
    factors = (_coefficient(product, jnp.vecdot(side, side))[:, None] for side in (left, right))
    return next(factors) * left + next(factors) * right


def _coefficient(product: jax.Array, squared_norm: jax.Array) -> jax.Array:
    """1 - a.b / (2 |a|^2) of each layer; 1 if a is 0."""
    is_zero = squared_norm == 0
    return jnp.where(is_zero, 1.0, 1 - product / (2 * jnp.where(is_zero, 1.0, squared_norm)))


def _products(left: jax.Array, right: jax.Array, blocks: list[_Block]) -> jax.Array:
    """Dot products of `left` and `right` of each layer, [layers of all blocks]."""
    sums = [
        columns.reshape(len(left), block.layers, block.width).sum(axis=(0, 2))
        for columns, block in zip(_columns(left * right, blocks), blocks, strict=True)
    ]
    return jnp.concatenate(sums)


def _per_column(per_layer: jax.Array, blocks: list[_Block]) -> jax.Array:
    """One number per layer repeated for each of its columns, [1, columns]."""
    widths = [block.width for block in blocks for _ in range(block.layers)]
    total = sum(widths)
    return jnp.repeat(per_layer, jnp.array(widths), total_repeat_length=total)[None]


def _reversed_bits(number: int, count: int) -> int:
    """`number` with its log2(count) bits reversed: the device that holds the row of that number,
    as the first level splits the rows into the largest parts."""
    width = count.bit_length() - 1
    return int(f"{number:0{width}b}"[::-1], 2) if width else 0
