"""A collective of all workers: it begins when the last of them is there, and needs them to its end.

Knows who is there; nothing of what they exchange.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import simpy

from scalejax.emulation.virtual_cluster import Body, VirtualCluster, after

Part = TypeVar("Part")


class Barrier(Generic[Part]):
    """Where workers wait for each other, again and again.

    What a worker brings is in its memory alone. One that fails before the exchange is over, while
    it waits or exchanges, loses it, and makes it again when it is back; the others wait, and an
    exchange that had begun begins anew, as NCCL's and Gloo's collectives do not survive a member.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        exchange_seconds: Callable[[], float],
        synchronised: Callable[[list[Part]], None],
    ) -> None:
        """Nobody is there.

        Args:
            world: of the workers.
            exchange_seconds: what the exchange takes from when all are there.
            exchanged: is given what all have brought, in the order of the workers.
        """
        self._cluster = cluster
        self._exchange_seconds, self._synchronised = exchange_seconds, synchronised
        self._parts: dict[int, Part] = {}
        self._over = cluster.env.event()
        self._begun = 0  # exchanges, of which only the last one counts

    def wait(self, worker: int, part: Part) -> Body:
        """Until all workers have exchanged what they have, of `worker` this `part`."""
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
            if number != self._begun:  # somebody has failed since
                return
            parts = [self._parts[worker] for worker in sorted(self._parts)]
            self._parts, self._over, over = {}, self._cluster.env.event(), self._over
            self._synchronised(parts)
            over.succeed()

        after(self._cluster.env, self._exchange_seconds(), end)
