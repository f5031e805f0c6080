"""Xception: residual blocks of separable convolutions, and how it is split over a mesh."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ImageNetworkConfig
from scalejax.models.convolution import UNIT_RULES, Unit, classified, classifier, max_pool
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNormScope
from scalejax.models.sharding import constrained_by_row, per_device

STEM = (32, 64)
"""Channels of the two ordinary convolutions at the entry."""
ENTRY = (128, 256, 728)
"""Channels of the entry's three blocks, each of which halves the places."""
MIDDLE, MIDDLE_BLOCKS = 728, 8
"""Channels and number of the blocks that keep shape."""
EXIT = (728, 1024)
"""Channels of the last block's two convolutions."""
TAIL = (1536, 2048)
"""Channels of the two convolutions after the blocks."""


class SeparableUnit(nnx.Module):
    """A separate 3x3 convolution of each channel, then a 1x1 over channels, then BatchNorm."""

    def __init__(
        self, width_in: int, width_out: int, *, dtype: jnp.dtype, bn: BatchNormScope, rngs: nnx.Rngs
    ):
        self.depthwise = nnx.Conv(
            width_in,
            width_in,
            (3, 3),
            padding=1,
            feature_group_count=width_in,
            use_bias=False,
            dtype=dtype,
            # By its nine incoming connections: outgoing ones would count all channels.
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_in", "normal"),
            rngs=rngs,
        )
        self.pointwise = Unit(width_in, width_out, size=1, dtype=dtype, bn=bn, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The normalised convolution of `inputs`."""
        hidden = constrained_by_row(per_device(self.depthwise, inputs))
        return self.pointwise(hidden, is_training=is_training)


class Block(nnx.Module):
    """Separable convolutions, ReLU before each, added to the input."""

    def __init__(
        self,
        width_in: int,
        widths: tuple[int, ...],
        *,
        is_halved: bool,
        dtype: jnp.dtype,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        units, width = [], width_in
        for width_out in widths:
            units.append(SeparableUnit(width, width_out, dtype=dtype, bn=bn, rngs=rngs))
            width = width_out
        self.units = nnx.List(units)
        self.shortcut = (
            Unit(width_in, width, size=1, stride=2, dtype=dtype, bn=bn, rngs=rngs)
            if is_halved
            else None
        )

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """`inputs` plus what the block has learned to add, at half the places if `is_halved`."""
        hidden = inputs
        for unit in self.units:
            hidden = unit(jax.nn.relu(hidden), is_training=is_training)
        if self.shortcut is None:
            return inputs + hidden
        hidden = max_pool(hidden, size=3, stride=2, padding=1)
        return self.shortcut(inputs, is_training=is_training) + hidden


class Xception(Network, names=("xception",)):
    """Two convolutions, twelve blocks and two more convolutions, all separable; the mean over
    places, a linear layer.

    As in the author's code (Keras, keras/applications/xception.py), but padded evenly on both
    sides, and without dropout before the linear layer, which is element-wise work on 2048
    numbers per image.

    Source: Chollet 2016, arXiv 1610.02357, figure 5.
    """

    def __init__(
        self,
        config: ImageNetworkConfig,
        dataset: DatasetFacts,
        *,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        dtype = jnp.dtype(config.compute_dtype)
        width = dataset.input_shape[-1]
        stem = []
        for index, channels in enumerate(map(config.scaled, STEM)):
            unit = Unit(
                width,
                channels,
                size=3,
                stride=2 if index == 0 else 1,
                is_padded=False,
                dtype=dtype,
                bn=bn,
                rngs=rngs,
            )
            stem.append(unit)
            width = channels
        self.stem = nnx.List(stem)
        plans = [((channels, channels), True) for channels in ENTRY]
        plans += [((MIDDLE,) * 3, False)] * MIDDLE_BLOCKS
        plans.append((EXIT, True))
        blocks = []
        for published, is_halved in plans:
            widths = tuple(map(config.scaled, published))
            blocks.append(Block(width, widths, is_halved=is_halved, dtype=dtype, bn=bn, rngs=rngs))
            width = widths[-1]
        self.blocks = nnx.List(blocks)
        tail = []
        for channels in map(config.scaled, TAIL):
            tail.append(SeparableUnit(width, channels, dtype=dtype, bn=bn, rngs=rngs))
            width = channels
        self.tail = nnx.List(tail)
        self.head = classifier(width, dataset.classes, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = inputs
        for unit in self.stem:
            hidden = jax.nn.relu(unit(hidden, is_training=is_training))
        for block in self.blocks:
            hidden = block(hidden, is_training=is_training)
        for unit in self.tail:
            hidden = jax.nn.relu(unit(hidden, is_training=is_training))
        return classified(self.head, hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Channels over fsdp and tensor (see `UNIT_RULES`); the depthwise kernels, 1 % of
        the parameters, are whole everywhere."""
        return UNIT_RULES
