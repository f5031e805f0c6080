"""VGG-16: 3x3 convolutions in five stages, and how it is split over a mesh."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ImageNetworkConfig
from scalejax.models.convolution import PERCEPTRON_RULES, Perceptron, convolution, max_pool
from scalejax.models.network import Network, PartitionRules
from scalejax.models.sharding import constrained_by_row

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions of each stage: configuration D."""
HIDDEN = 4096
"""Width of the two hidden linear layers."""


class Vgg(Network, names=("vgg16",)):
    """Stages of 3x3 convolutions with ReLU, each halved by a pool; three linear layers.

    Without the dropout between the linear layers (see `Perceptron`). Convolutions have biases, no
    BatchNorm, and He's initialisation; the paper's authors trained in steps, and later found that
    random initialisation makes this unnecessary.

    Source: Simonyan & Zisserman 2014, arXiv 1409.1556, table 1, D.
    """

    def __init__(self, config: ImageNetworkConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        height, width, channels = dataset.input_shape
        convolutions = []
        for published, count in STAGES:
            channels_out = config.scaled(published)
            for _ in range(count):
                convolutions.append(
                    convolution(
                        channels, channels_out, size=3, has_bias=True, dtype=dtype, rngs=rngs
                    )
                )
                channels = channels_out
        self.convolutions = nnx.List(convolutions)
        halvings = 2 ** len(STAGES)
        places = (height // halvings) * (width // halvings)
        self.linear = Perceptron(
            places * channels, config.scaled(HIDDEN), dataset.classes, dtype=dtype, rngs=rngs
        )

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden, layers = inputs, iter(self.convolutions)
        for _, count in STAGES:
            for _ in range(count):
                hidden = jax.nn.relu(constrained_by_row(next(layers)(hidden)))
            hidden = max_pool(hidden, size=2, stride=2)
        return self.linear(hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Channels over fsdp and tensor; see `PERCEPTRON_RULES`."""
        return PERCEPTRON_RULES
