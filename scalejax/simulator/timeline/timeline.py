"""Breakdown of the time of one step: its operations costed, then scheduled on streams.

`WhatIf` prepares a program once and costs it on many clusters.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalejax.hardware import Chip, Cluster
from scalejax.simulator.collectives.placement import collective_seconds, links
from scalejax.simulator.device_state import under_load
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.schedule import Schedule
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
    exposed_by_name: tuple[tuple[str, float], ...]
    """Exposed time of each collective (compute is stalled), by the compiler's name for it."""
    exposed: tuple[tuple[Axes, float], ...]
    """Exposed time of collectives, by the mesh axes that they span."""
    dispatch_seconds: float
    """Time in which the host dispatches all operations, while the devices run earlier ones."""
    overhead_seconds: float
    """Time of the step that is in none of its operations."""
    communication_seconds: float
    """Time of all collectives, overlapped or not."""
    launches_block: bool = False
    """Whether the host waits for each operation before it dispatches the next."""

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
        return self._walked_seconds + self.host_seconds + self.overhead_seconds

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


def timeline(program: Program, cluster: Cluster) -> Timeline:
    """Breakdown of the time of one step of `program` on `cluster`.

    Raises:
        ConfigError: if an operation waits for a collective that the program does not hold.
        DoesNotFit: if a collective spans nodes that no network joins.
    """
    return what_if(program).timeline(cluster)


@dataclass(frozen=True, slots=True)
class _ChipTimes:
    """Times of the distinct operations of a program on one chip, shape (operations,)."""

    chip: Chip
    is_compute_bound: NDArray[np.bool_]
    busy_seconds: NDArray[np.float64]
    launch_seconds: NDArray[np.float64]


class WhatIf:
    """One program, prepared for costing on any number of clusters.

    The times of operations are computed once for each `Chip` object, so that clusters made from
    each other by `dataclasses.replace` share them unless the chip was replaced. Scaling whole
    classes of cost by `Scales` is cheaper still.
    """

    def __init__(self, program: Program) -> None:
        """Read the schedule of `program`.

        Raises:
            ConfigError: if an operation waits for a collective that the program does not hold.
        """
        self.program = program
        """The program that is costed."""
        self.schedule = Schedule(program)
        """Events and distinct operations of the program."""
        self._chips: dict[int, _ChipTimes] = {}
        self._collectives: tuple[Cluster, NDArray[np.float64]] | None = None

    def timeline(self, cluster: Cluster, scales: Scales = NOMINAL) -> Timeline:
        """Breakdown of the time of a step on `cluster`.

        Args:
            cluster: the hardware.
            scales: factors on the time of each class of cost.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        cluster = under_load(cluster, self.program)
        schedule, attainable = self.schedule, cluster.chip.attainable
        times = self._chip_times(cluster.chip)
        busy = times.busy_seconds
        if scales is not NOMINAL:
            busy = busy * np.where(times.is_compute_bound, scales.compute, scales.memory)
        launch = times.launch_seconds * scales.launch
        collectives = self._collective_seconds(cluster) * scales.communication
        streams = Streams(
            schedule.segment_seconds(busy + launch).tolist(),
            collectives.tolist(),
            [links(each, cluster) for each in schedule.collectives],
            attainable.contention_fraction,
        )
        streams.run(schedule.events)
        streams.drain()
        total = busy * schedule.operation_runs
        return Timeline(
            compute_seconds=float(total @ times.is_compute_bound),
            memory_seconds=float(total @ ~times.is_compute_bound),
            launch_seconds=float(launch @ schedule.operation_runs),
            contention_seconds=streams.contention_seconds,
            exposed_by_name=tuple(streams.exposed.items()),
            exposed=self._by_axes(streams.exposed),
            dispatch_seconds=attainable.dispatch_seconds * schedule.dispatches * scales.launch,
            overhead_seconds=attainable.step_overhead_seconds * scales.launch,
            communication_seconds=float(collectives @ schedule.collective_runs),
            launches_block=cluster.conditions.launches_block,
        )

    def _chip_times(self, chip: Chip) -> _ChipTimes:
        """Times of the distinct operations on `chip`, cached with it so that its id stays taken."""
        known = self._chips.get(id(chip))
        if known is not None:
            return known
        if len(self._chips) >= _CHIPS_KEPT:
            self._chips.pop(next(iter(self._chips)))
        times = [operation_time(operation, chip) for operation in self.schedule.operations]
        self._chips[id(chip)] = _ChipTimes(
            chip,
            np.array([time.bound == "compute" for time in times], bool),
            np.array([time.busy_seconds for time in times], float),
            np.array([time.launch_seconds for time in times], float),
        )
        return self._chips[id(chip)]

    def _collective_seconds(self, cluster: Cluster) -> NDArray[np.float64]:
        """Times of the distinct collectives, shape (collectives,); cached for the last cluster."""
        if self._collectives is None or self._collectives[0] is not cluster:
            seconds = [collective_seconds(each, cluster) for each in self.schedule.collectives]
            self._collectives = cluster, np.array(seconds, float)
        return self._collectives[1]

    def _by_axes(self, exposed: dict[str, float]) -> tuple[tuple[Axes, float], ...]:
        by_axes: dict[Axes, float] = defaultdict(float)
        for name, seconds in exposed.items():
            by_axes[self.schedule.axes[name]] += seconds
        return tuple(sorted(by_axes.items()))


_prepared: dict[int, tuple[Program, WhatIf]] = {}


def what_if(program: Program) -> WhatIf:
    """`program` prepared for costing; cached by object for the last few programs.

    Raises:
        ConfigError: if an operation waits for a collective that the program does not hold.
    """
    known = _prepared.get(id(program))
    if known is not None:
        return known[1]
    if len(_prepared) >= _PROGRAMS_KEPT:
        _prepared.pop(next(iter(_prepared)), None)
    _prepared[id(program)] = program, WhatIf(program)
    return _prepared[id(program)][1]
