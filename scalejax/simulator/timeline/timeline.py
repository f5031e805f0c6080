"""Breakdown of the time of operations: each costed, then all scheduled on streams.

`WhatIf` prepares a program once and costs it on many clusters. `OperationCosts` costs many tuples
of operations on one cluster, whose timelines add up to that of a step (`total`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

from scalejax.hardware import Chip, Cluster
from scalejax.simulator.collectives.placement import collective_seconds, links
from scalejax.simulator.device_state import under_load
from scalejax.simulator.operations.roofline import OperationTime, operation_time
from scalejax.simulator.program import Collective, Loop, Operation, Program
from scalejax.simulator.timeline.schedule import Schedule, require_known_waits
from scalejax.simulator.timeline.streams import Streams

Axes = tuple[str, ...]
"""Mesh axes that a collective spans."""

_CHIPS_KEPT = 64  # chips whose operation times are cached: 100 kB each
_PROGRAMS_KEPT = 8


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
    """Time of the step that is in none of its operations."""
    communication_seconds: float
    """Time of all collectives, overlapped or not."""
    launches_block: bool
    """Whether the host waits for each operation before it dispatches the next."""
    exposed_by_name: tuple[tuple[str, float], ...] = ()
    """Exposed time of each collective, by the compiler's name for it; not where timelines were
    added up."""

    @property
    def exposed_seconds(self) -> float:
        """Time in which compute is stalled by collectives."""
        return math.fsum(seconds for _, seconds in self.exposed)

    @property
    def device_seconds(self) -> float:
        """Time of the step if all collectives took no time."""
        alone = math.fsum((self.compute_seconds, self.memory_seconds, self.launch_seconds))
        return alone + self._waits_for_host(alone) + self.overhead_seconds

    @property
    def host_seconds(self) -> float:
        """Time that devices wait for the host to dispatch their operations."""
        return self._waits_for_host(self._walked_seconds)

    @property
    def step_seconds(self) -> float:
        """Time of the step."""
        walked = self._walked_seconds
        return walked + self._waits_for_host(walked) + self.overhead_seconds

    def _waits_for_host(self, busy_seconds: float) -> float:
        """Time beyond `busy_seconds` until the host has dispatched all operations."""
        if self.launches_block:
            return self.dispatch_seconds
        return max(0.0, self.dispatch_seconds - busy_seconds)

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
    compute = memory = launch = contention = dispatch = communication = 0.0
    exposed: dict[Axes, float] = {}
    for part, times in runs:
        if times:
            compute += times * part.compute_seconds
            memory += times * part.memory_seconds
            launch += times * part.launch_seconds
            contention += times * part.contention_seconds
            dispatch += times * part.dispatch_seconds
            communication += times * part.communication_seconds
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
        launches_block=step.launches_block,
    )


def timeline(program: Program, cluster: Cluster) -> Timeline:
    """Breakdown of the time of one step of `program` on `cluster`.

    Raises:
        ConfigError: if an operation waits for a collective that the program does not hold.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    return what_if(program).timeline(cluster)


def _timeline(
    schedule: Schedule,
    cluster: Cluster,
    segments: Sequence[float],
    collectives: Sequence[float],
    scales: Scales = NOMINAL,
    **seconds: float,
) -> Timeline:
    """Timeline of a step of nothing but the operations of `schedule`.

    Args:
        schedule: the operations.
        cluster: the hardware.
        segments: time of each segment on its own.
        collectives: time of each distinct collective on its own.
        scales: factors on the time of each class of cost.
        **seconds: the terms of all compute operations.
    """
    attainable = cluster.chip.attainable
    collective_links = [links(each, cluster) for each in schedule.collectives]
    streams = Streams(segments, collectives, collective_links, attainable.contention_fraction)
    streams.run(schedule.events)
    streams.drain()
    exposed: dict[Axes, float] = {}
    for name, waited in streams.exposed.items():
        axes = schedule.axes[name]
        exposed[axes] = exposed.get(axes, 0.0) + waited
    return Timeline(
        **seconds,
        contention_seconds=streams.contention_seconds,
        exposed_by_name=tuple(streams.exposed.items()),
        exposed=tuple(sorted(exposed.items())),
        dispatch_seconds=attainable.dispatch_seconds * schedule.dispatches * scales.launch,
        overhead_seconds=attainable.step_overhead_seconds * scales.launch,
        communication_seconds=sum(map(mul, collectives, schedule.collective_runs)),
        launches_block=cluster.launch_mode == "blocking",
    )


