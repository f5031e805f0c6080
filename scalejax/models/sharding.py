"""Sharding constraints of activations while a network is computed.

A network states here over which axes its activations are sharded; the mesh, and how the run
divides tokens and microbatches, are in the context. Without a mesh these functions do nothing.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from scalejax.config.parallelism import (
    AXES,
    BATCH_AXES,
    CONTEXT,
    DATA,
    EXPERT,
    PIPELINE,
    TENSOR,
    ContextStrategy,
)
from scalejax.core.errors import ConfigError, refusal, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConstraints:
    """How a run divides tokens and microbatches, as far as a network needs to know."""

    is_sequence_parallel: bool = False
    """Whether tokens are sharded over the tensor axis between layers (sequence parallelism)."""
    microbatches: int = 1
    """Microbatches that a pipeline splits the rows into."""
    chunks: int = 1
    """Pipeline chunks (virtual stages) per stage."""
    context_strategy: ContextStrategy = "all_gather"
    """How attention sees tokens of other context shards."""
    is_zigzag: bool = False
    """Whether the tokens of a sample are in the order of `zigzag_chunks` throughout the step."""


_CONSTRAINTS: ContextVar[ShardingConstraints | None] = ContextVar("constraints", default=None)


@contextmanager
def sharding_context(mesh: AbstractMesh, constraints: ShardingConstraints) -> Iterator[None]:
    """Context in which networks are traced for `mesh` and `constraints`."""
    token = _CONSTRAINTS.set(constraints)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        _CONSTRAINTS.reset(token)


def constraints() -> ShardingConstraints:
    """The sharding constraints of the context; the defaults outside of one."""
    return _CONSTRAINTS.get() or ShardingConstraints()


def axis_size(axis: str) -> int:
    """Devices along `axis` of the mesh in the context; 1 without such a mesh, and 1 along the
    pipeline axis within a stage."""
    mesh = jax.sharding.get_abstract_mesh()
    is_stage = axis == PIPELINE and PIPELINE in mesh.manual_axes
    return mesh.shape[axis] if is_of_layout(mesh) and not is_stage else 1


def is_partly_manual() -> bool:
    """Whether the data axis or the pipeline is manual: the network is traced in a `shard_map` over
    the shards of the batch, or over the stages."""
    return not {DATA, PIPELINE}.isdisjoint(jax.sharding.get_abstract_mesh().manual_axes)


def constrained(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`array` constrained to `spec`; a dimension that its axes do not divide is not sharded.

    Where parameters are sharded over fsdp, the compiler may move either the parameters to the rows
    of the batch or the rows to the parameters; this constraint enforces the first. It needs the
    mesh in the context (`jax.sharding.use_abstract_mesh`), and changes nothing without a mesh of a
    `Layout`, or where its axes are manual (`shard_map`). The data, pipeline, expert and context
    axes may be manual: each shard of the batch, or stage, is then constrained over the other axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not is_of_layout(mesh):
        return array
    spec = without(mesh.manual_axes, spec)
    return jax.lax.with_sharding_constraint(
        array, divisible("an activation", spec, array.shape, mesh.shape)
    )


def without(axes: Collection[str], spec: PartitionSpec) -> PartitionSpec:
    """`spec` without `axes`."""
    return PartitionSpec(
        *(
            tuple(name for name in entry if name not in axes)
            if isinstance(entry, tuple)
            else None
            if entry in axes
            else entry
            for entry in spec
        )
    )


def per_device(layer: nnx.Module, rows: jax.Array) -> jax.Array:
    """`layer(rows)` for `rows` [batch, ...], computed in a `shard_map` by every device for its own
    rows, with replicated parameters; plain `layer(rows)` where `constrained` changes nothing.

    For layers that XLA cannot partition: in a depthwise convolution whose rows are sharded over
    data and replicated over tensor, it adds the replicas to the gradient of the kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not is_of_layout(mesh) or mesh.manual_axes:
        return layer(rows)  # type: ignore[operator]  a layer
    structure, params = nnx.split(layer)

    def apply(params: nnx.State, rows: jax.Array) -> jax.Array:
        return nnx.merge(structure, params)(rows)

    split = PartitionSpec(BATCH_AXES)
    specs = (PartitionSpec(), split)
    return jax.shard_map(apply, in_specs=specs, out_specs=split)(params, rows)


