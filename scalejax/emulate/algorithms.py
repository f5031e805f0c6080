"""Which algorithm a config names, ready to start.

Each is a small file with its source; they share the world, the tape and the servers.
"""

from typing import Protocol

from scalejax.emulate.downpour import Downpour
from scalejax.emulate.progress import Progress
from scalejax.emulate.servers import Servers
from scalejax.emulate.synchronous import AllReduced, Served
from scalejax.emulate.tape import Tape
from scalejax.emulate.world import World
from scalejax.emulation_config import AlgorithmConfig, DownpourConfig, SynchronousConfig


class Algorithm(Protocol):
    """A way in which workers train together."""

    dropped_gradients: int
    """Gradients that came too late to count."""

    def start(self) -> None:
        """Begin the lives of all workers."""
        ...


def algorithm_of(
    config: AlgorithmConfig, world: World, tape: Tape, servers: Servers, progress: Progress
) -> Algorithm:
    """The algorithm that `config` names, in `world`."""
    match config:
        case DownpourConfig():
            return Downpour(config, world, tape, servers, progress)
        case SynchronousConfig(exchange="parameter_server"):
            return Served(config, world, tape, servers, progress)
        case SynchronousConfig():
            return AllReduced(world, tape, servers, progress)
