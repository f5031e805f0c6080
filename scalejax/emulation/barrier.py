"""Barrier of all workers with a collective: starts when the last arrives, fails with any member.

Knows which workers have arrived; nothing of the data.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import simpy

from scalejax.emulation.virtual_cluster import Body, VirtualCluster, after

Part = TypeVar("Part")


class Barrier(Generic[Part]):
    """Reusable barrier at which workers wait for each other.

    A worker's data are only in its memory. If it fails before the collective is complete, it
    computes them again after its restart; the others wait, and the collective starts again,
    since NCCL's and Gloo's collectives do not survive the loss of a member.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        collective_seconds: Callable[[], float],
        synchronised: Callable[[list[Part]], None],
    ) -> None:
        """Create the barrier with no worker waiting.

        Args:
            cluster: the workers.
            collective_seconds: time of the collective after all have arrived.
            synchronised: called with the data of all workers, in their order.
        """
        self._cluster = cluster
        self._collective_seconds, self._synchronised = collective_seconds, synchronised
        self._parts: dict[int, Part] = {}
        self._over = cluster.env.event()
        self._begun = 0  # collectives started; only the last one counts

    def wait(self, worker: int, part: Part) -> Body:
        """Wait until the collective of all workers is complete; `worker` contributes `part`."""
        self._parts[worker], over = part, self._over
        if len(self._parts) == self._cluster.workers:
            self._begun += 1
            self._begin(self._begun)
        try:
            yield over
        except simpy.Interrupt:
            if over is self._over:
                del self._parts[worker]
                self._begun += 1
            raise

    def _begin(self, number: int) -> None:
        def end() -> None:
            if number != self._begun:  # a worker has failed since
                return
            parts = [self._parts[worker] for worker in sorted(self._parts)]
            self._parts, self._over, over = {}, self._cluster.env.event(), self._over
            self._synchronised(parts)
            over.succeed()

        after(self._cluster.env, self._collective_seconds(), end)
