"""A program's schedule prepared for repeated costing: distinct operations once, in arrays.

Compute between two communication events is one segment, however many operations it holds, and
operations that differ only in name are costed once. Knows no hardware and no seconds.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scalejax.core.errors import ConfigError
from scalejax.simulator.program import Collective, Loop, Operation, Program


@dataclass(frozen=True, slots=True)
class Work:
    """A segment of compute without a communication event inside."""

    segment: int
    """Index of the segment."""


@dataclass(frozen=True, slots=True)
class Start:
    """A collective joins the queue of the communication stream."""

    name: str
    """The compiler's name for it."""
    collective: int
    """Index among the distinct collectives."""
    is_async: bool
    """Whether compute continues meanwhile."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute stalls until a collective is done."""

    name: str
    """The compiler's name for the collective."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A loop that holds communication events."""

    name: str
    """The compiler's name for it."""
    trip_count: int
    """Iterations of the body."""
    body: tuple["Work | Start | Wait | Repeat", ...]
    """Events of one iteration."""


Event = Work | Start | Wait | Repeat
"""An event of a program that changes the state of the streams."""


class Schedule:
    """Events of a program in order, with its distinct operations and collectives."""

    events: tuple[Event, ...]
    """Events for the streams, in order."""
    operations: tuple[Operation, ...]
    """Distinct compute operations, without their names."""
    collectives: tuple[Collective, ...]
    """Distinct collectives."""
    members: tuple[tuple[Operation, ...], ...]
    """Operations of each segment in order, those of a loop within it once."""
    axes: dict[str, tuple[str, ...]]
    """Mesh axes that each collective spans, by its name."""
    operation_runs: NDArray[np.float64]
    """Runs of each distinct operation per step, shape (operations,)."""
    collective_runs: NDArray[np.float64]
    """Runs of each distinct collective per step, shape (collectives,)."""

    def __init__(self, program: Program, *, merge: bool = True) -> None:
        """Read `program`.

        Args:
            program: the compiled step.
            merge: whether operations without a communication event between them are one
                segment; if not, each operation is its own.

        Raises:
            ConfigError: if an operation waits for a collective that the program does not hold.
        """
        _require_known_waits(program)
        reader = _Reader(merge=merge)
        self.events = reader.read(program.operations, 1)
        self.operations = tuple(reader.operations)
        self.collectives = tuple(reader.collectives)
        self.members = tuple(tuple(members) for members in reader.members)
        self.axes = reader.axes
        self.operation_runs = np.array(
            [reader.operation_runs[index] for index in range(len(self.operations))], float
        )
        self.collective_runs = np.array(
            [reader.collective_runs[index] for index in range(len(self.collectives))], float
        )
        self.dispatches = _mean_runs_per_step(self.operations, self.operation_runs)
        self.dispatches += _mean_runs_per_step(self.collectives, self.collective_runs)
        """Operations that the host dispatches per step, averaged over all steps."""
        self.flop_by_dtype = Counter[str]()
        """FLOP of one device in one step by the type of their operands."""
        self.custom_calls = 0
        """Opaque custom calls per step."""
        for operation, runs in zip(self.operations, self.operation_runs.tolist(), strict=True):
            if operation.flop:
                self.flop_by_dtype[operation.dtype] += round(
                    operation.flop * runs * operation.share
                )
            if operation.kind == "custom":
                self.custom_calls += int(runs)
        columns = np.array(reader.entries, float).reshape(-1, 3)
        # Entries are in the order of their segments, and no segment is without one.
        self._first_entries = np.unique(columns[:, 0], return_index=True)[1]
        self._entry_operations = columns[:, 1].astype(int)
        self._entry_runs = columns[:, 2]

    def segment_seconds(self, operation_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of each segment without contention, shape (segments,).

        Args:
            operation_seconds: time of each distinct operation, shape (operations,).
        """
        seconds = operation_seconds[self._entry_operations] * self._entry_runs
        return np.add.reduceat(seconds, self._first_entries) if len(seconds) else seconds


class _Reader:
    """Collects segments, operations and collectives of a program."""

    def __init__(self, *, merge: bool) -> None:
        self.merge = merge
        self.operations: dict[Operation, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.operation_runs: dict[int, int] = {}
        self.collective_runs: dict[int, int] = {}
        self.members: list[list[Operation]] = []
        self.axes: dict[str, tuple[str, ...]] = {}
        self.entries: list[tuple[int, int, int]] = []  # segment, operation, runs per segment

    def read(self, items: tuple[Operation | Loop, ...], runs: int) -> tuple[Event, ...]:
        """Events of `items`, which run `runs` times in a step."""
        events: list[Event] = []
        for item in items:
            if isinstance(item, Loop):
                self._loop(item, runs, events)
            elif item.collective is not None:
                index = self.collectives.setdefault(item.collective, len(self.collectives))
                self.collective_runs[index] = self.collective_runs.get(index, 0) + runs
                self.axes[item.name] = item.collective.group.axes
                events.append(Start(item.name, index, item.collective.is_async))
            elif item.waits_for is not None:
                events.append(Wait(item.waits_for))
            elif item.kind != "wait":
                self._compute(item, runs, 1, events)
        return tuple(events)

    def _loop(self, loop: Loop, runs: int, events: list[Event]) -> None:
        if not loop.trip_count:
            return
        if self.merge and _is_compute_alone(loop):
            self._compute_loop(loop, runs, 1, events)
            return
        body = self.read(loop.body, runs * loop.trip_count)
        events.append(Repeat(loop.name, loop.trip_count, body))

    def _compute_loop(self, loop: Loop, runs: int, times: int, events: list[Event]) -> None:
        for item in loop.body:
            if isinstance(item, Loop):
                self._compute_loop(item, runs, times * loop.trip_count, events)
            elif item.kind != "wait":
                self._compute(item, runs, times * loop.trip_count, events)

    def _compute(self, item: Operation, runs: int, times: int, events: list[Event]) -> None:
        """Add an operation to the current segment, in which it runs `times` times."""
        if not times:
            return
        nameless = replace(item, name="", source=None)
        index = self.operations.setdefault(nameless, len(self.operations))
        self.operation_runs[index] = self.operation_runs.get(index, 0) + runs * times
        if not (self.merge and events and isinstance(events[-1], Work)):
            events.append(Work(len(self.members)))
            self.members.append([])
        self.members[-1].append(item)
        self.entries.append((len(self.members) - 1, index, times))


def _mean_runs_per_step(
    kinds: tuple[Operation, ...] | tuple[Collective, ...], runs: NDArray[np.float64]
) -> float:
    """Runs of all `kinds` per step, averaged over all steps (`share` of each)."""
    return float(np.array([kind.share for kind in kinds], float) @ runs)


def _is_compute_alone(loop: Loop) -> bool:
    return all(
        _is_compute_alone(item)
        if isinstance(item, Loop)
        else item.collective is None and item.waits_for is None
        for item in loop.body
    )


def _require_known_waits(program: Program) -> None:
    started = {item.name for item, _ in program.walk() if item.collective is not None}
    for item, _ in program.walk():
        if item.waits_for is not None and item.waits_for not in started:
            raise ConfigError(
                f"program {program.name!r}: {item.name} waits for {item.waits_for!r}, "
                "which is no collective of it."
            )