def is_of_layout(mesh: AbstractMesh) -> bool:
    """Whether `mesh` has the axes of a `Layout`, all of type Auto, or all but data, pipeline,
    expert and context."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in (DATA, PIPELINE, EXPERT, CONTEXT):
        if kinds.get(axis) == AxisType.Manual:
            kinds[axis] = AxisType.Auto
    return all(kinds.get(axis) == AxisType.Auto for axis in AXES)


def constrained_by_row(activations: jax.Array) -> jax.Array:
    """`activations` [batch, ...] with rows sharded over the batch axes; the other dimensions are
    left to the compiler."""
    rest = (PartitionSpec.UNCONSTRAINED,) * (activations.ndim - 1)
    return constrained(activations, PartitionSpec(BATCH_AXES, *rest))


def constrained_residual(x_BSD: jax.Array) -> jax.Array:
    """Activations between layers [batch, tokens, width]: rows sharded over the batch axes, tokens
    over context, and over tensor too with sequence parallelism."""
    axes = _token_axes(is_shared=constraints().is_sequence_parallel)
    return _constrained_tokens(x_BSD, axes)


def constrained_for_layer(x_BSD: jax.Array) -> jax.Array:
    """The input of a tensor-parallel layer, with the tokens of each context shard gathered over
    tensor; unchanged without sequence parallelism."""
    if not constraints().is_sequence_parallel:
        return x_BSD
    return _constrained_tokens(x_BSD, _token_axes(is_shared=False))


def constrained_for_head(activations: jax.Array) -> jax.Array:
    """Input or output of the output layer [batch, tokens, width or vocabulary]: rows sharded over
    the batch axes, tokens over context and over the pipeline, whose stages share the layer."""
    axes = _token_axes(is_shared=False)
    return _constrained_tokens(activations, (*axes, PIPELINE) if axis_size(PIPELINE) > 1 else axes)


def constrained_between(activations: jax.Array) -> jax.Array:
    """Intermediate activations of a tensor-parallel layer [batch, tokens, heads or inner width,
    ...], sharded over tensor, as with sequence parallelism the compiler might shard the tokens
    instead; unchanged without it."""
    if not constraints().is_sequence_parallel:
        return activations
    rest = (None,) * (activations.ndim - 3)
    axes = _token_axes(is_shared=False) or None
    return constrained(activations, PartitionSpec(BATCH_AXES, axes, TENSOR, *rest))


def constrained_keys(k_BTHK: jax.Array) -> jax.Array:
    """Keys or values [batch, tokens, heads, size] gathered over context; unchanged without context
    parallelism."""
    if axis_size(CONTEXT) == 1 or _has_own_tokens():
        return of_all_tokens(k_BTHK)
    return constrained(k_BTHK, PartitionSpec(BATCH_AXES, None, TENSOR, None))


def is_zigzag() -> bool:
    """Whether tokens are in the order of `zigzag_chunks`, in which attention proceeds by blocks."""
    return constraints().is_zigzag and axis_size(CONTEXT) > 1


def zigzag_chunks(shards: int) -> np.ndarray:
    """The chunks of a sample, twice as many as `shards`, in the order in which shards hold them:
    shard i holds chunks i and 2 shards - 1 - i, so that all have the same part of causal scores
    (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2).

    Example:
        >>> from scalejax.models.sharding import zigzag_chunks
        >>> zigzag_chunks(3).tolist()
        [0, 5, 1, 4, 2, 3]
    """
    first = np.arange(shards)
    return np.stack([first, 2 * shards - 1 - first], axis=1).reshape(-1)


def in_token_order(array: jax.Array, axis: int = 1) -> jax.Array:
    """`array` with the tokens of whole samples along `axis` put in the order in which context
    shards hold them; unchanged where that is their natural order, and where the context axis is
    manual: the tokens of a device were put in order before.

    Token numbers, targets and positions are put in order, once per step: 4 bytes per token, which
    every device of a context group has. Inside attention, queries, keys, values and results would
    have to move between devices in every block, forward and backward: queries alone are more bytes
    than the ring moves with few devices and many heads of queries per head of keys.
    """
    return array if _has_own_tokens() else _ordered(array, axis)


def of_own_tokens(array: jax.Array, axis: int) -> jax.Array:
    """The part of `array`, which every device has for all tokens of a sample along `axis`, for the
    tokens at hand: all, `in_token_order`, or those of a device where the context axis is manual."""
    ordered = _ordered(array, axis)
    if not _has_own_tokens():
        return ordered
    size = array.shape[axis] // axis_size(CONTEXT)
    start = jax.lax.axis_index(CONTEXT) * size
    return jax.lax.dynamic_slice_in_dim(ordered, start, size, axis)


def of_all_tokens(array: jax.Array) -> jax.Array:
    """`array` [batch, tokens] or [batch, tokens, heads, size], gathered over context where that
    axis is manual."""
    if not _has_own_tokens():
        return array
    mesh = jax.sharding.get_abstract_mesh()
    spec = without(mesh.manual_axes, PartitionSpec(BATCH_AXES, None, TENSOR, None))
    spec = PartitionSpec(*spec[: array.ndim])
    spec = divisible("the tokens", spec, array.shape, mesh.shape)
    # In a `shard_map` over the other axes: the compiler need not partition a gather.
    return jax.shard_map(
        lambda own: jax.lax.all_gather(own, CONTEXT, axis=1, tiled=True),
        in_specs=spec,
        out_specs=spec,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(array)


def sample_tokens(tokens: int) -> int:
    """Tokens of a sample with `tokens` at hand: more if the context axis is manual."""
    return tokens * axis_size(CONTEXT) if _has_own_tokens() else tokens


def summed_over_tokens(of_samples: jax.Array) -> jax.Array:
    """Sums over all tokens of each sample, from those over the tokens at hand."""
    return jax.lax.psum(of_samples, CONTEXT) if _has_own_tokens() else of_samples


def _has_own_tokens() -> bool:
    """Whether the network is traced for the tokens of one device along context."""
    mesh = jax.sharding.get_abstract_mesh()
    return is_of_layout(mesh) and CONTEXT in mesh.manual_axes


def _ordered(array: jax.Array, axis: int) -> jax.Array:
    if not is_zigzag():
        return array
    chunks = zigzag_chunks(axis_size(CONTEXT))
    shape = (*array.shape[:axis], chunks.size, -1, *array.shape[axis + 1 :])
    return jnp.take(array.reshape(shape), chunks, axis=axis).reshape(array.shape)


def _token_axes(*, is_shared: bool) -> tuple[str, ...]:
    axes = (CONTEXT,) if axis_size(CONTEXT) > 1 else ()
    return (*axes, TENSOR) if is_shared else axes


def _constrained_tokens(activations: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes and not constraints().is_sequence_parallel:
        return constrained_by_row(activations)
    rest = (PartitionSpec.UNCONSTRAINED,) * (activations.ndim - 2)
    return constrained(activations, PartitionSpec(BATCH_AXES, axes or None, *rest))


def divisible(
    name: str, rule: PartitionSpec, shape: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """`rule` without axes that do not divide their dimension; minor axes are dropped first."""
    if len(rule) > len(shape):
        accepted = f"the parameter has {len(shape)} dimensions, its partition rule {len(rule)}"
        raise ConfigError(refusal(name, shape, accepted))
    kept = []
    for size, axes in zip(shape, rule, strict=False):
        names = _axis_names(axes)
        for axis in names:
            if axis not in axis_sizes:
                raise ConfigError(unknown_name(f"partition rule of {name}", axis, axis_sizes))
        while size % math.prod(axis_sizes[axis] for axis in names):
            names = names[:-1]
        if names == _axis_names(axes):
            kept.append(axes)  # also None and UNCONSTRAINED
        else:
            kept.append(names or None)
    return PartitionSpec(*kept)


def split_axes(spec: PartitionSpec, dimensions: int) -> list[tuple[str, ...]]:
    """The axes over which `spec` shards each of `dimensions` dimensions."""
    return [_axis_names(entry) for entry in (*spec, *[None] * (dimensions - len(spec)))]


def also_over(
    axis: str,
    spec: PartitionSpec,
    shape: tuple[int, ...],
    axis_sizes: Mapping[str, int],
    order: Iterable[int],
) -> PartitionSpec:
    """`spec` with one dimension of `shape` sharded over `axis` as well; unchanged if none is
    divisible.

    Args:
        axis: axis of the mesh.
        spec: sharding over other axes.
        shape: shape of the parameter.
        axis_sizes: devices along each mesh axis.
        order: dimensions in order of preference.
    """
    split = split_axes(spec, len(shape))
    for index in order:
        axes = (*split[index], axis)
        if shape[index] % math.prod(axis_sizes[each] for each in axes) == 0:
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            entries[index] = axes if len(axes) > 1 else axis
            return PartitionSpec(*entries)
    return spec


def _axis_names(entry: Any) -> tuple[str, ...]:
    """The axes in one entry of a `PartitionSpec`."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()
