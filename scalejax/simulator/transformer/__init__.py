"""Closed-form `Program` of a transformer's training step, without compiling.

Maps dimensions and a strategy to operations, collectives and memory in milliseconds, for searches
over thousands of strategies. Tests compare products, bytes, collectives and memory of small
networks with compiled programs (`tests/simulator/test_transformer.py`), and step time and memory of
networks of 1e9 parameters, by layout (`experiments/closed_form`). A pipeline is 1F1B, where the
trainer's default is GPipe. Uses shapes and how XLA shards them; no compiler, hardware or seconds.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.simulator.transformer.block import block_backward, block_forward
from scalejax.simulator.transformer.embedding_and_loss import (
    Update,
    accumulator_elements,
    blocks_of_embedding_gradient,
    embedding,
    embedding_gradient,
    exchanged_chunks,
    logits,
    start_of_stage,
    update,
    zeros,
)
from scalejax.simulator.transformer.memory import (
    AMPERE_WORKSPACE_BYTES,
    DeviceMemory,
    least_bytes,
    memory_by_zero_stage,
    memory_use,
)
from scalejax.simulator.transformer.shape import (
    Adapters,
    BlockShard,
    Compiler,
    Recompute,
    Strategy,
    TransformerShape,
    block_shard,
    compiler_of,
    is_data_manual,
    is_uneven,
    logits_shard,
    scatters_each,
    slowest_stage,
    stage_counts,
    stage_kinds,
    stage_layout,
    sums_once,
    table_shard,
    zero_parts,
)
from scalejax.simulator.transforms.pipeline import Pipeline, pipelined, sent_between_stages

__all__ = [
    "AMPERE_WORKSPACE_BYTES",
    "Adapters",
    "Compiler",
    "DeviceMemory",
    "Part",
    "Recompute",
    "StepParts",
    "Strategy",
    "TransformerShape",
    "compiler_of",
    "exchange_of_chunks",
    "is_uneven",
    "least_bytes",
    "memory_by_zero_stage",
    "memory_use",
    "slowest_stage",
    "stage_counts",
    "step_parts",
    "transformer_program",
    "zero_parts",
]


class Part(NamedTuple):
    """Operations of a step as the function and the arguments that make them, quick to compare."""

    make: Callable[..., tuple[Operation | Loop, ...]] = tuple[Operation | Loop, ...]
    """Function that makes the operations; for a part without operations, the default."""
    arguments: tuple[Hashable, ...] = ()
    """Arguments of the function."""

    @property
    def operations(self) -> tuple[Operation | Loop, ...]:
        """The operations."""
        return self.make(*self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Parts of the blocks of one kind, each run once per block and microbatch."""

    forward: Part
    """Forward pass of a block."""
    backward: Part
    """Backward pass of a block."""
    count: int
    """Blocks of the slowest stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Parts of a step by how often they run."""

    before: Part
    """Operations before the first microbatch, once per step."""
    exchange: Part
    """Layers of chunks, and their gradients, between pipeline stages, once per step."""
    embedding: Part
    """Embedding, once per microbatch before its blocks."""
    blocks: tuple[BlockParts, ...]
    """Blocks of each kind, in order."""
    first_blocks: tuple[BlockParts, ...]
    """Additional dense blocks of the first of several stages, once per microbatch there."""
    logits: Part
    """Logits and loss, once per microbatch between the passes over its blocks."""
    embedding_gradient: Part
    """Gradient of the embedding, once per microbatch after its blocks."""
    sends: Part
    """Activations and gradients between pipeline stages, once per tick."""
    update: Part
    """Gradient synchronisation and optimizer update, once per step after the last microbatch."""


