"""Workers that do not communicate: an upper bound of the speed.

Source: tf_cnn_benchmarks (2023-10-05), `variable_update=independent`: every device trains a copy
with its part of the samples, and the copy of the first is the result. The others only take time,
so they are not computed here.
"""

from scalejax.emulation.instructions import InstructionLog, Rows
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster


class Independent:
    """The first worker, which stands for all."""

    def __init__(
        self,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self.dropped_gradients = 0
        """None."""
        self._cluster, self._instructions, self._servers, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._step = 0

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker, count=1)

    def _worker(self, worker: int) -> Body:
        while True:
            rows = Rows(worker=worker, index=self._step, workers=self._cluster.workers, way="part")
            gradient, metrics = self._instructions.gradient(self._servers.whole(), rows)
            yield self._cluster.computing(worker)
            for server, part in enumerate(gradient):
                self._servers.update(server, part)
            self._step += 1
            self._progress.made(1, [metrics], self._servers.whole)
