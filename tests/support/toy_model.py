"""A model in one file: its config, its network, and how a mesh splits it."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import ComputeType, ModelConfig
from scalejax.config.parallelism import TENSOR
from scalejax.models import Network, PartitionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig(ModelConfig):
    """A linear layer over flattened images."""

    name: Literal["toy"] = "toy"
    """Selects this network."""
    scale: float = 1.0
    """Factor of the logits."""
    compute_dtype: ComputeType = "float32"
    """Element type of activations."""


class Toy(Network, names=("toy",)):
    """Its network."""

    def __init__(self, config: ToyConfig, dataset: DatasetFacts, *, rngs: nnx.Rngs):
        self.scale = config.scale
        self.layer = nnx.Linear(math.prod(dataset.input_shape), dataset.classes, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [batch, classes] of images."""
        return self.scale * self.layer(inputs.reshape(inputs.shape[0], -1))

    @staticmethod
    def partition_rules() -> PartitionRules:
        """By column."""
        return ((r"layer/kernel$", P(None, TENSOR)),)
