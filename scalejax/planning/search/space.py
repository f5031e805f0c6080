"""Search space of strategies: all even divisions of network, samples and devices.

Only the blocks of pipeline stages may be uneven, by one. Knows nothing about memory and time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from scalejax.config.parallelism import BatchSplit, ContextStrategy, Layout
from scalejax.simulator.transformer import (
    Recompute,
    Strategy,
    TransformerShape,
    is_uneven,
    zero_parts,
)


def strategies(
    shape: TransformerShape,
    device_count: int,
    global_batch: int,
    *,
    moments: Literal[0, 1, 2] = 2,
) -> Iterator[Strategy]:
    """Yield every strategy that divides network, samples and devices."""
    for group in groups(shape, device_count, global_batch):
        yield from group.strategies(moments)


@dataclass(frozen=True, slots=True)
class Group:
    """Strategies with equal microbatches that differ only in ZeRO stage and chunks."""

    split: BatchSplit
    """Devices along each axis, the global batch, and its microbatches."""
    recompute: Recompute
    """Recompute in the backward pass."""
    sequence_parallel: bool
    """Whether tokens are sharded over tensor between layers."""
    context_strategy: ContextStrategy
    """How attention reads the tokens of other context shards."""
    zero_stages: tuple[Literal[0, 1, 2], ...]
    """Possible ZeRO stages of the data axis."""
    chunk_counts: tuple[int, ...]
    """Possible numbers of chunks per pipeline stage."""

    def __len__(self) -> int:
        return len(self.zero_stages) * len(self.chunk_counts)

    def strategies(self, moments: Literal[0, 1, 2]) -> Iterator[Strategy]:
        """Yield each strategy of the group."""
        for zero_stage in self.zero_stages:
            for chunks in self.chunk_counts:
                yield self.strategy(moments, zero_stage, chunks)

    def strategy(
        self, moments: Literal[0, 1, 2], zero_stage: Literal[0, 1, 2], chunks: int
    ) -> Strategy:
        """Strategy of the group with that ZeRO stage and number of chunks."""
        return Strategy(
            split=self.split,
            recompute=self.recompute,
            zero_stage=zero_stage,
            sequence_parallel=self.sequence_parallel,
            context_strategy=self.context_strategy,
            pipeline_chunks=chunks,
            moments=moments,
        )


_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "selective_op", "full")


def groups(shape: TransformerShape, device_count: int, global_batch: int) -> Iterator[Group]:
    """Yield every strategy that divides network, samples and devices, in groups."""
    for layout in _layouts(shape, device_count, global_batch):
        stages = _zero_stages(shape, layout)
        for microbatches in _divisors(global_batch // layout.batch_shards):
            chunks = _chunk_counts(shape, layout, microbatches)
            split = BatchSplit(global_batch=global_batch, layout=layout, microbatches=microbatches)
            for recompute in _RECOMPUTES:
                for parallel in _sequence_parallel(shape, layout):
                    for context in _context_strategies(shape, layout):
                        yield Group(split, recompute, parallel, context, stages, chunks)


def common_groups(
    shape: TransformerShape, device_count: int, global_batch: int, devices_per_node: int
) -> Iterator[tuple[int, list[Group]]]:
    """Yield the groups that most runs are made of, by rising size of the tensor axis.

    They use data and fsdp, with fsdp over a node, over eight nodes or over all devices; tensor
    within a node; experts unsharded or over as many devices as divide them; one to eight samples
    per device at once; no pipeline and no context. There are some hundreds, out of the tens of
    thousands of `groups`.
    """
    divided = (*_divided(shape), shape.vocabulary)
    for tensor in _divisors(math.gcd(device_count, *divided)):
        shards = device_count // tensor
        if tensor > devices_per_node or global_batch % shards:
            continue
        widths = [n for n in _divisors(math.gcd(shards, shape.hidden // tensor)) if n * tensor > 1]
        near = [n for n in widths if n * tensor in (devices_per_node, 8 * devices_per_node)]
        found: list[Group] = []
        for fsdp in sorted({1, *near, *widths[-1:]}):
            experts = _divisors(math.gcd(shards // fsdp, shape.expert_count))
            for expert in sorted({experts[0], experts[-1]}):
                layout = Layout(
                    data=shards // fsdp // expert, fsdp=fsdp, expert=expert, tensor=tensor,
                    context=1, pipeline=1,
                )  # fmt: skip
                samples = global_batch // layout.batch_shards
                for microbatch in (1, 2, 4, 8):
                    if samples % microbatch:
                        continue
                    split = BatchSplit(
                        global_batch=global_batch,
                        layout=layout,
                        microbatches=samples // microbatch,
                    )
                    found += [
                        Group(split, recompute, tensor > 1, "all_gather", stages, (1,))
                        for recompute in _RECOMPUTES
                        for stages in (_zero_stages(shape, layout),)
                        if tensor == 1 or True in _sequence_parallel(shape, layout)
                    ]
        yield tensor, found


def left_out(shape: TransformerShape, device_counts: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the tensor axis that divide devices and blocks, but not the vocabulary."""
    sizes = {
        tensor
        for count in device_counts
        for tensor in _divisors(math.gcd(count, *_divided(shape)))
        if shape.vocabulary % tensor
    }
    return tuple(sorted(sizes))


