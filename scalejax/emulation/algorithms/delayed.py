"""Synchronous SGD whose all-reduce overlaps with the next gradient, or with the next read.

Source: tf_cnn_benchmarks (2023-10-05): `variable_consistency=relaxed` applies the mean gradient of
the previous step, and zeros at the first step; with `staged_vars`, each step reads the parameters
as they were one update ago.
"""

from scalejax.config.emulation import DelayedConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.barrier import Barrier
from scalejax.emulation.instructions import Rows, Shards, Value
from scalejax.emulation.virtual_cluster import Body


class Delayed(Algorithm[DelayedConfig], config=DelayedConfig):
    """Synchronous workers whose gradients or parameters are one step old."""

    def __post_init__(self) -> None:
        self._delays_gradients = self.config.delayed == "gradients"
        self._barrier = Barrier[tuple[Shards, Value]](
            self.cluster, self._left_seconds, self._synchronised
        )
        self._step, self._began_seconds = 0, 0.0
        self._read = self.servers.whole()
        self._before: Shards = ()

    def _worker(self, worker: int) -> Body:
        workers = self.cluster.workers
        while True:
            rows = Rows(worker=worker, index=self._step, workers=workers, way="part")
            made = self.instructions.gradient(self._read, rows)
            yield self.cluster.computing(worker)
            yield from self._barrier.wait(worker, made)

    def _left_seconds(self) -> float:
        """Remaining seconds of the all-reduce, which (or half of which) began with the step.

        Ignores that a worker which failed meanwhile was missing from it.
        """
        collective, passed = self.cluster.durations.collective_seconds, self.cluster.now
        passed -= self._began_seconds
        hidden, paid = (
            (collective, 0.0) if self._delays_gradients else (collective / 2, collective / 2)
        )
        return max(0.0, hidden - passed) + paid

    def _synchronised(self, arrived: list[tuple[Shards, Value]]) -> None:
        share = [1 / len(arrived)] * len(arrived)
        mean = self.instructions.combine_shards(share, [gradient for gradient, _ in arrived])
        applied = mean
        if self._delays_gradients:
            applied = self._before or self.instructions.combine_shards([0.0], [mean])
            self._before = mean
        read = self.servers.whole()
        for server, part in enumerate(applied):
            self.servers.update(server, part)
        self._read = self.servers.whole() if self._delays_gradients else read
        self._step, self._began_seconds = self._step + 1, self.cluster.now
        self.progress.made(1, [each for _, each in arrived], self.servers.whole)
