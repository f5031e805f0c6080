"""Breakdown of the time of operations: each is costed, then all are scheduled on streams.

`WhatIf` prepares a program once and costs it on many clusters. `OperationCosts` costs many tuples
of operations on one cluster; their timelines add up to that of a step (`total`).
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

import numpy as np
from numpy.typing import NDArray

from scalejax.config.parallelism import PIPELINE, TENSOR
from scalejax.hardware import Chip, Cluster
from scalejax.simulator.collectives.placement import collective_seconds, contention, links
from scalejax.simulator.device_state import under_load, with_routing
from scalejax.simulator.operations.roofline import OperationTime, operation_time
from scalejax.simulator.program import (
    Collective,
    Loop,
    Operation,
    Program,
    require_known_waits,
)
from scalejax.simulator.timeline.schedule import (
    Event,
    Repeat,
    Schedule,
    Start,
    Wait,
    Work,
    costed_fields,
    dispatches_of_blocks,
    is_compute_alone,
)
from scalejax.simulator.timeline.streams import Streams

Axes = tuple[str, ...]
"""Mesh axes that a collective spans."""

_CHIPS_KEPT = 64  # chips whose operation times are cached: 100 kB each
_PROGRAMS_KEPT = 8
_OPERATIONS_KEPT = 200_000  # objects that `OperationCosts` knows: 100 MB
_SEGMENTS_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on the modelled time of each class of cost."""

    compute: float = 1.0
    """Factor on compute-bound operations."""
    memory: float = 1.0
    """Factor on memory-bound operations."""
    launch: float = 1.0
    """Factor on gaps between operations, host dispatch, and the overhead of a step."""
    communication: float = 1.0
    """Factor on collectives."""


NOMINAL = Scales()
"""All factors 1: the times of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Breakdown of the time of one step; its parts add up to `step_seconds`."""

    compute_seconds: float
    """Time of compute-bound operations."""
    memory_seconds: float
    """Time of memory-bound operations."""
    launch_seconds: float
    """Time between operations."""
    contention_seconds: float
    """Slowdown of compute that overlaps with collectives."""
    exposed: tuple[tuple[Axes, float], ...]
    """Exposed time of collectives (compute is stalled), by the mesh axes that they span."""
    dispatch_seconds: float
    """Time in which the host dispatches all operations, while the devices run earlier ones."""
    overhead_seconds: float
    """Time of the step outside its operations."""
    communication_seconds: float
    """Time of all collectives, overlapped or not."""
    launches_block: bool
    """Whether the host waits for each operation before it dispatches the next."""
    exchange_seconds: float = 0.0
    """Part of the exposed time spent on sending tokens to experts: the host waits for it too, as it
    reads how many tokens arrived before it dispatches what follows."""
    exposed_by_name: tuple[tuple[str, float], ...] = ()
    """Exposed time of each collective, by the compiler's name for it; empty if timelines were added
    up."""

    @property
    def exposed_seconds(self) -> float:
        """Time in which compute is stalled by collectives."""
        return math.fsum(seconds for _, seconds in self.exposed)

    @property
    def device_seconds(self) -> float:
        """Time of the step if all collectives took no time."""
        alone = math.fsum((self.compute_seconds, self.memory_seconds, self.launch_seconds))
        return alone + self._waits_for_host(alone, 0.0) + self.overhead_seconds

    @property
    def host_seconds(self) -> float:
        """Time that devices wait for the host to dispatch their operations."""
        return self._waits_for_host(self._walked_seconds, self.exchange_seconds)

    @property
    def step_seconds(self) -> float:
        """Time of the step."""
        walked, waited = self._walked_seconds, self.exchange_seconds
        return walked + self._waits_for_host(walked, waited) + self.overhead_seconds

    def _waits_for_host(self, busy_seconds: float, waited_seconds: float) -> float:
        """Time beyond `busy_seconds` until the host has dispatched all operations, if it waits for
        `waited_seconds` in between."""
        if self.launches_block:
            return self.dispatch_seconds
        if not self.dispatch_seconds:
            return 0.0
        return max(0.0, self.dispatch_seconds + waited_seconds - busy_seconds)

    @property
    def _walked_seconds(self) -> float:
        """Time of the streams, if the host always dispatches ahead."""
        return math.fsum(
            (
                self.compute_seconds,
                self.memory_seconds,
                self.launch_seconds,
                self.contention_seconds,
                *(seconds for _, seconds in self.exposed),
            )
        )