def _divided(shape: TransformerShape) -> tuple[int, ...]:
    """Sizes of a block that the tensor axis has to divide."""
    divided = shape.heads, shape.kv_heads, shape.ffn_hidden
    return divided if shape.experts is None else (*divided, shape.experts.expert_hidden)


def _layouts(shape: TransformerShape, device_count: int, global_batch: int) -> Iterator[Layout]:
    """Yield the layouts that divide the network and the samples."""
    divided = (*_divided(shape), shape.vocabulary)
    for pipeline in _divisors(device_count):
        if pipeline > shape.layers:
            break
        stage = device_count // pipeline
        for tensor in _divisors(math.gcd(stage, *divided)):
            # The closed form of latent attention needs whole samples.
            parts = 1 if shape.latent is not None else shape.tokens
            for context in _divisors(math.gcd(stage // tensor, parts)):
                shards = stage // tensor // context
                if global_batch % shards:
                    continue
                for fsdp in _divisors(math.gcd(shards, shape.hidden // tensor)):
                    for expert in _divisors(math.gcd(shards // fsdp, shape.expert_count)):
                        yield Layout(
                            data=shards // fsdp // expert,
                            fsdp=fsdp,
                            expert=expert,
                            tensor=tensor,
                            context=context,
                            pipeline=pipeline,
                        )


def _zero_stages(shape: TransformerShape, layout: Layout) -> tuple[Literal[0, 1, 2], ...]:
    """ZeRO stages that shard anything: the trainer replicates matrices whose width the data axis
    does not divide."""
    parts = zero_parts(layout)
    if parts == 1 or shape.hidden % (parts * layout.fsdp):
        return (0,)
    return (0, 1) if layout.data == 1 else (0, 1, 2)


def _chunk_counts(shape: TransformerShape, layout: Layout, microbatches: int) -> tuple[int, ...]:
    if layout.pipeline == 1 or microbatches % layout.pipeline or is_uneven(shape, layout):
        return (1,)
    return _divisors(shape.kinds[-1][1] // layout.pipeline)


def _sequence_parallel(shape: TransformerShape, layout: Layout) -> tuple[bool, ...]:
    if layout.tensor == 1 or shape.tokens % (layout.context * layout.tensor):
        return (False,)
    return (False, True)


def _context_strategies(shape: TransformerShape, layout: Layout) -> tuple[ContextStrategy, ...]:
    """Context strategies that tokens and heads allow with fused attention (no ring with a
    pipeline); unfused attention can only gather keys."""
    if layout.context == 1 or not shape.is_fused:
        return ("all_gather",)
    found: list[ContextStrategy] = ["all_gather"]
    if shape.tokens % (2 * layout.context) == 0 and layout.pipeline == 1:
        found.append("ring")
    heads, kv_heads = shape.heads // layout.tensor, shape.kv_heads // layout.tensor
    if heads % layout.context == 0 and 0 in (kv_heads % layout.context, layout.context % kv_heads):
        found.append("all_to_all")
    return tuple(found)


def _divisors(number: int) -> tuple[int, ...]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*low, *(number // each for each in low)}))
