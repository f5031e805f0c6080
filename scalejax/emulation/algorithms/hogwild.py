"""Hogwild: workers that read and write one shared memory without locks.

The parameters are blocks, each read or written atomically, in a random order each time. Others
write between two blocks, so that a gradient is computed on parameters that never existed together,
and is applied to later ones.

Source: Niu, Recht, Re & Wright 2011, "Hogwild!: a lock-free approach to parallelizing stochastic
gradient descent", NIPS 24, algorithm 1; there a block is one number.
"""

from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster


class Hogwild:
    """Workers, each with its part of the examples, and their shared memory."""

    def __init__(
        self,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self.dropped_gradients = 0
        """Always 0: every gradient is written."""
        self._cluster, self._instructions, self._memory, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._minibatches = [0] * cluster.workers
        self._draws = [cluster.random("blocks", worker) for worker in range(cluster.workers)]

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        memory, cluster = self._memory, self._cluster
        while True:
            parts: dict[int, tuple[Value, int]] = {}
            for block in self._order(worker):
                parts[block] = memory.params[block], memory.versions[block]
                yield from self._moved(worker, block)
            read, versions = zip(*(parts[block] for block in sorted(parts)), strict=True)
            gradient, metrics = self._instructions.gradient(read, self._next_rows(worker))
            yield cluster.computing(worker)
            yield from self._write(worker, gradient, versions)
            self._progress.made(1, [metrics], memory.whole)

    def _write(self, worker: int, gradient: Shards, versions: tuple[int, ...]) -> Body:
        memory = self._memory
        update_seconds = self._cluster.durations.update_seconds / len(gradient)
        for block in self._order(worker):
            memory.staleness[memory.versions[block] - versions[block]] += 1
            memory.update(block, gradient[block])
            yield from self._moved(worker, block)
            if update_seconds:
                yield self._cluster.env.timeout(update_seconds)

    def _moved(self, worker: int, block: int) -> Body:
        """Wait until a block has been copied between memory and worker."""
        if self._cluster.durations.worker_bytes_per_second is not None:
            moved = self._cluster.env.event()
            self._cluster.receive(worker, self._memory.shard_bytes[block], moved.succeed)
            yield moved

    def _order(self, worker: int) -> list[int]:
        """A random order of the blocks; workers with one order and speed would never interleave."""
        return self._draws[worker].permutation(len(self._memory.params)).tolist()

    def _next_rows(self, worker: int) -> Rows:
        index, self._minibatches[worker] = self._minibatches[worker], self._minibatches[worker] + 1
        return Rows(worker=worker, index=index, workers=self._cluster.workers, way="own")
