"""The networks, one module each, with their partition rules over a mesh."""

from scalejax.models import (  # noqa: F401  each registers its networks
    alexnet,
    bert,
    cnn,
    efficientnet,
    gpt,
    inception,
    llama,
    mlp,
    resnet,
    vgg,
    vit,
    xception,
)
from scalejax.models.network import (
    Network,
    NetworkWithFeatures,
    PartitionRules,
    build_network,
    is_cast,
    network_class,
    param_specs,
    parameter_path,
)
from scalejax.models.normalization import BatchNorm, BatchNormScope

__all__ = [
    "BatchNorm",
    "BatchNormScope",
    "Network",
    "NetworkWithFeatures",
    "PartitionRules",
    "build_network",
    "is_cast",
    "network_class",
    "param_specs",
    "parameter_path",
]
