"""Synchronous SGD whose all-reduce overlaps with the next gradient, or with the next read.

Source: tf_cnn_benchmarks (2023-10-05): `variable_consistency=relaxed` applies the mean gradient of
the step before, at the first step zeros; `staged_vars` has each step read the parameters that were
there one update ago.
"""

from scalejax.config.emulation import DelayedConfig
from scalejax.emulation.barrier import Barrier
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster


class Delayed:
    """Synchronous workers whose gradients or parameters are one step old."""

    def __init__(
        self,
        config: DelayedConfig,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self.dropped_gradients = 0
        """Always 0: all gradients are waited for."""
        self._delays_gradients = config.delayed == "gradients"
        self._cluster, self._instructions, self._servers, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._barrier = Barrier[tuple[Shards, Value]](
            cluster, self._left_seconds, self._synchronised
        )
        self._step, self._began_seconds = 0, 0.0
        self._read = servers.whole()
        self._before: Shards = ()

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        workers = self._cluster.workers
        while True:
            rows = Rows(worker=worker, index=self._step, workers=workers, way="part")
            made = self._instructions.gradient(self._read, rows)
            yield self._cluster.computing(worker)
            yield from self._barrier.wait(worker, made)

    def _left_seconds(self) -> float:
        """Remaining seconds of the all-reduce, which (or half of which) began with the step.

        Ignores that a worker which failed meanwhile was missing in it.
        """
        collective, passed = self._cluster.durations.collective_seconds, self._cluster.now
        passed -= self._began_seconds
        hidden, paid = (
            (collective, 0.0) if self._delays_gradients else (collective / 2, collective / 2)
        )
        return max(0.0, hidden - passed) + paid

    def _synchronised(self, arrived: list[tuple[Shards, Value]]) -> None:
        share = [1 / len(arrived)] * len(arrived)
        mean = self._instructions.combine_shards(share, [gradient for gradient, _ in arrived])
        applied = mean
        if self._delays_gradients:
            applied = self._before or self._instructions.combine_shards([0.0], [mean])
            self._before = mean
        read = self._servers.whole()
        for server, part in enumerate(applied):
            self._servers.update(server, part)
        self._read = self._servers.whole() if self._delays_gradients else read
        self._step, self._began_seconds = self._step + 1, self._cluster.now
        self._progress.made(1, [each for _, each in arrived], self._servers.whole)
