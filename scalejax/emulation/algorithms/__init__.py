"""Asynchronous and synchronous training algorithms, selected by their config.

Each is a small file with its source, named below; they share the virtual cluster, the instruction
log and the parameter servers.
"""

from scalejax.emulation.algorithms import (  # noqa: F401  each registers itself
    delayed,
    downpour,
    easgd,
    hogwild,
    independent,
    local_sgd,
    sandblaster,
    stale_synchronous,
    synchronous,
)
from scalejax.emulation.algorithms.algorithm import algorithm_of

__all__ = ["algorithm_of"]
