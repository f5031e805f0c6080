"""Hogwild: workers that read and write one shared memory without locks.

The parameters are blocks, each read or written atomically, in a random order each time. Other
workers write between two blocks, so that a gradient is computed on parameters that never existed
together, and is applied to later ones.

Source: Niu, Recht, Re & Wright 2011, "Hogwild!: a lock-free approach to parallelizing stochastic
gradient descent", NIPS 24, algorithm 1; there a block is one number.
"""

from scalejax.config.emulation import HogwildConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.instructions import Shards, Value
from scalejax.emulation.virtual_cluster import Body


class Hogwild(Algorithm[HogwildConfig], config=HogwildConfig):
    """Workers, each with its part of the examples, and their shared memory."""

    def __post_init__(self) -> None:
        self._draws = [
            self.cluster.random("blocks", worker) for worker in range(self.cluster.workers)
        ]

    def _worker(self, worker: int) -> Body:
        memory, cluster = self.servers, self.cluster
        while True:
            parts: dict[int, tuple[Value, int]] = {}
            for block in self._order(worker):
                parts[block] = memory.params[block], memory.versions[block]
                yield from self._moved(worker, block)
            read, versions = zip(*(parts[block] for block in sorted(parts)), strict=True)
            gradient, metrics = self.instructions.gradient(read, self._own_rows(worker))
            yield cluster.computing(worker)
            yield from self._write(worker, gradient, versions)
            self.progress.made(1, [metrics], memory.whole)

    def _write(self, worker: int, gradient: Shards, versions: tuple[int, ...]) -> Body:
        memory = self.servers
        update_seconds = self.cluster.durations.update_seconds / len(gradient)
        for block in self._order(worker):
            memory.staleness[memory.versions[block] - versions[block]] += 1
            memory.update(block, gradient[block])
            yield from self._moved(worker, block)
            if update_seconds:
                yield self.cluster.env.timeout(update_seconds)

    def _moved(self, worker: int, block: int) -> Body:
        """Wait until a block has been copied between memory and worker."""
        if self.cluster.durations.worker_bytes_per_second is not None:
            moved = self.cluster.env.event()
            self.cluster.receive(worker, self.servers.shard_bytes[block], moved.succeed)
            yield moved

    def _order(self, worker: int) -> list[int]:
        """A random order of the blocks; workers of equal order and speed would never interleave."""
        return self._draws[worker].permutation(len(self.servers.params)).tolist()
