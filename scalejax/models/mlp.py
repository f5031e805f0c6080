"""A fully connected network over flattened images or numbers, and how a mesh splits it."""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import DatasetFacts
from scalejax.config.model import MlpConfig
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.network import Network, PartitionRules
from scalejax.models.sharding import constrained_by_row


class Mlp(Network, names=("mlp",)):
    """Linear layers with ReLU between them, He initialised."""

    def __init__(self, config: MlpConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        widths = (math.prod(dataset.input_shape), *config.hidden, dataset.classes)
        self.layers = nnx.List(
            nnx.Linear(
                width_in,
                width_out,
                dtype=jnp.dtype(config.compute_dtype),
                kernel_init=nnx.initializers.he_normal(),
                rngs=rngs,
            )
            for width_in, width_out in pairwise(widths)
        )

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels] or numbers."""
        hidden = inputs.reshape(inputs.shape[0], -1)
        for layer in self.layers[:-1]:
            hidden = jax.nn.relu(constrained_by_row(layer(hidden)))
        return constrained_by_row(self.layers[-1](hidden).astype(jnp.float32))

    @staticmethod
    def output_layers(config: MlpConfig) -> tuple[str, ...]:
        """The last of the layers."""
        return (f"layers/{len(config.hidden)}",)

    @staticmethod
    def partition_rules() -> PartitionRules:
        """Megatron's pairs (arXiv 1909.08053): split by column, then by row, with one sum."""
        return (
            (r"layers/\d*[02468]/kernel$", P(FSDP, TENSOR)),
            (r"layers/\d*[02468]/bias$", P(TENSOR)),
            (r"layers/\d*[13579]/kernel$", P(TENSOR, FSDP)),
        )
