"""The layers that image networks share: a convolution before BatchNorm, and the classifier."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.models.network import placed_by_row

HE_NORMAL = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
"""He's initialisation by outgoing connections, not truncated: that of Goyal et al. 2017
(arXiv 1706.02677, section 5.1) and torchvision."""


def convolution(
    width_in: int, width_out: int, *, size: int, stride: int, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Conv:
    """A square convolution without bias, padded by (size - 1) / 2 on every side.

    Symmetric padding, as in torchvision: XLA's "SAME" would pad an even image of a stride-2
    layer on one side only.
    """
    return nnx.Conv(
        width_in,
        width_out,
        (size, size),
        strides=stride,
        padding=(size - 1) // 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=HE_NORMAL,
        rngs=rngs,
    )


def classifier(width: int, classes: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """The last layer: weights drawn with standard deviation 0.01 (Goyal et al. 2017), float32
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
    return placed_by_row(head(placed_by_row(hidden.mean((1, 2)))))
