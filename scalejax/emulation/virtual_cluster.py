"""Virtual cluster of an emulated run: virtual time, heterogeneous workers, shared links.

Knows delays and queues; nothing of the values computed or sent.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy
from simpy.core import EmptySchedule

from scalejax.config.emulation import EmulationConfig, FailuresConfig, StragglersConfig
from scalejax.core.errors import ConfigError

Then = Callable[[], object]
"""Callback of an event."""
Body = Generator[simpy.Event, Any, None]
"""Process of a worker (simpy), which yields the events it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Mean durations and bandwidths of all actions of an algorithm."""

    gradient_seconds: float
    """Mean time of one worker's gradient."""
    gradient_deviation_seconds: float
    """Standard deviation of that time between gradients."""
    collective_seconds: float
    """Exposed time of an all-reduce over all workers."""
    update_seconds: float
    """Time of a server's update of all parameters."""
    latency_seconds: float
    """Latency of a message between worker and server."""
    worker_bytes_per_second: float | None
    """Bandwidth of a host of workers to the servers, each direction; None: unlimited."""
    server_bytes_per_second: float | None
    """Bandwidth of a server to the workers, each direction; None: unlimited."""
    workers_per_host: int
    """Workers on each host."""
    link_bytes_per_second: float | None = None
    """Bandwidth of a worker to the others of its host, each direction; None: unlimited."""
    host_bytes_per_second: float | None = None
    """Bandwidth of all workers of a host to its memory, each direction; None: unlimited."""
    hop_seconds: float | None = None
    """Latency of a message between workers of one host; None: `latency_seconds`."""


