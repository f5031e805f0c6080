"""Where the time of one step goes: its operations costed, then walked on two streams.

`WhatIf` keeps a program ready to be costed on many clusters.
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

_CHIPS_KEPT = 64  # times of operations on so many chips are kept: 100 kB each
_PROGRAMS_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on the times of each class of cost: what a step would take if they were off."""

    compute: float = 1.0
    """Operations that arithmetic limits."""
    memory: float = 1.0
    """Operations that memory bandwidth limits."""
    launch: float = 1.0
    """Gaps between operations, the host's work for each of them, and the overhead of a step."""
    communication: float = 1.0
    """Collectives."""


NOMINAL = Scales()
"""All as the model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of one step goes; its parts add up to `step_seconds`."""

    compute_seconds: float
    """Time of the operations that arithmetic limits."""
    memory_seconds: float
    """Time of the operations that memory bandwidth limits."""
    launch_seconds: float
    """Time between operations."""
    contention_seconds: float
    """Time that compute lost because it ran beside collectives."""
    exposed_by_name: tuple[tuple[str, float], ...]
    """Time that compute stood still for each collective, by the compiler's name for it."""
    exposed: tuple[tuple[Axes, float], ...]
    """The same by the mesh axes that the collectives span."""
    dispatch_seconds: float
    """Time in which the host sets off all operations, while the devices run those before."""
    overhead_seconds: float
    """Time of the step that is in none of its operations."""
    communication_seconds: float
    """Time that collectives took, hidden or not."""
    launches_block: bool = False
    """Whether the host waits for each operation before it sets off the next."""

    @property
    def exposed_seconds(self) -> float:
        """Time that compute stood still for collectives."""
        return math.fsum(seconds for _, seconds in self.exposed)

    @property
    def device_seconds(self) -> float:
        """Time of a step in which all collectives were free."""
        alone = math.fsum((self.compute_seconds, self.memory_seconds, self.launch_seconds))
        return alone + self._waits_for_host(alone) + self.overhead_seconds

    @property
    def host_seconds(self) -> float:
        """Time that devices wait for the host to set off their operations."""
        return self._waits_for_host(self._walked_seconds)

    @property
    def step_seconds(self) -> float:
        """Time of the step."""
        return self._walked_seconds + self.host_seconds + self.overhead_seconds

    def _waits_for_host(self, busy_seconds: float) -> float:
        """Time beyond `busy_seconds` until the host has set off all operations."""
        if self.launches_block:
            return self.dispatch_seconds
        return max(0.0, self.dispatch_seconds - busy_seconds)

    @property
    def _walked_seconds(self) -> float:
        """Time of both streams, on a host that is always ahead."""
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
    """The time of each part of one step of `program` on `cluster`.

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
    """One program, costed on any number of clusters without reading it again.

    The times of operations are computed once for each `Chip` object, so that clusters made from
    each other by `dataclasses.replace` share them unless it is the chip that was replaced. What
    only makes classes of cost slower or faster is cheaper still as `Scales`.
    """

    def __init__(self, program: Program) -> None:
        """Make `program` ready.

        Raises:
            ConfigError: if an operation waits for a collective that the program does not hold.
        """
        self.program = program
        """What is costed."""
        self.schedule = Schedule(program)
        """Its events, and what differs among its operations."""
        self._chips: dict[int, _ChipTimes] = {}
        self._collectives: tuple[Cluster, NDArray[np.float64]] | None = None

    def timeline(self, cluster: Cluster, scales: Scales = NOMINAL) -> Timeline:
        """Where the time of a step goes on `cluster`.

        Args:
            cluster: the hardware.
            scales: by how much the times of each class of cost are off.

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
        collectives = self._exchange_seconds(cluster) * scales.communication
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
        """Times of the distinct operations on `chip`, kept with it: no other can get its id."""
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

    def _exchange_seconds(self, cluster: Cluster) -> NDArray[np.float64]:
        """Times of the distinct exchanges, shape (collectives,); those of the last cluster kept."""
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
    """`program` made ready to be costed; the same again for the same object.

    The last few programs are kept.

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
