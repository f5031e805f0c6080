"""Quantisation to 8-bit floating point, and products of quantised operands.

An operand is divided by a scale, so that its largest value is near the largest of the type, rounded
to 8 bits, and multiplied by the scale again in the product. Scales are powers of two, so that these
multiplications are exact, and a CPU, which computes the products in bfloat16, multiplies the same
numbers as the 8-bit units for which XLA's compiler for NVIDIA GPUs recognises the pattern.
Activations and matrices are in e4m3 (largest value 448), gradients in e5m2 (57,344); in the block
formats all are in e4m3.

- "float8": one scale for each operand, from its current values (per-tensor current scaling;
  Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433).
- "float8_delayed": one for each operand, from the largest value (amax) that it had in the last
  steps (per-tensor delayed scaling; `DelayedScaling` of NVIDIA's Transformer Engine, with its
  algorithm "max", a margin of 0 and e5m2 gradients). It is known before the operand is; values
  beyond it become the largest of the type.
- "float8_blockwise": one for every 128 values along the sum, and for every 128 x 128 of a matrix
  (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).
- "mxfp8": one for every 32 values along the sum (Open Compute Project 2023, "OCP Microscaling
  Formats (MX) Specification", version 1.0; Rouhani et al. 2023, arXiv 2310.10537).

Knows arrays; nothing of layers and meshes. Where the compiler shards an operand, its largest value
is over all shards. Where the data axis is manual (`layout.mode` other than "jit", and ZeRO 2,
several microbatches or the noise scale over data), each device along it scales its own rows, except
in "float8_delayed", whose scales are those of all devices. Gradients there, and over context in a
pipeline with a timetable, are those of the loss of a device's own rows or tokens, larger by a
factor of the number of such devices: histories of gradients hold these values, and a run that
resumes with more of these devices clips in its first step.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalejax.config.model import Float8Type

PyTree = Any
"""Nested dicts of arrays."""

_DELAYED: Float8Type = "float8_delayed"
_BLOCKS: dict[Float8Type, int] = {"float8_blockwise": 128, "mxfp8": 32}
"""Values along the sum that share a scale."""

_FRACTION_BITS, _BIAS = 23, 127
_FRACTION = (1 << _FRACTION_BITS) - 1
"""Bits of the fraction of float32, their mask, and the bias of its exponents (IEEE 754)."""


class Quantised(NamedTuple):
    """An array in 8 bits: `values` times `scale`."""

    values: jax.Array
    """Of the array's shape, e4m3 or e5m2."""
    scale: jax.Array
    """A power of two, float32, of a shape that broadcasts."""


def quantised(array: jax.Array, dtype: Any, axes: tuple[int, ...] | None = None) -> Quantised:
    """`array` with one scale for all values, or one for all values along `axes`."""
    top = np.float32(jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(array), axis=axes, keepdims=axes is not None).astype(jnp.float32)
    power, inverse = _power_and_inverse(largest, top)
    # What is not finite stays so: earlier overflow is not hidden.
    scale = jnp.where(jnp.isfinite(largest), power, largest)
    narrow = jnp.clip(array.astype(jnp.float32) * inverse, -top, top)
    return Quantised(narrow.astype(dtype), scale)


def _power_and_inverse(largest: jax.Array, top: np.float32) -> tuple[jax.Array, jax.Array]:
    """The smallest power of two that brings `largest` down to `top`, and 1 over it; computed in
    bits, as exp2 is not exact everywhere, and 0 below the smallest normal number."""
    bits, top_bits = lax.bitcast_convert_type(largest, jnp.int32), top.view(np.int32)
    is_above = (bits & _FRACTION) > (top_bits & _FRACTION)
    biased = (bits >> _FRACTION_BITS) - (top_bits >> _FRACTION_BITS) + is_above + _BIAS
    biased = jnp.clip(biased, 1, 2 * _BIAS - 1)
    power, inverse = (
        lax.bitcast_convert_type(each << _FRACTION_BITS, jnp.float32)
        for each in (biased, 2 * _BIAS - biased)
    )
    return power, inverse


def quantised_by(array: jax.Array, dtype: Any, scale: jax.Array) -> Quantised:
    """`array` with the given scale, whatever its values; what is not finite stays so."""
    top = np.float32(jnp.finfo(dtype).max)
    scaled = array.astype(jnp.float32) * (1 / scale)
    narrow = jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -top, top), scaled)
    return Quantised(narrow.astype(dtype), scale)


def of_tensor(array: jax.Array, dtype: Any, scale: jax.Array | None) -> Quantised:
    """`array` with `scale`, or if that is None with a scale from its values."""
    return quantised(array, dtype) if scale is None else quantised_by(array, dtype, scale)


def amax(array: jax.Array) -> jax.Array:
    """The largest absolute value, float32."""
    return jnp.max(jnp.abs(array)).astype(jnp.float32)


