"""Downpour SGD: replicas that fetch parameters and push gradients without waiting for others.

Source: Dean et al. 2012, "Large scale distributed deep networks", NIPS 25, section 4.1 and
appendix, algorithm 7.1.
"""

from itertools import count

import simpy

from scalejax.config.emulation import DownpourConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.instructions import InstructionLog, Shards, Value
from scalejax.emulation.parameter_servers import Copy
from scalejax.emulation.virtual_cluster import Body


class Downpour(Algorithm[DownpourConfig], config=DownpourConfig):
    """Replicas, each with its part of the examples, and their shared servers."""

    def __post_init__(self) -> None:
        self._warm = self.cluster.env.event()
        self._warming = simpy.Resource(self.cluster.env)  # held by the replica that warms up

    def start(self) -> None:
        """Start all replicas; only one at first if the parameters are warmed up."""
        self._warm_up()
        self.cluster.start(self._replica)

    def _replica(self, worker: int) -> Body:
        """Process of a replica. It starts when the parameters are warmed up, or warms them up
        itself: the first replica does so, or the next one if that fails."""
        with self._warming.request() as turn:
            yield turn | self._warm
            yield from self._trains(worker)

    def _trains(self, worker: int) -> Body:
        config, instructions, replica = self.config, self.instructions, _Replica()
        for step in count():
            if step % config.n_fetch == 0:
                arrived = self._fetch(worker, replica)
                if config.waits_for_fetch or not replica.copy:
                    yield arrived
            (copy,) = replica.copy
            gradient, metrics = instructions.gradient(copy.params, self._own_rows(worker))
            yield self.cluster.computing(worker)
            replica.add(instructions, gradient, metrics, copy)
            replica.step(instructions, gradient, config.local_learning_rate)
            if step % config.n_push == 0:
                self._push(worker, replica)

    def _fetch(self, worker: int, replica: "_Replica") -> simpy.Event:
        arrived = self.cluster.env.event()

        def take(copy: Copy) -> None:
            replica.copy = [copy]
            arrived.succeed()

        self.servers.fetch(worker, take)
        return arrived

    def _push(self, worker: int, replica: "_Replica") -> None:
        gradient, metrics, versions = replica.accrued, replica.metrics, replica.versions
        replica.accrued, replica.metrics = (), []

        def apply(server: int, part: Value) -> None:
            self.servers.staleness[self.servers.versions[server] - versions[server]] += 1
            self.servers.update(server, part)

        def applied() -> None:
            self.progress.made(len(metrics), metrics, self.servers.whole)
            self._warm_up()

        self.servers.push(worker, gradient, apply, applied)

    def _warm_up(self) -> None:
        if not self._warm.triggered and self.servers.versions[0] >= self.config.warmstart_updates:
            self._warm.succeed()


class _Replica:
    """State of a replica."""

    def __init__(self) -> None:
        self.copy: list[Copy] = []
        """The fetched parameters."""
        self.accrued: Shards = ()
        """Sum of the gradients since the last push."""
        self.metrics: list[Value] = []
        """Metrics of their minibatches."""
        self.versions: tuple[int, ...] = ()
        """Server versions of the oldest parameters used for these gradients."""

    def add(
        self, instructions: InstructionLog, gradient: Shards, metrics: Value, copy: Copy
    ) -> None:
        """Add a gradient to those to be pushed."""
        if not self.accrued:
            self.accrued, self.versions = gradient, copy.versions
        else:
            self.accrued = instructions.combine_shards((1.0, 1.0), (self.accrued, gradient))
        self.metrics.append(metrics)

    def step(self, instructions: InstructionLog, gradient: Shards, learning_rate: float) -> None:
        """Apply a gradient to the replica's own copy."""
        if learning_rate:
            (copy,) = self.copy
            params = instructions.combine_shards((1.0, -learning_rate), (copy.params, gradient))
            self.copy = [Copy(params=params, versions=copy.versions)]
