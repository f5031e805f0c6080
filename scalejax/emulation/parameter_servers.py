"""Parameter servers: each holds a part of every parameter, and takes what comes as it comes.

No order holds between servers, so that a worker may get parts of different ages (Dean et al.
2012, section 4.1). Between one worker and one server messages keep theirs, as on one connection:
parameters are never older than what the worker pushed before it asked. Knows messages and versions;
the arithmetic is the tape's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scalejax.config.emulation import FailuresConfig
from scalejax.emulation.compression import Compression
from scalejax.emulation.instructions import InstructionLog, Shards, Value
from scalejax.emulation.virtual_cluster import Line, Then, VirtualCluster, after


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """All parameters, as a worker got them."""

    params: Shards
    """A part from every server."""
    versions: tuple[int, ...]
    """Updates that each server had made by then."""


@dataclass(slots=True)
class _Push:
    """Part of a gradient, sent to a server."""

    has_come: bool = False
    """It is there, and waits for its turn or has had it."""
    behind: list[Then] = field(default_factory=list)
    """What comes after it on the same connection, until it has come."""


class Servers:
    """The servers of a run, and what joins them to the workers."""

    def __init__(
        self,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        shard_bytes: Sequence[int],
        failures: FailuresConfig,
    ) -> None:
        """With the parameters before the first update.

        Args:
            world: where they are.
            tape: does the arithmetic.
            shard_bytes: size of the part that each holds.
            failures: how they break.
        """
        self.params = list(instructions.initial())
        """The part that each server holds."""
        self.states = [instructions.optimizer(params) for params in self.params]
        """Of its optimizer."""
        self.versions = [0] * len(self.params)
        """Updates that it has made."""
        self.staleness: Counter[int] = Counter()
        """How many gradients met a server that had made so many updates since their worker read
        its parameters."""
        self.sent_bytes = 0
        """That workers and servers have sent each other."""
        self.failures = 0
        """Times that a server failed."""
        self.shard_bytes = tuple(shard_bytes)
        """Size of the part that each holds."""
        self.compression: Compression | None = None
        """What workers do to gradients before they push them."""
        self._cluster, self._instructions = cluster, instructions
        self._pushes: dict[tuple[int, int], _Push] = {}  # the last of a worker to a server
        self._in, self._out, self._at_work = (
            [Line(cluster.env) for _ in self.params] for _ in range(3)
        )
        if failures.server_mtbf_seconds is not None:
            for server in range(len(self.params)):
                cluster.env.process(self._fail(server, failures))

    def whole(self) -> Shards:
        """All parameters as they are now."""
        return tuple(self.params)

    def fetch(self, worker: int, then: Callable[[Copy], object]) -> None:
        """Ask every server for its part; `then` gets them when all have come."""
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
        part when it is its turn; `then` is called when all have."""
        left = len(gradient)
        if self.compression is not None:
            gradient = self.compression.sent(worker, gradient)

        def applied(server: int, part: Value) -> None:
            nonlocal left
            if self._cluster.done.triggered:  # at the same moment, and too late
                return
            apply(server, part)
            left -= 1
            if not left:
                then()

        for server, part in enumerate(gradient):
            self._pushed(worker, server, part, applied)

    def operate(self, then: Callable[[], object] = lambda: None) -> None:
        """Have every server do one small operation on its own part, at the word of a coordinator;
        `then` is called when all have answered. What is sent is a few numbers."""
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
        """Apply a gradient to the part of one server."""
        self.params[server], self.states[server] = self._instructions.update(
            self.params[server], self.states[server], gradient
        )
        self.versions[server] += 1

    def put(self, server: int, params: Value) -> None:
        """Replace the part of one server by what an update made elsewhere has come to."""
        self.params[server] = params
        self.versions[server] += 1

    def _asked(self, worker: int, server: int, arrived: Callable[[int, Value, int], None]) -> None:
        cluster, size = self._cluster, self.shard_bytes[server]
        before = self._pushes.get((worker, server))
        self.sent_bytes += size

        def asked() -> None:
            # Read when the server begins to send, and sent as it is then.
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
        cluster, size = self._cluster, self.shard_bytes[server]
        if self.compression is not None:
            size = self.compression.sent_bytes(server)
        self.sent_bytes += size
        seconds = cluster.durations.update_seconds / len(self.params)
        push = self._pushes[worker, server] = _Push()

        def on_wire() -> None:
            after(cluster.env, cluster.durations.latency_seconds, at_server)

        def at_server() -> None:
            self._in[server].serve(self._link_seconds(size), at_work)

        def at_work() -> None:
            self._at_work[server].serve(seconds, lambda: applied(server, part))
            push.has_come = True
            for request in push.behind:
                request()
            push.behind.clear()  # which would keep the parameters that came of them

        cluster.send(worker, size, on_wire)

    def _link_seconds(self, size: int) -> float:
        rate = self._cluster.durations.server_bytes_per_second
        return size / rate if rate else 0.0

    def _fail(self, server: int, failures: FailuresConfig):
        generator = self._cluster.random("server failures", server)
        mtbf = failures.server_mtbf_seconds
        while mtbf and self._cluster.living:  # when nobody is left, nothing is to happen any more
            yield self._cluster.env.timeout(generator.exponential(mtbf))
            self.failures += 1
            self._at_work[server].close(failures.server_restart_seconds)
            yield self._cluster.env.timeout(failures.server_restart_seconds)
