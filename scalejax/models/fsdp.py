"""Parameters that are kept in parts over fsdp: gathered where they are used, and never kept whole.

The compiler may move either the parameters to the rows of the batch or the rows to the
parameters. A network settles here for the first, and for when: a matrix is gathered for the
forward pass, gathered again for the backward pass, and its gradient is summed to where the
parameter is kept (ZeRO 3; Rajbhandari et al. 2020, arXiv 1910.02054). All of it travels in the
compute type.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from scalejax.config.model import Remat
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.sharding import (
    axis_size,
    constraints,
    is_data_manual,
    placed,
    placed_for_layer,
)


def _brought(parameter: jax.Array, kept: PartitionSpec) -> jax.Array:
    """`parameter` where it is used; held in its parts first, so that it travels as it is here and
    not as what it was converted from."""
    return placed(placed(parameter, kept), _whole(kept))


def _whole(kept: PartitionSpec) -> PartitionSpec:
    """`kept` without fsdp: how the parameter lies where it is used."""
    used = []
    for entry in kept:
        names = entry if isinstance(entry, tuple) else (entry,)
        rest = tuple(name for name in names if name is not None and name != FSDP)
        used.append(rest or None)
    return PartitionSpec(*used)


def gathered(table: jax.Array, kept: PartitionSpec) -> jax.Array:
    """`table`, gathered over fsdp, for a use that keeps it until the backward pass.

    Args:
        table: a parameter in the compute type.
        kept: how the parameter is split.
    """
    return _gathered(table, kept)  # type: ignore[return-value]  custom_vjp forgets the type


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(table: jax.Array, kept: PartitionSpec) -> jax.Array:
    return _brought(table, kept)


def _gathered_forward(table: jax.Array, kept: PartitionSpec) -> tuple[jax.Array, None]:
    return _brought(table, kept), None


def _gathered_backward(kept: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (placed(gradient, kept),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def looked_up(table: jax.Array, indices: jax.Array, used: PartitionSpec) -> jax.Array:
    """Rows of `table`, one per index; the gradient is a sum over rows of the batch.

    Left to itself, the compiler would move the gradients of the rows instead, all to all.

    Args:
        table: an embedding [rows, width], gathered.
        indices: of any shape; those beyond the table mean its last row.
        used: how the gathered table is split.
    """
    if is_data_manual() and (parts := axis_size(TENSOR)) > 1 and table.shape[0] % parts == 0:
        return _looked_up_by_part(table, indices, used)  # type: ignore[return-value]  likewise
    return jnp.take(_summed(table, used), indices, axis=0, mode="clip")


_TABLE, _WHOLE = PartitionSpec(TENSOR, None), PartitionSpec()


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _looked_up_by_part(table: jax.Array, indices: jax.Array, used: PartitionSpec) -> jax.Array:
    """Every device along tensor looks up what its part of the table holds, and all add up.

    It is what the compiler makes of a lookup too; beside a data axis of our own and two others
    its partitioner aborts (XLA's spmd_partitioner_util.cc:497, jax 0.10.2).
    """

    def part(table: jax.Array, indices: jax.Array) -> jax.Array:
        is_here, place = _places(table.shape[0], indices)
        found = jnp.take(table, place, axis=0)
        return jax.lax.psum(jnp.where(is_here[..., None], found, 0), TENSOR)

    return _over_tensor(part, (_TABLE, _WHOLE), _WHOLE)(table, indices)


def _looked_up_forward(
    table: jax.Array, indices: jax.Array, used: PartitionSpec
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _looked_up_by_part(table, indices, used), (table, indices)  # type: ignore[return-value]


def _looked_up_backward(
    used: PartitionSpec, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    table, indices = saved

    def part(table: jax.Array, indices: jax.Array, gradient: jax.Array) -> jax.Array:
        is_here, place = _places(table.shape[0], indices)
        own = jnp.where(is_here[..., None], gradient, 0)
        return jnp.zeros_like(table).at[place].add(own)

    specs = (_TABLE, _WHOLE, _WHOLE)
    return placed(_over_tensor(part, specs, _TABLE)(table, indices, gradient), used), None


_looked_up_by_part.defvjp(_looked_up_forward, _looked_up_backward)


def _places(rows: int, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of `indices` a device's `rows` of the table hold, and where; 0 for the others."""
    place = jnp.minimum(indices, rows * jax.lax.axis_size(TENSOR) - 1)
    place -= rows * jax.lax.axis_index(TENSOR)
    is_here = (place >= 0) & (place < rows)
    return is_here, jnp.where(is_here, place, 0)


def _over_tensor(
    part: Callable[..., jax.Array], specs: tuple[PartitionSpec, ...], out: PartitionSpec
) -> Callable[..., jax.Array]:
    """`part`, run by each device along tensor for itself; the other axes as they are."""
    return jax.shard_map(part, in_specs=specs, out_specs=out, axis_names={TENSOR}, check_vma=False)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(table: jax.Array, used: PartitionSpec) -> jax.Array:
    """`table`, whose gradient is held as the table is before it is added to others."""
    return table


_summed.defvjp(
    lambda table, used: (table, None), lambda used, _, gradient: (placed(gradient, used),)
)


def product(
    equation: str, kept: PartitionSpec, activations: jax.Array, kernel: jax.Array
) -> jax.Array:
    """The `einsum` of activations and a matrix that is gathered for it, forward and backward.

    Args:
        equation: of the einsum.
        kept: how the matrix is split.
        activations: rows of the batch.
        kernel: the matrix, in the type of the activations.
    """
    return _product(equation, kept, activations, kernel)  # type: ignore[return-value]  likewise


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    equation: str, kept: PartitionSpec, activations: jax.Array, kernel: jax.Array
) -> jax.Array:
    return jnp.einsum(equation, activations, _brought(kernel, kept))


