"""A training algorithm of several workers, each registered by the class of its config."""

from collections import Counter
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Generic, TypeVar

import simpy

from scalejax.config.emulation import AlgorithmConfig
from scalejax.emulation.instructions import InstructionLog, Rows
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster

C = TypeVar("C", bound=AlgorithmConfig)


@dataclass(eq=False)
class Algorithm(Generic[C]):
    """Training algorithm of several workers; a subclass names the config that it is built for."""

    config: C
    """Its settings."""
    cluster: VirtualCluster
    """Clock, links and failures of the workers."""
    instructions: InstructionLog
    """Log of what is computed, and when."""
    servers: Servers
    """Holders of the parameters."""
    progress: Progress
    """Reports what happens in the run."""
    dropped_gradients = 0
    """Gradients dropped because they came too late."""

    _minibatches: Counter[int] = field(default_factory=Counter, init=False)

    def __init_subclass__(cls, config: type[AlgorithmConfig] | None = None) -> None:
        if config is not None:
            algorithm_of.register(config, cls)

    def __post_init__(self) -> None:
        """Create the state that the algorithm itself keeps."""

    def start(self) -> None:
        """Start the processes of all workers."""
        self.cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        """Process of a worker."""
        raise NotImplementedError

    def _fetched(self, worker: int) -> simpy.Event:
        """Event of the arrival of the parameters of all servers, a `Copy`."""
        arrived = self.cluster.env.event()
        self.servers.fetch(worker, arrived.succeed)
        return arrived

    def _own_rows(self, worker: int, sharing: int = 1) -> Rows:
        """The next samples of a worker, from its own part of the examples."""
        index, self._minibatches[worker] = self._minibatches[worker], self._minibatches[worker] + 1
        workers = self.cluster.workers
        return Rows(worker=worker, index=index, workers=workers, way="own", sharing=sharing)


@singledispatch
def algorithm_of(
    config: AlgorithmConfig,
    cluster: VirtualCluster,
    instructions: InstructionLog,
    servers: Servers,
    progress: Progress,
) -> Algorithm:
    """The algorithm of `config`, an `EmulationConfig.core`, with its workers in `cluster`."""
    raise NotImplementedError(f"algorithm_of is not registered for {type(config).__name__}")
