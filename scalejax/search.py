"""Searches over strategies: which spread of a transformer over devices is best, and by how much.

Every strategy that the devices can be divided into is held against the memory of one, and what
fits is costed. The step in closed form is a few pieces that run many times, each of which waits
for all that it starts; so its time is a sum over pieces, which strategies share. The sum is what
`predict` gives for the whole `Program` (a test compares them). Arithmetic on plain data; knows no
network of JAX, no compiler, no files.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scalejax.cost import (
    StepTerms,
    Timeline,
    collective_seconds,
    memory_verdict,
    operation_time,
    sent_between_stages,
    step_terms,
)
from scalejax.cost.schedule import Event, Start, Wait, Work
from scalejax.cost.streams import Streams
from scalejax.errors import DoesNotFit, require_at_least
from scalejax.hardware import Chip, Cluster
from scalejax.layout import BatchSplit, Layout
from scalejax.program import MemoryUse, Operation, Program
from scalejax.transformer_program import (
    AMPERE_WORKSPACE_BYTES,
    Held,
    Recompute,
    Strategy,
    TransformerShape,
    memory_use,
    part_of,
    pieces,
    pipeline_of,
    update_piece,
)

Objective = Literal["time", "cost", "memory"]
"""What is least: the time of a step, device-hours (or their price) of a sample, memory."""

HOPPER_WORKSPACE_BYTES = 32 * 1024**2
"""See `AMPERE_WORKSPACE_BYTES`."""
_HOPPER = (9, 0)
_TOLD_EVERY = 500  # groups of strategies
_SECONDS_PER_HOUR = 3600.0

_NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)

Axes = tuple[str, ...]
OnProgress = Callable[[int, int], None]
"""Called with the number of groups of like strategies that have been costed, and of all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy that fits, and what it takes."""

    strategy: Strategy
    """How the step is spread."""
    step_seconds: float
    """Time of one step."""
    peak_memory_bytes: int
    """Most memory held at once on one device."""

    @property
    def samples_per_second(self) -> float:
        """Throughput over all devices."""
        return self.strategy.split.global_batch / self.step_seconds

    @property
    def device_hours_per_sample(self) -> float:
        """What one sample occupies."""
        devices = self.strategy.layout.device_count
        return devices / self.samples_per_second / _SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    ranked: tuple[Candidate, ...]
    """All strategies that fit, the best first."""
    considered: int
    """Strategies that the devices can be divided into."""
    nearest: tuple[Strategy, float] | None
    """Where none fits, the one that needs least memory, and how many times what there is."""


def search(
    shape: TransformerShape,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    global_batch: int,
    *,
    objective: Objective = "time",
    moments: Literal[0, 1, 2] = 2,
    on_progress: OnProgress = lambda done, total: None,
) -> Found:
    """Every strategy that fits, the best first.

    Args:
        shape: the network.
        cluster: the devices.
        device_counts: how many of them; strategies for all counts are ranked together.
        global_batch: samples of an update.
        objective: what is least.
        moments: arrays like the parameters that the optimizer keeps.
        on_progress: told now and then.

    Raises:
        ConfigError: if there are no devices, or no samples.
        DoesNotFit: if the cluster has fewer devices.
    """
    require_at_least("global_batch", global_batch, 1)
    for count in device_counts:
        require_at_least("devices", count, 1)
        _require_devices(count, cluster)
    considered = 0
    fitting: list[tuple[_Group, list[Strategy]]] = []
    for count in device_counts:
        for group in _groups(shape, count, global_batch):
            considered += len(group.zero_stages) * len(group.chunk_counts)
            fits = _fitting(shape, group, global_batch, moments, cluster.chip)
            if fits:
                fitting.append((group, fits))
    costs = StrategyCosts(shape, cluster)
    ranked: list[Candidate] = []
    for index, (_, fits) in enumerate(fitting):
        if index % _TOLD_EVERY == 0:
            on_progress(index, len(fitting))
        ranked += costs.candidates(fits)
    on_progress(len(fitting), len(fitting))
    ranked.sort(key=_KEYS[objective])
    nearest = None
    if not ranked:
        nearest = _nearest(shape, cluster, device_counts, global_batch, moments)
    return Found(ranked=tuple(ranked), considered=considered, nearest=nearest)


_KEYS: dict[Objective, Callable[[Candidate], tuple[float, float]]] = {
    "time": lambda each: (each.step_seconds, each.peak_memory_bytes),
    "cost": lambda each: (each.device_hours_per_sample, each.step_seconds),
    "memory": lambda each: (each.peak_memory_bytes, each.step_seconds),
}


def pareto(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Those that no other beats in both time and memory, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=_KEYS["time"]):
        if not front or each.peak_memory_bytes < front[-1].peak_memory_bytes:
            front.append(each)
    return tuple(front)


def losses(
    own: Sequence[tuple[str, float]], best: Sequence[tuple[str, float]]
) -> tuple[tuple[str, float], ...]:
    """(term, seconds) by which each part of a step is longer than the best step's, or shorter.

    The largest first; what is alike to a thousandth of the best step is left out.

    Args:
        own: `StrategyCosts.terms` of a strategy.
        best: those of the winner.
    """
    mine, winners = dict(own), dict(best)
    names = dict.fromkeys((*mine, *winners))
    changes = [(name, mine.get(name, 0.0) - winners.get(name, 0.0)) for name in names]
    least = 1e-3 * math.fsum(winners.values())
    return tuple(sorted((each for each in changes if abs(each[1]) > least), key=lambda e: -e[1]))


def workspace_bytes(chip: Chip) -> int:
    """Memory that the library for products is given on `chip`."""
    is_recent = chip.cuda is not None and chip.cuda.compute_capability >= _HOPPER
    return HOPPER_WORKSPACE_BYTES if is_recent else AMPERE_WORKSPACE_BYTES


def strategies(
    shape: TransformerShape,
    device_count: int,
    global_batch: int,
    *,
    moments: Literal[0, 1, 2] = 2,
) -> Iterator[Strategy]:
    """Every strategy that divides network, samples and devices evenly."""
    for group in _groups(shape, device_count, global_batch):
        yield from group.strategies(global_batch, moments)


@dataclass(frozen=True, slots=True)
class _Group:
    """Strategies whose microbatches are alike: they differ in ZeRO stage and chunks."""

    layout: Layout
    microbatches: int
    recompute: Recompute
    sequence_parallel: bool
    zero_stages: tuple[Literal[0, 1, 2], ...]
    chunk_counts: tuple[int, ...]

    def strategies(self, global_batch: int, moments: Literal[0, 1, 2]) -> Iterator[Strategy]:
        for zero_stage in self.zero_stages:
            for chunks in self.chunk_counts:
                yield self.strategy(global_batch, moments, zero_stage, chunks)

    def strategy(
        self,
        global_batch: int,
        moments: Literal[0, 1, 2],
        zero_stage: Literal[0, 1, 2],
        chunks: int,
    ) -> Strategy:
        return Strategy(
            split=BatchSplit(
                global_batch=global_batch, layout=self.layout, microbatches=self.microbatches
            ),
            recompute=self.recompute,
            zero_stage=zero_stage,
            sequence_parallel=self.sequence_parallel,
            pipeline_chunks=chunks,
            moments=moments,
        )


def _groups(shape: TransformerShape, device_count: int, global_batch: int) -> Iterator[_Group]:
    for layout in _layouts(shape, device_count, global_batch):
        stages: tuple[Literal[0, 1, 2], ...] = (0, 1, 2) if layout.data > 1 else (0,)
        for microbatches in _divisors(global_batch // layout.batch_shards):
            chunks = _chunk_counts(shape, layout, microbatches)
            for recompute in _recomputes(shape):
                for parallel in _sequence_parallel(shape, layout):
                    yield _Group(layout, microbatches, recompute, parallel, stages, chunks)


def _layouts(shape: TransformerShape, device_count: int, global_batch: int) -> Iterator[Layout]:
    """Devices along each axis, where they divide the network and the samples."""
    divided = (shape.heads, shape.kv_heads, shape.ffn_hidden, shape.vocabulary)
    for pipeline in _divisors(math.gcd(device_count, shape.layers)):
        stage = device_count // pipeline
        for tensor in _divisors(math.gcd(stage, *divided)):
            for context in _divisors(math.gcd(stage // tensor, shape.tokens)):
                shards = stage // tensor // context
                if global_batch % shards:
                    continue
                for fsdp in _divisors(math.gcd(shards, shape.hidden // tensor)):
                    yield Layout(
                        data=shards // fsdp,
                        fsdp=fsdp,
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                    )


def _chunk_counts(shape: TransformerShape, layout: Layout, microbatches: int) -> tuple[int, ...]:
    if layout.pipeline == 1 or microbatches % layout.pipeline:
        return (1,)
    return _divisors(shape.layers // layout.pipeline)


def _recomputes(shape: TransformerShape) -> tuple[Recompute, ...]:
    """Fused attention keeps no scores that could be computed again."""
    return ("none", "full") if shape.is_fused else ("none", "selective", "full")


def _sequence_parallel(shape: TransformerShape, layout: Layout) -> tuple[bool, ...]:
    if layout.tensor == 1 or shape.tokens % (layout.context * layout.tensor):
        return (False,)
    return (False, True)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _fitting(
    shape: TransformerShape,
    group: _Group,
    global_batch: int,
    moments: Literal[0, 1, 2],
    chip: Chip,
) -> list[Strategy]:
    """Those of a group that fit; most need no more than a look at what they must hold."""
    free = chip.memory_bytes - chip.runtime_reserve_bytes - workspace_bytes(chip)
    layout = group.layout
    least = shape.layers * sum(shape.matrices) / layout.pipeline / layout.tensor / layout.fsdp
    if 4 * least * (1 + moments / layout.data) > free:
        return []
    part = part_of(shape, group.strategy(global_batch, moments, 0, 1))
    held = Held(part, layout, group.microbatches, moments)
    return [
        group.strategy(global_batch, moments, zero_stage, chunks)
        for zero_stage in group.zero_stages
        for chunks in group.chunk_counts
        if held.batch_bytes
        + held.state_bytes(zero_stage)
        + held.temporary_bytes(zero_stage, chunks)
        <= free
    ]


def _nearest(
    shape: TransformerShape,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    global_batch: int,
    moments: Literal[0, 1, 2],
) -> tuple[Strategy, float] | None:
    """The strategy that needs least memory, and how many times what there is."""
    workspace = workspace_bytes(cluster.chip)
    best: tuple[Strategy, float] | None = None
    for count in device_counts:
        for strategy in strategies(shape, count, global_batch, moments=moments):
            memory = memory_use(shape, strategy, workspace_bytes=workspace)
            verdict = memory_verdict(memory, cluster.chip)
            ratio = verdict.peak_bytes / verdict.memory_bytes
            if best is None or ratio < best[1]:
                best = strategy, ratio
    return best


def _require_devices(count: int, cluster: Cluster) -> None:
    most = cluster.max_device_count
    if most is None and cluster.network is None:
        most = cluster.devices_per_node
    if most is not None and count > most:
        raise DoesNotFit(f"devices={count} is refused: {cluster.name} has at most {most}.")


# --- what a strategy takes ---


@dataclass(slots=True)
class _PieceTime:
    """Where the time of operations goes; as `Timeline`."""

    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    contention_seconds: float
    communication_seconds: float
    dispatches: float
    exposed: dict[Axes, float]

    @property
    def walked_seconds(self) -> float:
        """Time of both streams."""
        alone = self.compute_seconds + self.memory_seconds + self.launch_seconds
        return alone + self.contention_seconds + sum(self.exposed.values())

    def times(self, runs: int) -> "_PieceTime":
        """So many runs of them."""
        return _PieceTime(
            self.compute_seconds * runs,
            self.memory_seconds * runs,
            self.launch_seconds * runs,
            self.contention_seconds * runs,
            self.communication_seconds * runs,
            self.dispatches * runs,
            {axes: seconds * runs for axes, seconds in self.exposed.items()},
        )


def _summed(parts: Sequence[_PieceTime]) -> _PieceTime:
    exposed: dict[Axes, float] = {}
    for part in parts:
        for axes, seconds in part.exposed.items():
            exposed[axes] = exposed.get(axes, 0.0) + seconds
    return _PieceTime(
        sum([part.compute_seconds for part in parts]),
        sum([part.memory_seconds for part in parts]),
        sum([part.launch_seconds for part in parts]),
        sum([part.contention_seconds for part in parts]),
        sum([part.communication_seconds for part in parts]),
        sum([part.dispatches for part in parts]),
        exposed,
    )


class StrategyCosts:
    """Times of the strategies of one network on one cluster, pieces that they share kept."""

    def __init__(self, shape: TransformerShape, cluster: Cluster) -> None:
        """Nothing is costed yet."""
        self._shape = shape
        self._cluster = cluster
        self._reserve_bytes = workspace_bytes(cluster.chip) + cluster.chip.runtime_reserve_bytes
        # Kept with its operations, whose id no other tuple can then get.
        self._known: dict[int, tuple[tuple[Operation, ...], _PieceTime]] = {}
        self._known_sent: dict[tuple[int, ...], _PieceTime] = {}

    def candidates(self, strategies: Sequence[Strategy]) -> list[Candidate]:
        """What each of some strategies takes, which differ in ZeRO stage and chunks alone.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        first = strategies[0]
        shared, block = self._shared(first)
        held = Held(
            part_of(self._shape, first), first.layout, first.split.microbatches, first.moments
        )
        stub = _without_operations(self._shape, first)
        updates = {
            stage: self._piece(update_piece(self._shape, replace(first, zero_stage=stage)))
            for stage in {each.zero_stage for each in strategies}
        }
        found = []
        for each in strategies:
            bubble, handed_on = self._bubble(each)
            sent = self._sent(each) if handed_on else None
            walked = shared.walked_seconds + updates[each.zero_stage].walked_seconds
            dispatches = shared.dispatches + updates[each.zero_stage].dispatches
            if sent is not None:
                walked += bubble * block.walked_seconds + handed_on * sent.walked_seconds
                dispatches += bubble * block.dispatches + handed_on * sent.dispatches
            attainable = self._cluster.chip.attainable
            seconds = max(walked, attainable.dispatch_seconds * dispatches)
            seconds += attainable.step_overhead_seconds
            added = step_terms(stub, self._cluster, seconds)
            seconds += (added.stragglers_seconds or 0.0) + (added.input_seconds or 0.0)
            peak = held.batch_bytes + held.state_bytes(each.zero_stage) + self._reserve_bytes
            peak += held.temporary_bytes(each.zero_stage, each.pipeline_chunks)
            found.append(Candidate(each, seconds, peak))
        return found

    def terms(self, strategy: Strategy) -> tuple[tuple[str, float], ...]:
        """(term, seconds) of the step of `strategy`: those of the waterfall of `predict` that are
        known, and take time."""
        shared, block = self._shared(strategy)
        bubble, handed_on = self._bubble(strategy)
        parts = [shared, self._piece(update_piece(self._shape, strategy)), block.times(bubble)]
        if handed_on:
            parts.append(self._sent(strategy).times(handed_on))
        times = _timeline(_summed(parts), self._cluster)
        stub = _without_operations(self._shape, strategy)
        return _terms(times, step_terms(stub, self._cluster, times.step_seconds))

    def _shared(self, strategy: Strategy) -> tuple["_PieceTime", "_PieceTime"]:
        """What all microbatches take, and of it one block, forward and backward."""
        parts = pieces(self._shape, strategy)
        count, layers = strategy.split.microbatches, self._layers(strategy)
        ends = (parts.embedding, parts.logits, parts.embedding_gradient)
        every = _summed([self._piece(each) for each in ends])
        block = _summed((self._piece(parts.forward), self._piece(parts.backward)))
        once = self._piece(parts.before)
        return _summed((once, every.times(count), block.times(count * layers))), block

    def _layers(self, strategy: Strategy) -> int:
        return self._shape.layers // strategy.layout.pipeline

    def _bubble(self, strategy: Strategy) -> tuple[int, int]:
        """(blocks in the bubble, microbatches handed on), as `pipelined` counts them."""
        stages, chunks = strategy.layout.pipeline, strategy.pipeline_chunks
        if stages == 1:
            return 0, 0
        handed_on = strategy.split.microbatches * chunks + stages - 1
        return (stages - 1) * (self._layers(strategy) // chunks), handed_on

    def _sent(self, strategy: Strategy) -> "_PieceTime":
        """What one microbatch hands from stage to stage."""
        layout = strategy.layout
        boundary = part_of(self._shape, strategy).stream_bytes
        key = layout.pipeline, layout.tensor, layout.device_count, boundary
        key = (*key, strategy.sequence_parallel)
        if key not in self._known_sent:
            pipeline = pipeline_of(self._shape, strategy)
            operations = (
                ()
                if pipeline is None
                else sent_between_stages(
                    pipeline, layout.tensor, layout.device_count // layout.pipeline
                )
            )
            self._known_sent[key] = _piece_time(operations, self._cluster)
        return self._known_sent[key]

    def _piece(self, operations: tuple[Operation, ...]) -> _PieceTime:
        known = self._known.get(id(operations))
        if known is None:
            time = _piece_time(operations, self._cluster)
            known = self._known[id(operations)] = operations, time
        return known[1]


def _timeline(sums: _PieceTime, cluster: Cluster) -> Timeline:
    """The whole step, from the sums of its pieces."""
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
    )


