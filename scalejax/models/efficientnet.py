"""EfficientNet-Lite0: inverted residual blocks of depthwise convolutions, split over a mesh."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ImageNetworkConfig
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.convolution import HE_NORMAL, classifier
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.models.sharding import constrained_by_row

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
"""Blocks, side of the kernel, stride of the first block, ratio of inner to input channels, and
output channels (Tan & Le 2019, arXiv 1905.11946, table 1)."""
EPSILON = 1e-3
"""Added to a variance before its root (`batch_norm_epsilon` in TensorFlow's efficientnet_lite)."""


class Depthwise(nnx.Module):
    """A separate convolution of each channel, padded as TensorFlow's "SAME".

    Computed as a sum of shifted products, not as XLA's grouped convolution, which takes several
    times as long on a CPU; a GPU's compiler makes one kernel of the sum. The FLOP of the model,
    which count matrix products and convolutions, leave it out: 9 % of this network's.
    """

    def __init__(self, channels: int, *, size: int, stride: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.stride, self.dtype = stride, dtype
        init = nnx.initializers.normal(math.sqrt(2) / size)  # He's, by incoming connections
        self.kernel = nnx.Param(init(rngs.params(), (size, size, channels), jnp.float32))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[batch, height, width, channels], both sides divided by the stride and rounded up."""
        kernel = self.kernel[...].astype(self.dtype).astype(jnp.float32)
        return depthwise(inputs, kernel, self.stride)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def depthwise(inputs: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """The convolution of every channel of `inputs` [batch, height, width, channels] with its part
    of `kernel` [side, side, channels], summed in float32, returned in the type of the inputs.

    Its gradient with respect to the inputs is such a convolution too: left to JAX it would be a sum
    of padded arrays, which takes minutes to compile.
    """
    size, total = len(kernel), jnp.zeros((), jnp.float32)
    for place, seen in enumerate(_shifted(inputs, size, stride)):
        weight = kernel[None, None, None, *divmod(place, size)]
        total = total + seen.astype(jnp.float32) * weight
    return total.astype(inputs.dtype)


def _shifted(inputs: jax.Array, size: int, stride: int) -> list[jax.Array]:
    """Shifted inputs for each element of a kernel, row by row."""
    spans, around = _windows(inputs.shape[1:3], size, stride)
    padded = jnp.pad(inputs, [(0, 0), *around, (0, 0)])
    return [
        padded[:, row : row + spans[0] : stride, column : column + spans[1] : stride]
        for row in range(size)
        for column in range(size)
    ]


def _windows(
    sides: tuple[int, ...], size: int, stride: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Extent of window starts, and padding, of both sides."""
    spans = [(-(-side // stride) - 1) * stride + 1 for side in sides]
    missing = [max(span + size - 1 - side, 0) for span, side in zip(spans, sides, strict=True)]
    return spans, [(each // 2, each - each // 2) for each in missing]


def _depthwise_forward(
    inputs: jax.Array, kernel: jax.Array, stride: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return depthwise(inputs, kernel, stride), (inputs, kernel)


def _depthwise_backward(
    stride: int, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inputs, kernel = kept
    size, sides = len(kernel), inputs.shape[1:3]
    wide = gradient.astype(jnp.float32)
    of_kernel = [
        jnp.sum(each.astype(jnp.float32) * wide, (0, 1, 2))
        for each in _shifted(inputs, size, stride)
    ]
    spans, around = _windows(sides, size, stride)
    # Zeros between the gradients where windows skip places, and around them as far as the kernel
    # reaches, so that the convolution below needs no more padding.
    edges = []
    for side, span, (before, _) in zip(sides, spans, around, strict=True):
        edges.append((size - 1 - before, side - span + before, stride - 1))
    spread = jax.lax.pad(gradient, jnp.zeros((), gradient.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    total = jnp.zeros((), jnp.float32)
    for row in range(size):
        for column in range(size):
            seen = spread[:, row : row + sides[0], column : column + sides[1]]
            weight = kernel[None, None, None, size - 1 - row, size - 1 - column]
            total = total + seen.astype(jnp.float32) * weight
    return total.astype(inputs.dtype), jnp.stack(of_kernel).reshape(kernel.shape)


depthwise.defvjp(_depthwise_forward, _depthwise_backward)


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
        return self.norm(constrained_by_row(self.layer(inputs)), is_training=is_training)


def pointwise(
    width_in: int, width_out: int, *, dtype: jnp.dtype, bn: BatchNormScope, rngs: nnx.Rngs
) -> Unit:
    """A 1x1 convolution, computed as a matrix product, and its BatchNorm."""
    layer = nnx.Linear(
        width_in, width_out, use_bias=False, dtype=dtype, kernel_init=HE_NORMAL, rngs=rngs
    )
    return Unit(layer, width_out, dtype=dtype, bn=bn, rngs=rngs)


class Block(nnx.Module):
    """Widens the channels, convolves each separately, and narrows them again; added to the input
    where the shape is unchanged."""

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


class EfficientNetLite(Network, names=("efficientnet_lite0",)):
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
        return self.classified(self.features(inputs, is_training=is_training))

    def features(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The input of the last layer, [batch, width]: the mean over places of the layer before."""
        hidden = jax.nn.relu6(self.stem(inputs, is_training=is_training))
        for block in self.blocks:
            hidden = block(hidden, is_training=is_training)
        hidden = jax.nn.relu6(self.tail(hidden, is_training=is_training))
        return hidden.mean((1, 2))

    def classified(self, features: jax.Array) -> jax.Array:
        """Logits [batch, classes] of features."""
        return constrained_by_row(self.head(constrained_by_row(features)))

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
