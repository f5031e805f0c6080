"""Inception v3: modules of parallel towers of convolutions, and how it is split over a mesh."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ImageNetworkConfig
from scalejax.models.convolution import UNIT_RULES, Unit, classified, classifier, max_pool
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNormScope


class Layer(NamedTuple):
    """A convolution with BatchNorm and ReLU."""

    channels: int
    """Output channels as published."""
    size: int | tuple[int, int] = 1
    """Height and width of the window."""
    is_padded: bool = True
    """Whether it sees beyond the border."""
    stride: int = 1
    """Places from one output to the next."""


class TowerPlan(NamedTuple):
    """One of the parallel parts of a module."""

    layers: tuple[Layer, ...]
    """Convolutions in their order."""
    pool: Literal["mean", "max"] | None = None
    """Pooling before them: mean over 3x3, or maximum with stride 2."""
    is_forked: bool = False
    """Whether the last two convolutions are parallel, both applied to the one before them."""


class Tower(nnx.Module):
    """The convolutions of a `TowerPlan`."""

    def __init__(
        self,
        plan: TowerPlan,
        width_in: int,
        *,
        config: ImageNetworkConfig,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        self.pool, self.is_forked = plan.pool, plan.is_forked
        units, widths = [], [width_in]
        for layer in plan.layers:
            is_second_of_fork = plan.is_forked and len(units) == len(plan.layers) - 1
            unit = Unit(
                widths[-2] if is_second_of_fork else widths[-1],
                config.scaled(layer.channels),
                size=layer.size,
                stride=layer.stride,
                is_padded=layer.is_padded,
                dtype=jnp.dtype(config.compute_dtype),
                bn=bn,
                rngs=rngs,
            )
            units.append(unit)
            widths.append(config.scaled(layer.channels))
        self.units = nnx.List(units)
        self.width_out = sum(widths[-2:]) if plan.is_forked else widths[-1]

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> list[jax.Array]:
        """The tower's result; two results if it is forked."""

        def applied(unit: Unit, hidden: jax.Array) -> jax.Array:
            return jax.nn.relu(unit(hidden, is_training=is_training))

        if self.pool == "max":
            inputs = max_pool(inputs, size=3, stride=2)
        elif self.pool == "mean":
            inputs = _mean_pool(inputs)
        chain = self.units[:-2] if self.is_forked else self.units
        for unit in chain:
            inputs = applied(unit, inputs)
        if self.is_forked:
            return [applied(unit, inputs) for unit in self.units[-2:]]
        return [inputs]


class Module(nnx.Module):
    """Towers over the same input, their channels side by side."""

    def __init__(
        self,
        plans: tuple[TowerPlan, ...],
        width_in: int,
        *,
        config: ImageNetworkConfig,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        self.towers = nnx.List(
            Tower(plan, width_in, config=config, bn=bn, rngs=rngs) for plan in plans
        )
        self.width_out = sum(tower.width_out for tower in self.towers)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """[batch, height, width, channels of all towers]."""
        parts = [part for tower in self.towers for part in tower(inputs, is_training=is_training)]
        return jnp.concatenate(parts, axis=-1)


class Inception(Network, names=("inception_v3",)):
    """A stem of convolutions, eleven modules, the mean over places, a linear layer.

    Without the auxiliary head, as TensorFlow's benchmarks ran it
    (tensorflow/benchmarks, tf_cnn_benchmarks/models/inception_model.py), and without dropout
    before the linear layer: element-wise work on 2048 numbers per image. Convolutions are padded
    evenly on both sides; at 299 x 299 pixels that is TensorFlow's padding too.

    Source: Szegedy et al. 2015, arXiv 1512.00567, table 1 and figures 5 to 7.
    """

    def __init__(
        self,
        config: ImageNetworkConfig,
        dataset: DatasetFacts,
        *,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        modules, width = [], dataset.input_shape[-1]
        for plans in (*STEM, *MODULES):
            module = Module(plans, width, config=config, bn=bn, rngs=rngs)
            modules.append(module)
            width = module.width_out
        self.modules = nnx.List(modules)
        dtype = jnp.dtype(config.compute_dtype)
        self.head = classifier(width, dataset.classes, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = inputs
        for module in self.modules:
            hidden = module(hidden, is_training=is_training)
        return classified(self.head, hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Channels over fsdp and tensor; see `UNIT_RULES`."""
        return UNIT_RULES


def _halved(channels: int) -> Layer:
    return Layer(channels, 3, is_padded=False, stride=2)


def _with_5x5(pooled: int) -> tuple[TowerPlan, ...]:
    """Figure 5 (35 x 35 places), its second 3x3 pair a 5x5 as in the published code."""
    return (
        TowerPlan((Layer(64),)),
        TowerPlan((Layer(48), Layer(64, 5))),
        TowerPlan((Layer(64), Layer(96, 3), Layer(96, 3))),
        TowerPlan((Layer(pooled),), pool="mean"),
    )


def _with_7x7(inner: int) -> tuple[TowerPlan, ...]:
    """Figure 6 (17 x 17 places)."""
    row, column = (1, 7), (7, 1)
    doubled = (Layer(inner, column), Layer(inner, row), Layer(inner, column), Layer(192, row))
    return (
        TowerPlan((Layer(192),)),
        TowerPlan((Layer(inner), Layer(inner, row), Layer(192, column))),
        TowerPlan((Layer(inner), *doubled)),
        TowerPlan((Layer(192),), pool="mean"),
    )


def _with_forks() -> tuple[TowerPlan, ...]:
    """Figure 7 (8 x 8 places)."""
    ends = (Layer(384, (1, 3)), Layer(384, (3, 1)))
    return (
        TowerPlan((Layer(320),)),
        TowerPlan((Layer(384), *ends), is_forked=True),
        TowerPlan((Layer(448), Layer(384, 3), *ends), is_forked=True),
        TowerPlan((Layer(192),), pool="mean"),
    )


STEM = (
    (TowerPlan((_halved(32), Layer(32, 3, is_padded=False), Layer(64, 3))),),
    (TowerPlan((Layer(80), Layer(192, 3, is_padded=False)), pool="max"),),
    (TowerPlan((), pool="max"),),
)
"""Modules of one tower that take 299 pixels to 35 places."""
MODULES = (
    _with_5x5(32),
    _with_5x5(64),
    _with_5x5(64),
    (
        TowerPlan((_halved(384),)),
        TowerPlan((Layer(64), Layer(96, 3), _halved(96))),
        TowerPlan((), pool="max"),
    ),
    _with_7x7(128),
    _with_7x7(160),
    _with_7x7(160),
    _with_7x7(192),
    (
        TowerPlan((Layer(192), _halved(320))),
        TowerPlan((Layer(192), Layer(192, (1, 7)), Layer(192, (7, 1)), _halved(192))),
        TowerPlan((), pool="max"),
    ),
    _with_forks(),
    _with_forks(),
)
"""The modules of the network: three kinds, separated by modules that halve the places."""


def _mean_pool(images: jax.Array) -> jax.Array:
    """The mean over each place and its neighbours, without those beyond the border."""
    return nnx.avg_pool(images, (3, 3), padding="SAME", count_include_pad=False)
