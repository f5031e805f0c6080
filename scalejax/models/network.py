"""The interface of networks, their registration by `model.name`, their partition specs, and the
import of a user's own network.

A network is a `flax.nnx` module over one batch. It knows its layers and the partition rules of its
parameters; it knows no mesh, no batch size and no optimizer.
"""

import inspect
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from scalejax.config.data import DatasetFacts
from scalejax.config.model import CustomConfig, ModelConfig
from scalejax.config.parallelism import PIPELINE
from scalejax.core.environment import own_module
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.models.lora import ADAPTERS, adapted_path, adapter_specs
from scalejax.models.normalization import BatchNormScope
from scalejax.models.sharding import also_over, divisible, split_axes

PartitionRules = tuple[tuple[str, PartitionSpec], ...]
"""Regular expressions on parameter paths, with the mesh axes that shard each dimension."""


_NETWORKS: dict[str, type["Network"]] = {}
"""Class of the network of each `model.name`."""


class Network(nnx.Module):
    """The base of every network, built-in or a user's own.

    A class that begins `class Mlp(Network, names=("mlp",))` is the network for these values of
    `model.name`, and is built as `Mlp(config, dataset, rngs=...)`, with `bn=` as well if
    `has_batch_norm` of the config is true.

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
    fused: ClassVar[tuple[tuple[str, int], ...]] = ()
    """Names of layers whose kernel holds several matrices side by side, with the dimension of one
    layer's kernel that counts them."""

    def __init_subclass__(cls, names: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _NETWORKS.update(dict.fromkeys(names, cls))

    @abstractmethod
    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits, float32 [..., classes].

        Args:
            inputs: normalised images [batch, height, width, channels] in the compute type, or
                tokens int32 [batch, tokens].
            is_training: whether BatchNorm takes its statistics from this batch.
        """

    @staticmethod
    def output_layers(config: Any) -> tuple[str, ...]:
        """Paths of the layers that compute logits, besides those with a part named "head": Muon,
        SOAP and Shampoo leave them, and layers named "depthwise", to AdamW.

        Args:
            config: config of the network.
        """
        return ()

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Sharding of parameters over mesh axes: the first rule that matches a path applies; a
        parameter without one is replicated."""
        return ()


@singledispatch
def network_class(model: ModelConfig) -> type[Network]:
    """The class of the network that `model` names.

    Raises:
        ConfigError: if it is a user's own and cannot be imported.
    """
    if model.name not in _NETWORKS:
        raise NotImplementedError(f"a network is not registered for {type(model).__name__}")
    return _NETWORKS[model.name]


@singledispatch
def build_network(
    model: ModelConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
) -> Network:
    """A network with fresh parameters, for the inputs and classes of `dataset`.

    Raises:
        ConfigError: if it is a user's own and cannot be imported or built.
    """
    constructor = cast(Callable[..., Network], network_class(model))
    scope = {"bn": bn} if model.has_batch_norm else {}
    return constructor(model, dataset, **scope, rngs=rngs)


def is_cast(model: ModelConfig, path: str) -> bool:
    """Whether the network uses the parameter at `path` only in the compute type, so that it may be
    gathered in that type; False for a user's own network, where this is unknown."""
    return model.own_module is None and path.endswith(("kernel", "embedding", *ADAPTERS))


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
        matrix, adapter = adapted_path(name)
        for pattern, rule in rules:
            if re.search(pattern, matrix):
                rule = rule if adapter is None else adapter_specs(rule)[adapter]
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


@network_class.register
def import_network(config: CustomConfig) -> type[Network]:
    """The class at "module:Class"; modules are found in the working directory too.

    Raises:
        ConfigError: if there is no such module or class, it is no `Network`, or cannot be called
            as one.
    """
    path = config.path
    module_name, class_name = path.split(":")
    module = own_module("model.path", path)
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


@build_network.register
def build_custom(
    config: CustomConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
) -> Network:
    """The user's own network that `config` names.

    Raises:
        ConfigError: if it cannot be imported, or does not take the options given.
    """
    network = import_network(config)
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
