"""A small convolutional network with BatchNorm, and how it is split over a mesh."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import CnnConfig
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.convolution import classified, classifier, convolution
from scalejax.models.network import Network, PartitionRules
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.models.sharding import constrained_by_row


class Cnn(Network, names=("cnn",)):
    """Stride-2 3x3 convolutions, each with BatchNorm and ReLU; the mean over places; a linear
    layer."""

    def __init__(
        self, config: CnnConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
    ):
        dtype = jnp.dtype(config.compute_dtype)
        widths = (dataset.input_shape[-1], *config.channels)
        self.convolutions = nnx.List(
            convolution(width_in, width_out, size=3, stride=2, dtype=dtype, rngs=rngs)
            for width_in, width_out in pairwise(widths)
        )
        self.norms = nnx.List(
            BatchNorm(width, scope=bn, dtype=dtype, rngs=rngs) for width in config.channels
        )
        self.head = classifier(widths[-1], dataset.classes, dtype=dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        hidden = inputs
        for layer, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = constrained_by_row(layer(hidden))
            hidden = jax.nn.relu(norm(hidden, is_training=is_training))
        return classified(self.head, hidden)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Output channels over the tensor axis, input channels over fsdp."""
        return (
            (r"convolutions/\d+/kernel$", P(None, None, FSDP, TENSOR)),
            (r"norms/\d+/(scale|bias)$", P(TENSOR)),
            (r"head/kernel$", P(FSDP, TENSOR)),
        )
