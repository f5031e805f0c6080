"""AlexNet with one tower, and how it is split over a mesh."""

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ImageNetworkConfig
from scalejax.models.convolution import PERCEPTRON_RULES, Perceptron, convolution, max_pool
from scalejax.models.network import Network, PartitionRules
from scalejax.models.sharding import constrained_by_row

CHANNELS = (64, 192, 384, 384, 256)
"""Channels of each convolution."""
SIZES = (11, 5, 3, 3, 3)
"""Height and width of each convolution's window."""
POOLED = (0, 1, 4)
"""Convolutions that a pool follows."""
HIDDEN = 4096
"""Width of the two hidden linear layers."""


class AlexNet(Network, names=("alexnet",)):
    """Five convolutions with ReLU, three pools, three linear layers.

    The one-tower network of Krizhevsky 2014 (arXiv 1404.5997) as in TensorFlow's benchmarks
    (tensorflow/benchmarks, tf_cnn_benchmarks/models/alexnet_model.py): 227 x 227 images, a first
    convolution with stride 4 and no padding, and 384 channels in the fourth (torchvision's has
    256). No local response normalisation, and no dropout (see `Perceptron`).
    """

    def __init__(self, config: ImageNetworkConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        *sides, channels = dataset.input_shape
        convolutions = []
        for index, (published, size) in enumerate(zip(CHANNELS, SIZES, strict=True)):
            is_first = index == 0
            layer = convolution(
                channels,
                config.scaled(published),
                size=size,
                stride=4 if is_first else 1,
                is_padded=not is_first,
                has_bias=True,
                dtype=dtype,
                rngs=rngs,
            )
            convolutions.append(layer)
            channels = config.scaled(published)
        self.convolutions = nnx.List(convolutions)
        height, width = map(_places_left, sides)
        self.linear = Perceptron(
            height * width * channels,
            config.scaled(HIDDEN),
            dataset.classes,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = inputs
        for index, layer in enumerate(self.convolutions):
            hidden = jax.nn.relu(constrained_by_row(layer(hidden)))
            if index in POOLED:
                hidden = max_pool(hidden, size=3, stride=2)
        return self.linear(hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Channels over fsdp and tensor; see `PERCEPTRON_RULES`."""
        return PERCEPTRON_RULES


def _places_left(side: int) -> int:
    """Places along a side of `side` pixels that the linear layers see: 6 for 227."""
    side = (side - SIZES[0]) // 4 + 1
    for _ in POOLED:
        side = (side - 3) // 2 + 1
    return side
