"""Elastic averaging SGD: workers with parameters of their own, and a centre that ties them.

Source: Zhang, Choromanska & LeCun 2015, "Deep learning with elastic averaging SGD", NIPS 28,
algorithm 1 (asynchronous): a worker asks for the centre, moves towards it by a part of their
difference, and sends that part, by which the centre moves. A local step is that of the run's
optimizer, whose state the worker keeps (momentum and Nesterov: algorithm 2). A worker that comes
back after a failure takes the centre for its parameters, and of its own has the state after its
last step, which is taken to be saved at each: its learning rate goes on where it was.
"""

import simpy

from scalejax.config.emulation import EasgdConfig
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy, Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Body, VirtualCluster


class Easgd:
    """Workers, each with its part of the examples, and the servers that hold the centre."""

    def __init__(
        self,
        config: EasgdConfig,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        servers: Servers,
        progress: Progress,
    ) -> None:
        self.dropped_gradients = 0
        """None: all go into their worker's parameters."""
        self._period, self._part = config.period_steps, config.moving_rate / cluster.workers
        self._cluster, self._instructions, self._servers, self._progress = (
            cluster,
            instructions,
            servers,
            progress,
        )
        self._minibatches = [0] * cluster.workers
        self._states = [tuple(servers.states)] * cluster.workers

    def start(self) -> None:
        """Begin."""
        self._cluster.start(self._worker)

    def _worker(self, worker: int) -> Body:
        """The life of a worker, which begins at the centre, with its next samples."""
        instructions, cluster = self._instructions, self._cluster
        first: Copy = yield self._fetched(worker)
        params = first.params
        while True:
            index = self._minibatches[worker]
            before = params
            if index % self._period == 0:
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
            self._progress.made(1, [metrics], self._servers.whole)

    def _fetched(self, worker: int) -> simpy.Event:
        arrived = self._cluster.env.event()
        self._servers.fetch(worker, arrived.succeed)
        return arrived

    def _push(self, worker: int, difference: Shards, centre: Copy) -> None:
        servers = self._servers

        def apply(server: int, part: Value) -> None:
            servers.staleness[servers.versions[server] - centre.versions[server]] += 1
            servers.put(
                server, self._instructions.combine((1.0, 1.0), (servers.params[server], part))
            )

        servers.push(worker, difference, apply)
