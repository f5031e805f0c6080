"""A step walked in schedule order on two streams: one computes, the other communicates.

Compute operations follow one another. An asynchronous collective starts when compute reaches
it and the collectives before it are done; compute goes on, and stands still at the `wait` only
for what is left. A synchronous collective holds up compute from start to end.

Left out: compute slows by a few per cent while both streams are busy, and collectives of
different groups could overlap each other.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from scalejax.cost.communication import collective_seconds
from scalejax.cost.compute import operation_time
from scalejax.errors import ConfigError
from scalejax.hardware import Cluster
from scalejax.program import Collective, Loop, Operation, Program

Axes = tuple[str, ...]
"""Mesh axes that a collective spans."""

_SAME_SECONDS = 1e-12  # two iterations alike to a picosecond are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of one step goes; the first four terms add up to it."""

    compute_seconds: float
    """Time of the operations that arithmetic limits."""
    memory_seconds: float
    """Time of the operations that memory bandwidth limits."""
    launch_seconds: float
    """Time between operations."""
    exposed: tuple[tuple[Axes, float], ...]
    """Time that compute stood still for collectives, by the mesh axes they span."""
    communication_seconds: float
    """Time that collectives took, hidden or not."""

    @property
    def exposed_seconds(self) -> float:
        """Time that compute stood still for collectives."""
        return math.fsum(seconds for _, seconds in self.exposed)

    @property
    def device_seconds(self) -> float:
        """Time of a step in which all collectives were free."""
        return math.fsum((self.compute_seconds, self.memory_seconds, self.launch_seconds))

    @property
    def step_seconds(self) -> float:
        """Time of the step."""
        return math.fsum(
            (
                self.compute_seconds,
                self.memory_seconds,
                self.launch_seconds,
                *(seconds for _, seconds in self.exposed),
            )
        )


def timeline(program: Program, cluster: Cluster) -> Timeline:
    """The time of each part of one step of `program` on `cluster`.

    Raises:
        ConfigError: if an operation waits for a collective that the program does not hold.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    _require_known_waits(program)
    walk = _Walk(cluster)
    walk.run(program.operations)
    walk.drain()
    return Timeline(
        compute_seconds=walk.busy["compute"],
        memory_seconds=walk.busy["memory"],
        launch_seconds=walk.busy["launch"],
        exposed=tuple(sorted(walk.exposed.items())),
        communication_seconds=walk.busy["communication"],
    )


def _require_known_waits(program: Program) -> None:
    started = {item.name for item, _ in program.walk() if item.collective is not None}
    for item, _ in program.walk():
        if item.waits_for is not None and item.waits_for not in started:
            raise ConfigError(
                f"program {program.name!r}: {item.name} waits for {item.waits_for!r}, "
                "which is no collective of it."
            )


class _Walk:
    """The two streams at one moment: what was done, and what is under way."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.busy: dict[str, float] = defaultdict(float)
        self.exposed: dict[Axes, float] = defaultdict(float)
        self.now = 0.0  # where compute stands, iterations that were not walked left out
        self.idle_from = 0.0  # when the communication stream is free
        self.finish: dict[str, float] = {}  # when each collective is done
        self.axes: dict[str, Axes] = {}

    def run(self, operations: Iterable[Operation | Loop]) -> None:
        for item in operations:
            if isinstance(item, Loop):
                self._loop(item)
            elif item.collective is not None:
                self._communicate(item.name, item.collective)
            elif item.waits_for is not None:
                # Not started yet: the first iteration of a loop whose collectives run ahead.
                self._wait(item.waits_for, self.finish.get(item.waits_for, self.now))
            elif item.kind != "wait":
                self._compute(item)

    def drain(self) -> None:
        """Wait for what is still under way at the end of the step, in the order it ends."""
        for name, finish in sorted(self.finish.items(), key=lambda entry: entry[1]):
            self._wait(name, finish)

    def _compute(self, operation: Operation) -> None:
        time = operation_time(operation, self.cluster.chip)
        self.busy[time.bound] += time.busy_seconds
        self.busy["launch"] += time.launch_seconds
        self.now += time.seconds

    def _communicate(self, name: str, collective: Collective) -> None:
        seconds = collective_seconds(collective, self.cluster)
        self.busy["communication"] += seconds
        self.idle_from = max(self.now, self.idle_from) + seconds
        self.finish[name] = self.idle_from
        self.axes[name] = collective.group.axes
        if not collective.is_async:
            self._wait(name, self.idle_from)

    def _wait(self, name: str, finish: float) -> None:
        if finish > self.now:
            self.exposed[self.axes[name]] += finish - self.now
            self.now = finish

    def _loop(self, loop: Loop) -> None:
        """Walk iterations until one leaves the streams as it found them; the rest are alike."""
        for done in range(1, loop.trip_count + 1):
            lags = self._lags()
            busy, exposed = dict(self.busy), dict(self.exposed)
            self.run(loop.body)
            if _alike(lags, self._lags()):
                rest = loop.trip_count - done  # adds to the totals; the streams see lags alone
                _add_difference(self.busy, busy, rest)
                _add_difference(self.exposed, exposed, rest)
                return

    def _lags(self) -> dict[str, float]:
        """How long after compute each collective under way will end: all that the future sees.

        The stream itself is free when the last of them ends.
        """
        return {
            name: finish - self.now for name, finish in self.finish.items() if finish > self.now
        }


def _alike(before: dict[str, float], after: dict[str, float]) -> bool:
    return all(
        abs(before.get(name, 0.0) - after.get(name, 0.0)) < _SAME_SECONDS
        for name in before.keys() | after.keys()
    )


def _add_difference(total: dict, before: dict, times: int) -> None:
    for key, value in total.items():
        total[key] = value + times * (value - before.get(key, 0.0))
