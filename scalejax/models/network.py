"""What a network is to the rest of scalejax, and how one is built and split.

A network is a `flax.nnx` module over one batch. It knows its layers, and by which rules its
parameters are split over a mesh; it knows no mesh, no batch size and no optimizer.
"""

import importlib
import inspect
import math
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from scalejax.data_config import DatasetFacts
from scalejax.errors import ConfigError, refusal, unknown_name
from scalejax.layout import AXES, BATCH_AXES, DATA
from scalejax.model_config import CustomConfig
from scalejax.models.normalization import BatchNormScope

PartitionRules = tuple[tuple[str, PartitionSpec], ...]
"""Regular expressions on paths of parameters, and the mesh axes that split each dimension."""


class Network(nnx.Module):
    """The base of every network, built-in or a user's own.

    A user's own class is built as `Class(dataset, compute_dtype=..., bn=..., rngs=..., **options)`
    with `dataset` a `DatasetFacts`, `compute_dtype` a NumPy type, `bn` the `BatchNormScope` for
    its `BatchNorm` layers, and `options` those of the `run.toml`. It is called as
    `network(inputs, is_training=...)` and returns logits (see `__call__`); for data that hides
    words, `places=` is given besides, int32 [batch, hidden words], and logits are of those places.

    Paths of parameters join attribute names with "/" ("layers/0/kernel"). Weight decay, and the
    trust ratios of LARS and LAMB, hold for those that end in "kernel" or "embedding".
    """

    stacked: ClassVar[tuple[str, ...]] = ()
    """First parts of the paths whose parameters hold all layers, one per index of their first
    dimension: optimizers that treat layers one by one look there."""

    @abstractmethod
    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits, float32 [..., classes].

        Args:
            inputs: normalised images [batch, height, width, channels] in the compute type, or
                tokens int32 [batch, tokens].
            is_training: whether BatchNorm takes its statistics from this batch.
        """

    @staticmethod
    def partition_rules() -> PartitionRules:
        """By which mesh axes parameters are split: the first rule found in a path holds, and a
        parameter without one is whole on every device."""
        return ()


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
        array, _divisible("an activation", spec, array.shape, mesh.shape)
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


def parameter_path(path: tuple[Any, ...]) -> str:
    """The "/"-joined name of a leaf, from its path in a JAX tree."""
    return keystr(path, simple=True, separator="/")


def param_specs(params_shapes: Any, rules: PartitionRules, axis_sizes: Mapping[str, int]) -> Any:
    """The tree of `PartitionSpec`s by which `rules` split a tree of parameters.

    A dimension that its axes do not divide stays whole.

    Args:
        params_shapes: tree of arrays or of their shapes.
        rules: of the network; see `Network.partition_rules`.
        axis_sizes: devices along each mesh axis.

    Raises:
        ConfigError: if a rule names an unknown axis, or more dimensions than there are.
    """

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = parameter_path(path)
        for pattern, rule in rules:
            if re.search(pattern, name):
                return _divisible(name, rule, leaf.shape, axis_sizes)
        return PartitionSpec()

    return tree_map_with_path(spec, params_shapes)


def _divisible(
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


def _axis_names(entry: Any) -> tuple[str, ...]:
    """The axes in one entry of a `PartitionSpec`."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def import_network(path: str) -> type[Network]:
    """The class at "module:Class"; modules are found in the working directory too.

    Raises:
        ConfigError: if there is no such module or class, it is no `Network`, or is not called
            as one.
    """
    module_name, class_name = path.split(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        accepted = f"{module_name!r}, installed or in {os.getcwd()}, must import ({error})"
        raise ConfigError(refusal("model.path", path, accepted)) from error
    found = getattr(module, class_name, None)
    if found is None:
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        found_there = [f"{module_name}:{name}" for name in classes]
        raise ConfigError(unknown_name("model.path", path, found_there))
    if not (inspect.isclass(found) and issubclass(found, Network)):
        accepted = f"{class_name} must be a subclass of scalejax.models.Network"
        raise ConfigError(refusal("model.path", path, accepted))
    if inspect.isabstract(found):
        accepted = f"{class_name} must define __call__(self, inputs, *, is_training)"
        raise ConfigError(refusal("model.path", path, accepted))
    try:
        inspect.signature(found.__call__).bind(None, None, is_training=True)
    except TypeError as error:
        accepted = f"it is called as network(inputs, is_training=...), but: {error}"
        raise ConfigError(refusal("model.path", path, accepted)) from error
    return found


def build_custom(
    config: CustomConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
) -> Network:
    """The user's own network that `config` names.

    Raises:
        ConfigError: if it cannot be imported, or does not take the options given.
    """
    network = import_network(config.path)
    if dataset.is_masked:
        try:
            inspect.signature(network.__call__).bind(None, None, is_training=True, places=None)
        except TypeError as error:
            accepted = f"for data that hides words it is called with places=, but: {error}"
            raise ConfigError(refusal("model.path", config.path, accepted)) from error
    constructor = cast(Callable[..., Network], network)
    keywords = {
        "compute_dtype": jnp.dtype(config.compute_dtype),
        "bn": bn,
        "rngs": rngs,
        **config.options,
    }
    try:
        inspect.signature(constructor.__init__).bind(None, dataset, **keywords)
    except TypeError as error:
        accepted = (
            f"{config.path} is built as Class(dataset, compute_dtype=, bn=, rngs=, **options), "
            f"and with these options: {error}"
        )
        raise ConfigError(refusal("model.options", config.options, accepted)) from error
    return constructor(dataset, **keywords)
