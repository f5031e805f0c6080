"""The networks, one module each, with their partition rules over a mesh."""

from importlib import import_module
from pkgutil import iter_modules

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

for _module in iter_modules(__path__, f"{__name__}."):  # each registers its networks
    import_module(_module.name)