# Delayed scaling: statistics of each linear layer for its input, its matrix and the gradient of its
# output, in this order; part of the state of the run, as those of BatchNorm are.

SCALES, AMAX_HISTORY = "float8_scales", "amax_history"
"""Names of the statistics: the scales of the step, [..., 3], and the largest values of the last
steps, the latest first, [..., 3, steps]."""


def initial_history(lead: tuple[int, ...], steps: int) -> dict[str, jax.Array]:
    """The statistics of a layer before the first step, with scales of 1 as in Transformer Engine;
    `lead` is the leading part of their shape, before that of one layer."""
    return {
        SCALES: jnp.ones((*lead, 3), jnp.float32),
        AMAX_HISTORY: jnp.zeros((*lead, 3, steps), jnp.float32),
    }


def is_scales(path: Sequence[Any]) -> bool:
    """Whether the leaf of a tree at this path holds scales."""
    return any(getattr(entry, "key", None) == SCALES for entry in path)


def scales_of(statistics: PyTree) -> PyTree:
    """The scales among the statistics of a network, None in place of the others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_scales(path) else None, statistics
    )


def with_present_scales(average: PyTree, statistics: PyTree) -> PyTree:
    """The average of statistics over updates, but with the present scales and histories: a mean
    would begin at scales of 1, thousands of times those of matrices, and retain them for long."""

    def chosen(path: Sequence[Any], mean: jax.Array, present: jax.Array) -> jax.Array:
        is_own = any(getattr(entry, "key", None) in (SCALES, AMAX_HISTORY) for entry in path)
        return present if is_own else mean

    return jax.tree_util.tree_map_with_path(chosen, average, statistics)


def with_amaxes(statistics: PyTree, amaxes: PyTree) -> PyTree:
    """The statistics of a network after a step: the step's largest values at the head of the
    histories, and scales from the largest value of each history. A scale stays as it is if its
    history holds only zeros, or a value that is not finite.

    Args:
        statistics: those before the step.
        amaxes: the largest values of the step, in place of the scales as `scales_of` gives them.
    """
    if not isinstance(statistics, dict) or SCALES not in statistics:
        if not isinstance(statistics, dict):
            return statistics
        return {name: with_amaxes(part, amaxes[name]) for name, part in statistics.items()}
    history, scales = statistics[AMAX_HISTORY], statistics[SCALES]
    history = jnp.concatenate([amaxes[SCALES][..., None], history[..., :-1]], axis=-1)
    largest = jnp.max(history, axis=-1)
    tops = (forward_type(_DELAYED), forward_type(_DELAYED), gradient_type(_DELAYED))
    powers = [
        _power_and_inverse(largest[..., index], np.float32(jnp.finfo(dtype).max))[0]
        for index, dtype in enumerate(tops)
    ]
    is_known = jnp.isfinite(largest) & (largest > 0)
    scales = jnp.where(is_known, jnp.stack(powers, axis=-1), scales)
    return {**statistics, SCALES: scales, AMAX_HISTORY: history}


def for_each_use(scales: jax.Array | None, uses: int) -> Iterator[jax.Array | None]:
    """`scales` for each of `uses` products that share them; their largest values are combined."""
    return iter([None] * uses if scales is None else _apart(scales, uses))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apart(scales: jax.Array, uses: int) -> tuple[jax.Array, ...]:
    return (scales,) * uses


_apart.defvjp(
    lambda scales, uses: ((scales,) * uses, None),
    lambda uses, _, amaxes: (jnp.max(jnp.stack(amaxes), axis=0),),
)


def restored(narrow: Quantised, dtype: Any) -> jax.Array:
    """The numbers that `narrow` stands for, in `dtype`, exactly."""
    return narrow.values.astype(dtype) * narrow.scale.astype(dtype)


def forward_type(recipe: Float8Type) -> Any:
    """The 8-bit type of activations and matrices."""
    return jnp.float8_e4m3fn


def gradient_type(recipe: Float8Type) -> Any:
    """The 8-bit type of gradients of activations."""
    return jnp.float8_e4m3fn if recipe in _BLOCKS else jnp.float8_e5m2


def along_sum(
    array: jax.Array,
    letters: str,
    result: str,
    recipe: Float8Type,
    dtype: Any,
    *,
    is_matrix: bool,
    scale: jax.Array | None = None,
) -> jax.Array:
    """`array` rounded to 8 bits as an operand of an einsum, in its own type.

    Args:
        array: the operand.
        letters: its letters in the equation.
        result: the letters of the result; letters of the operand that it lacks are summed over.
        recipe: which values share a scale.
        dtype: the 8-bit type.
        is_matrix: whether it is a matrix of parameters, whose blocks are squares in
            "float8_blockwise".
        scale: the scale in "float8_delayed"; None in the other formats.
    """
    if recipe not in _BLOCKS:
        return restored(of_tensor(array, dtype, scale), array.dtype)
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