def step_parts(shape: TransformerShape, strategy: Strategy) -> StepParts:
    """Parts of the step of a device of the slowest stage; logits are included even if it is not the
    last stage."""
    layout = strategy.layout
    slowest = slowest_stage(shape, strategy)
    kinds = stage_kinds(shape, slowest.layers, layout.pipeline)
    blocks = tuple((_shard(kind, strategy, count), count) for kind, count in kinds)
    first = shape.kinds[:-1] if layout.pipeline > 1 else ()
    shard = blocks[-1][0]
    microbatches = strategy.split.microbatches
    accumulated = accumulator_elements(shape, layout, microbatches)
    stages, stage_devices = layout.pipeline, layout.device_count // layout.pipeline
    boundary = shard.stream_bytes, strategy.sequence_parallel
    is_scattered = scatters_each(strategy)
    # The compiler of 0.10 zeroes stacks of activations and gradients before the first block.
    gathers_first = (
        strategy.zero_stage > 0
        and accumulated == 0
        and shape.compiler == "0.10"
        and shape.adapters is None
    )
    end = Update(
        shape=shape,
        layout=layout,
        zero_stage=strategy.zero_stage,
        moments=strategy.moments,
        is_accumulated=accumulated > 0,
        is_summed_once=sums_once(shape, strategy) and not is_scattered,
        tables=table_shard(shape, strategy),
        gathers_last=not gathers_first,
    )
    is_gathered = strategy.zero_stage > 0
    # The last stage looks nothing up; it needs the table only for tied embeddings.
    is_last_alone = stages > 1 and slowest.has_logits and not shape.has_tied_embeddings
    shards = end.parts if is_scattered else dict.fromkeys(end.counts, 1)
    own = sum(count // shards[name] for name, count in end.counts.items())
    before = Part(zeros, (shape, own)) if accumulated else Part()
    if stages > 1:
        in_flight = PipelineTicks("1f1b", stages, microbatches, 1).in_flight
        started = shape, accumulated, layout, blocks, is_gathered, in_flight
        before = Part(start_of_stage, started)
    return StepParts(
        before=before,
        exchange=exchange_of_chunks(shape, strategy),
        embedding=Part()
        if is_last_alone
        else Part(
            embedding, (blocks, is_gathered, accumulated > 0, end if gathers_first else None)
        ),
        blocks=tuple(_block_parts(each, count) for each, count in blocks),
        first_blocks=tuple(_block_parts(_shard(kind, strategy, n), n) for kind, n in first),
        logits=Part(
            logits,
            (
                logits_shard(kinds[-1][0], strategy),
                is_data_manual(strategy) or stages > 1,
                is_scattered,
                is_gathered,
            ),
        ),
        embedding_gradient=Part(
            embedding_gradient,
            (
                blocks_of_embedding_gradient(blocks),
                accumulated > 0,
                layout.data if is_scattered else 1,
                None if stages == 1 else int(slowest.has_logits),
                is_data_manual(strategy),
            ),
        ),
        sends=Part(sent_between_stages, (stages, *boundary, layout.tensor, stage_devices, False))
        if stages > 1
        else Part(),
        update=Part(update, (end,)),
    )


def exchange_of_chunks(shape: TransformerShape, strategy: Strategy) -> Part:
    """What stages with several chunks send each other; the only part that depends on chunks."""
    chunks = strategy.pipeline_chunks
    return Part(exchanged_chunks, (shape, strategy.layout, chunks)) if chunks > 1 else Part()


def _block_parts(shard: BlockShard, count: int) -> BlockParts:
    prefix = "dense." if shard.shape.is_first else ""
    return BlockParts(
        forward=Part(block_forward, (shard, prefix)),
        backward=Part(block_backward, (shard, prefix)),
        count=count,
    )


def _shard(kind: TransformerShape, strategy: Strategy, count: int) -> BlockShard:
    """A device's shard of a block of one kind; a single dense block before the others is in no
    loop, and the compiler recomputes none of it."""
    shard = block_shard(kind, strategy)
    is_single = count == 1 and kind.is_first
    return replace(shard, recompute="none") if is_single else shard


def _loops(blocks: Sequence[BlockParts], name: Literal["forward", "backward"]) -> Iterator[Loop]:
    """Yield the loops of a pass over the blocks of each kind."""
    for each in blocks:
        part: Part = getattr(each, name)
        kind = part.arguments[-1]
        yield Loop(name=f"{kind}{name}", trip_count=each.count, body=part.operations)


def transformer_program(
    shape: TransformerShape,
    strategy: Strategy,
    *,
    workspace_bytes: int = AMPERE_WORKSPACE_BYTES,
) -> Program:
    """Program of one training step of `shape` with `strategy`, per device.

    Args:
        shape: the network and its samples.
        strategy: parallelism, microbatches and recompute.
        workspace_bytes: workspace of the matrix-product library (cuBLAS).

    Raises:
        ConfigError: if the axes do not divide the network.
    """
    strategy.require_fits(shape)
    slowest = slowest_stage(shape, strategy)
    parts = step_parts(shape, strategy)
    body = (
        *parts.embedding.operations,
        *_loops(parts.blocks, "forward"),
        *(parts.logits.operations if slowest.has_logits else ()),
        *_loops(parts.blocks[::-1], "backward"),
        *parts.embedding_gradient.operations,
    )
    layout, count = strategy.layout, strategy.split.microbatches
    if count > 1 or layout.pipeline > 1:
        body = (Loop(name="microbatches", trip_count=count, body=body),)
    program = Program(
        name="transformer train step",
        backend="closed_form",
        target="closed form",
        compiler="none",
        mesh_axes=tuple(stage_layout(layout).axis_sizes.items()),
        operations=(
            *parts.before.operations,
            *parts.exchange.operations,
            *body,
            *parts.update.operations,
        ),
        memory=memory_use(shape, strategy, workspace_bytes=workspace_bytes),
        global_batch=strategy.split.global_batch,
        tokens_per_sample=shape.tokens,
        model_flop=shape.model_flop(strategy.split.global_batch),
        state_bytes=shape.state_bytes(strategy.moments),
    )
    if layout.pipeline == 1:
        return program
    pipeline = Pipeline(
        stages=layout.pipeline,
        chunks=strategy.pipeline_chunks,
        layers=stage_counts(shape, layout) if is_uneven(shape, layout) else None,
        microbatches=count,
        boundary_bytes=block_shard(shape, strategy).stream_bytes,
        is_boundary_divided=strategy.sequence_parallel,
        is_sent_in_parts=False,
    )
    first = *_loops(parts.first_blocks, "forward"), *_loops(parts.first_blocks, "backward")
    ends = (*first, *(() if slowest.has_logits else parts.logits.operations))
    whole = pipelined(program, pipeline, last=ends)
    return replace(whole, memory=program.memory, model_flop=program.model_flop)
