"""Program of a pipeline under DualPipe, derived from the program of its stages.

Microbatches enter at both ends, half of them at each, and a device holds two stages, one of each
direction. In the middle of a step it computes a forward pass of one direction while it computes a
backward pass of the other: what either sends, to experts or to a neighbour, takes no extra time
unless everything that both send takes longer than everything that both compute. At the ends passes
run separately, and the device is idle for (p/2 - 1) (F&B + B - 3W), for p stages, a pair F&B, a
backward pass B and a weights pass W (`transforms.pipeline`). scalejax does not train it: it
compiles 1F1B, from which this program is made.

Left out: what kernels of communication take from those of compute beyond a chip's contention (the
report reserves 20 of 132 multiprocessors); what is done once a step for the second stage too: the
sum of its gradients with the device that has its other copy, the gather of its parameters, and
without ZeRO their update; and that a device's two copies of an embedding may be one. Independent of
hardware.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1, figures 4
and 5, table 2.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from scalejax.config.pipeline_schedule import PipelineTicks
from scalejax.simulator.program import Loop, MemoryUse, Operation, Program
from scalejax.simulator.transforms.pipeline import BUBBLE, PAIRED

_COMPUTE_TYPE_BYTES, _GRADIENT_BYTES = 2, 4
"""Bytes of a parameter in the compute type, and of the sum of its gradients (float32)."""

DUALPIPE = "DualPipe: derived from the program of 1F1B, which is what trains"
"""Note on a program."""

Items = tuple[Operation | Loop, ...]


def with_paired_passes(program: Program) -> Program:
    """`program` in which everything sent in a pair of passes overlaps with everything computed in
    it; a program without such pairs is unchanged."""
    operations = tuple(
        _beside(item)
        if isinstance(item, Loop) and item.name.removesuffix(BUBBLE).endswith(PAIRED)
        else item
        for item in program.operations
    )
    return replace(program, operations=operations)


def _beside(loop: Loop) -> Loop:
    """A loop whose iterations start all collectives, compute, and then wait for them."""
    sent = [
        replace(
            item,
            share=item.share * times,
            collective=replace(collective, is_async=True, share=collective.share * times),
        )
        for item, times in _walk(loop.body, 1)
        if (collective := item.collective) is not None
    ]
    waits = [
        Operation(name=f"{each.name}.paired", kind="wait", dtype=each.dtype, waits_for=each.name)
        for each in sent
    ]
    return replace(loop, body=(*sent, *_computed(loop.body), *waits))


def _walk(items: Iterable[Operation | Loop], times: int) -> Iterator[tuple[Operation, int]]:
    for item in items:
        if isinstance(item, Loop):
            yield from _walk(item.body, times * item.trip_count)
        else:
            yield item, times


def _computed(items: Iterable[Operation | Loop]) -> Items:
    """`items` without collectives, and without waits for them."""
    made: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            if body := _computed(item.body):
                made.append(replace(item, body=body))
        elif item.collective is None and item.waits_for is None:
            made.append(item)
    return tuple(made)


def with_second_stage(
    memory: MemoryUse, ticks: PipelineTicks, *, parameters: int, state_bytes: int
) -> MemoryUse:
    """Memory of a device with two stages, derived from that of 1F1B: it adds a second copy of the
    parameters in the compute type, in bfloat16, and of their summed gradients, and the activations
    of one microbatch more than there are stages (table 2 of the report).

    A microbatch's activations are taken to be an equal part of all temporary memory but casts and
    gradients, which is too much by what the largest pass holds for itself.

    Args:
        memory: memory under 1F1B, whose stages hold as many microbatches as there are stages.
        ticks: the pipeline.
        parameters: elements of the layers of a stage, on a device.
        state_bytes: bytes of their parameters and moments that a device adds to its state: 0 if
            ZeRO shards them, then over twice as many devices.
    """
    copies = parameters * (_COMPUTE_TYPE_BYTES + _GRADIENT_BYTES)
    held = ticks._replace(schedule="1f1b").in_flight
    activations = max(0, memory.temporary_bytes - copies)
    more = round(activations * (ticks.in_flight - held) / held)
    return replace(
        memory,
        argument_bytes=memory.argument_bytes + state_bytes,
        output_bytes=memory.output_bytes + state_bytes,
        alias_bytes=memory.alias_bytes + state_bytes,
        temporary_bytes=memory.temporary_bytes + copies + more,
    )
