"""Trace of a predicted step: start and end of each operation on its stream.

Simulates the streams as `timeline` does, but operation by operation and with every iteration of
the loops; the last event ends when the step does.
"""

from dataclasses import dataclass, replace
from typing import Literal

from scalejax.core import drawing
from scalejax.core.serialization import JsonValue
from scalejax.core.tabular import Tabular
from scalejax.core.units import format_seconds
from scalejax.hardware import Cluster
from scalejax.simulator.collectives.placement import collective_seconds, contention, links
from scalejax.simulator.device_state import under_load
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Operation, Program
from scalejax.simulator.timeline.schedule import Event, Repeat, Schedule, Start
from scalejax.simulator.timeline.streams import Streams
from scalejax.simulator.timeline.timeline import timeline

StreamName = Literal["compute", "links", "network", "to host", "from host"]
_STREAMS: tuple[StreamName, ...] = ("links", "network", "to host", "from host")
"""Streams of the sets of links of `scalejax.simulator.collectives.placement.links`."""
_MOST_SPANS = 400
"""Maximum number of spans drawn per lane: about as many as can be distinguished."""
MOST_EVENTS = 50_000
"""Default limit of events in one trace, for a file of 15 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One interval of a stream: an operation, a wait or overhead."""

    name: str
    """The compiler's name for the operation, or a description of the wait."""
    stream: StreamName
    """Stream that the event occupies."""
    start_seconds: float
    """Start, counted from the start of the step; the operation's launch comes before it."""
    end_seconds: float
    """End, counted from the start of the step."""
    bound: Literal["compute", "memory", "communication", "wait", "overhead", "left out"]
    """Limiting resource: "wait" is compute stalled by a collective or the host, "left out" the
    iterations of a loop that are not in the trace."""
    operation: Operation | None = None
    """The operation; None for waits and overhead."""
    iteration: tuple[int, ...] = ()
    """Iteration of each enclosing loop, from 0, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace(Tabular):
    """Trace of one predicted step."""

    events: tuple[TraceEvent, ...]
    """Events in order of their starts."""
    most_iterations: int | None
    """Iterations of each loop in the trace; None if all are."""

    @property
    def step_seconds(self) -> float:
        """Time of the step."""
        return max((event.end_seconds for event in self.events), default=0.0)

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The events, a row for each."""
        return [
            {
                "name": event.name,
                "stream": event.stream,
                "bound": event.bound,
                "start_seconds": event.start_seconds,
                "end_seconds": event.end_seconds,
            }
            for event in self.events
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows: a lane for each stream."""
        said = f"one step on one device, {format_seconds(self.step_seconds)}"
        return drawing.heading(said) + drawing.lanes(self._spans(_MOST_SPANS))

    def _spans(self, most: int) -> dict[str, list[tuple[float, float, str]]]:
        """Spans of each stream; neighbours too close to distinguish are merged, `most` per lane."""
        apart, found = self.step_seconds / most, dict[str, list[tuple[float, float, str]]]()
        for event in self.events:
            lane = "waits" if event.stream == "compute" and event.bound == "wait" else event.stream
            spans = found.setdefault(lane, [])
            begin, end = event.start_seconds, event.end_seconds
            if spans and begin - spans[-1][1] < apart and end - spans[-1][0] < 4 * apart:
                first, until, name = spans[-1]
                count = int(name.partition(" operations")[0]) if " operations" in name else 1
                spans[-1] = (first, max(until, end), f"{count + 1} operations")
            elif end > begin:
                spans.append((begin, end, event.name))
        return {name: spans for name, spans in found.items() if spans}


def trace_step(program: Program, cluster: Cluster, most_events: int = MOST_EVENTS) -> StepTrace:
    """Trace of one step of `program` on `cluster`: every operation with its start and end.

    Args:
        program: the compiled step.
        cluster: the hardware.
        most_events: limit above which later iterations of loops are merged into one event.

    Raises:
        ConfigError: if an operation waits for a collective that is not in the program.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    cluster = under_load(cluster, program)
    times, schedule = timeline(program, cluster), Schedule(program.operations, merge=False)
    most_iterations = _most_iterations(schedule.events, most_events)
    streams = _TracedStreams(program, schedule, cluster, most_iterations)
    streams.run(schedule.events)
    streams.drain()
    streams.add_at_end("wait for the host", times.host_seconds, "wait")
    streams.add_at_end("overhead of the step", times.overhead_seconds, "overhead")
    return StepTrace(
        events=tuple(sorted(streams.events, key=lambda event: event.start_seconds)),
        most_iterations=most_iterations,
    )


def _most_iterations(events: tuple[Event, ...], most_events: int) -> int | None:
    """Largest number of iterations that stays within `most_events`; None for all."""
    most = _longest_loop(events)
    if _count(events, most) <= most_events:
        return None
    while most > 1 and _count(events, most) > most_events:
        most //= 2
    return most


def _longest_loop(events: tuple[Event, ...]) -> int:
    loops = [event for event in events if isinstance(event, Repeat)]
    return max((max(loop.trip_count, _longest_loop(loop.body)) for loop in loops), default=1)


def _count(events: tuple[Event, ...], most_iterations: int) -> int:
    return sum(
        min(event.trip_count, most_iterations) * _count(event.body, most_iterations)
        if isinstance(event, Repeat)
        else 1
        for event in events
    )


class _TracedStreams(Streams):
    """Streams that record trace events, and simulate every iteration."""

    def __init__(
        self, program: Program, schedule: Schedule, cluster: Cluster, most_iterations: int | None
    ) -> None:
        self._operations = schedule.starts
        self._times = [operation_time(each, cluster.chip) for each in self._operations]
        self._collectives = {
            item.name: item for item, _ in program.walk() if item.collective is not None
        }
        self._most_iterations = most_iterations
        self._iteration: tuple[int, ...] = ()
        self._is_on = True
        self.events: list[TraceEvent] = []
        super().__init__(
            [time.seconds for time in self._times],
            [collective_seconds(each, cluster) for each in schedule.collectives],
            [links(each, cluster) for each in schedule.collectives],
            [each.is_send for each in schedule.collectives],
            [contention(each, cluster) for each in schedule.collectives],
        )

    def add_at_end(self, name: str, seconds: float, bound: Literal["wait", "overhead"]) -> None:
        """Stall for `seconds`; placed at the end, wherever in the step the stall happens."""
        if seconds:
            self._add(name, "compute", self.now, self.now + seconds, bound)
            self.now += seconds

    def work(self, segment: int) -> None:
        before, time = self.now, self._times[segment]
        super().work(segment)
        # Contention slows the launch and the work by the same factor.
        gap = (self.now - before) * (time.launch_seconds / time.seconds if time.seconds else 0.0)
        operation = self._operations[segment]
        self._add(operation.name, "compute", before + gap, self.now, time.bound, operation)

    def start(self, event: Start) -> tuple[float, float]:
        begin, end = super().start(event)
        operation = self._collectives[event.name]
        stream = _STREAMS[self._collective_links[event.collective]]
        self._add(event.name, stream, begin, end, "communication", operation)
        return begin, end

    def _slow_down(self, name: str, seconds: float) -> None:
        super()._slow_down(name, seconds)
        for place in range(len(self.events) - 1, -1, -1):
            event = self.events[place]
            if event.name == name:
                # If iterations are left out, the last recorded one has already ended.
                if event.end_seconds > self.now:
                    self.events[place] = replace(
                        event,
                        start_seconds=self._beside_send(event.start_seconds, seconds),
                        end_seconds=self._beside_send(event.end_seconds, seconds),
                    )
                return

    def repeat(self, loop: Repeat) -> None:
        outer, was_on, left_out_from = self._iteration, self._is_on, self.now
        shown = loop.trip_count
        if self._most_iterations is not None:
            shown = min(shown, self._most_iterations)
        for index in range(loop.trip_count):
            if index == shown:
                self._is_on, left_out_from = False, self.now
            self._iteration = (*outer, index)
            self.run(loop.body)
        self._iteration, self._is_on = outer, was_on
        if shown < loop.trip_count:
            name = f"{loop.name}: {loop.trip_count - shown} more iterations"
            self._add(name, "compute", left_out_from, self.now, "left out")

    def _wait(self, name: str, finish: float) -> None:
        if finish > self.now:
            self._add(f"wait for {name}", "compute", self.now, finish, "wait")
        super()._wait(name, finish)

    def _add(
        self,
        name: str,
        stream: StreamName,
        start: float,
        end: float,
        bound: Literal["compute", "memory", "communication", "wait", "overhead", "left out"],
        operation: Operation | None = None,
    ) -> None:
        if self._is_on:
            self.events.append(
                TraceEvent(
                    name=name,
                    stream=stream,
                    start_seconds=start,
                    end_seconds=end,
                    bound=bound,
                    operation=operation,
                    iteration=self._iteration,
                )
            )
