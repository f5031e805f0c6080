"""EfficientNet-Lite0: inverted residual blocks of depthwise convolutions, split over a mesh."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.data_config import DatasetFacts
from scalejax.layout import FSDP, TENSOR
from scalejax.model_config import ImageNetworkConfig
from scalejax.models.convolution import HE_NORMAL, classified, classifier
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.models.placement import placed_by_row

STEM, TAIL = 32, 1280
"""Channels after the first convolution and after the last."""
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Blocks, side of the kernel, stride of the first block, channels inside over those that come in,
and channels that go out (Tan & Le 2019, arXiv 1905.11946, table 1)."""
EPSILON = 1e-3
"""Added to a variance before its root (`batch_norm_epsilon` in TensorFlow's efficientnet_lite)."""


class Depthwise(nnx.Module):
    """A convolution of each channel by itself, padded as TensorFlow's "SAME".

    As a sum of shifted products, and not XLA's grouped convolution, which on a CPU takes several
    times as long; a GPU's compiler makes one kernel of the sum. FLOP of the model, which are
    those of products of matrices and of convolutions, leave it out: 8 % of this network's.
    """

    def __init__(self, channels: int, *, size: int, stride: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.size, self.stride, self.dtype = size, stride, dtype
        init = nnx.initializers.normal(math.sqrt(2) / size)  # He's, by incoming connections
        self.kernel = nnx.Param(init(rngs.params(), (size, size, channels), jnp.float32))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[batch, height, width, channels], both sides divided by the stride and rounded up."""
        kernel = self.kernel[...].astype(self.dtype).astype(jnp.float32)
        places = [-(-side // self.stride) for side in inputs.shape[1:3]]
        spans = [(count - 1) * self.stride + 1 for count in places]
        missing = [
            max(span + self.size - 1 - side, 0)
            for span, side in zip(spans, inputs.shape[1:3], strict=True)
        ]
        around = [(each // 2, each - each // 2) for each in missing]
        padded = jnp.pad(inputs, [(0, 0), *around, (0, 0)])
        total = jnp.zeros((), jnp.float32)
        for row in range(self.size):
            for column in range(self.size):
                shifted = padded[
                    :,
                    row : row + spans[0] : self.stride,
                    column : column + spans[1] : self.stride,
                ]
                total += shifted.astype(jnp.float32) * kernel[None, None, None, row, column]
        return total.astype(self.dtype)


class Unit(nnx.Module):
    """A layer without bias, and its BatchNorm."""

    def __init__(
        self,
        layer: nnx.Conv | nnx.Linear | Depthwise,
        channels: int,
        *,
        dtype: jnp.dtype,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        self.layer = layer
        self.norm = BatchNorm(channels, scope=bn, dtype=dtype, epsilon=EPSILON, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The normalised outputs of the layer."""
        return self.norm(placed_by_row(self.layer(inputs)), is_training=is_training)


def pointwise(
    width_in: int, width_out: int, *, dtype: jnp.dtype, bn: BatchNormScope, rngs: nnx.Rngs
) -> Unit:
    """A 1x1 convolution, as the product of matrices that it is, and its BatchNorm."""
    layer = nnx.Linear(
        width_in, width_out, use_bias=False, dtype=dtype, kernel_init=HE_NORMAL, rngs=rngs
    )
    return Unit(layer, width_out, dtype=dtype, bn=bn, rngs=rngs)


class Block(nnx.Module):
    """Channels widened, each convolved by itself, and narrowed again; added to the input where
    the shape stays."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        size: int,
        stride: int,
        expansion: int,
        dtype: jnp.dtype,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        inner = width_in * expansion
        self.expand = (
            pointwise(width_in, inner, dtype=dtype, bn=bn, rngs=rngs) if expansion > 1 else None
        )
        layer = Depthwise(inner, size=size, stride=stride, dtype=dtype, rngs=rngs)
        self.depthwise = Unit(layer, inner, dtype=dtype, bn=bn, rngs=rngs)
        self.project = pointwise(inner, width_out, dtype=dtype, bn=bn, rngs=rngs)
        self.is_residual = stride == 1 and width_in == width_out

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The block of `inputs`, at its stride and width."""
        hidden = inputs
        if self.expand is not None:
            hidden = jax.nn.relu6(self.expand(hidden, is_training=is_training))
        hidden = jax.nn.relu6(self.depthwise(hidden, is_training=is_training))
        hidden = self.project(hidden, is_training=is_training)
        return inputs + hidden if self.is_residual else hidden


class EfficientNetLite(Network):
    """A 3x3 stem, sixteen inverted residual blocks, a 1x1 layer, the mean over places, a linear
    layer; ReLU6, and no squeeze-and-excitation.

    Without the dropout of 0.2 before the linear layer, which is element-wise work on 1280
    numbers per image.

    Source: Tan & Le 2019, arXiv 1905.11946; tensorflow/tpu, efficientnet/lite.
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
        width = config.scaled(STEM)
        stem = nnx.Conv(
            dataset.input_shape[-1],
            width,
            (3, 3),
            strides=2,
            padding="SAME",
            use_bias=False,
            dtype=dtype,
            kernel_init=HE_NORMAL,
            rngs=rngs,
        )
        self.stem = Unit(stem, width, dtype=dtype, bn=bn, rngs=rngs)
        blocks = []
        for count, size, stride, expansion, channels in STAGES:
            for index in range(count):
                block = Block(
                    width,
                    config.scaled(channels),
                    size=size,
                    stride=stride if index == 0 else 1,
                    expansion=expansion,
                    dtype=dtype,
                    bn=bn,
                    rngs=rngs,
                )
                blocks.append(block)
                width = config.scaled(channels)
        self.blocks = nnx.List(blocks)
        self.tail = pointwise(width, config.scaled(TAIL), dtype=dtype, bn=bn, rngs=rngs)
        self.head = classifier(config.scaled(TAIL), dataset.classes, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = jax.nn.relu6(self.stem(inputs, is_training=is_training))
        for block in self.blocks:
            hidden = block(hidden, is_training=is_training)
        hidden = jax.nn.relu6(self.tail(hidden, is_training=is_training))
        return classified(self.head, hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Output channels over the tensor axis, input channels over fsdp; the depthwise kernels,
        3 % of the parameters, are whole everywhere."""
        return (
            (r"stem/layer/kernel$", P(None, None, FSDP, TENSOR)),
            (r"(expand|project|tail)/layer/kernel$", P(FSDP, TENSOR)),
            (r"norm/(scale|bias)$", P(TENSOR)),
            (r"head/kernel$", P(FSDP, TENSOR)),
            (r"head/bias$", P(TENSOR)),
        )
