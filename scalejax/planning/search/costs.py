"""Step time and memory of strategies, from the groups of operations that they share.

The closed-form step is a few groups of operations that run many times, each of which waits for
all collectives that it starts; so its time is a sum over groups. It equals what `predict` gives
for the whole `Program`, to rounding.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalejax.hardware import Chip, Cluster
from scalejax.simulator.collectives.placement import collective_seconds, links
from scalejax.simulator.device_state import in_graph
from scalejax.simulator.operations.roofline import OperationTime, operation_time
from scalejax.simulator.program import MemoryUse, Operation, Program
from scalejax.simulator.site_effects import StepTerms, step_terms
from scalejax.simulator.timeline.schedule import Event, Start, Wait, Work
from scalejax.simulator.timeline.streams import Streams
from scalejax.simulator.timeline.timeline import Timeline
from scalejax.simulator.transformer import (
    AMPERE_WORKSPACE_BYTES,
    Strategy,
    TransformerShape,
    block_shard,
    memory_by_zero_stage,
    pipeline_of,
    slowest_stage,
    step_operations,
    update_operations,
)
from scalejax.simulator.transforms.pipeline import sent_between_stages

HOPPER_WORKSPACE_BYTES = 32 * 1024**2
"""Workspace that XLA gives to cuBLAS from Hopper on; see `AMPERE_WORKSPACE_BYTES`."""
_HOPPER = (9, 0)
_SECONDS_PER_HOUR = 3600.0
_NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)

Axes = tuple[str, ...]
"""Mesh axes that a collective spans."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy that fits, with its step time and memory."""

    strategy: Strategy
    """Parallelism, microbatches and recompute."""
    step_seconds: float
    """Time of one step."""
    peak_memory_bytes: int
    """Peak memory of one device."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all devices."""
        return self.strategy.split.global_batch / self.step_seconds

    @property
    def device_hours_per_sample(self) -> float:
        """Device-hours per sample."""
        devices = self.strategy.layout.device_count
        return devices / self.samples_per_second / _SECONDS_PER_HOUR


def workspace_bytes(chip: Chip) -> int:
    """Workspace of the matrix-product library on `chip`."""
    is_recent = chip.cuda is not None and chip.cuda.compute_capability >= _HOPPER
    return HOPPER_WORKSPACE_BYTES if is_recent else AMPERE_WORKSPACE_BYTES


@dataclass(slots=True)
class _OperationsTime:
    """Breakdown of the time of a group of operations, as `Timeline`."""

    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    contention_seconds: float
    communication_seconds: float
    dispatches: float
    exposed: dict[Axes, float]

    @property
    def streams_seconds(self) -> float:
        """Time of the streams."""
        alone = self.compute_seconds + self.memory_seconds + self.launch_seconds
        return alone + self.contention_seconds + sum(self.exposed.values())

    def times(self, runs: int) -> "_OperationsTime":
        """Breakdown of `runs` runs of the operations."""
        return _OperationsTime(
            self.compute_seconds * runs,
            self.memory_seconds * runs,
            self.launch_seconds * runs,
            self.contention_seconds * runs,
            self.communication_seconds * runs,
            self.dispatches * runs,
            {axes: seconds * runs for axes, seconds in self.exposed.items()},
        )


def _summed(parts: Sequence[_OperationsTime]) -> _OperationsTime:
    exposed: dict[Axes, float] = {}
    for part in parts:
        for axes, seconds in part.exposed.items():
            exposed[axes] = exposed.get(axes, 0.0) + seconds
    return _OperationsTime(
        sum([part.compute_seconds for part in parts]),
        sum([part.memory_seconds for part in parts]),
        sum([part.launch_seconds for part in parts]),
        sum([part.contention_seconds for part in parts]),
        sum([part.communication_seconds for part in parts]),
        sum([part.dispatches for part in parts]),
        exposed,
    )


