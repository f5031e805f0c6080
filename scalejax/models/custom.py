"""The import of a user's own network, and how it is built."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import cast

import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import CustomConfig
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.models.network import Network, build_network, network_class
from scalejax.models.normalization import BatchNormScope


@network_class.register
def import_network(config: CustomConfig) -> type[Network]:
    """The class at "module:Class"; modules are found in the working directory too.

    Raises:
        ConfigError: if there is no such module or class, it is no `Network`, or is not called
            as one.
    """
    path = config.path
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
