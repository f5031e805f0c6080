"""One update of a network that is divided among devices: locally or fully connected.

As in Dean et al. 2012, section 3 and figure 3: layers whose units see their neighbourhood alone
need little of other devices, and those that see everything need all. Nothing here imports
scalejax.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

MINIBATCH = 32
LAYERS, FIELD, MAPS = 3, 8, 8
"""Of a locally connected network: a unit sees FIELD x FIELD x MAPS units of the layer below."""
WIDTHS = (440, 2560, 2560, 2560, 2560, 8192)
"""Of the fully connected one: the speech network of the paper, 42 million parameters."""
AXIS = "parts"


def build_full(mesh):
    """Five layers, each divided by its outputs, or by its inputs, which then are added up."""

    def loss(weights, rows):
        hidden = rows
        for number, weight in enumerate(weights):
            hidden = hidden.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)
            hidden = jax.nn.relu(hidden) if number < len(weights) - 1 else hidden
        return jnp.mean(hidden.astype(jnp.float32) ** 2)

    weights = []
    for number, shape in enumerate(pairwise(WIDTHS)):
        axes = (None, AXIS) if number % 2 == 0 else (AXIS, None)
        weights.append(_sharded(mesh, shape, *axes))
    return _step(loss, weights), (weights, _sharded(mesh, (MINIBATCH, WIDTHS[0]), None, None))


def _build_local(side, mesh):
    """Three layers of SIDE x SIDE places with weights of their own, whose rows are divided; a
    device gets of its neighbour the rows that its last units see."""
    places, spread = PartitionSpec(AXIS), PartitionSpec(None, AXIS)

    @partial(jax.shard_map, mesh=mesh, in_specs=(places, spread), out_specs=spread)
    def layer(weight, units):  # [rows, side, FIELD^2 MAPS, MAPS], [samples, rows, side, MAPS]
        size = lax.axis_size(AXIS)
        above = [(number, number - 1) for number in range(1, size)]
        halo = lax.ppermute(units[:, : FIELD - 1], AXIS, above) if size > 1 else units[:, :0]
        rows = units.shape[1]
        seen = jnp.concatenate([units, halo], axis=1)
        seen = jnp.pad(
            seen, ((0, 0), (0, rows + FIELD - 1 - seen.shape[1]), (0, FIELD - 1), (0, 0))
        )
        patches = [
            seen[:, down : down + rows, right : right + side]
            for down in range(FIELD)
            for right in range(FIELD)
        ]
        fields = jnp.concatenate(patches, axis=-1)
        return jnp.einsum("brsf,rsfm->brsm", fields, weight.astype(jnp.bfloat16))

    def loss(weights, images):
        units = images
        for number, weight in enumerate(weights):
            units = layer(weight, units)
            units = jax.nn.relu(units) if number < LAYERS - 1 else units
        return jnp.mean(units.astype(jnp.float32) ** 2)

    shape = (side, side, FIELD**2 * MAPS, MAPS)
    weights = [_sharded(mesh, shape, AXIS) for _ in range(LAYERS)]
    images = _sharded(mesh, (MINIBATCH, side, side, MAPS), None, AXIS, dtype=jnp.bfloat16)
    return _step(loss, weights), (weights, images)


build_64, build_128, build_256, build_384 = (
    partial(_build_local, side) for side in (64, 128, 256, 384)
)


def _sharded(mesh, shape, *axes, dtype=jnp.float32):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _step(loss, weights):
    def step(weights, samples):
        gradient = jax.grad(loss)(weights, samples)
        return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, gradient)

    kept = jax.tree.map(lambda weight: weight.sharding, weights)
    return jax.jit(step, donate_argnums=0, out_shardings=kept)
