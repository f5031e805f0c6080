"""Synchronous SGD: every update uses the gradients of all workers, or of the first to finish.

Source: Goyal et al. 2017, arXiv 1706.02677, section 3; with backup workers, Chen et al. 2016,
"Revisiting distributed synchronous SGD", arXiv 1604.00981, section 3.
"""

from scalejax.config.emulation import SynchronousConfig
from scalejax.emulation.barrier import Barrier
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy, Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster


class AllReduced:
    """Workers that each hold all parameters, and all-reduce their gradients."""

    def __init__(
        self,
        config: SynchronousConfig,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self.dropped_gradients = 0
        """Always 0: all workers are waited for."""
        self._cluster, self._instructions, self._servers, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._reduction = config.reduction
        seconds = cluster.durations.collective_seconds
        self._barrier = Barrier[tuple[Shards, Value]](cluster, lambda: seconds, self._synchronised)
        self._step = 0

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        while True:
            made = self._instructions.gradient(tuple(self._servers.params), self._rows(worker))
            yield self._cluster.computing(worker)
            yield from self._barrier.wait(worker, made)

    def _rows(self, worker: int) -> Rows:
        return Rows(worker=worker, index=self._step, workers=self._cluster.workers, way="part")

    def _synchronised(self, made: list[tuple[Shards, Value]]) -> None:
        for server in range(len(self._servers.params)):
            parts = [gradient[server] for gradient, _ in made]
            self._servers.update(server, reduced(self._instructions, self._reduction, parts))
        self._step += 1
        self._progress.made(1, [metrics for _, metrics in made], self._servers.whole)


class Served:
    """Workers that push to servers, which wait for all of them, or for the first few."""

    def __init__(
        self,
        config: SynchronousConfig,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self._cluster, self._instructions, self._servers, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._reduction = config.reduction
        self._wanted = cluster.workers - config.backup_workers
        self._next = cluster.env.event()
        self._parts: list[dict[int, Value]] = [{} for _ in servers.params]
        self._metrics: dict[int, Value] = {}
        self._step = 0
        self._minibatches = [0] * cluster.workers
        self.dropped_gradients = 0
        """Gradients dropped because they came too late."""

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        while True:
            step = self._step
            arrived = self._cluster.env.event()
            self._servers.fetch(worker, arrived.succeed)
            copy: Copy = yield arrived
            gradient, metrics = self._instructions.gradient(copy.params, self._rows(worker, step))
            yield self._cluster.computing(worker)
            self._push(worker, step, gradient, metrics)
            while self._step == step:
                yield self._next

    def _rows(self, worker: int, step: int) -> Rows:
        """Samples of a gradient: parts of one global batch if all workers count; otherwise the
        fastest are not known beforehand, and each worker has its own samples."""
        workers = self._cluster.workers
        if self._wanted == workers:
            return Rows(worker=worker, index=step, workers=workers, way="part")
        index, self._minibatches[worker] = self._minibatches[worker], self._minibatches[worker] + 1
        return Rows(worker=worker, index=index, workers=workers, way="own", sharing=self._wanted)

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

        self._servers.push(worker, gradient, apply)

    def _update(self) -> None:
        """Apply the mean of the arrived gradients; each server sums in the order of the workers."""
        for server, parts in enumerate(self._parts):
            ordered = [parts[worker] for worker in sorted(parts)]
            self._servers.update(server, reduced(self._instructions, self._reduction, ordered))
        metrics = [self._metrics[worker] for worker in sorted(self._metrics)]
        self._parts, self._metrics = [{} for _ in self._parts], {}
        self._step += 1
        self._progress.made(1, metrics, self._servers.whole)
        self._next, following = self._cluster.env.event(), self._next
        following.succeed()


def reduced(instructions: InstructionLog, reduction: str, parts: list[Value]) -> Value:
    """The gradient of an update: mean or Adasum of the gradients of all workers."""
    if reduction == "adasum":
        return instructions.adasum(parts)
    return instructions.combine([1 / len(parts)] * len(parts), parts)