def total(runs: Sequence[tuple[Timeline, int]]) -> Timeline:
    """Timeline of a step that repeats the operations of others, each as often as given.

    Exact for operations that wait for all collectives they start. The overhead is that of one step.
    """
    compute = memory = launch = contention = dispatch = communication = exchange = 0.0
    exposed: dict[Axes, float] = {}
    for part, times in runs:
        if times:
            compute += times * part.compute_seconds
            memory += times * part.memory_seconds
            launch += times * part.launch_seconds
            contention += times * part.contention_seconds
            dispatch += times * part.dispatch_seconds
            communication += times * part.communication_seconds
            exchange += times * part.exchange_seconds
            for axes, seconds in part.exposed:
                exposed[axes] = exposed.get(axes, 0.0) + times * seconds
    step, _ = runs[0]
    return Timeline(
        compute_seconds=compute,
        memory_seconds=memory,
        launch_seconds=launch,
        contention_seconds=contention,
        exposed=tuple(sorted(exposed.items())),
        dispatch_seconds=dispatch,
        overhead_seconds=step.overhead_seconds,
        communication_seconds=communication,
        exchange_seconds=exchange,
        launches_block=step.launches_block,
    )


def timeline(program: Program, cluster: Cluster) -> Timeline:
    """Breakdown of the time of one step of `program` on `cluster`.

    Raises:
        ConfigError: if an operation waits for a collective that is not in the program.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    return what_if(program).timeline(cluster)


def _timeline(
    cluster: Cluster,
    streams: Streams,
    events: Sequence[Event],
    axes: Mapping[str, Axes],
    *,
    dispatch_seconds: float,
    exchanges: Collection[str] = (),
    more_of_host: float = 0.0,
    scales: Scales = NOMINAL,
    **seconds: float,
) -> Timeline:
    """Timeline of a step that consists of `events` only.

    Args:
        cluster: the hardware.
        streams: idle streams, with the times of all segments and collectives.
        events: events to run on the streams.
        axes: mesh axes that each collective spans, by its name.
        dispatch_seconds: time in which the host dispatches all operations.
        exchanges: names of collectives that the host waits for.
        more_of_host: additional time of the pipeline's slowest host, as a share of this host's
            time.
        scales: factors on the time of each class of cost.
        **seconds: the terms of all compute operations, and the time of all collectives.
    """
    attainable = cluster.chip.attainable
    streams.run(events)
    streams.drain()
    of_exchanges = math.fsum(streams.exposed.get(name, 0.0) for name in exchanges)
    if dispatch_seconds and more_of_host:
        dispatch_seconds += more_of_host * (dispatch_seconds + of_exchanges)
    exposed: dict[Axes, float] = {}
    for name, waited in streams.exposed.items():
        exposed[axes[name]] = exposed.get(axes[name], 0.0) + waited
    return Timeline(
        **seconds,
        contention_seconds=streams.contention_seconds,
        exposed_by_name=tuple(streams.exposed.items()),
        exchange_seconds=of_exchanges,
        exposed=tuple(sorted(exposed.items())),
        dispatch_seconds=dispatch_seconds * scales.launch,
        overhead_seconds=attainable.step_overhead_seconds * scales.launch,
        launches_block=cluster.launch_mode == "blocking",
    )


def _dispatch_seconds(
    cluster: Cluster, dispatches: float, collectives: Iterable[tuple[Collective, int]]
) -> float:
    """Time in which the host dispatches that many operations.

    Args:
        cluster: the hardware.
        dispatches: number of operations, including collectives.
        collectives: each distinct collective, and how often it runs.
    """
    attainable = cluster.chip.attainable
    seconds = attainable.dispatch_seconds * dispatches
    each, member = attainable.collective_dispatch_seconds, attainable.member_dispatch_seconds
    if not (each or member):
        return seconds
    groups = [(one, one.share * runs) for one, runs in collectives if one.group.size > 1]
    seconds += each * sum(runs for _, runs in groups)
    if not any(PIPELINE in one.group.axes and links(one, cluster) == 1 for one, _ in groups):
        return seconds
    over_tensor = [(one.group.size, runs) for one, runs in groups if one.group.axes == (TENSOR,)]
    return seconds + member * sum(size * runs for size, runs in over_tensor)


_Seen = tuple[Operation, Start | Wait | None, int, float]
"""An operation, its event if it computes nothing, the index among what costs the same (below 0 if
none), and its time if it computes."""


class _Runs:
    """Contents of parts of a step, and how often they run; as in a `Schedule`."""

    def __init__(self) -> None:
        self.segments: list[float] = []
        """Time of each segment of compute on its own."""
        self.operations: dict[int, int] = {}
        """Runs of each distinct compute operation, by index."""
        self.collectives: dict[int, int] = {}
        """Runs of each distinct collective, by index."""
        self.axes: dict[str, Axes] = {}
        """Mesh axes that each collective spans, by its name."""

    def close(self, segment: list[float], events: list[Event]) -> None:
        """Add a segment of operations with those times, if there are any."""
        if segment:
            events.append(_work(len(self.segments)))
            self.segments.append(sum(segment))
            segment.clear()


@lru_cache(maxsize=_SEGMENTS_KEPT)
def _work(segment: int) -> Work:
    return Work(segment)


class OperationCosts:
    """Timelines of tuples of operations on one cluster.

    Equal operations are costed once; if they are the same object, as operations of a search are,
    their fields are not even compared.
    """

    def __init__(self, cluster: Cluster) -> None:
        """Start with no known times."""
        self._cluster = cluster
        self._seen: dict[int, _Seen] = {}
        self._indices: dict[tuple[object, ...] | Collective, int] = {}
        self._times: list[OperationTime] = []
        self._shares: list[float] = []
        self._collectives: list[Collective] = []
        self._collective_seconds: list[float] = []
        self._collective_shares: list[float] = []
        self._links: list[int] = []
        self._is_send: list[bool] = []
        self._contention: list[float] = []

    def timeline(self, operations: tuple[Operation | Loop, ...]) -> Timeline:
        """Timeline of one run of operations that wait for all collectives they start.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        if len(self._seen) > _OPERATIONS_KEPT:
            self._seen.clear()
        found = _Runs()
        events = self._events(operations, 1, found)
        busy, launch, dispatches = {"compute": 0.0, "memory": 0.0}, 0.0, 0.0
        for index, runs in found.operations.items():
            time = self._times[index]
            busy[time.bound] += runs * time.busy_seconds
            launch += runs * time.launch_seconds
            dispatches += runs * self._shares[index]
        seconds, shares = self._collective_seconds, self._collective_shares
        dispatches += sum([runs * shares[i] for i, runs in found.collectives.items()])
        collectives = ((self._collectives[i], runs) for i, runs in found.collectives.items())
        return _timeline(
            self._cluster,
            Streams(found.segments, seconds, self._links, self._is_send, self._contention),
            events,
            found.axes,
            dispatch_seconds=_dispatch_seconds(self._cluster, dispatches, collectives),
            compute_seconds=busy["compute"],
            memory_seconds=busy["memory"],
            launch_seconds=launch,
            communication_seconds=sum([runs * seconds[i] for i, runs in found.collectives.items()]),
        )

    def _events(self, items: tuple[Operation | Loop, ...], runs: int, found: _Runs) -> list[Event]:
        """Events of `items`, which run `runs` times, as in a `Schedule`."""
        events: list[Event] = []
        segment: list[float] = []
        seen, of_operations = self._seen, found.operations
        for item in items:
            known = seen.get(id(item))
            if known is None:
                if isinstance(item, Loop):
                    if is_compute_alone(item):
                        self._compute(item, runs, 1, found, segment)
                    elif item.trip_count:
                        found.close(segment, events)
                        body = tuple(self._events(item.body, runs * item.trip_count, found))
                        events.append(Repeat(item.name, item.trip_count, body))
                    continue
                known = self._see(item)
            _, event, index, seconds = known
            if event is None:
                if index >= 0:
                    of_operations[index] = of_operations.get(index, 0) + runs
                    segment.append(seconds)
                continue
            found.close(segment, events)
            events.append(event)
            if index >= 0:
                found.collectives[index] = found.collectives.get(index, 0) + runs
                found.axes[event.name] = item.collective.group.axes  # type: ignore[union-attr]  it is one
        found.close(segment, events)
        return events

    def _compute(
        self, loop: Loop, runs: int, times: int, found: _Runs, segment: list[float]
    ) -> None:
        """Add a loop that only computes to a segment, in which it runs `times` times."""
        times *= loop.trip_count
        for item in loop.body if times else ():
            if isinstance(item, Loop):
                self._compute(item, runs, times, found, segment)
                continue
            _, _, index, seconds = self._seen.get(id(item)) or self._see(item)
            if index >= 0:
                found.operations[index] = found.operations.get(index, 0) + runs * times
                segment.append(seconds * times)

    def _see(self, item: Operation) -> _Seen:
        """Cost an unknown operation, and keep it, so that no other object can get its id."""
        event, index, seconds = None, -1, 0.0
        if (collective := item.collective) is not None:
            index = self._indices.setdefault(collective, len(self._links))
            if index == len(self._links):
                self._collectives.append(collective)
                self._collective_seconds.append(collective_seconds(collective, self._cluster))
                self._collective_shares.append(collective.share)
                self._links.append(links(collective, self._cluster))
                self._is_send.append(collective.is_send)
                self._contention.append(contention(collective, self._cluster))
            event = Start(item.name, index, collective.is_async)
        elif item.waits_for is not None:
            event = Wait(item.waits_for)
        elif item.kind != "wait":
            index = self._indices.setdefault(costed_fields(item), len(self._times))
            if index == len(self._times):
                self._times.append(operation_time(item, self._cluster.chip))
                self._shares.append(item.share)
            seconds = self._times[index].seconds
        known = self._seen[id(item)] = item, event, index, seconds
        return known


