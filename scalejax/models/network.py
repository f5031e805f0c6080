"""The interface of networks, their partition specs, and the import of a user's own network.

A network is a `flax.nnx` module over one batch. It knows its layers and the partition rules of its
parameters; it knows no mesh, no batch size and no optimizer.
"""

import importlib
import inspect
import math
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from scalejax.config.data import DatasetFacts
from scalejax.config.model import CustomConfig
from scalejax.config.parallelism import PIPELINE
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.models.normalization import BatchNormScope
from scalejax.models.sharding import also_over, divisible, split_axes

PartitionRules = tuple[tuple[str, PartitionSpec], ...]
"""Regular expressions on parameter paths, with the mesh axes that shard each dimension."""


class Network(nnx.Module):
    """The base of every network, built-in or a user's own.

    A user's own class is built as `Class(dataset, compute_dtype=..., bn=..., rngs=..., **options)`
    with `dataset` a `DatasetFacts`, `compute_dtype` a NumPy type, `bn` the `BatchNormScope` for
    its `BatchNorm` layers, and `options` those of the `run.toml`. It is called as
    `network(inputs, is_training=...)` and returns logits (see `__call__`); for masked language
    modelling `places=` is passed too, int32 [batch, masked tokens], and logits are of those places.

    Paths of parameters join attribute names with "/" ("layers/0/kernel"). Weight decay, and the
    trust ratios of LARS and LAMB, apply to those that end in "kernel" or "embedding".
    """

    stacked: ClassVar[tuple[str, ...]] = ()
    """First parts of the paths of stacked parameters, whose first dimension counts layers:
    layer-wise optimizers treat each index as a layer."""

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
        """Sharding of parameters over mesh axes: the first rule that matches a path applies; a
        parameter without one is replicated."""
        return ()


@runtime_checkable
class NetworkWithFeatures(Protocol):
    """A network split into a backbone and a last layer, `head`: the logits are
    `classified(features(inputs, is_training=...))`, and `classified` reads only the parameters of
    `head`."""

    def features(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The input of the last layer, [batch, width]."""
        ...

    def classified(self, features: jax.Array) -> jax.Array:
        """Logits, float32 [batch, classes], of features [batch, width]."""
        ...


def parameter_path(path: tuple[Any, ...]) -> str:
    """The "/"-joined name of a leaf, from its path in a JAX tree."""
    return keystr(path, simple=True, separator="/")


def param_specs(params_shapes: Any, rules: PartitionRules, axis_sizes: Mapping[str, int]) -> Any:
    """The tree of `PartitionSpec`s of a tree of parameters by `rules`.

    A dimension that its axes do not divide is not sharded; where pipeline stages do not divide the
    layers, they shard another dimension, so that each still holds no more than its share.

    Args:
        params_shapes: tree of arrays or of their shapes.
        rules: partition rules of the network; see `Network.partition_rules`.
        axis_sizes: devices along each mesh axis.

    Raises:
        ConfigError: if a rule names an unknown axis, or more dimensions than there are.
    """

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = parameter_path(path)
        for pattern, rule in rules:
            if re.search(pattern, name):
                kept = divisible(name, rule, leaf.shape, axis_sizes)
                if PIPELINE in rule and PIPELINE not in kept:
                    return _over_stages(kept, leaf.shape, axis_sizes)
                return kept
        return PartitionSpec()

    return tree_map_with_path(spec, params_shapes)


def _over_stages(
    kept: PartitionSpec, shape: tuple[int, ...], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """`kept` with the first divisible dimension sharded over the pipeline axis too, preferably an
    unsharded one."""
    parts = [math.prod(axis_sizes[axis] for axis in axes) for axes in split_axes(kept, len(shape))]
    order = sorted(range(len(shape)), key=lambda index: parts[index] > 1)
    return also_over(PIPELINE, kept, shape, axis_sizes, order)


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