def _product_forward(
    equation: str, kept: PartitionSpec, activations: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(equation, kept, activations, kernel), (activations, kernel)  # type: ignore[return-value]


def _product_backward(
    equation: str,
    kept: PartitionSpec,
    saved: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    activations, kernel = saved
    whole = _brought(kernel, kept)
    # A product is linear in either operand; `jax.vjp` would trace it once more for its value.
    to_activations = jax.linear_transpose(lambda x: jnp.einsum(equation, x, whole), activations)
    to_kernel = jax.linear_transpose(lambda w: jnp.einsum(equation, activations, w), whole)
    (of_activations,), (of_kernel,) = to_activations(gradient), to_kernel(gradient)
    return of_activations, placed(of_kernel, kept)


_product.defvjp(_product_forward, _product_backward)


def _is_summed(kept: PartitionSpec) -> bool:
    """Whether devices along tensor each make a summand of the product, not a part of it."""
    return TENSOR in (kept[0] if isinstance(kept[0], tuple) else (kept[0],))


@jax.custom_vjp
def _with_whole_gradient(product_BSD: jax.Array) -> jax.Array:
    """`product_BSD`, whose gradient each device along tensor has for all tokens.

    In a sequence-parallel run the sum is scattered over tokens. Its gradient is gathered here,
    once, for the gradients of both operands; left to itself the compiler gathers the operand
    for that of the kernel, and computes the whole of it everywhere.
    """
    return product_BSD


_with_whole_gradient.defvjp(
    lambda product_BSD: (product_BSD, None),
    lambda _, gradient_BSD: (placed_for_layer(gradient_BSD),),
)


def linear(
    layer: nnx.Linear | nnx.LinearGeneral,
    equation: str,
    kept: PartitionSpec,
    x: jax.Array,
    remat: Remat,
) -> jax.Array:
    """`layer` applied to `x` in its type, the kernel being kept in parts.

    Where the block is computed again in its backward pass, the kernel that is gathered for that
    serves both; else it is gathered for each, and not kept in between.

    Args:
        layer: a kernel, and maybe a bias.
        equation: of the einsum of `x` and the kernel.
        kept: how the kernel is split.
        x: rows of the batch, [B, S, ...].
        remat: what the backward pass of the block computes again.
    """
    bias = None if layer.bias is None else layer.bias[...].astype(x.dtype)
    result = multiplied(layer.kernel[...], equation, kept, x, remat)
    return result if bias is None else result + jnp.expand_dims(bias, (0, 1))


def multiplied(
    kernel: jax.Array, equation: str, kept: PartitionSpec, x: jax.Array, remat: Remat
) -> jax.Array:
    """The product of `x` and a kernel that is kept in parts; the rest as for `linear`."""
    kernel = kernel.astype(x.dtype)
    if remat in ("selective_op", "full"):
        result = jnp.einsum(equation, x, gathered(kernel, kept))
    else:
        result = product(equation, kept, x, kernel)
    if constraints().is_sequence_parallel and _is_summed(kept):
        result = _with_whole_gradient(result)
    return result
