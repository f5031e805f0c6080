"""Workers that do not communicate: an upper bound on the speed.

Source: tf_cnn_benchmarks (2023-10-05), `variable_update=independent`: every device trains a copy
with its part of the samples, and the copy of the first is the result. The others only take time,
so they are not computed here.
"""

from scalejax.config.emulation import IndependentConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.instructions import Rows
from scalejax.emulation.virtual_cluster import Body


class Independent(Algorithm[IndependentConfig], config=IndependentConfig):
    """The first worker, which stands for all."""

    def __post_init__(self) -> None:
        self._step = 0

    def start(self) -> None:
        """Begin."""
        self.cluster.start(self._worker, count=1)

    def _worker(self, worker: int) -> Body:
        while True:
            rows = Rows(worker=worker, index=self._step, workers=self.cluster.workers, way="part")
            gradient, metrics = self.instructions.gradient(self.servers.whole(), rows)
            yield self.cluster.computing(worker)
            for server, part in enumerate(gradient):
                self.servers.update(server, part)
            self._step += 1
            self.progress.made(1, [metrics], self.servers.whole)
