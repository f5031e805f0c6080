"""Closed-form `Program` of a transformer's training step, without compiling.

From dimensions and a strategy to operations, collectives and memory in under a millisecond, for
searches over thousands of strategies. Tests compare products, bytes, collectives and memory of gpt
with compiled programs, on all axes but the pipeline's: that one is 1F1B, and the trainer runs GPipe
(for stages with unequal numbers of blocks, state and memory, the redistribution of blocks and the
products of the longest stage are compared too). Left out are fusions of scalars and single vectors,
a quarter to a third of all operations: where launches or the host take most of a step, as in small
networks on A100, the step is up to a third too short. Knows shapes and how XLA shards them; no
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
from scalejax.simulator.transformer.memory import (
    AMPERE_WORKSPACE_BYTES,
    memory_by_zero_stage,
    memory_use,
)
from scalejax.simulator.transformer.shape import (
    Recompute,
    Strategy,
    TransformerShape,
    block_shard,
    is_uneven,
    slowest_stage,
    stage_layout,
    sums_once,
)
from scalejax.simulator.transforms.pipeline import Pipeline, pipelined

__all__ = [
    "AMPERE_WORKSPACE_BYTES",
    "Recompute",
    "StepOperations",
    "Strategy",
    "TransformerShape",
    "block_shard",
    "memory_by_zero_stage",
    "memory_use",
    "pipeline_of",
    "slowest_stage",
    "step_operations",
    "transformer_program",
    "update_operations",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperations:
    """Operations of a step by how often they run; equal tuples are one object (cached)."""

    before: tuple[Operation, ...]
    """Operations before the first microbatch, once per step."""
    embedding: tuple[Operation, ...]
    """Embedding, once per microbatch before its blocks."""
    forward: tuple[Operation, ...]
    """Forward pass of a block, once per block and microbatch."""
    logits: tuple[Operation, ...]
    """Logits and loss, once per microbatch between the passes over its blocks."""
    backward: tuple[Operation, ...]
    """Backward pass of a block, once per block and microbatch."""
    embedding_gradient: tuple[Operation, ...]
    """Gradient of the embedding, once per microbatch after its blocks."""
    update: tuple[Operation, ...]
    """Gradient synchronisation and optimizer update, once per step after the last microbatch."""


def step_operations(shape: TransformerShape, strategy: Strategy) -> StepOperations:
    """Operations of a device of the slowest stage; logits are included even if that is not the
    last stage."""
    shard, layout = block_shard(shape, strategy), strategy.layout
    layers, dealt = (
        slowest_stage(shape, strategy).layers,
        layout if is_uneven(shape, layout) else None,
    )
    accumulated = accumulator_elements(shape, layout, strategy.split.microbatches)
    return StepOperations(
        before=zeros(shape, accumulated, dealt) if accumulated else (),
        embedding=embedding(shard, layers, strategy.zero_stage > 0),
        forward=block_forward(shard),
        logits=logits(shard),
        backward=block_backward(shard),
        embedding_gradient=embedding_gradient(shard, layers, accumulated > 0),
        update=update_operations(shape, strategy),
    )


def update_operations(shape: TransformerShape, strategy: Strategy) -> tuple[Operation, ...]:
    """Operations of a device after the last microbatch: gradient sums and optimizer update."""
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
    """Program of one training step of `shape` with `strategy`, per device.

    Args:
        shape: the network, and its samples.
        strategy: parallelism, microbatches and recompute.
        workspace_bytes: workspace of the matrix-product library (cuBLAS).

    Raises:
        ConfigError: if the axes do not divide the network.
    """
    strategy.require_fits(shape)
    slowest = slowest_stage(shape, strategy)
    parts = step_operations(shape, strategy)
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
    """Pipeline stages and their boundary activations; None for a single stage."""
    layout = strategy.layout
    if layout.pipeline == 1:
        return None
    return Pipeline(
        stages=layout.pipeline,
        chunks=strategy.pipeline_chunks,
        layers=stage_layers(shape.layers, layout.pipeline) if is_uneven(shape, layout) else None,
        microbatches=strategy.split.microbatches,
        boundary_bytes=block_shard(shape, strategy).stream_bytes,
        is_boundary_divided=strategy.sequence_parallel,
    )
