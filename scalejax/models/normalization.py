"""Batch normalisation with a chosen scope of its statistics, and the norms of transformers.

Knows groups of samples and the name of a mesh axis; nothing of meshes, layouts or steps.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from scalejax.core.errors import ConfigError, refusal, require_at_least, require_multiple

MOMENTUM = 0.9
"""Fraction of a running statistic that one step retains (torchvision's 0.1 is 1 minus it)."""
EPSILON = 1e-5
"""Added to a variance before its root (torchvision's default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormScope:
    """Which samples share one mean and one variance in training."""

    groups: int = 1
    """Number of equal groups of contiguous rows of the batch, each with its own statistics. Rows of
    one device are contiguous, so as many groups as devices is BatchNorm per device."""
    is_in_turn: bool = False
    """Whether running statistics are updated by each group in sequence, not by their mean."""
    axis_name: str | None = None
    """Inside `shard_map`: mesh axis whose devices share their statistics; None for no sharing."""

    def __post_init__(self) -> None:
        require_at_least("bn.groups", self.groups, 1)
        if self.axis_name is not None and self.groups > 1:
            accepted = f"statistics shared over {self.axis_name!r} are of one group"
            raise ConfigError(refusal("bn.groups", self.groups, accepted))


class BatchNorm(nnx.Module):
    """Subtracts the mean and divides by the standard deviation of each channel (the last axis).

    In training both are computed in float32 over the samples of a group that count, and the running
    statistics move toward the groups' average, or toward each group in turn; a group without a
    sample that counts does not move them. In evaluation the running statistics are used.
    The running variance is the population variance (divided by n, as in TensorFlow and Flax).

    Inside `shard_map` with `scope.axis_name=None` every device ends with running statistics of
    its own. This module leaves them so: the step averages them over the data axis, once per
    update, before it returns them.

    Source: Ioffe & Szegedy 2015, arXiv 1502.03167; per-group statistics as in Goyal et al. 2017,
    section 2.3, arXiv 1706.02677.
    """

    def __init__(
        self,
        features: int,
        *,
        scope: BatchNormScope,
        dtype: jnp.dtype,
        epsilon: float = EPSILON,
        scale_init: Initializer = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ):
        self.scope = scope
        self.dtype = dtype
        self.epsilon = epsilon
        self.is_frozen = False  # if so, it computes in training what it does in evaluation
        self.row_weights: jax.Array | None = nnx.data(None)  # of the batch; None if all rows count
        self.scale = nnx.Param(scale_init(rngs.params(), (features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((features,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((features,), jnp.float32))

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """`inputs` [batch, ..., features], normalised, in the compute type."""
        is_training = is_training and not self.is_frozen
        groups = self.scope.groups if is_training else 1
        require_multiple("batch", inputs.shape[0], groups, "bn.groups")
        grouped = inputs.reshape(groups, -1, *inputs.shape[1:]).astype(jnp.float32)
        per_channel = (groups, *(1,) * (inputs.ndim - 1), -1)
        if is_training:
            mean, var, is_counted = self._statistics(grouped)
            self.mean.set_value(self._moved(self.mean[...], mean, is_counted))
            self.var.set_value(self._moved(self.var[...], var, is_counted))
        else:
            mean, var = self.mean[...][None], self.var[...][None]
        scale = self.scale[...][None] * jax.lax.rsqrt(var + self.epsilon)
        normalised = (grouped - mean.reshape(per_channel)) * scale.reshape(per_channel)
        bias = self.bias[...].reshape((1,) * inputs.ndim + (-1,))
        return (normalised + bias).astype(self.dtype).reshape(inputs.shape)

    def _statistics(self, grouped: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Mean and variance [groups, features] of `grouped` [groups, rows, ..., features], and
        whether any row of a group counts [groups]; None if all rows do."""
        axes = tuple(range(1, grouped.ndim - 1))
        if self.row_weights is None:
            moments = jnp.stack([grouped.mean(axes), jnp.square(grouped).mean(axes)])
            counted = None
        else:
            counts = (self.row_weights > 0).reshape(len(grouped), -1, *(1,) * (grouped.ndim - 2))
            rows = jnp.where(counts, grouped, 0)
            moments = jnp.stack([rows.mean(axes), jnp.square(rows).mean(axes)])
            counted = counts.astype(jnp.float32).mean(axes)
        if self.scope.axis_name is not None:
            moments = jax.lax.pmean(moments, self.scope.axis_name)
            counted = jax.lax.pmean(counted, self.scope.axis_name)
        if counted is not None:
            moments /= jnp.where(counted > 0, counted, 1)[None]
        mean, mean_of_squares = moments
        # rounding can take the difference of two near-equal numbers below zero
        var = jnp.maximum(mean_of_squares - jnp.square(mean), 0.0)
        return mean, var, None if counted is None else counted[:, 0] > 0

    def _moved(
        self, running: jax.Array, of_groups: jax.Array, is_counted: jax.Array | None
    ) -> jax.Array:
        """`running` [features] after statistics [groups, features] of one forward pass."""
        groups = self.scope.groups
        if is_counted is not None:
            kept = jnp.where(is_counted, MOMENTUM, 1.0)
            if not self.scope.is_in_turn:
                return kept.mean() * running + jnp.tensordot((1 - kept) / groups, of_groups, 1)
            kept_later = jnp.append(jnp.cumprod(kept[:0:-1])[::-1], 1.0)
            return kept.prod() * running + jnp.tensordot((1 - kept) * kept_later, of_groups, 1)
        if not self.scope.is_in_turn:
            return MOMENTUM * running + (1 - MOMENTUM) * of_groups.mean(0)
        shares = (1 - MOMENTUM) * MOMENTUM ** jnp.arange(groups - 1, -1, -1, dtype=jnp.float32)
        return MOMENTUM**groups * running + jnp.tensordot(shares, of_groups, 1)


def moving_norms(network: nnx.Module) -> list[BatchNorm]:
    """Every BatchNorm of `network` that normalises by the batch in training: those not frozen."""
    modules = (module for _, module in nnx.iter_modules(network))
    return [each for each in modules if isinstance(each, BatchNorm) and not each.is_frozen]


def weigh_rows(network: nnx.Module, weights: jax.Array) -> None:
    """Leave the rows of weight 0 out of the statistics of every BatchNorm of `network`."""
    for _, module in nnx.iter_modules(network):
        if isinstance(module, BatchNorm):
            module.row_weights = weights


def normalised(norm: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """`norm(x)`, recomputed from `x` in the backward pass: otherwise it would save six intermediate
    results, half of them in float32."""
    structure, params = nnx.split(norm)

    def apply(params: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, params)(x)

    return jax.checkpoint(apply, prevent_cse=False)(params, x)
