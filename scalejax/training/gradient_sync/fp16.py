"""Float16 compression: gradients are cast to float16, all-reduced in it, then divided.

Source: Horovod's `Compression.fp16`; the sum is in float16 there too, so that the sum of the
devices' gradients must stay below 65504.
"""

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.gradient_sync import Fp16Config
from scalejax.config.parallelism import DATA
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync, compressed


@build_gradient_sync.register
def _fp16(config: Fp16Config, **_: object) -> GradientSync:
    return compressed(lambda weighted, _: synchronised(weighted), config.error_feedback)


def synchronised(gradient: PyTree) -> tuple[PyTree, PyTree]:
    """The mean of what all devices sent, and what this one sent, float32."""
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), gradient)
    devices = lax.axis_size(DATA)
    mean = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / devices, lax.psum(cast, DATA))
    return mean, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), cast)