class StrategyCosts:
    """Times of the strategies of one network on one cluster; shared operations are cached."""

    def __init__(self, shape: TransformerShape, cluster: Cluster) -> None:
        """Start with empty caches."""
        self._shape = shape
        self._cluster = in_graph(cluster)
        self._reserve_bytes = workspace_bytes(cluster.chip) + cluster.chip.runtime_reserve_bytes
        # Cached with its operations, so that their id stays taken.
        self._known: dict[int, tuple[tuple[Operation, ...], _OperationsTime]] = {}
        self._known_operations: _Known = {}
        self._known_sends: dict[tuple[int, ...], _OperationsTime] = {}

    def candidates(self, strategies: Sequence[Strategy]) -> list[Candidate]:
        """Time and memory of strategies that differ only in ZeRO stage and chunks.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        first = strategies[0]
        stages = {each.zero_stage for each in strategies}
        microbatch_times_of = {
            stage: self._microbatch_times(replace(first, zero_stage=stage)) for stage in stages
        }
        memory_of = memory_by_zero_stage(self._shape, strategies)
        stub = _without_operations(self._shape, first)
        updates = {
            stage: self._time_of_operations(
                update_operations(self._shape, replace(first, zero_stage=stage))
            )
            for stage in stages
        }
        found = []
        for each in strategies:
            microbatches, block, last = microbatch_times_of[each.zero_stage]
            bubble, sends = self._bubble(each)
            sent = self._send_time(each) if sends else None
            streams_seconds = (
                microbatches.streams_seconds + updates[each.zero_stage].streams_seconds
            )
            dispatches = microbatches.dispatches + updates[each.zero_stage].dispatches
            if sent is not None:
                streams_seconds += bubble * block.streams_seconds + sends * sent.streams_seconds
                streams_seconds += last.streams_seconds
                dispatches += bubble * block.dispatches + sends * sent.dispatches
                dispatches += last.dispatches
            attainable = self._cluster.chip.attainable
            dispatch = attainable.dispatch_seconds * dispatches
            launches_block = self._cluster.conditions.launches_block
            seconds = (
                streams_seconds + dispatch if launches_block else max(streams_seconds, dispatch)
            )
            seconds += attainable.step_overhead_seconds
            added = step_terms(stub, self._cluster, seconds)
            seconds += (added.stragglers_seconds or 0.0) + (added.input_seconds or 0.0)
            memory = memory_of[each.zero_stage]
            peak = memory.batch_bytes + memory.state_bytes(each.zero_stage) + self._reserve_bytes
            peak += memory.temporary_bytes(each.zero_stage, each.pipeline_chunks)
            found.append(Candidate(each, seconds, peak))
        return found

    def terms(self, strategy: Strategy) -> tuple[tuple[str, float], ...]:
        """(term, seconds) of the step of `strategy`: the known, nonzero terms of the waterfall of
        `predict`."""
        microbatches, block, last = self._microbatch_times(strategy)
        bubble, sends = self._bubble(strategy)
        parts = [microbatches, self._time_of_operations(update_operations(self._shape, strategy))]
        idle = [block.times(bubble), last]
        if sends:
            sent, idle_ticks = self._send_time(strategy), strategy.layout.pipeline - 1
            parts.append(sent.times(sends - idle_ticks))
            idle.append(sent.times(idle_ticks))
        times = _timeline(_summed([*parts, *idle]), self._cluster)
        working = _timeline(_summed(parts), self._cluster)
        stub = _without_operations(self._shape, strategy)
        added = step_terms(stub, self._cluster, times.step_seconds)
        return _terms(times, working, added)

    def _microbatch_times(
        self, strategy: Strategy
    ) -> tuple["_OperationsTime", "_OperationsTime", "_OperationsTime"]:
        """Times of all microbatches; of one block, forward and backward; and of the logits of one
        microbatch where the last stage is not the slowest."""
        parts, slowest = (
            step_operations(self._shape, strategy),
            slowest_stage(self._shape, strategy),
        )
        count, layers = strategy.split.microbatches, slowest.layers
        logits = self._time_of_operations(parts.logits)
        ends = (
            self._time_of_operations(parts.embedding),
            logits.times(1 if slowest.has_logits else 0),
            self._time_of_operations(parts.embedding_gradient),
        )
        every = _summed(ends)
        block = _summed(
            (self._time_of_operations(parts.forward), self._time_of_operations(parts.backward))
        )
        once = self._time_of_operations(parts.before)
        microbatches = _summed((once, every.times(count), block.times(count * layers)))
        return microbatches, block, logits.times(0 if slowest.has_logits else 1)

    def _bubble(self, strategy: Strategy) -> tuple[int, int]:
        """(blocks in the bubble, sends of microbatches), as `pipelined` counts them."""
        stages, chunks = strategy.layout.pipeline, strategy.pipeline_chunks
        if stages == 1:
            return 0, 0
        sends = strategy.split.microbatches * chunks + stages - 1
        others = self._shape.layers - slowest_stage(self._shape, strategy).layers
        return others // chunks, sends

    def _send_time(self, strategy: Strategy) -> "_OperationsTime":
        """Time of sending one microbatch between stages."""
        layout = strategy.layout
        boundary = block_shard(self._shape, strategy).stream_bytes
        key = layout.pipeline, layout.tensor, layout.device_count, boundary
        key = (*key, strategy.sequence_parallel)
        if key not in self._known_sends:
            pipeline = pipeline_of(self._shape, strategy)
            operations = (
                ()
                if pipeline is None
                else sent_between_stages(
                    pipeline, layout.tensor, layout.device_count // layout.pipeline
                )
            )
            self._known_sends[key] = _operations_time(
                operations, self._cluster, self._known_operations
            )
        return self._known_sends[key]

    def _time_of_operations(self, operations: tuple[Operation, ...]) -> _OperationsTime:
        known = self._known.get(id(operations))
        if known is None:
            time = _operations_time(operations, self._cluster, self._known_operations)
            known = self._known[id(operations)] = operations, time
        return known[1]


def _timeline(sums: _OperationsTime, cluster: Cluster) -> Timeline:
    """Timeline of the whole step, from the sums over its operations."""
    attainable = cluster.chip.attainable
    return Timeline(
        compute_seconds=sums.compute_seconds,
        memory_seconds=sums.memory_seconds,
        launch_seconds=sums.launch_seconds,
        contention_seconds=sums.contention_seconds,
        exposed_by_name=(),
        exposed=tuple(sorted(sums.exposed.items())),
        dispatch_seconds=attainable.dispatch_seconds * sums.dispatches,
        overhead_seconds=attainable.step_overhead_seconds,
        communication_seconds=sums.communication_seconds,
        launches_block=cluster.conditions.launches_block,
    )


_Known = dict[tuple[object, ...], OperationTime]
"""Cache of operation times on one chip, by all fields that they depend on."""


def _operation_time(operation: Operation, chip: Chip, known: _Known) -> OperationTime:
    """Time of an operation, cached for equal ones."""
    key = (
        operation.kind,
        operation.dtype,
        operation.flop,
        operation.read_bytes,
        operation.write_bytes,
        operation.shape,
    )
    time = known.get(key)
    if time is None:
        time = known[key] = operation_time(operation, chip)
    return time


def _operations_time(
    operations: tuple[Operation, ...], cluster: Cluster, known: _Known
) -> _OperationsTime:
    """Time of one run of operations that wait for all collectives they start.

    Args:
        operations: a group of operations.
        cluster: the devices.
        known: cache of operation times on its chip, which is filled.
    """
    busy = {"compute": 0.0, "memory": 0.0}
    launch = 0.0
    segments: list[float] = []
    collectives: list[float] = []
    collective_links: list[int] = []
    events: list[Event] = []
    axes: dict[str, Axes] = {}
    dispatches = 0
    for operation in operations:
        if operation.collective is not None:
            axes[operation.name] = operation.collective.group.axes
            events.append(Start(operation.name, len(collectives), operation.collective.is_async))
            collectives.append(collective_seconds(operation.collective, cluster))
            collective_links.append(links(operation.collective, cluster))
        elif operation.waits_for is not None:
            events.append(Wait(operation.waits_for))
            continue
        else:
            time = _operation_time(operation, cluster.chip, known)
            busy[time.bound] += time.busy_seconds
            launch += time.launch_seconds
            if events and isinstance(events[-1], Work):
                segments[-1] += time.seconds
            else:
                events.append(Work(len(segments)))
                segments.append(time.seconds)
        dispatches += 1
    contention = cluster.chip.attainable.contention_fraction
    streams = Streams(segments, collectives, collective_links, contention)
    streams.run(events)
    streams.drain()
    exposed: dict[Axes, float] = defaultdict(float)
    for name, seconds in streams.exposed.items():
        exposed[axes[name]] += seconds
    return _OperationsTime(
        compute_seconds=busy["compute"],
        memory_seconds=busy["memory"],
        launch_seconds=launch,
        contention_seconds=streams.contention_seconds,
        exposed=dict(exposed),
        communication_seconds=math.fsum(collectives),
        dispatches=dispatches,
    )


def _without_operations(shape: TransformerShape, strategy: Strategy) -> Program:
    """Program with devices and samples only, on which the site's conditions depend."""
    return Program(
        name="transformer train step",
        backend="closed_form",
        target="closed form",
        compiler="none",
        mesh_axes=tuple(strategy.layout.axis_sizes.items()),
        operations=(),
        memory=_NO_MEMORY,
        global_batch=strategy.split.global_batch,
        tokens_per_sample=shape.tokens,
    )


def _terms(times: Timeline, working: Timeline, added: StepTerms) -> tuple[tuple[str, float], ...]:
    """Known, nonzero terms of the waterfall of `predict`.

    Args:
        times: timeline of the step.
        working: timeline of the step without its bubble.
        added: seconds that stragglers and input add.
    """
    collectives = ((f"communication {' x '.join(axes)}", value) for axes, value in working.exposed)
    terms = (
        ("compute", working.compute_seconds),
        ("memory", working.memory_seconds),
        ("launch", working.launch_seconds),
        *collectives,
        ("contention", working.contention_seconds),
        ("host", working.host_seconds),
        ("overhead", working.overhead_seconds),
        ("bubble", times.step_seconds - working.step_seconds),
        ("stragglers", added.stragglers_seconds or 0.0),
        ("input", added.input_seconds or 0.0),
    )
    return tuple((name, seconds) for name, seconds in terms if seconds)
