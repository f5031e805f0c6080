"""Where activations lie on the mesh while a network is computed.

A network says here what of its activations is split over which axes; the mesh, and how the run
divides tokens and microbatches, are in the context. Without a mesh nothing here does anything.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from scalejax.config.parallelism import AXES, BATCH_AXES, CONTEXT, DATA, PIPELINE, TENSOR
from scalejax.core.errors import ConfigError, refusal, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConstraints:
    """What a network must know of its run besides the mesh."""

    is_sequence_parallel: bool = False
    """Whether devices along tensor each hold a part of the tokens between layers."""
    microbatches: int = 1
    """Parts of the rows that the stages of a pipeline take in turn."""
    chunks: int = 1
    """Parts of the blocks of one stage."""


_ARRANGEMENT: ContextVar[ShardingConstraints | None] = ContextVar("arrangement", default=None)


@contextmanager
def arranged(mesh: AbstractMesh, constraints: ShardingConstraints) -> Iterator[None]:
    """A context in which networks are traced for `mesh`."""
    token = _ARRANGEMENT.set(constraints)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        _ARRANGEMENT.reset(token)


def constraints() -> ShardingConstraints:
    """That of the context."""
    return _ARRANGEMENT.get() or ShardingConstraints()


def axis_size(axis: str) -> int:
    """Devices along `axis` of the mesh in the context; 1 where there is none of ours."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if _is_ours(mesh) else 1


def is_data_manual() -> bool:
    """Whether the network is traced for the rows of one part of the data axis."""
    return DATA in jax.sharding.get_abstract_mesh().manual_axes


def placed(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`array`, held as `spec` says (a dimension that its axes do not divide stays whole).

    Where parameters are split over fsdp, the compiler may move either the parameters to the rows
    of the batch or the rows to the parameters; a network settles here for the first. It needs
    the mesh in the context (`jax.sharding.use_abstract_mesh`), and changes nothing where there
    is none of ours, or where its axes are `shard_map`'s. The data axis alone may be
    `shard_map`'s: each part of the batch is then placed on the axes that are left.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _is_ours(mesh):
        return array
    if DATA in mesh.manual_axes:
        spec = _without(DATA, spec)
    return jax.lax.with_sharding_constraint(
        array, divisible("an activation", spec, array.shape, mesh.shape)
    )


def _without(axis: str, spec: PartitionSpec) -> PartitionSpec:
    """`spec`, with nothing split over `axis`."""
    return PartitionSpec(
        *(
            tuple(name for name in entry if name != axis)
            if isinstance(entry, tuple)
            else None
            if entry == axis
            else entry
            for entry in spec
        )
    )


def per_device(layer: nnx.Module, rows: jax.Array) -> jax.Array:
    """`layer` of `rows` [batch, ...], computed by every device for its own rows, its parameters
    whole everywhere; where `placed` changes nothing, `layer(rows)`.

    For what XLA cannot divide: of a depthwise convolution whose rows are split over data, and
    which devices along tensor repeat, it adds the repetitions to the gradient of the kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _is_ours(mesh) or mesh.manual_axes:
        return layer(rows)  # type: ignore[operator]  a layer
    structure, params = nnx.split(layer)

    def apply(params: nnx.State, rows: jax.Array) -> jax.Array:
        return nnx.merge(structure, params)(rows)

    split = PartitionSpec(BATCH_AXES)
    specs = (PartitionSpec(), split)
    return jax.shard_map(apply, in_specs=specs, out_specs=split)(params, rows)


def _is_ours(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether `mesh` has the axes of a layout, and leaves all, or all but data, to the compiler."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(DATA) == AxisType.Manual:
        kinds[DATA] = AxisType.Auto
    return all(kinds.get(axis) == AxisType.Auto for axis in AXES)


def placed_by_row(activations: jax.Array) -> jax.Array:
    """`activations` [batch, ...], rows divided over the axes that divide the batch; the other
    dimensions as the compiler sees fit."""
    rest = (PartitionSpec.UNCONSTRAINED,) * (activations.ndim - 1)
    return placed(activations, PartitionSpec(BATCH_AXES, *rest))


def placed_residual(x_BSD: jax.Array) -> jax.Array:
    """Activations between layers [batch, tokens, width]: rows over the axes that divide the batch,
    tokens over context, and over tensor too where the run is sequence-parallel."""
    axes = _token_axes(is_shared=constraints().is_sequence_parallel)
    return _placed_tokens(x_BSD, axes)


def placed_for_layer(x_BSD: jax.Array) -> jax.Array:
    """The input of a layer that devices along tensor share, each of which needs all the tokens
    of its part of the context; unchanged where they hold them anyway."""
    if not constraints().is_sequence_parallel:
        return x_BSD
    return _placed_tokens(x_BSD, _token_axes(is_shared=False))


def placed_for_head(activations: jax.Array) -> jax.Array:
    """What the output layer reads and makes [batch, tokens, width or vocabulary]: rows over the
    axes that divide the batch, tokens over context and over the stages of a pipeline, none of
    which has the layer for itself."""
    axes = _token_axes(is_shared=False)
    return _placed_tokens(activations, (*axes, PIPELINE) if axis_size(PIPELINE) > 1 else axes)


def placed_between(activations: jax.Array) -> jax.Array:
    """What a layer that devices along tensor share makes on its way [batch, tokens, heads or
    inner width, ...], divided over tensor; unchanged but in a sequence-parallel run, where the
    compiler could as well divide the tokens."""
    if not constraints().is_sequence_parallel:
        return activations
    rest = (None,) * (activations.ndim - 3)
    axes = _token_axes(is_shared=False) or None
    return placed(activations, PartitionSpec(BATCH_AXES, axes, TENSOR, *rest))


def placed_keys(k_BTHK: jax.Array) -> jax.Array:
    """Keys or values [batch, tokens, heads, size], all tokens of a sample on every device along
    context; unchanged where nothing divides them."""
    if axis_size(CONTEXT) == 1:
        return k_BTHK
    return placed(k_BTHK, PartitionSpec(BATCH_AXES, None, TENSOR, None))


def _token_axes(*, is_shared: bool) -> tuple[str, ...]:
    axes = (CONTEXT,) if axis_size(CONTEXT) > 1 else ()
    return (*axes, TENSOR) if is_shared else axes


def _placed_tokens(activations: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes and not constraints().is_sequence_parallel:
        return placed_by_row(activations)
    rest = (PartitionSpec.UNCONSTRAINED,) * (activations.ndim - 2)
    return placed(activations, PartitionSpec(BATCH_AXES, axes or None, *rest))


def divisible(
    name: str, rule: PartitionSpec, shape: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """`rule`, without the axes that do not divide their dimension: of several, the minor first."""
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
            kept.append(axes)  # also None, and "as the compiler sees fit"
        else:
            kept.append(names or None)
    return PartitionSpec(*kept)


def split_axes(spec: PartitionSpec, dimensions: int) -> list[tuple[str, ...]]:
    """The axes over which `spec` splits each of so many dimensions."""
    return [_axis_names(entry) for entry in (*spec, *[None] * (dimensions - len(spec)))]


def also_over(
    axis: str,
    spec: PartitionSpec,
    shape: tuple[int, ...],
    axis_sizes: Mapping[str, int],
    order: Iterable[int],
) -> PartitionSpec:
    """`spec` with one dimension of `shape` split over `axis` as well; as it is where none divides.

    Args:
        axis: of the mesh.
        spec: what is split over other axes.
        shape: of the parameter.
        axis_sizes: devices along each mesh axis.
        order: dimensions, the one to take if it divides first.
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
