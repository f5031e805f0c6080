"""The layers that image networks share: convolutions, BatchNorm after them, pools, classifier."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.models.sharding import constrained_by_row

HE_NORMAL = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
"""He's initialisation by outgoing connections, not truncated, as in Goyal et al. 2017
(arXiv 1706.02677, section 5.1) and torchvision."""


def convolution(
    width_in: int,
    width_out: int,
    *,
    size: int | tuple[int, int],
    stride: int = 1,
    is_padded: bool = True,
    has_bias: bool = False,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A convolution, by default without bias and padded by (size - 1) / 2 on every side.

    Symmetric padding, as in torchvision: XLA's "SAME" would pad an even image of a stride-2
    layer on one side only.
    """
    sides = (size, size) if isinstance(size, int) else size
    return nnx.Conv(
        width_in,
        width_out,
        sides,
        strides=stride,
        padding=tuple((side - 1) // 2 for side in sides) if is_padded else "VALID",
        use_bias=has_bias,
        dtype=dtype,
        kernel_init=HE_NORMAL,
        rngs=rngs,
    )


class Unit(nnx.Module):
    """A convolution and its BatchNorm."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        size: int | tuple[int, int],
        stride: int = 1,
        is_padded: bool = True,
        is_last: bool = False,
        dtype: jnp.dtype,
        bn: BatchNormScope,
        rngs: nnx.Rngs,
    ):
        self.convolution = convolution(
            width_in,
            width_out,
            size=size,
            stride=stride,
            is_padded=is_padded,
            dtype=dtype,
            rngs=rngs,
        )
        # A block whose last scale is zero starts as the identity (Goyal et al. 2017, section 5.1).
        scale_init = nnx.initializers.zeros if is_last else nnx.initializers.ones
        self.norm = BatchNorm(width_out, scope=bn, dtype=dtype, scale_init=scale_init, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """The normalised convolution of `inputs`."""
        return self.norm(constrained_by_row(self.convolution(inputs)), is_training=is_training)


def max_pool(images: jax.Array, *, size: int, stride: int, padding: int = 0) -> jax.Array:
    """The maximum over each square neighbourhood of [batch, height, width, channels]."""
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    # In float16 XLA decomposes the gradient before it partitions, and gathers the batch for it.
    is_widened = images.dtype == jnp.float16
    pooled = jax.lax.reduce_window(
        images.astype(jnp.float32) if is_widened else images,
        -jnp.inf,
        jax.lax.max,
        (1, size, size, 1),
        (1, stride, stride, 1),
        around,
    )
    return pooled.astype(images.dtype) if is_widened else pooled


def classifier(width: int, classes: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """The last layer: weights drawn with standard deviation 0.01 (Goyal et al. 2017), and float32
    sums, so that logits do not lose bits before the loss."""
    return nnx.Linear(
        width,
        classes,
        dtype=dtype,
        kernel_init=nnx.initializers.normal(0.01),
        preferred_element_type=jnp.float32,
        rngs=rngs,
    )


def classified(head: nnx.Linear, hidden: jax.Array) -> jax.Array:
    """Logits, float32 [batch, classes], of the mean of `hidden` over its places."""
    return constrained_by_row(head(constrained_by_row(hidden.mean((1, 2)))))


class Perceptron(nnx.Module):
    """The three linear layers, with ReLU between them, at the end of networks from before 2015.

    The first takes every place of every channel; weights of the two hidden layers are drawn as in
    He et al. 2015 (arXiv 1502.01852), so that depth keeps the variance. No dropout: it is
    element-wise work on two rows per image, under 0.1 % of a step.
    """

    def __init__(
        self, width_in: int, width: int, classes: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.first, self.second = (
            nnx.Linear(
                inputs, width, dtype=dtype, kernel_init=nnx.initializers.he_normal(), rngs=rngs
            )
            for inputs in (width_in, width)
        )
        self.head = classifier(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, float32 [batch, classes], of activations [batch, height, width, channels]."""
        hidden = constrained_by_row(images.reshape(images.shape[0], -1))
        for layer in (self.first, self.second):
            hidden = jax.nn.relu(constrained_by_row(layer(hidden)))
        return constrained_by_row(self.head(hidden))


CONVOLUTION_RULES = (
    (r"convolutions?(/\d+)?/kernel$", P(None, None, FSDP, TENSOR)),
    (r"head/kernel$", P(FSDP, TENSOR)),
    (r"head/bias$", P(TENSOR)),
)
"""Output channels over the tensor axis, input channels over fsdp."""
UNIT_RULES = (*CONVOLUTION_RULES, (r"norm/(scale|bias)$", P(TENSOR)))
"""Partition rules where BatchNorm follows convolutions."""
PERCEPTRON_RULES = (
    *CONVOLUTION_RULES,
    (r"convolutions/\d+/bias$", P(TENSOR)),
    (r"first/kernel$", P(FSDP, TENSOR)),
    (r"first/bias$", P(TENSOR)),
    (r"second/kernel$", P(TENSOR, FSDP)),
)
"""Partition rules where a `Perceptron` follows convolutions with biases: its hidden layers are a
pair, by column and by row (Megatron, arXiv 1909.08053)."""
