"""Searches over strategies: which spread of a transformer over devices is best, and by how much.

Every strategy that the devices can be divided into is held against the memory of one, and what
fits is costed. The step in closed form is a few pieces that run many times, each of which waits
for all that it starts; so its time is a sum over pieces, which strategies share. The sum is what
`predict` gives for the whole `Program` (a test compares them). Arithmetic on plain data; knows no
network of JAX, no compiler, no files.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from scalejax.cost import (
    StepTerms,
    Timeline,
    as_used,
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
    Recompute,
    Strategy,
    TransformerShape,
    memory_use,
    pieces,
    pipeline_of,
)

Objective = Literal["time", "cost", "memory"]
"""What is least: the time of a step, device-hours (or their price) of a sample, memory."""

HOPPER_WORKSPACE_BYTES = 32 * 1024**2
"""See `AMPERE_WORKSPACE_BYTES`."""
_HOPPER = (9, 0)
_TOLD_EVERY = 2000  # strategies
_SECONDS_PER_HOUR = 3600.0

Axes = tuple[str, ...]
OnProgress = Callable[[int, int], None]
"""Called with the number of strategies that have been costed, and of all that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy that fits, and what it takes."""

    strategy: Strategy
    """How the step is spread."""
    step_seconds: float
    """Time of one step."""
    peak_memory_bytes: int
    """Most memory held at once on one device."""
    terms: tuple[tuple[str, float], ...]
    """(term, seconds) of the step, those of the waterfall of `predict`."""

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
    considered, fitting = 0, []
    workspace = workspace_bytes(cluster.chip)
    free = cluster.chip.memory_bytes - cluster.chip.runtime_reserve_bytes
    for count in device_counts:
        for way in _ways(shape, count, global_batch):
            considered += 1
            if _least_state_bytes(shape, way, moments) > free:
                continue
            strategy = way.strategy(global_batch, moments)
            memory = memory_use(shape, strategy, workspace_bytes=workspace)
            if memory_verdict(memory, cluster.chip).fits:
                fitting.append((strategy, memory))
    costs = StrategyCosts(shape, cluster)
    ranked = []
    for index, (strategy, memory) in enumerate(fitting):
        if index % _TOLD_EVERY == 0:
            on_progress(index, len(fitting))
        ranked.append(costs.candidate(strategy, memory))
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


def losses(candidate: Candidate, winner: Candidate) -> tuple[tuple[str, float], ...]:
    """(term, seconds) by which each part of a step is longer than the winner's, or shorter, the
    largest first; what is alike in both is left out."""
    own, best = dict(candidate.terms), dict(winner.terms)
    names = dict.fromkeys((*own, *best))
    changes = [(name, own.get(name, 0.0) - best.get(name, 0.0)) for name in names]
    least = 1e-3 * winner.step_seconds
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
    for way in _ways(shape, device_count, global_batch):
        yield way.strategy(global_batch, moments)


@dataclass(frozen=True, slots=True)
class _Way:
    """A strategy before it is built: most are dropped for their memory."""

    layout: Layout
    microbatches: int
    recompute: Recompute
    zero_stage: Literal[0, 1, 2]
    sequence_parallel: bool
    chunks: int

    def strategy(self, global_batch: int, moments: Literal[0, 1, 2]) -> Strategy:
        return Strategy(
            split=BatchSplit(
                global_batch=global_batch, layout=self.layout, microbatches=self.microbatches
            ),
            recompute=self.recompute,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            pipeline_chunks=self.chunks,
            moments=moments,
        )


def _ways(shape: TransformerShape, device_count: int, global_batch: int) -> Iterator[_Way]:
    for layout in _layouts(shape, device_count, global_batch):
        per_device = global_batch // layout.batch_shards
        zero_stages = get_args(Literal[0, 1, 2]) if layout.data > 1 else (0,)
        for microbatches in _divisors(per_device):
            for chunks in _chunk_counts(shape, layout, microbatches):
                for recompute in _recomputes(shape):
                    for stage in zero_stages:
                        for parallel in _sequence_parallel(shape, layout):
                            yield _Way(layout, microbatches, recompute, stage, parallel, chunks)


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


def _least_state_bytes(shape: TransformerShape, way: _Way, moments: int) -> float:
    """Below what any device needs: matrices and their moments, and nothing else."""
    layout = way.layout
    own = shape.layers * sum(shape.matrices) / (layout.pipeline * layout.tensor * layout.fsdp)
    return 4 * own * (1 + moments / (layout.data if way.zero_stage else 1))


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


@dataclass(frozen=True, slots=True)
class _PieceTime:
    """Where the time of one run of a piece goes; as `Timeline`."""

    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    contention_seconds: float
    exposed: tuple[tuple[Axes, float], ...]
    communication_seconds: float
    dispatches: int


class StrategyCosts:
    """Times of the strategies of one network on one cluster, pieces that they share kept."""

    def __init__(self, shape: TransformerShape, cluster: Cluster) -> None:
        """Nothing is costed yet."""
        self._shape = shape
        self._cluster = cluster
        # Kept with its operations, whose id no other tuple can then get.
        self._known: dict[int, tuple[tuple[Operation, ...], _PieceTime]] = {}

    def candidate(self, strategy: Strategy, memory: MemoryUse) -> Candidate:
        """What `strategy` takes, given what it holds.

        Raises:
            DoesNotFit: if a collective spans nodes that no network joins.
        """
        stub = _without_operations(self._shape, strategy, memory)
        cluster = as_used(self._cluster, stub)
        times = self._timeline(strategy, cluster)
        added = step_terms(stub, cluster, times.step_seconds)
        return Candidate(
            strategy=strategy,
            step_seconds=math.fsum(
                (times.step_seconds, added.stragglers_seconds or 0.0, added.input_seconds or 0.0)
            ),
            peak_memory_bytes=memory_verdict(memory, cluster.chip).peak_bytes,
            terms=_terms(times, added),
        )

    def _timeline(self, strategy: Strategy, cluster: Cluster) -> Timeline:
        sums: dict[str, float] = defaultdict(float)
        exposed: dict[Axes, float] = defaultdict(float)
        for operations, runs in self._runs(strategy):
            piece = self._piece(operations, cluster)
            for name in _SUMMED:
                sums[name] += runs * getattr(piece, name)
            for axes, seconds in piece.exposed:
                exposed[axes] += runs * seconds
        attainable = cluster.chip.attainable
        return Timeline(
            compute_seconds=sums["compute_seconds"],
            memory_seconds=sums["memory_seconds"],
            launch_seconds=sums["launch_seconds"],
            contention_seconds=sums["contention_seconds"],
            exposed_by_name=(),
            exposed=tuple(sorted(exposed.items())),
            dispatch_seconds=attainable.dispatch_seconds * sums["dispatches"],
            overhead_seconds=attainable.step_overhead_seconds,
            communication_seconds=sums["communication_seconds"],
        )

    def _runs(self, strategy: Strategy) -> list[tuple[tuple[Operation, ...], int]]:
        """The pieces of a step, and how often each of them runs; as `pipelined` has them."""
        parts = pieces(self._shape, strategy)
        count, stages = strategy.split.microbatches, strategy.layout.pipeline
        layers = self._shape.layers // stages
        blocks = count * layers
        runs = [(parts.before, 1), (parts.update, 1), (parts.embedding, count)]
        runs += [(parts.logits, count), (parts.embedding_gradient, count)]
        pipeline = pipeline_of(self._shape, strategy)
        if pipeline is not None:
            blocks += (stages - 1) * (layers // pipeline.chunks)
            layout = strategy.layout
            sent = sent_between_stages(pipeline, layout.tensor, layout.device_count // stages)
            runs.append((sent, count * pipeline.chunks + stages - 1))
        return [*runs, (parts.forward, blocks), (parts.backward, blocks)]

    def _piece(self, operations: tuple[Operation, ...], cluster: Cluster) -> _PieceTime:
        known = self._known.get(id(operations))
        if known is None or known[0] is not operations:
            known = self._known[id(operations)] = operations, _piece_time(operations, cluster)
        return known[1]


_SUMMED = (
    "compute_seconds",
    "memory_seconds",
    "launch_seconds",
    "contention_seconds",
    "communication_seconds",
    "dispatches",
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
        exposed=tuple(exposed.items()),
        communication_seconds=math.fsum(exchanges),
        dispatches=dispatches,
    )


def _without_operations(shape: TransformerShape, strategy: Strategy, memory: MemoryUse) -> Program:
    """What the conditions of a run depend on: devices and samples."""
    return Program(
        name="transformer train step",
        backend="closed_form",
        target="closed form",
        compiler="none",
        mesh_axes=tuple(strategy.layout.axis_sizes.items()),
        operations=(),
        memory=memory,
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
