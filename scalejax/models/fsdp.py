"""Fully sharded data parallelism (FSDP): parameters are all-gathered where they are used.

The compiler may move either the parameters to the rows of the batch or the rows to the
parameters. These functions enforce the first, and its schedule: a matrix is all-gathered for the
forward pass and again for the backward pass, and its gradient is reduce-scattered to the shards of
the parameter (ZeRO 3; Rajbhandari et al. 2020, arXiv 1910.02054). All communication is in the
compute type.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import PartitionSpec

from scalejax.config.model import DecoderRemat, Float8Type
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.float8 import (
    SCALES,
    Quantised,
    along_sum,
    amax,
    forward_type,
    gradient_type,
    initial_history,
    of_tensor,
    restored,
)
from scalejax.models.lora import AdaptedLayer, adapter_specs
from scalejax.models.remat import is_recomputed
from scalejax.models.sharding import (
    axis_size,
    constrained,
    constrained_for_layer,
    constraints,
    is_partly_manual,
)


def _brought(parameter: jax.Array, kept: PartitionSpec) -> jax.Array:
    """`parameter`, all-gathered over fsdp; constrained to its shards first, so that it is gathered
    in its current type, not in the one it was cast from."""
    return constrained(constrained(parameter, kept), _whole(kept))


def _whole(kept: PartitionSpec) -> PartitionSpec:
    """`kept` without fsdp: the sharding of the parameter where it is used."""
    used = []
    for entry in kept:
        names = entry if isinstance(entry, tuple) else (entry,)
        rest = tuple(name for name in names if name is not None and name != FSDP)
        used.append(rest or None)
    return PartitionSpec(*used)


def gathered(table: jax.Array, kept: PartitionSpec) -> jax.Array:
    """`table`, all-gathered over fsdp once for the forward and the backward pass.

    Args:
        table: a parameter in the compute type.
        kept: sharding of the parameter.
    """
    return _gathered(table, kept)  # type: ignore[return-value]  custom_vjp forgets the type


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(table: jax.Array, kept: PartitionSpec) -> jax.Array:
    return _brought(table, kept)


def _gathered_forward(table: jax.Array, kept: PartitionSpec) -> tuple[jax.Array, None]:
    return _brought(table, kept), None


def _gathered_backward(kept: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrained(gradient, kept),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def looked_up(table: jax.Array, indices: jax.Array, used: PartitionSpec) -> jax.Array:
    """Embedding lookup: rows of `table`, one per index; its gradient sums over rows of the batch.

    Left to itself, the compiler would send the gradients of the rows instead, in an all-to-all.

    Args:
        table: an embedding [rows, width], gathered.
        indices: any shape; indices beyond the table are clipped to its last row.
        used: sharding of the gathered table.
    """
    if is_partly_manual() and (parts := axis_size(TENSOR)) > 1 and table.shape[0] % parts == 0:
        return _looked_up_by_part(table, indices, used)  # type: ignore[return-value]  likewise
    return jnp.take(_summed(table, used), indices, axis=0, mode="clip")


_TABLE, _WHOLE = PartitionSpec(TENSOR, None), PartitionSpec()


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _looked_up_by_part(table: jax.Array, indices: jax.Array, used: PartitionSpec) -> jax.Array:
    """Vocabulary-parallel lookup: each device along tensor looks up its shard; the sum is returned.

    The compiler partitions a lookup in this way too, but with a manual data axis and two others
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
    return constrained(_over_tensor(part, specs, _TABLE)(table, indices, gradient), used), None


_looked_up_by_part.defvjp(_looked_up_forward, _looked_up_backward)


