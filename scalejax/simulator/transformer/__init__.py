"""The step of a transformer in closed form: the `Program` that the compiler would give, at once.

From dimensions and a strategy to operations, collectives and memory in under a millisecond, for
searches over thousands of strategies. Tests hold products, bytes, exchanges and memory of gpt
against compiled programs, on all axes but the pipeline's: that one is 1F1B, and what trains is
GPipe (of stages that hold unlike numbers of blocks, state and memory, what is dealt out to them and
the products of the longest are held too). Left out are fusions of scalars and single vectors, a
quarter to a third of all operations: where launches or the host take most of a step, as in small
networks on A100, it comes out up to a third too short. Knows shapes and how XLA divides them; no
compiler, no hardware, no seconds.
"""

from dataclasses import dataclass, replace

from scalejax.config.parallelism import stage_layers
from scalejax.simulator.program import Loop, Operation, Program
from scalejax.simulator.transformer.block import block_backward, block_forward
from scalejax.simulator.transformer.embedding_and_loss import (
    Update,
    accumulator_elements,
    embedding,
    embedding_gradient,
    logits,
    update,
    zeros,
)
from scalejax.simulator.transformer.memory import AMPERE_WORKSPACE_BYTES, held_by_stage, memory_use
from scalejax.simulator.transformer.shape import (
    Recompute,
    Strategy,
    TransformerShape,
    is_uneven,
    pace,
    part_of,
    stage_layout,
    sums_once,
)
from scalejax.simulator.transforms.pipeline import Pipeline, pipelined

__all__ = [
    "AMPERE_WORKSPACE_BYTES",
    "Pieces",
    "Recompute",
    "Strategy",
    "TransformerShape",
    "held_by_stage",
    "memory_use",
    "pace",
    "part_of",
    "pieces",
    "pipeline_of",
    "transformer_program",
    "update_piece",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The operations of a step by how often they run; equal pieces are the same objects."""

    before: tuple[Operation, ...]
    """Once, before the first microbatch."""
    embedding: tuple[Operation, ...]
    """For every microbatch, before its blocks."""
    forward: tuple[Operation, ...]
    """For every block of every microbatch."""
    logits: tuple[Operation, ...]
    """For every microbatch, between the passes over its blocks."""
    backward: tuple[Operation, ...]
    """For every block of every microbatch."""
    embedding_gradient: tuple[Operation, ...]
    """For every microbatch, after its blocks."""
    update: tuple[Operation, ...]
    """Once, after the last microbatch."""


def pieces(shape: TransformerShape, strategy: Strategy) -> Pieces:
    """The operations of a device of the stage that sets the pace, and logits even so where that
    is not the last."""
    part, layout = part_of(shape, strategy), strategy.layout
    layers, dealt = pace(shape, strategy).layers, layout if is_uneven(shape, layout) else None
    accumulated = accumulator_elements(shape, layout, strategy.split.microbatches)
    return Pieces(
        before=zeros(shape, accumulated, dealt) if accumulated else (),
        embedding=embedding(part, layers, strategy.zero_stage > 0),
        forward=block_forward(part),
        logits=logits(part),
        backward=block_backward(part),
        embedding_gradient=embedding_gradient(part, layers, accumulated > 0),
        update=update_piece(shape, strategy),
    )


def update_piece(shape: TransformerShape, strategy: Strategy) -> tuple[Operation, ...]:
    """What a device does once, after the last microbatch."""
    microbatches, layout = strategy.split.microbatches, strategy.layout
    return update(
        Update(
            shape=shape,
            layout=layout,
            zero_stage=strategy.zero_stage,
            microbatches=microbatches,
            moments=strategy.moments,
            is_accumulated=accumulator_elements(shape, layout, microbatches) > 0,
            is_summed_once=sums_once(shape, strategy),
        )
    )


def transformer_program(
    shape: TransformerShape,
    strategy: Strategy,
    *,
    workspace_bytes: int = AMPERE_WORKSPACE_BYTES,
) -> Program:
    """What each device does in one step of training `shape` as `strategy` says.

    Args:
        shape: the network, and its samples.
        strategy: how it is spread.
        workspace_bytes: memory that the library for products takes for itself.

    Raises:
        ConfigError: if the axes do not divide the network.
    """
    strategy.require_fits(shape)
    slowest = pace(shape, strategy)
    parts = pieces(shape, strategy)
    body = (
        *parts.embedding,
        Loop(name="forward", trip_count=slowest.layers, body=parts.forward),
        *(parts.logits if slowest.has_logits else ()),
        Loop(name="backward", trip_count=slowest.layers, body=parts.backward),
        *parts.embedding_gradient,
    )
    count, pipeline = strategy.split.microbatches, pipeline_of(shape, strategy)
    if count > 1 or pipeline is not None:
        body = (Loop(name="microbatches", trip_count=count, body=body),)
    program = Program(
        name="transformer train step",
        backend="closed_form",
        target="closed form",
        compiler="none",
        mesh_axes=tuple(stage_layout(strategy.layout).axis_sizes.items()),
        operations=(*parts.before, *body, *parts.update),
        memory=memory_use(shape, strategy, workspace_bytes=workspace_bytes),
        global_batch=strategy.split.global_batch,
        tokens_per_sample=shape.tokens,
        model_flop=shape.model_flop(strategy.split.global_batch),
        state_bytes=4 * shape.parameters * (1 + strategy.moments),
    )
    if pipeline is None:
        return program
    whole = pipelined(program, pipeline, last=() if slowest.has_logits else parts.logits)
    return replace(whole, memory=program.memory, model_flop=program.model_flop)


def pipeline_of(shape: TransformerShape, strategy: Strategy) -> Pipeline | None:
    """The stages, and what they hand each other; None of a single one."""
    layout = strategy.layout
    if layout.pipeline == 1:
        return None
    return Pipeline(
        stages=layout.pipeline,
        chunks=strategy.pipeline_chunks,
        layers=stage_layers(shape.layers, layout.pipeline) if is_uneven(shape, layout) else None,
        microbatches=strategy.split.microbatches,
        boundary_bytes=part_of(shape, strategy).stream_bytes,
        is_boundary_divided=strategy.sequence_parallel,
    )
