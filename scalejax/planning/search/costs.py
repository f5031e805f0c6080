"""Step time and memory of strategies, from the groups of operations that they share.

The closed-form step is a few groups of operations that run many times. Each group waits for all
collectives that it starts, so the timeline of the step is the total of theirs. It equals what
`predict` gives for the whole `Program`, up to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.simulator.device_state import in_graph
from scalejax.simulator.expert_load import with_expert_load
from scalejax.simulator.program import MemoryUse, Program
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import OperationCosts, Timeline, total
from scalejax.simulator.transformer import (
    DeviceMemory,
    Part,
    Strategy,
    TransformerShape,
    exchange_of_chunks,
    slowest_stage,
    stage_counts,
    step_parts,
)
from scalejax.xla.closed_form import workspace_bytes

_SECONDS_PER_HOUR = 3600.0
_NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)


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


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Timelines that make up the steps of strategies which differ in pipeline chunks only."""

    busy: Timeline
    """Everything that the slowest stage does, except for sends."""
    block: Timeline
    """One block, forward and backward."""
    sends: Timeline
    """Sends between stages in one tick."""
    ends: tuple[tuple[Timeline, int], ...]
    """For one microbatch: dense blocks of the first stage, and logits of the last stage if that is
    not the slowest."""
    other_blocks: int
    """Blocks of all other stages."""
    more_blocks: int
    """Blocks that the stage with the most has beyond the slowest: its host launches them too."""

    def timeline(self, strategy: Strategy, exchange: Timeline) -> Timeline:
        """Timeline of the step of `strategy`; `exchange` is that of exchanging chunks."""
        stages, chunks = strategy.layout.pipeline, strategy.pipeline_chunks
        if stages == 1:
            return self.busy
        ticks = PipelineTicks("1f1b", stages, strategy.split.microbatches, chunks)
        idle = (self.block, self.other_blocks // chunks), *self.ends
        sends = self.sends, ticks.work + ticks.idle
        step = total(((self.busy, 1), (exchange, 1), sends, *idle))
        if not (self.more_blocks and step.dispatch_seconds):
            return step
        of_block = self.block.dispatch_seconds + self.block.exchange_seconds
        more = self.more_blocks * strategy.split.microbatches * of_block
        return replace(step, dispatch_seconds=step.dispatch_seconds + more)


class StrategyCosts:
    """Times of the strategies of one network on one cluster; shared operations are cached."""

    def __init__(self, shape: TransformerShape, cluster: Cluster, site: Site = NO_SITE) -> None:
        """Start with empty caches."""
        self._shape, self._site = shape, site
        self._cluster = in_graph(cluster)
        self._reserve_bytes = workspace_bytes(cluster.chip) + cluster.chip.runtime_reserve_bytes
        self._costs = OperationCosts(self._cluster)
        self._known: dict[Part, Timeline] = {}

    def candidates(
        self, strategies: Sequence[Strategy], memory_of: Mapping[Literal[0, 1, 2], DeviceMemory]
    ) -> list[Candidate]:
        """Time and memory of strategies that differ only in ZeRO stage and chunks.

        Args:
            strategies: the strategies.
            memory_of: their memory by ZeRO stage.

        Raises:
            DoesNotFit: if a collective spans nodes that no network connects.
        """
        stub = _without_operations(self._shape, strategies[0])
        times_of: dict[int, _StepTimes] = {}
        found = []
        for each in strategies:
            stage = each.zero_stage
            if stage not in times_of:
                times_of[stage] = self._step_times(each, stub)
            exchange = self._timeline(exchange_of_chunks(self._shape, each))
            seconds = times_of[stage].timeline(each, exchange).step_seconds
            added = step_terms(stub, self._cluster, self._site, seconds)
            seconds += (added.stragglers_seconds or 0.0) + (added.input_seconds or 0.0)
            memory = memory_of[stage]
            peak = memory.batch_bytes + memory.state_bytes(stage) + self._reserve_bytes
            peak += memory.temporary_bytes(stage, each.pipeline_chunks)
            found.append(Candidate(each, seconds, peak))
        return found

    def _step_times(self, strategy: Strategy, stub: Program) -> _StepTimes:
        parts, slowest = step_parts(self._shape, strategy), slowest_stage(self._shape, strategy)
        microbatches, logits = strategy.split.microbatches, self._timeline(parts.logits)
        blocks, first = (
            [
                (
                    total(
                        (
                            (self._timeline(each.forward, stub), 1),
                            (self._timeline(each.backward, stub), 1),
                        )
                    ),
                    each.count,
                )
                for each in kinds
            ]
            for kinds in (parts.blocks, parts.first_blocks)
        )
        busy = (
            (self._timeline(parts.before), 1),
            (self._timeline(parts.embedding), microbatches),
            *((block, microbatches * count) for block, count in blocks),
            (logits, microbatches if slowest.has_logits else 0),
            (self._timeline(parts.embedding_gradient), microbatches),
            (self._timeline(parts.update), 1),
        )
        ends = (*first, *(() if slowest.has_logits else ((logits, 1),)))
        others = self._shape.kinds[-1][1] - slowest.layers
        counts = stage_counts(self._shape, strategy.layout)
        more = max(counts) - slowest.layers if strategy.layout.pipeline > 1 else 0
        sends = self._timeline(parts.sends)
        return _StepTimes(total(busy), blocks[-1][0], sends, ends, others, more)

    def _timeline(self, part: Part, stub: Program | None = None) -> Timeline:
        """Timeline of one run of a part; with a `stub`, as the fullest of its devices runs it, if
        the loads of experts are uneven."""
        known = self._known.get(part)
        if known is None:
            operations, exponent = part.operations, self._site.conditions.expert_load_exponent
            if stub is not None and exponent is not None:
                operations = with_expert_load(replace(stub, operations=operations), exponent)
                operations = operations.operations
            known = self._known[part] = self._costs.timeline(operations)
        return known


def _without_operations(shape: TransformerShape, strategy: Strategy) -> Program:
    """Program with devices and samples only: the site's conditions depend on nothing else."""
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
