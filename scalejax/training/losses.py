"""The loss of each target: softmax cross-entropy, or the user's own function.

Knows logits and targets; nothing of samples, weights and means.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalejax.config.dataset_facts import IGNORED_TARGET, DatasetFacts
from scalejax.config.training import LossConfig
from scalejax.core.environment import own_function
from scalejax.core.errors import ConfigError, in_one_line, refusal
from scalejax.models.sharding import is_partly_manual


def losses_of(logits: jax.Array, targets: jax.Array, how: LossConfig) -> jax.Array:
    """The loss of each target, float32 of the shape of `targets`."""
    if not how.is_own:
        return _cross_entropy(logits, targets, how)
    # A target that is left out is masked afterwards; its number would make a gradient NaN.
    targets = jnp.where(targets == IGNORED_TARGET, 0, targets)
    return _own(how)(logits, targets, **how.options).astype(jnp.float32)


def require_loss(how: LossConfig, dataset: DatasetFacts) -> None:
    """Refuse a user's own loss that is not valid, by trying it on shapes alone.

    Raises:
        ConfigError: if there is no such function, its code fails, it does not take the options, or
            returns anything but a number for each target.
    """
    if not how.is_own:
        return
    function = _own(how)
    called = f"{how.kind} is called as function(logits, targets, **options), but"
    try:
        inspect.signature(function).bind(None, None, **how.options)
    except TypeError as error:
        accepted = f"{called}: {error}"
        raise ConfigError(refusal("loss.options", how.options, accepted)) from error
    except ValueError:
        pass  # a built-in one has no signature: the call will tell
    shape = (2, *dataset.target_shape)
    logits = jax.ShapeDtypeStruct((*shape, dataset.classes), jnp.float32)
    targets = jax.ShapeDtypeStruct(shape, jnp.int32)

    def tried(logits: jax.Array, targets: jax.Array) -> Any:
        return function(logits, targets, **how.options)

    try:
        made = jax.eval_shape(tried, logits, targets)
    except Exception as error:
        accepted = f"{called} {in_one_line(error)}"
        raise ConfigError(refusal("loss.kind", how.kind, accepted)) from error
    is_array = isinstance(made, jax.ShapeDtypeStruct)
    if not (is_array and made.shape == shape and jnp.issubdtype(made.dtype, jnp.floating)):
        said = f"{made.dtype} of shape {made.shape}" if is_array else type(made).__name__
        accepted = (
            f"for targets of shape {shape} it gives {said}, but must give floating-point numbers "
            "of that shape, one loss per target"
        )
        raise ConfigError(refusal("loss.kind", how.kind, accepted))


def _own(how: LossConfig) -> Callable[..., jax.Array]:
    return own_function("loss.kind", how.kind, "logits and targets")


def _cross_entropy(logits: jax.Array, targets: jax.Array, how: LossConfig) -> jax.Array:
    """Softmax cross-entropy with label smoothing and z-loss, float32 of the shape of `targets`.

    If the data axis is manual (`shard_map`), the logit of the target is picked by a sum over all: a
    gather along sharded classes makes XLA's partitioner abort (spmd_partitioner_util.cc:497, jax
    0.10.2).
    """
    if not is_partly_manual():
        of_target = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
        is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
        picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        of_target = jax.nn.logsumexp(logits, axis=-1) - picked
    smoothing = how.label_smoothing
    if smoothing == 0 and how.z_loss == 0:
        return of_target
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    of_all = log_sum - logits.mean(axis=-1)
    smoothed = (1 - smoothing) * of_target + smoothing * of_all
    return smoothed + how.z_loss * log_sum**2 if how.z_loss else smoothed
