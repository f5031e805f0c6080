"""Asynchronous and synchronous training algorithms, selected by their config.

Each is a small file with its source; they share the virtual cluster, the instruction log and the
parameter servers.
"""

from typing import Protocol

from scalejax.config.emulation import (
    AlgorithmConfig,
    DelayedConfig,
    DownpourConfig,
    EasgdConfig,
    EmulationConfig,
    HogwildConfig,
    IndependentConfig,
    LocalSgdConfig,
    SandblasterConfig,
    StaleSynchronousConfig,
    SynchronousConfig,
    core_of,
)
from scalejax.emulation.algorithms.delayed import Delayed
from scalejax.emulation.algorithms.downpour import Downpour
from scalejax.emulation.algorithms.easgd import Easgd
from scalejax.emulation.algorithms.hogwild import Hogwild
from scalejax.emulation.algorithms.independent import Independent
from scalejax.emulation.algorithms.local_sgd import LocalSgd
from scalejax.emulation.algorithms.sandblaster import Sandblaster
from scalejax.emulation.algorithms.stale_synchronous import StaleSynchronous
from scalejax.emulation.algorithms.synchronous import AllReduced, Served
from scalejax.emulation.instructions import InstructionLog
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import VirtualCluster


class Algorithm(Protocol):
    """Training algorithm of several workers."""

    dropped_gradients: int
    """Gradients dropped because they came too late."""

    def start(self) -> None:
        """Start the processes of all workers."""
        ...


def algorithm_of(
    config: AlgorithmConfig,
    cluster: VirtualCluster,
    instructions: InstructionLog,
    servers: Servers,
    progress: Progress,
) -> Algorithm:
    """The algorithm of `config`, with its workers in `cluster`."""
    match core_of(config):
        case DownpourConfig() as core:
            return Downpour(core, cluster, instructions, servers, progress)
        case SynchronousConfig(gradient_sync="parameter_server") as core:
            return Served(core, cluster, instructions, servers, progress)
        case SynchronousConfig() as core:
            return AllReduced(core, cluster, instructions, servers, progress)
        case StaleSynchronousConfig() as core:
            return StaleSynchronous(core, cluster, instructions, servers, progress)
        case EasgdConfig() as core:
            return Easgd(core, cluster, instructions, servers, progress)
        case HogwildConfig():
            return Hogwild(cluster, instructions, servers, progress)
        case LocalSgdConfig() as core:
            return LocalSgd(core, cluster, instructions, servers, progress)
        case DelayedConfig() as core:
            return Delayed(core, cluster, instructions, servers, progress)
        case IndependentConfig():
            return Independent(cluster, instructions, servers, progress)
        case SandblasterConfig() as core:
            return Sandblaster(core, cluster, instructions, servers, progress)


def minibatches_per_update(emulation: EmulationConfig) -> int:
    """Steps of the run for each update of one optimizer, on which the learning rate depends."""
    match emulation.core:
        case DownpourConfig(n_push=n_push):
            return n_push
        case EasgdConfig():  # every worker has an optimizer, for its share of all steps
            return emulation.workers
        case _:
            return 1
