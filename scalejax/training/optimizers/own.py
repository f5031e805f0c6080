"""A user's own optimizer: the function at an import path, and what it gives.

Knows import paths and Optax transformations; nothing of networks and meshes.
"""

import importlib
import inspect
import os
import sys

import optax

from scalejax.config.optimizer import CustomOptimizerConfig
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.training.schedules import Schedule


def own_optimizer(
    config: CustomOptimizerConfig, schedule: Schedule
) -> optax.GradientTransformation:
    """What the function at "module:function" makes of the schedule and the options; modules are
    found in the working directory too.

    Raises:
        ConfigError: if there is no such module or function, it does not take the options, or gives
            no transformation.
    """
    module_name, function_name = config.path.split(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        accepted = f"{module_name!r}, installed or in {os.getcwd()}, must import ({error})"
        raise ConfigError(refusal("optimizer.path", config.path, accepted)) from error
    function = getattr(module, function_name, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        there = [f"{module_name}:{name}" for name in functions]
        raise ConfigError(unknown_name("optimizer.path", config.path, there))
    if not callable(function):
        accepted = f"{function_name} must be a function of the learning rate"
        raise ConfigError(refusal("optimizer.path", config.path, accepted))
    try:
        inspect.signature(function).bind(schedule, **config.options)
    except TypeError as error:
        accepted = f"{config.path} is called as function(learning_rate, **options), but: {error}"
        raise ConfigError(refusal("optimizer.options", config.options, accepted)) from error
    made = function(schedule, **config.options)
    if not isinstance(made, optax.GradientTransformation):
        accepted = f"it gives {type(made).__name__}, where an optax.GradientTransformation must be"
        raise ConfigError(refusal("optimizer.path", config.path, accepted))
    return made
