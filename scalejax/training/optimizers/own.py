"""A user's own optimizer: the function at an import path, and what it returns.

Knows import paths and Optax transformations; nothing of networks and meshes.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalejax.config.optimizer import CustomOptimizerConfig
from scalejax.core.environment import own_function
from scalejax.core.errors import ConfigError, in_one_line, refusal
from scalejax.training.schedules import Schedule


def own_optimizer(
    config: CustomOptimizerConfig, schedule: Schedule
) -> optax.GradientTransformation:
    """What the function at "module:function" returns for the schedule and the options; modules are
    found in the working directory too.

    Raises:
        ConfigError: if there is no such module or function, its code fails, it does not take the
            options, or it returns no transformation; also raised by `init` of the transformation,
            if one of its functions fails.
    """
    function = own_function("optimizer.path", config.path, "the learning rate")
    called = f"{config.path} is called as function(learning_rate, **options), but"
    try:
        inspect.signature(function).bind(schedule, **config.options)
    except TypeError as error:
        accepted = f"{called}: {error}"
        raise ConfigError(refusal("optimizer.options", config.options, accepted)) from error
    except ValueError:
        pass  # a built-in one has no signature: the call will tell
    try:
        made = function(schedule, **config.options)
    except Exception as error:
        accepted = f"{called} {in_one_line(error)}"
        raise ConfigError(refusal("optimizer.path", config.path, accepted)) from error
    if not isinstance(made, optax.GradientTransformation):
        accepted = f"it gives {type(made).__name__}, not an optax.GradientTransformation"
        raise ConfigError(refusal("optimizer.path", config.path, accepted))
    return _tried(config, made)


def _tried(
    config: CustomOptimizerConfig, made: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`made`, with an `init` that also tries an update of these parameters, by shapes alone, and
    refuses an optimizer that fails, such as one that needs the loss."""

    def init(params: Any) -> Any:
        try:
            state = made.init(params)
            if not jax.tree.leaves(params):  # a placeholder that marks per-parameter state
                return state
            updates, _ = jax.eval_shape(made.update, params, state, params)
            if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
                raise ValueError("updates differ in shape from the parameters")
        except Exception as error:
            accepted = (
                "it must make its state from parameters, and updates from gradients, state and "
                f"parameters alone, but {in_one_line(error)}"
            )
            raise ConfigError(refusal("optimizer.path", config.path, accepted)) from error
        return state

    return optax.GradientTransformation(init, made.update)
