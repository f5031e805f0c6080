"""Parameter servers: each holds a shard of every parameter, and serves requests in order.

Servers are not synchronised with each other, so that a worker may get shards of different versions
(Dean et al. 2012, section 4.1). Messages between one worker and one server keep their order, as on
one connection: fetched parameters include what the worker pushed before. Knows messages and
versions; the values are computed by way of the instruction log.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scalejax.config.emulation import FailuresConfig
from scalejax.config.gradient_sync import GradientSyncConfig
from scalejax.emulation.instructions import InstructionLog, Shards, Value
from scalejax.emulation.virtual_cluster import Line, Then, VirtualCluster, after


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """All parameters, as fetched by a worker."""

    params: Shards
    """A shard from every server."""
    versions: tuple[int, ...]
    """Number of updates that each server had made by then."""


@dataclass(slots=True)
class _Push:
    """Part of a gradient, sent to a server."""

    has_come: bool = False
    """Whether it has arrived at the server."""
    behind: list[Then] = field(default_factory=list)
    """Later messages on the same connection, held until it has arrived."""


class Servers:
    """The servers of a run, and their links to the workers."""

    def __init__(
        self,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        shard_bytes: Sequence[int],
        failures: FailuresConfig,
    ) -> None:
        """Create servers that hold the initial parameters.

        Args:
            cluster: the workers and links.
            instructions: log through which values are computed.
            shard_bytes: bytes of the shard of each server.
            failures: failure model of the servers.
        """
        self.params = list(instructions.initial())
        """Parameter shard of each server."""
        self.states = [instructions.optimizer(params) for params in self.params]
        """Optimizer state of each server."""
        self.versions = [0] * len(self.params)
        """Number of updates of each server."""
        self.staleness: Counter[int] = Counter()
        """Number of gradients by staleness: the updates of a server since the worker of a gradient
        read its parameters."""
        self.sent_bytes = 0
        """Bytes sent between workers and servers."""
        self.failures = 0
        """Number of server failures."""
        self.shard_bytes = tuple(shard_bytes)
        """Bytes of the shard of each server."""
        self.message_bytes = self.shard_bytes
        """Bytes of a pushed gradient's part for each server."""
        self._compression: GradientSyncConfig | None = None
        self._residuals: dict[tuple[int, int], Value] = {}  # by worker and server
        self._cluster, self._instructions = cluster, instructions
        self._pushes: dict[tuple[int, int], _Push] = {}  # the last push of a worker to a server
        self._in, self._out, self._at_work = (
            [Line(cluster.env) for _ in self.params] for _ in range(3)
        )
        if failures.server_mtbf_seconds is not None:
            for server in range(len(self.params)):
                cluster.env.process(self._fail(server, failures))

    def compress(self, compression: GradientSyncConfig, message_bytes: Sequence[int]) -> None:
        """Have workers compress what they push, to `message_bytes` for each server."""
        self._compression, self.message_bytes = compression, tuple(message_bytes)

    def whole(self) -> Shards:
        """The current parameters."""
        return tuple(self.params)

    def fetch(self, worker: int, then: Callable[[Copy], object]) -> None:
        """Fetch the shard of every server; `then` is called with them when all have arrived."""
        parts: dict[int, tuple[Value, int]] = {}

        def arrived(server: int, part: Value, version: int) -> None:
            parts[server] = part, version
            if len(parts) == len(self.params):
                whole = [parts[server] for server in range(len(self.params))]
                then(
                    Copy(
                        params=tuple(part for part, _ in whole), versions=tuple(v for _, v in whole)
                    )
                )

        for server in range(len(self.params)):
            self._asked(worker, server, arrived)

    def push(
        self,
        worker: int,
        gradient: Shards,
        apply: Callable[[int, Value], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Send every server its part of `gradient`; each calls `apply` with its number and the
        part when it processes it; `then` is called when all have."""
        left = len(gradient)
        if self._compression is not None:
            gradient = tuple(
                self._compressed(worker, server, part) for server, part in enumerate(gradient)
            )

        def applied(server: int, part: Value) -> None:
            nonlocal left
            if self._cluster.done.triggered:  # the run ended at this same time
                return
            apply(server, part)
            left -= 1
            if not left:
                then()

        for server, part in enumerate(gradient):
            self._pushed(worker, server, part, applied)

    def _compressed(self, worker: int, server: int, part: Value) -> Value:
        """The part as received; its residual is added to the next one."""
        kept = self._residuals.get((worker, server))
        sent, left = self._instructions.compress(part, kept)
        if self._compression is not None and self._compression.keeps_state:
            self._residuals[worker, server] = left
        return sent

    def operate(self, then: Callable[[], object] = lambda: None) -> None:
        """Have every server do one small operation on its shard, requested by a coordinator; `then`
        is called when all have answered. Messages hold only a few numbers."""
        left, seconds = len(self.params), self._cluster.durations.update_seconds / len(self.params)
        env, latency_seconds = self._cluster.env, self._cluster.durations.latency_seconds

        def answered() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        def done() -> None:
            after(env, latency_seconds, answered)

        for line in self._at_work:
            after(env, latency_seconds, lambda line=line: line.serve(seconds, done))

    def update(self, server: int, gradient: Value) -> None:
        """Apply a gradient to the shard of one server."""
        self.params[server], self.states[server] = self._instructions.update(
            self.params[server], self.states[server], gradient
        )
        self.versions[server] += 1

    def put(self, server: int, params: Value) -> None:
        """Replace the shard of one server with the result of an update made elsewhere."""
        self.params[server] = params
        self.versions[server] += 1

    def _asked(self, worker: int, server: int, arrived: Callable[[int, Value, int], None]) -> None:
        cluster, size = self._cluster, self.shard_bytes[server]
        before = self._pushes.get((worker, server))
        self.sent_bytes += size

        def asked() -> None:
            # The shard is read when the server begins to send.
            part, version = self.params[server], self.versions[server]

            def sent() -> None:
                after(cluster.env, cluster.durations.latency_seconds, on_host)

            def on_host() -> None:
                cluster.receive(worker, size, lambda: arrived(server, part, version))

            self._out[server].serve(self._link_seconds(size), sent)

        def at_work() -> None:
            self._at_work[server].serve(0.0, asked)

        def at_server() -> None:
            if before is None or before.has_come:
                at_work()
            else:
                before.behind.append(at_work)

        after(cluster.env, cluster.durations.latency_seconds, at_server)

    def _pushed(
        self, worker: int, server: int, part: Value, applied: Callable[[int, Value], None]
    ) -> None:
        cluster, size = self._cluster, self.message_bytes[server]
        self.sent_bytes += size
        seconds = cluster.durations.update_seconds / len(self.params)
        push = self._pushes[worker, server] = _Push()

        def on_link() -> None:
            after(cluster.env, cluster.durations.latency_seconds, at_server)

        def at_server() -> None:
            self._in[server].serve(self._link_seconds(size), at_work)

        def at_work() -> None:
            self._at_work[server].serve(seconds, lambda: applied(server, part))
            push.has_come = True
            for request in push.behind:
                request()
            push.behind.clear()  # the requests would keep their parameters in memory

        cluster.send(worker, size, on_link)

    def _link_seconds(self, size: int) -> float:
        rate = self._cluster.durations.server_bytes_per_second
        return size / rate if rate else 0.0

    def _fail(self, server: int, failures: FailuresConfig):
        generator = self._cluster.random("server failures", server)
        mtbf = failures.server_mtbf_seconds
        while mtbf and self._cluster.living:  # without workers left, the run stops
            yield self._cluster.env.timeout(generator.exponential(mtbf))
            self.failures += 1
            self._at_work[server].close(failures.server_restart_seconds)
            yield self._cluster.env.timeout(failures.server_restart_seconds)
