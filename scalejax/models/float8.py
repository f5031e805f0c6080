"""Quantisation to 8-bit floating point, and products of quantised operands.

An operand is divided by a scale, so that its largest value is near the largest of the type, rounded
to 8 bits, and multiplied by the scale again in the product. Scales are powers of two, so that these
multiplications are exact, and the products of a CPU, which computes them in bfloat16, are of the
same numbers as those of 8-bit units, into which XLA's compiler for NVIDIA GPUs turns the pattern.
Activations and matrices are in e4m3 (largest value 448), gradients in e5m2 (57,344); in the block
formats all are in e4m3.

- "float8": one scale for each operand, of its present values (per-tensor current scaling;
  Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433).
- "float8_blockwise": one for 128 values along the sum, and for 128 x 128 of a matrix
  (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).
- "mxfp8": one for 32 values along the sum (Open Compute Project 2023, "OCP Microscaling Formats
  (MX) Specification", version 1.0; Rouhani et al. 2023, arXiv 2310.10537).

Knows arrays; nothing of layers and meshes. Where the compiler shards an operand, its largest value
is that of all shards. Where the data axis is manual (`layout.mode` other than "jit", and ZeRO 2,
several microbatches or the noise scale over data), each device along it scales its own rows.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.config.model import Float8Type

_BLOCKS: dict[Float8Type, int] = {"float8_blockwise": 128, "mxfp8": 32}
"""Values along the sum that share a scale."""

_FRACTION_BITS, _BIAS = 23, 127
_FRACTION = (1 << _FRACTION_BITS) - 1
"""Of float32: bits of the fraction, their mask, and what is added to its exponents (IEEE 754)."""


class Quantised(NamedTuple):
    """An array in 8 bits: `values` times `scale`."""

    values: jax.Array
    """Of the array's shape, e4m3 or e5m2."""
    scale: jax.Array
    """A power of two, float32, of a shape that broadcasts."""


def quantised(array: jax.Array, dtype: Any, axes: tuple[int, ...] | None = None) -> Quantised:
    """`array` with one scale for all values, or for those along each of `axes`."""
    top = np.float32(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(array), axis=axes, keepdims=axes is not None).astype(jnp.float32)
    # The least power of two that brings `largest` down to `top`, in bits: exp2 is not exact
    # everywhere, and 0 below its least normal number.
    bits, top_bits = lax.bitcast_convert_type(largest, jnp.int32), top.view(np.int32)
    is_above = (bits & _FRACTION) > (top_bits & _FRACTION)
    biased = (bits >> _FRACTION_BITS) - (top_bits >> _FRACTION_BITS) + is_above + _BIAS
    biased = jnp.clip(biased, 1, 2 * _BIAS - 1)
    power, inverse = (
        lax.bitcast_convert_type(each << _FRACTION_BITS, jnp.float32)
        for each in (biased, 2 * _BIAS - biased)
    )
    # Not finite stays so: what overflowed before is not hidden.
    scale = jnp.where(jnp.isfinite(largest), power, largest)
    narrow = jnp.clip(array.astype(jnp.float32) * inverse, -top, top)
    return Quantised(narrow.astype(dtype), scale)


def restored(narrow: Quantised, dtype: Any) -> jax.Array:
    """The numbers that `narrow` stands for, in `dtype`, exactly."""
    return narrow.values.astype(dtype) * narrow.scale.astype(dtype)


def forward_type(recipe: Float8Type) -> Any:
    """The 8-bit type of activations and matrices."""
    return jnp.float8_e4m3fn


def gradient_type(recipe: Float8Type) -> Any:
    """The 8-bit type of gradients of activations."""
    return jnp.float8_e5m2 if recipe == "float8" else jnp.float8_e4m3fn


def along_sum(
    array: jax.Array, letters: str, result: str, recipe: Float8Type, dtype: Any, *, is_matrix: bool
) -> jax.Array:
    """`array` rounded to 8 bits as an operand of an einsum, in its own type.

    Args:
        array: the operand.
        letters: its letters in the equation.
        result: the letters of the result: those of the operand that it lacks are summed over.
        recipe: which values share a scale.
        dtype: the 8-bit type.
        is_matrix: whether it is a matrix of parameters, whose blocks are squares in
            "float8_blockwise".
    """
    if recipe == "float8":
        return restored(quantised(array, dtype), array.dtype)
    summed = [axis for axis, letter in enumerate(letters) if letter not in result]
    kept = [axis for axis in range(array.ndim) if axis not in summed]
    block = _BLOCKS[recipe]
    rows = block if is_matrix and recipe == "float8_blockwise" else 1
    order = (*kept, *summed)
    moved = array.transpose(order)
    plane = moved.reshape(math.prod(array.shape[axis] for axis in kept), -1)
    in_blocks = _split(_split(plane, 0, rows), 2, block)
    narrow = restored(quantised(in_blocks, dtype, axes=(1, 3)), array.dtype)
    height, _, width, _ = in_blocks.shape
    plane = narrow.reshape(height * rows, width * block)[: plane.shape[0], : plane.shape[1]]
    back = sorted(range(array.ndim), key=lambda axis: order[axis])
    return plane.reshape(moved.shape).transpose(back)


def _split(array: jax.Array, axis: int, block: int) -> jax.Array:
    """`array` with `axis` in blocks, the last one filled with zeros, which set no scale."""
    size = array.shape[axis]
    missing = -size % block
    padding = [(0, missing if each == axis else 0) for each in range(array.ndim)]
    shape = (*array.shape[:axis], -1, block, *array.shape[axis + 1 :])
    return jnp.pad(array, padding).reshape(shape)
