"""A schedule of operations prepared for costing, with each distinct operation once.

Compute between two communication events is one segment, however many operations it contains, and
operations that differ only in name are costed once. Independent of hardware; holds no times.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from scalejax.simulator.program import Collective, Loop, Operation
from scalejax.simulator.transforms.pipeline import BUBBLE


@dataclass(frozen=True, slots=True)
class Work:
    """A segment of compute without a communication event inside."""

    segment: int
    """Index of the segment."""


@dataclass(frozen=True, slots=True)
class Start:
    """A collective joins the queue of the communication stream."""

    name: str
    """The compiler's name for the collective."""
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
    """A loop that contains communication events."""

    name: str
    """The compiler's name for the loop."""
    trip_count: int
    """Iterations of the body."""
    body: tuple["Work | Start | Wait | Repeat", ...]
    """Events of one iteration."""


Event = Work | Start | Wait | Repeat
"""An event of a program that changes the state of the streams."""


costed_fields = attrgetter(
    "kind", "dtype", "flop", "read_bytes", "write_bytes", "shape", "convolution_pass",
    "convolution_groups", "channels_first", "grouped_pass", "share",
)  # fmt: skip
"""Fields of a compute operation except name and source: if they are equal, so is the cost."""


class Schedule:
    """Events of operations in order, with the distinct operations and collectives."""

    def __init__(self, operations: tuple[Operation | Loop, ...], *, merge: bool = True) -> None:
        """Read `operations`.

        Args:
            operations: a program's, or some of them that wait for all collectives they start.
            merge: whether operations without a communication event between them form one
                segment; if not, each operation is its own segment.
        """
        self._merge = merge
        self.operations: list[Operation] = []
        """Distinct compute operations, the first of each kind."""
        self.kinds: dict[tuple[object, ...], int] = {}
        """Index of each distinct operation by the fields that set its time, in order."""
        self.collectives: dict[Collective, int] = {}
        """Index of each distinct collective, in order."""
        self.starts: list[Operation] = []
        """First operation of each segment."""
        self.axes: dict[str, tuple[str, ...]] = {}
        """Mesh axes that each collective spans, by its name."""
        self.segments: list[list[tuple[int, int]]] = []
        """(index, runs) of each operation of each segment, in order."""
        self.operation_runs: list[int] = []
        """Runs of each distinct operation per step."""
        self.collective_runs: list[int] = []
        """Runs of each distinct collective per step."""
        self.exchanges: set[str] = set()
        """Names of collectives that send tokens to experts, or back, while compute waits."""
        self.dispatches = 0.0
        """Operations that the host dispatches per step, averaged over all steps."""
        self.events = self._read(operations, 1)
        """Events for the streams, in order."""

    @cached_property
    def routes_tokens(self) -> bool:
        """Whether the numbers of expert rows follow from the tokens' choices, so that only the
        device knows them; not if experts are padded to a capacity."""
        tokens = [each.tokens for each in self.collectives if each.tokens is not None]
        is_padded = bool(tokens) and all(each.has_capacity for each in tokens)
        return not is_padded and any(each.grouped_pass is not None for each in self.operations)

    @cached_property
    def flop_by_dtype(self) -> Counter[str]:
        """FLOP of one device in one step by the type of their operands."""
        found: Counter[str] = Counter()
        for operation, runs in zip(self.operations, self.operation_runs, strict=True):
            if operation.flop:
                found[operation.dtype] += round(operation.flop * runs * operation.share)
        return found

    @cached_property
    def custom_calls(self) -> int:
        """Opaque custom calls per step."""
        runs = zip(self.operations, self.operation_runs, strict=True)
        return sum(times for operation, times in runs if operation.kind == "custom")

    def _read(self, items: tuple[Operation | Loop, ...], runs: int) -> tuple[Event, ...]:
        """Events of `items`, which run `runs` times in a step."""
        events: list[Event] = []
        for item in items:
            if isinstance(item, Loop):
                self._loop(item, runs, events)
            elif item.collective is not None:
                index = self.collectives.setdefault(item.collective, len(self.collectives))
                if index == len(self.collective_runs):
                    self.collective_runs.append(0)
                self.collective_runs[index] += runs
                self.dispatches += runs * item.collective.share
                self.axes[item.name] = item.collective.group.axes
                if item.collective.tokens is not None and not item.collective.is_async:
                    self.exchanges.add(item.name)
                events.append(Start(item.name, index, item.collective.is_async))
            elif item.waits_for is not None:
                events.append(Wait(item.waits_for))
            elif item.kind != "wait":
                self._compute(item, runs, 1, events)
        return tuple(events)

    def _loop(self, loop: Loop, runs: int, events: list[Event]) -> None:
        if not loop.trip_count:
            return
        if self._merge and is_compute_alone(loop):
            self._compute_loop(loop, runs, 1, events)
            return
        body = self._read(loop.body, runs * loop.trip_count)
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
        index = self.kinds.setdefault(costed_fields(item), len(self.kinds))
        if index == len(self.operations):
            self.operations.append(item)
            self.operation_runs.append(0)
        self.operation_runs[index] += runs * times
        self.dispatches += runs * times * item.share
        if not (self._merge and events and isinstance(events[-1], Work)):
            events.append(Work(len(self.segments)))
            self.starts.append(item)
            self.segments.append([])
        self.segments[-1].append((index, times))


def dispatches_of_blocks(items: tuple[Operation | Loop, ...], depth: int = 0) -> float:
    """Operations that the host dispatches per step in loops within others: the blocks of a stage,
    for each of its microbatches, without the bubble."""
    found = 0.0
    for item in items:
        if isinstance(item, Loop):
            if depth or not item.name.endswith(BUBBLE):
                found += item.trip_count * dispatches_of_blocks(item.body, depth + 1)
        elif depth > 1 and item.waits_for is None and item.kind != "wait":
            found += item.share if item.collective is None else item.collective.share
    return found


def is_compute_alone(loop: Loop) -> bool:
    """Whether a loop contains no communication event."""
    return all(
        is_compute_alone(item)
        if isinstance(item, Loop)
        else item.collective is None and item.waits_for is None
        for item in loop.body
    )