class OperationCosts:
    """Timelines of tuples of operations on one cluster; equal operations are costed once."""

    def __init__(self, cluster: Cluster) -> None:
        """Start with no known times."""
        self._cluster = cluster
        self._operations: dict[tuple[object, ...], OperationTime] = {}
        self._collectives: dict[Collective, float] = {}

    def timeline(self, operations: tuple[Operation | Loop, ...]) -> Timeline:
        """Timeline of one run of operations that wait for all collectives they start.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        schedule = Schedule(operations)
        busy, launch = {"compute": 0.0, "memory": 0.0}, 0.0
        seconds: list[float] = []
        for index, (kind, runs) in enumerate(
            zip(schedule.kinds, schedule.operation_runs, strict=True)
        ):
            time = self._operations.get(kind)
            if time is None:
                time = operation_time(schedule.operations[index], self._cluster.chip)
                self._operations[kind] = time
            busy[time.bound] += runs * time.busy_seconds
            launch += runs * time.launch_seconds
            seconds.append(time.seconds)
        collectives: list[float] = []
        for each in schedule.collectives:
            known = self._collectives.get(each)
            if known is None:
                known = self._collectives[each] = collective_seconds(each, self._cluster)
            collectives.append(known)
        return _timeline(
            schedule,
            self._cluster,
            [sum([seconds[i] * runs for i, runs in segment]) for segment in schedule.segments],
            collectives,
            compute_seconds=busy["compute"],
            memory_seconds=busy["memory"],
            launch_seconds=launch,
        )


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
            ConfigError: if an operation waits for a collective that the program does not hold.
        """
        require_known_waits(program)
        self.program = program
        """The program that is costed."""
        self.schedule = schedule = Schedule(program.operations)
        """Events and distinct operations of the program."""
        self._runs = np.array(schedule.operation_runs, float)
        entries = [entry for segment in schedule.segments for entry in segment]
        self._entries, self._entry_runs = np.array(entries, int).reshape(-1, 2).T
        # No segment is without an operation.
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
        times = self._chip_times(cluster.chip)
        busy, launch = times.busy_seconds, times.launch_seconds * scales.launch
        if scales is not NOMINAL:
            busy = busy * np.where(times.is_compute_bound, scales.compute, scales.memory)
        segments = (busy + launch)[self._entries] * self._entry_runs
        if len(segments):
            segments = np.add.reduceat(segments, self._first_entries)
        total = busy * self._runs
        return _timeline(
            self.schedule,
            cluster,
            segments.tolist(),
            (self._collective_seconds(cluster) * scales.communication).tolist(),
            scales,
            compute_seconds=float(total @ times.is_compute_bound),
            memory_seconds=float(total @ ~times.is_compute_bound),
            launch_seconds=float(launch @ self._runs),
        )

    def _chip_times(self, chip: Chip) -> _ChipTimes:
        """Times of the distinct operations on `chip`; those on the last few chips are kept."""
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
        """Times of the distinct collectives, shape (collectives,); kept for the last cluster."""
        known = self._collectives  # read once: threads may share this object
        if known is None or known[0] is not cluster:
            seconds = [collective_seconds(each, cluster) for each in self.schedule.collectives]
            known = self._collectives = cluster, np.array(seconds, float)
        return known[1]


_prepared: deque[WhatIf] = deque(maxlen=_PROGRAMS_KEPT)


def what_if(program: Program) -> WhatIf:
    """`program` prepared for costing; the last few programs are kept.

    Raises:
        ConfigError: if an operation waits for a collective that the program does not hold.
    """
    for known in tuple(_prepared):
        if known.program is program:
            return known
    prepared = WhatIf(program)
    _prepared.append(prepared)
    return prepared
