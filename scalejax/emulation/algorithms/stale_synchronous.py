"""Stale synchronous parallel: asynchronous workers with a bound on staleness.

A worker at clock c sees all updates of clocks up to c - s - 1, its own updates, and some of the
others' up to c + s - 1; those that come sooner wait at the server. s = 0 is bulk synchronous.

Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
server", NIPS 26, section 3. Parameters are read at every clock, not kept for the next.
"""

from dataclasses import dataclass, field

from scalejax.config.emulation import StaleSynchronousConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.instructions import Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy
from scalejax.emulation.virtual_cluster import Body


class StaleSynchronous(Algorithm[StaleSynchronousConfig], config=StaleSynchronousConfig):
    """Workers, each with its part of the examples, and servers that hold back the fastest."""

    def __post_init__(self) -> None:
        self._bound = self.config.staleness_bound
        self._sent = [0] * self.cluster.workers
        self._clocks = [0] * self.cluster.workers  # clock of each worker, complete on every server
        self._held: list[_Update] = []
        self._advanced = self.cluster.env.event()

    def _worker(self, worker: int) -> Body:
        while True:
            while self._sent[worker] - min(self._clocks) > self._bound:
                yield self._advanced
            copy: Copy = yield self._fetched(worker)
            clock = self._sent[worker]
            rows = Rows(worker=worker, index=clock, workers=self.cluster.workers, way="own")
            gradient, metrics = self.instructions.gradient(copy.params, rows)
            yield self.cluster.computing(worker)
            self._sent[worker] += 1
            update = _Update(
                clock=clock,
                worker=worker,
                gradient=gradient,
                metrics=metrics,
                versions=copy.versions,
            )
            self._push(update)

    def _push(self, update: "_Update") -> None:
        def arrived(server: int, part: Value) -> None:
            update.waiting.append((server, part))
            if update not in self._held:
                self._held.append(update)
            self._apply(update)

        def arrived_everywhere() -> None:
            slowest, self._clocks[update.worker] = min(self._clocks), update.clock + 1
            if min(self._clocks) > slowest:
                for held in sorted(self._held, key=lambda each: (each.clock, each.worker)):
                    self._apply(held)
                self._advanced, following = self.cluster.env.event(), self._advanced
                following.succeed()

        self.servers.push(update.worker, update.gradient, arrived, arrived_everywhere)

    def _apply(self, update: "_Update") -> None:
        """Apply the arrived parts of `update`, if the slowest worker may see it."""
        if update.clock >= min(self._clocks) + self._bound:
            return
        servers = self.servers
        for server, part in update.waiting:
            servers.staleness[servers.versions[server] - update.versions[server]] += 1
            servers.update(server, part)
            update.applied += 1
        update.waiting.clear()
        if update.applied == len(update.gradient):
            self._held.remove(update)
            self.progress.made(1, [update.metrics], servers.whole)


@dataclass(slots=True, kw_only=True, eq=False)
class _Update:
    """A pushed gradient that is not completely applied."""

    clock: int
    worker: int
    gradient: Shards
    metrics: Value
    versions: tuple[int, ...]
    waiting: list[tuple[int, Value]] = field(default_factory=list)
    """(server, part) of the parts that have arrived and are not applied."""
    applied: int = 0
    """Number of servers that have applied their part."""