def _piece_time(operations: tuple[Operation, ...], cluster: Cluster) -> _PieceTime:
    """One run of operations that wait for all they start, on two streams."""
    busy = {"compute": 0.0, "memory": 0.0}
    launch = 0.0
    segments: list[float] = []
    exchanges: list[float] = []
    events: list[Event] = []
    axes: dict[str, Axes] = {}
    dispatches = 0
    for operation in operations:
        if operation.collective is not None:
            axes[operation.name] = operation.collective.group.axes
            events.append(Start(operation.name, len(exchanges), operation.collective.is_async))
            exchanges.append(collective_seconds(operation.collective, cluster))
        elif operation.waits_for is not None:
            events.append(Wait(operation.waits_for))
            continue
        else:
            time = operation_time(operation, cluster.chip)
            busy[time.bound] += time.busy_seconds
            launch += time.launch_seconds
            if events and isinstance(events[-1], Work):
                segments[-1] += time.seconds
            else:
                events.append(Work(len(segments)))
                segments.append(time.seconds)
        dispatches += 1
    streams = Streams(segments, exchanges, cluster.chip.attainable.contention_fraction)
    streams.run(events)
    streams.drain()
    exposed: dict[Axes, float] = defaultdict(float)
    for name, seconds in streams.exposed.items():
        exposed[axes[name]] += seconds
    return _PieceTime(
        compute_seconds=busy["compute"],
        memory_seconds=busy["memory"],
        launch_seconds=launch,
        contention_seconds=streams.contention_seconds,
        exposed=dict(exposed),
        communication_seconds=math.fsum(exchanges),
        dispatches=dispatches,
    )


def _without_operations(shape: TransformerShape, strategy: Strategy) -> Program:
    """What the conditions of a run depend on: devices and samples."""
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


def _terms(times: Timeline, added: StepTerms) -> tuple[tuple[str, float], ...]:
    """Those of the waterfall of `predict` that are known, and take time."""
    exchanges = ((f"communication {' x '.join(axes)}", value) for axes, value in times.exposed)
    terms = (
        ("compute", times.compute_seconds),
        ("memory", times.memory_seconds),
        ("launch", times.launch_seconds),
        *exchanges,
        ("contention", times.contention_seconds),
        ("host", times.host_seconds),
        ("overhead", times.overhead_seconds),
        ("stragglers", added.stragglers_seconds or 0.0),
        ("input", added.input_seconds or 0.0),
    )
    return tuple((name, seconds) for name, seconds in terms if seconds)
