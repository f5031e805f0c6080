"""Elastic averaging SGD: workers with their own parameters, coupled by a centre variable.

Source: Zhang, Choromanska & LeCun 2015, "Deep learning with elastic averaging SGD", NIPS 28,
algorithm 1 (asynchronous): a worker fetches the centre, moves towards it by a fraction of their
difference, and sends that fraction, which is added to the centre. A local step is a step of the
run's optimizer, whose state the worker keeps (momentum and Nesterov: algorithm 2). A worker that
restarts after a failure takes the centre as its parameters, and keeps its optimizer state, which is
assumed to be saved after each step, so that its learning rate continues.
"""

from scalejax.config.emulation import EasgdConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.instructions import Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy
from scalejax.emulation.virtual_cluster import Body


class Easgd(Algorithm[EasgdConfig], config=EasgdConfig):
    """Workers, each with its part of the examples, and servers that hold the centre."""

    def __post_init__(self) -> None:
        self._part = self.config.moving_rate / self.cluster.workers
        self._states = [tuple(self.servers.states)] * self.cluster.workers

    def _worker(self, worker: int) -> Body:
        """Process of a worker, which starts from the centre and continues with its next samples."""
        instructions, cluster = self.instructions, self.cluster
        first: Copy = yield self._fetched(worker)
        params = first.params
        while True:
            index = self._minibatches[worker]
            before = params
            if index % self.config.period_steps == 0:
                centre: Copy = yield self._fetched(worker)
                difference = instructions.combine_shards(
                    (self._part, -self._part), (params, centre.params)
                )
                params = instructions.combine_shards((1.0, -1.0), (params, difference))
                self._push(worker, difference, centre)
            rows = Rows(worker=worker, index=index, workers=cluster.workers, way="own")
            gradient, metrics = instructions.gradient(before, rows)
            yield cluster.computing(worker)
            each = zip(params, self._states[worker], gradient, strict=True)
            params, self._states[worker] = zip(
                *(instructions.update(*parts) for parts in each), strict=True
            )
            self._minibatches[worker] += 1
            self.progress.made(1, [metrics], self.servers.whole)

    def _push(self, worker: int, difference: Shards, centre: Copy) -> None:
        servers = self.servers

        def apply(server: int, part: Value) -> None:
            servers.staleness[servers.versions[server] - centre.versions[server]] += 1
            servers.put(
                server, self.instructions.combine((1.0, 1.0), (servers.params[server], part))
            )

        servers.push(worker, difference, apply)
