"""ResNet v1.5 of 18 to 152 layers, and how it is split over a mesh."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ResNetConfig
from scalejax.models.convolution import UNIT_RULES, Unit, classified, classifier, max_pool
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNormScope

STEM_WIDTH = 64
"""Channels after the first convolution, and inside the blocks of the first stage."""


class Block(nnx.Module):
    """A residual block: its units with ReLU between them, added to the input, then ReLU."""

    def __init__(
        self,
        width_in: int,
        width: int,
        *,
        is_bottleneck: bool,
        stride: int,
        zero_gamma: bool = True,
        dtype: jnp.dtype,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        def unit(*args: int, **keywords: int) -> Unit:
            return Unit(*args, **keywords, dtype=dtype, bn=bn, rngs=rngs)

        if is_bottleneck:
            width_out = 4 * width
            units = (
                unit(width_in, width, size=1),
                # The stride is here, not on the 1x1 before: that is what makes it v1.5.
                unit(width, width, size=3, stride=stride),
                unit(width, width_out, size=1, is_last=zero_gamma),
            )
        else:
            width_out = width
            units = (
                unit(width_in, width, size=3, stride=stride),
                unit(width, width, size=3, is_last=zero_gamma),
            )
        self.units = nnx.List(units)
        is_same_shape = stride == 1 and width_in == width_out
        self.shortcut = None if is_same_shape else unit(width_in, width_out, size=1, stride=stride)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """`inputs` plus what the block has learned to add, at the block's stride and width."""
        hidden = inputs
        for unit in self.units[:-1]:
            hidden = jax.nn.relu(unit(hidden, is_training=is_training))
        residual = self.units[-1](hidden, is_training=is_training)
        if self.shortcut is not None:
            inputs = self.shortcut(inputs, is_training=is_training)
        return jax.nn.relu(inputs + residual)


class ResNet(Network, names=("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")):
    """A 7x7 stem, four stages of residual blocks, the mean over places, a linear layer.

    Source: He et al. 2015, arXiv 1512.03385, table 1; initialised as in Goyal et al. 2017.
    """

    def __init__(
        self, config: ResNetConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
    ):
        dtype = jnp.dtype(config.compute_dtype)
        blocks_per_stage, is_bottleneck = {
            "resnet18": ((2, 2, 2, 2), False),
            "resnet34": ((3, 4, 6, 3), False),
            "resnet50": ((3, 4, 6, 3), True),
            "resnet101": ((3, 4, 23, 3), True),
            "resnet152": ((3, 8, 36, 3), True),
        }[config.name]
        self.stem = Unit(
            dataset.input_shape[-1], STEM_WIDTH, size=7, stride=2, dtype=dtype, bn=bn, rngs=rngs
        )
        blocks = []
        width_in = STEM_WIDTH
        for stage, count in enumerate(blocks_per_stage):
            width = STEM_WIDTH * 2**stage
            for index in range(count):
                block = Block(
                    width_in,
                    width,
                    is_bottleneck=is_bottleneck,
                    stride=2 if stage > 0 and index == 0 else 1,
                    zero_gamma=config.zero_gamma,
                    dtype=dtype,
                    bn=bn,
                    rngs=rngs,
                )
                blocks.append(block)
                width_in = 4 * width if is_bottleneck else width
        self.blocks = nnx.List(blocks)
        self.head = classifier(width_in, dataset.classes, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = jax.nn.relu(self.stem(inputs, is_training=is_training))
        hidden = max_pool(hidden, size=3, stride=2, padding=1)
        for block in self.blocks:
            hidden = block(hidden, is_training=is_training)
        return classified(self.head, hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Output channels over the tensor axis, input channels over fsdp."""
        return UNIT_RULES