@dataclass(frozen=True, slots=True)
class _ChipTimes:
    """Times of the distinct operations of a program on one chip, shape (operations,)."""

    chip: Chip
    is_compute_bound: NDArray[np.bool_]
    busy_seconds: NDArray[np.float64]
    launch_seconds: NDArray[np.float64]


class WhatIf:
    """One program, prepared in arrays for costing on any number of clusters.

    The times of operations are computed once for each `Chip` object, so that clusters made from
    each other by `dataclasses.replace` share them unless the chip was replaced. Scaling whole
    classes of cost by `Scales` is cheaper still.
    """

    def __init__(self, program: Program) -> None:
        """Read the schedule of `program`.

        Raises:
            ConfigError: if an operation waits for a collective that is not in the program.
        """
        require_known_waits(program)
        self.program = program
        """The program that is costed."""
        self.schedule = schedule = Schedule(program.operations)
        """Events and distinct operations of the program."""
        self._more_of_host = 0.0
        if program.most_blocks > 1 and schedule.dispatches:
            of_blocks = dispatches_of_blocks(program.operations) / schedule.dispatches
            self._more_of_host = (program.most_blocks - 1) * of_blocks
        self._runs = np.array(schedule.operation_runs, float)
        entries = [entry for segment in schedule.segments for entry in segment]
        self._entries, self._entry_runs = np.array(entries, int).reshape(-1, 2).T
        # Every segment has an operation.
        self._first_entries = np.cumsum([0, *map(len, schedule.segments)])[:-1]
        self._chips: deque[_ChipTimes] = deque(maxlen=_CHIPS_KEPT)
        self._collectives: tuple[Cluster, NDArray[np.float64]] | None = None

    def timeline(self, cluster: Cluster, scales: Scales = NOMINAL) -> Timeline:
        """Timeline of a step on `cluster`.

        Args:
            cluster: the hardware.
            scales: factors on the time of each class of cost.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        cluster = under_load(cluster, self.program)
        if self.schedule.routes_tokens:
            cluster = with_routing(cluster)
        times = self._chip_times(cluster.chip)
        busy, launch = times.busy_seconds, times.launch_seconds * scales.launch
        if scales is not NOMINAL:
            busy = busy * np.where(times.is_compute_bound, scales.compute, scales.memory)
        segments = (busy + launch)[self._entries] * self._entry_runs
        if len(segments):
            segments = np.add.reduceat(segments, self._first_entries)
        total = busy * self._runs
        schedule = self.schedule
        collectives = (self._collective_seconds(cluster) * scales.communication).tolist()
        streams = Streams(
            segments.tolist(),
            collectives,
            [links(each, cluster) for each in schedule.collectives],
            [each.is_send for each in schedule.collectives],
            [contention(each, cluster) for each in schedule.collectives],
        )
        return _timeline(
            cluster,
            streams,
            schedule.events,
            schedule.axes,
            dispatch_seconds=_dispatch_seconds(
                cluster,
                schedule.dispatches,
                zip(schedule.collectives, schedule.collective_runs, strict=True),
            ),
            exchanges=schedule.exchanges,
            more_of_host=self._more_of_host,
            scales=scales,
            communication_seconds=sum(map(mul, collectives, schedule.collective_runs)),
            compute_seconds=float(total @ times.is_compute_bound),
            memory_seconds=float(total @ ~times.is_compute_bound),
            launch_seconds=float(launch @ self._runs),
        )

    def _chip_times(self, chip: Chip) -> _ChipTimes:
        """Times of the distinct operations on `chip`; cached for the last few chips."""
        for known in tuple(self._chips):
            if known.chip is chip:
                return known
        times = [operation_time(operation, chip) for operation in self.schedule.operations]
        prepared = _ChipTimes(
            chip,
            np.array([time.bound == "compute" for time in times], bool),
            np.array([time.busy_seconds for time in times], float),
            np.array([time.launch_seconds for time in times], float),
        )
        self._chips.append(prepared)
        return prepared

    def _collective_seconds(self, cluster: Cluster) -> NDArray[np.float64]:
        """Times of the distinct collectives, shape (collectives,); cached for the last cluster."""
        known = self._collectives  # read once: threads may share this object
        if known is None or known[0] is not cluster:
            seconds = [collective_seconds(each, cluster) for each in self.schedule.collectives]
            known = self._collectives = cluster, np.array(seconds, float)
        return known[1]


_prepared: deque[WhatIf] = deque(maxlen=_PROGRAMS_KEPT)


def what_if(program: Program) -> WhatIf:
    """`program` prepared for costing; the last few programs are cached.

    Raises:
        ConfigError: if an operation waits for a collective that is not in the program.
    """
    for known in tuple(_prepared):
        if known.program is program:
            return known
    prepared = WhatIf(program)
    _prepared.append(prepared)
    return prepared
