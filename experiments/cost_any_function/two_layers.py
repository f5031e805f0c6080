"""A training step written without scalejax: two layers, batch over one axis, width over another.

Nothing here imports scalejax. `cost.py` costs it on GPUs that are not here.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

ROWS, WIDTH, HIDDEN = 16384, 8192, 32768


def build(mesh):
    """The jitted step and the shapes of its arguments, sharded over `mesh`."""

    def sharded(shape, dtype, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(weights, rows):
        up, down = weights
        return jnp.mean((jax.nn.gelu(rows @ up) @ down - rows).astype(jnp.float32) ** 2)

    def step(weights, rows):
        gradient = jax.grad(loss)(weights, rows)
        return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, gradient)

    weights = (
        sharded((WIDTH, HIDDEN), jnp.bfloat16, None, "width"),
        sharded((HIDDEN, WIDTH), jnp.bfloat16, "width", None),
    )
    rows = sharded((ROWS, WIDTH), jnp.bfloat16, "batch", None)
    kept = jax.tree.map(lambda weight: weight.sharding, weights)
    return jax.jit(step, donate_argnums=0, out_shardings=kept), (weights, rows)