class Line:
    """First-in first-out queue with one server, such as a link or a processor."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_at = 0.0
        self._waiting: deque[_Service] = deque()

    def serve(self, seconds: float, then: Then) -> None:
        """Queue a request of `seconds`, and call `then` when it is served."""
        now = self._env.now
        begin = max(now, self._free_at)
        self._free_at = begin + seconds
        if begin > now:
            while self._waiting and self._waiting[0].begin_at <= now:
                self._waiting.popleft()
            service = _Service(begin, seconds, then)
            self._waiting.append(service)
            then = partial(service.end, begin)
        after(self._env, self._free_at - now, then)

    def close(self, seconds: float) -> None:
        """Start no service for `seconds` from now; a current one completes, and the queue keeps its
        order."""
        now = self._env.now
        waiting = [each for each in self._waiting if each.begin_at > now]
        opens_at = now + seconds
        if (waiting[0].begin_at if waiting else self._free_at) >= opens_at:
            return
        self._free_at = opens_at
        for each in waiting:
            each.begin_at = self._free_at
            self._free_at += each.seconds
            after(self._env, self._free_at - now, partial(each.end, each.begin_at))


@dataclass(slots=True)
class _Service:
    """A request in a queue."""

    begin_at: float
    seconds: float
    then: Then

    def end(self, began_at: float) -> None:
        """Complete the request, unless it was postponed meanwhile."""
        if began_at == self.begin_at:
            self.then()


def after(env: simpy.Environment, seconds: float, then: Then) -> None:
    """Call `then` after `seconds`; at once if 0."""
    if seconds <= 0:
        then()
        return
    timeout = env.timeout(seconds)
    assert timeout.callbacks is not None  # noqa: S101  a new event has callbacks

    def happen(_: simpy.Event) -> None:
        then()

    timeout.callbacks.append(happen)


class VirtualCluster:
    """The workers of an emulation, their delays and failures, and the clock."""

    def __init__(self, config: EmulationConfig, durations: Durations, *, seed: int) -> None:
        """Create all workers at virtual second 0.

        Args:
            config: workers, stragglers and failures.
            durations: mean durations of all actions.
            seed: seed of all random numbers.
        """
        self.env = simpy.Environment()
        self.durations = durations
        self.workers = config.workers
        self.done = self.env.event()
        """Event at the end of the run."""
        self.living = config.workers
        """Number of workers that have not failed permanently."""
        self.worker_failures = 0
        """Number of worker failures."""
        self._failures = config.failures
        self._seed = seed
        self._slowness = slowness(config.stragglers, config.workers, self.random("slowness"))
        self._times = [
            gradient_times(
                config.stragglers,
                durations.gradient_seconds * factor,
                durations.gradient_deviation_seconds * factor,
                self.random("gradient", worker),
            )
            for worker, factor in enumerate(self._slowness)
        ]
        hosts = -(-config.workers // durations.workers_per_host)
        self._sending = [Line(self.env) for _ in range(hosts)]
        self._receiving = [Line(self.env) for _ in range(hosts)]

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self.env.now

    def computing(self, worker: int) -> simpy.Event:
        """Event at the end of the gradient that `worker` begins now."""
        return self.env.timeout(next(self._times[worker]))

    def start(self, life: Callable[[int], Body], *, count: int | None = None) -> None:
        """Start the process of each worker, or of the first `count`; after a failure it is started
        again, if the worker restarts."""
        for worker in range(self.workers if count is None else count):
            self.env.process(self._lives(worker, life))

    def send(self, worker: int, payload_bytes: float, then: Then) -> None:
        """Call `then` when `payload_bytes` of `worker` have left through the link of its host."""
        self._pass(self._sending[worker // self.durations.workers_per_host], payload_bytes, then)

    def receive(self, worker: int, payload_bytes: float, then: Then) -> None:
        """Call `then` when `payload_bytes` have arrived through the link of its host."""
        self._pass(self._receiving[worker // self.durations.workers_per_host], payload_bytes, then)

    def run(self) -> None:
        """Advance virtual time until the run is done.

        Raises:
            ConfigError: if it cannot finish because too many workers have failed permanently.
        """
        try:
            while not self.done.processed:
                self.env.step()
        except EmptySchedule as error:
            raise ConfigError(
                f"the run does not end: {self.workers - self.living} of {self.workers} workers "
                f"have failed for good by virtual second {self.env.now:.6g}, and nothing goes on. "
                "With emulation.failures.worker_restart_seconds they come back."
            ) from error

    def random(self, *name: str | int) -> np.random.Generator:
        """An independent random generator for this name."""
        return random_stream(self._seed, *name)

    def _pass(self, line: Line, payload_bytes: float, then: Then) -> None:
        rate = self.durations.worker_bytes_per_second
        line.serve(payload_bytes / rate if rate else 0.0, then)

    def _lives(self, worker: int, life: Callable[[int], Body]) -> Body:
        failures, generator = self._failures, self.random("failures", worker)
        if failures.worker_mtbf_seconds is None:
            yield from life(worker)
            return
        while True:
            process = self.env.process(_until_interrupted(life(worker)))
            yield process | self.env.timeout(generator.exponential(failures.worker_mtbf_seconds))
            if not process.is_alive:
                return
            process.interrupt()
            self.worker_failures += 1
            if failures.worker_restart_seconds is None:
                self.living -= 1
                return
            yield self.env.timeout(failures.worker_restart_seconds)


def _until_interrupted(life: Body) -> Body:
    try:
        yield from life
    except simpy.Interrupt:  # the worker failed: its work is lost
        return


def random_stream(seed: int, *name: str | int) -> np.random.Generator:
    """A random generator that depends only on a seed and a name."""
    words = [part if isinstance(part, int) else int.from_bytes(part.encode()) for part in name]
    return np.random.default_rng([seed, *words])


def slowness(
    config: StragglersConfig, workers: int, generator: np.random.Generator
) -> tuple[float, ...]:
    """Factor on the mean time of each worker; the slow ones are random."""
    slow = set(generator.permutation(workers)[: round(config.slow_share * workers)].tolist())
    return tuple(config.slow_factor if worker in slow else 1.0 for worker in range(workers))


def gradient_times(
    config: StragglersConfig,
    mean_seconds: float,
    deviation_seconds: float,
    generator: np.random.Generator,
) -> Generator[float, None, None]:
    """Random times of successive gradients in seconds, at least 0.

    A normal time below 0 counts as 0, which raises the mean by less than 0.1 % if the standard
    deviation is a third of it, and by 8 % if the two are equal: use a lognormal time then.
    """
    if config.distribution == "exponential":
        while True:
            yield generator.exponential(mean_seconds)
    if deviation_seconds == 0 or mean_seconds == 0:
        while True:
            yield mean_seconds
    if config.distribution == "lognormal":
        sigma = np.sqrt(np.log1p((deviation_seconds / mean_seconds) ** 2))
        while True:
            yield mean_seconds * float(np.exp(sigma * generator.standard_normal() - sigma**2 / 2))
    while True:
        yield max(0.0, float(generator.normal(mean_seconds, deviation_seconds)))


def are_returning(failures: FailuresConfig) -> bool:
    """Whether every worker restarts after every failure."""
    return failures.worker_mtbf_seconds is None or failures.worker_restart_seconds is not None
