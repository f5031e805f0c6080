"""Synchronous SGD: every update uses the gradients of all workers, or of the first to finish.

Source: Goyal et al. 2017, arXiv 1706.02677, section 3; with backup workers, Chen et al. 2016,
"Revisiting distributed synchronous SGD", arXiv 1604.00981, section 3.
"""

from typing import Any

from scalejax.config.emulation import SynchronousConfig
from scalejax.emulation.algorithms.algorithm import Algorithm, algorithm_of
from scalejax.emulation.barrier import Barrier
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy
from scalejax.emulation.virtual_cluster import Body


class AllReduced(Algorithm[SynchronousConfig]):
    """Workers that each hold all parameters, and all-reduce their gradients."""

    def __post_init__(self) -> None:
        seconds = self.cluster.durations.collective_seconds
        self._barrier = Barrier[tuple[Shards, Value]](
            self.cluster, lambda: seconds, self._synchronised
        )
        self._step = 0

    def _worker(self, worker: int) -> Body:
        while True:
            made = self.instructions.gradient(tuple(self.servers.params), self._rows(worker))
            yield self.cluster.computing(worker)
            yield from self._barrier.wait(worker, made)

    def _rows(self, worker: int) -> Rows:
        return Rows(worker=worker, index=self._step, workers=self.cluster.workers, way="part")

    def _synchronised(self, made: list[tuple[Shards, Value]]) -> None:
        for server in range(len(self.servers.params)):
            parts = [gradient[server] for gradient, _ in made]
            self.servers.update(server, reduced(self.instructions, self.config.reduction, parts))
        self._step += 1
        self.progress.made(1, [metrics for _, metrics in made], self.servers.whole)


class Served(Algorithm[SynchronousConfig]):
    """Workers that push to servers, which wait for all of them, or for the first few."""

    def __post_init__(self) -> None:
        self._wanted = self.cluster.workers - self.config.backup_workers
        self._next = self.cluster.env.event()
        self._parts: list[dict[int, Value]] = [{} for _ in self.servers.params]
        self._metrics: dict[int, Value] = {}
        self._step = 0

    def _worker(self, worker: int) -> Body:
        while True:
            step = self._step
            copy: Copy = yield self._fetched(worker)
            gradient, metrics = self.instructions.gradient(copy.params, self._rows(worker, step))
            yield self.cluster.computing(worker)
            self._push(worker, step, gradient, metrics)
            while self._step == step:
                yield self._next

    def _rows(self, worker: int, step: int) -> Rows:
        """Samples of a gradient: parts of one global batch if all workers count. Otherwise the
        fastest workers are not known beforehand, and each has its own samples."""
        workers = self.cluster.workers
        if self._wanted == workers:
            return Rows(worker=worker, index=step, workers=workers, way="part")
        return self._own_rows(worker, sharing=self._wanted)

    def _push(self, worker: int, step: int, gradient: Shards, metrics: Value) -> None:
        def apply(server: int, part: Value) -> None:
            parts = self._parts[server]
            if step != self._step or len(parts) == self._wanted or worker in parts:
                self.dropped_gradients += server == 0
                return
            parts[worker] = part
            self._metrics[worker] = metrics
            if all(len(parts) == self._wanted for parts in self._parts):
                self._update()

        self.servers.push(worker, gradient, apply)

    def _update(self) -> None:
        """Apply the mean of the arrived gradients; each server sums in the order of the workers."""
        for server, parts in enumerate(self._parts):
            ordered = [parts[worker] for worker in sorted(parts)]
            self.servers.update(server, reduced(self.instructions, self.config.reduction, ordered))
        metrics = [self._metrics[worker] for worker in sorted(self._metrics)]
        self._parts, self._metrics = [{} for _ in self._parts], {}
        self._step += 1
        self.progress.made(1, metrics, self.servers.whole)
        self._next, following = self.cluster.env.event(), self._next
        following.succeed()


@algorithm_of.register
def _synchronous(config: SynchronousConfig, *shared: Any) -> Algorithm:
    return (AllReduced if config.is_all_reduced else Served)(config, *shared)


def reduced(instructions: InstructionLog, reduction: str, parts: list[Value]) -> Value:
    """The gradient of an update: mean or Adasum of the gradients of all workers."""
    if reduction == "adasum":
        return instructions.adasum(parts)
    return instructions.combine([1 / len(parts)] * len(parts), parts)