def _places(rows: int, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of `indices` are in a device's `rows` of the table, and their local rows, or 0."""
    place = jnp.minimum(indices, rows * jax.lax.axis_size(TENSOR) - 1)
    place -= rows * jax.lax.axis_index(TENSOR)
    is_here = (place >= 0) & (place < rows)
    return is_here, jnp.where(is_here, place, 0)


def _over_tensor(
    part: Callable[..., jax.Array], specs: tuple[PartitionSpec, ...], out: PartitionSpec
) -> Callable[..., jax.Array]:
    """`part` in a `shard_map` over the tensor axis; the other axes are left to the compiler."""
    return jax.shard_map(part, in_specs=specs, out_specs=out, axis_names={TENSOR}, check_vma=False)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(table: jax.Array, used: PartitionSpec) -> jax.Array:
    """`table`, whose gradient is constrained to the table's sharding before accumulation."""
    return table


_summed.defvjp(
    lambda table, used: (table, None), lambda used, _, gradient: (constrained(gradient, used),)
)


def product(
    equation: str, kept: PartitionSpec, activations: jax.Array, kernel: jax.Array
) -> jax.Array:
    """The `einsum` of activations and a matrix that is all-gathered for it, forward and backward.

    Args:
        equation: equation of the einsum.
        kept: sharding of the matrix.
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
    equation: str, kept: PartitionSpec, activations: CustomVJPPrimal, kernel: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array]]:
    """The product, and what its gradients need: no activations if the matrix is frozen."""
    result = _product(equation, kept, activations.value, kernel.value)
    saved = activations.value if kernel.perturbed else None
    return result, (saved, kernel.value)  # type: ignore[return-value]


def _product_backward(
    equation: str,
    kept: PartitionSpec,
    saved: tuple[jax.Array | None, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    activations, kernel = saved
    whole = _brought(kernel, kept)
    if activations is None:  # the matrix is frozen
        operands, result = equation.split("->")
        rows, matrix = operands.split(",")
        return jnp.einsum(f"{result},{matrix}->{rows}", gradient, whole), None
    # A product is linear in either operand; `jax.vjp` would trace it once more for its value.
    to_activations = jax.linear_transpose(lambda x: jnp.einsum(equation, x, whole), activations)
    (of_activations,) = to_activations(gradient)
    to_kernel = jax.linear_transpose(lambda w: jnp.einsum(equation, activations, w), whole)
    (of_kernel,) = to_kernel(gradient)
    return of_activations, constrained(of_kernel, kept)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _float8_product(
    equation: str,
    kept: PartitionSpec | None,
    recipe: Float8Type,
    activations: jax.Array,
    kernel: jax.Array,
    scales: jax.Array | None,
) -> jax.Array:
    """The product in 8-bit floating point (`scalejax.models.float8`): the operands of all three
    products, one forward and two for gradients, are rounded to it; results are not.

    Args:
        equation: equation of the einsum.
        kept: sharding of the matrix, which is all-gathered in each pass, before it is rounded;
            None if it is gathered already.
        recipe: which values share a scale.
        activations: rows of the batch.
        kernel: the matrix, in the type of the activations.
        scales: scales of activations, matrix and gradient in "float8_delayed"; their own gradient
            is the largest values of the three. None in the other formats.
    """
    (rows, matrix), result = _letters(equation)
    whole = kernel if kept is None else _brought(kernel, kept)
    dtype, (of_rows, of_matrix, _) = forward_type(recipe), _each(scales)
    narrow = along_sum(activations, rows, result, recipe, dtype, is_matrix=False, scale=of_rows)
    return jnp.einsum(
        equation,
        narrow,
        along_sum(whole, matrix, result, recipe, dtype, is_matrix=True, scale=of_matrix),
    )


def _each(scales: jax.Array | None) -> Sequence[jax.Array | None]:
    """The scales of activations, matrix and gradient; None where there are none."""
    return (None,) * 3 if scales is None else jnp.unstack(scales)


def _letters(equation: str) -> tuple[tuple[str, str], str]:
    """Letters of the two operands of an einsum, and of its result."""
    operands, result = equation.split("->")
    rows, matrix = operands.split(",")
    return (rows, matrix), result


def _float8_forward(
    equation: str,
    kept: PartitionSpec | None,
    recipe: Float8Type,
    activations: CustomVJPPrimal,
    kernel: CustomVJPPrimal,
    scales: CustomVJPPrimal | None,
) -> tuple[jax.Array, tuple[Any, jax.Array, jax.Array | None, jax.Array | None]]:
    """The product, and what its gradients need: activations in 8 bits where one scale serves both
    products that read them."""
    given = None if scales is None else scales.value
    result = _float8_product(equation, kept, recipe, activations.value, kernel.value, given)
    saved = None
    if kernel.perturbed:
        saved = activations.value
        if recipe in ("float8", "float8_delayed"):
            saved = of_tensor(saved, forward_type(recipe), _each(given)[0])
    largest = None if given is None else amax(activations.value)
    return result, (saved, kernel.value, given, largest)  # type: ignore[return-value]


def _float8_backward(
    equation: str,
    kept: PartitionSpec | None,
    recipe: Float8Type,
    saved: tuple[Any, jax.Array, jax.Array | None, jax.Array | None],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    (rows, matrix), result = _letters(equation)
    activations, kernel, scales, largest = saved
    whole = kernel if kept is None else _brought(kernel, kept)
    forward, backward = forward_type(recipe), gradient_type(recipe)
    _, of_matrix, of_gradient = _each(scales)
    of_activations = jnp.einsum(
        f"{result},{matrix}->{rows}",
        along_sum(gradient, result, rows, recipe, backward, is_matrix=False, scale=of_gradient),
        along_sum(whole, matrix, rows, recipe, forward, is_matrix=True, scale=of_matrix),
    )
    amaxes = None if largest is None else jnp.stack([largest, amax(whole), amax(gradient)])
    if activations is None:  # the matrix is frozen
        return of_activations, None, amaxes
    if isinstance(activations, Quantised):
        narrow = restored(activations, kernel.dtype)
    else:
        narrow = along_sum(activations, rows, matrix, recipe, forward, is_matrix=False)
    of_kernel = jnp.einsum(
        f"{rows},{result}->{matrix}",
        narrow,
        along_sum(gradient, result, matrix, recipe, backward, is_matrix=False, scale=of_gradient),
    )
    of_kernel = of_kernel if kept is None else constrained(of_kernel, kept)
    return of_activations, of_kernel, amaxes


_float8_product.defvjp(_float8_forward, _float8_backward, symbolic_zeros=True)


def _is_summed(kept: PartitionSpec) -> bool:
    """Whether the contraction is sharded over tensor, so that devices hold partial sums."""
    return TENSOR in (kept[0] if isinstance(kept[0], tuple) else (kept[0],))


@jax.custom_vjp
def _with_whole_gradient(product_BSD: jax.Array) -> jax.Array:
    """`product_BSD`, whose gradient is gathered over tensor for all tokens.

    With sequence parallelism the product is reduce-scattered over tokens. Its gradient is gathered
    here once, for the gradients of both operands; left to itself, the compiler would gather the
    operand for the kernel's gradient, and compute all of that on every device.
    """
    return product_BSD


_with_whole_gradient.defvjp(
    lambda product_BSD: (product_BSD, None),
    lambda _, gradient_BSD: (constrained_for_layer(gradient_BSD),),
)


def linear(
    layer: nnx.Linear | nnx.LinearGeneral,
    equation: str,
    kept: PartitionSpec,
    x: jax.Array,
    remat: DecoderRemat,
) -> jax.Array:
    """`layer` applied to `x`, in the type of `x`, with a kernel sharded over fsdp.

    Where the block is recomputed in its backward pass, one all-gather serves recomputation and
    gradients; otherwise the kernel is gathered in each pass, and not saved in between.

    Args:
        layer: a kernel and an optional bias.
        equation: equation of the einsum of `x` and the kernel.
        kept: sharding of the kernel.
        x: rows of the batch, [B, S, ...].
        remat: what the backward pass of the block recomputes.
    """
    bias = None if layer.bias is None else layer.bias[...].astype(x.dtype)
    result = multiplied(
        layer.kernel[...], equation, kept, x, remat, recipe_of(layer), scales_of_layer(layer)
    )
    if (adaptation := adapted(layer, equation, kept, x, remat)) is not None:
        result = result + adaptation
    return result if bias is None else result + jnp.expand_dims(bias, (0, 1))


def adapted(
    layer: nnx.Linear | nnx.LinearGeneral,
    equation: str,
    kept: PartitionSpec,
    x: jax.Array,
    remat: DecoderRemat,
) -> jax.Array | None:
    """What the adapters of `layer` (`scalejax.models.lora`) add to its product with `x`: scale x
    (x A) B; None if it has none. Arguments as for `linear`."""
    if not isinstance(layer, AdaptedLayer):
        return None
    (rows, matrix), result = _letters(equation)
    inputs = "".join(letter for letter in matrix if letter not in result)
    narrow = "".join(letter for letter in rows if letter not in inputs) + "R"
    split_a, split_b = adapter_specs(kept)
    a, b = layer.lora_a[...], layer.lora_b[...]
    narrowed = multiplied(a, f"{rows},{inputs}R->{narrow}", split_a, x, remat)
    outputs = matrix.removeprefix(inputs)
    back = f"{narrow},R{outputs}->{result}"
    return multiplied(b, back, split_b, narrowed * layer.lora_scale, remat)


def recipe_of(layer: nnx.Module) -> Float8Type | None:
    """The 8-bit format of the layer's products; None if they are in the compute type."""
    return getattr(layer, "float8_recipe", None)


def scales_of_layer(layer: nnx.Module) -> jax.Array | None:
    """The scales of a layer in "float8_delayed"; None in other formats."""
    return getattr(layer, SCALES)[...] if recipe_of(layer) == "float8_delayed" else None


def in_float8(network: nnx.Module, recipe: Float8Type, history: int) -> None:
    """Compute the linear layers of the blocks of `network` in 8-bit floating point, with `history`
    steps remembered in "float8_delayed"."""
    for path, layer in nnx.iter_modules(network):
        if path and path[0] == "blocks" and isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            layer.float8_recipe = recipe  # type: ignore[attr-defined]  a static attribute more
            if recipe == "float8_delayed":
                layers = layer.kernel[...].shape[:1]
                for name, value in initial_history(layers, history).items():
                    setattr(layer, name, nnx.BatchStat(value))


def multiplied(
    kernel: jax.Array,
    equation: str,
    kept: PartitionSpec,
    x: jax.Array,
    remat: DecoderRemat,
    recipe: Float8Type | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """The product of `x` and a kernel sharded over fsdp, in the 8-bit format `recipe` if there is
    one, with its `scales` in "float8_delayed"; other arguments as for `linear`."""
    kernel = kernel.astype(x.dtype)
    is_gathered = is_recomputed(remat)
    result: jax.Array
    if recipe is not None:
        brought = gathered(kernel, kept) if is_gathered else kernel
        used = None if is_gathered else kept
        result = _float8_product(  # type: ignore[assignment]
            equation, used, recipe, x, brought, scales
        )
    elif is_gathered:
        result = jnp.einsum(equation, x, gathered(kernel, kept))
    else:
        result = product(equation, kept, x, kernel)
    if constraints().is_sequence_parallel and _is_summed(kept):
        result = _with_whole_gradient(result)
    return result
