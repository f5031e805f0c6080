"""Parameters that are gathered one after the other, into lists of tensors, while nothing computes.

DeepSpeed's ZeRO-3 of 2021 gathers each parameter by itself: it waits for the device, makes a view
of the result for each device, and calls all_gather with that list (microsoft/DeepSpeed, runtime/
zero/partition_parameters.py: _allgather_param), of which PyTorch makes one buffer, and from there a
copy for each device (ProcessGroupNCCL::allgather, flattenForScatterGatherOutputs). Gradients go the
same way back. Views and copies grow in number with devices, however small the parts.

Where activations are recomputed, parameters are gathered three times: forward, for the recompute,
and backward (Rajbhandari et al. 2021, arXiv 2104.07857, section 4.1). Left out: small parameters,
which all devices keep. Knows nothing of hardware.
"""

from collections.abc import Iterator
from dataclasses import replace

from scalejax.config.parallelism import FSDP
from scalejax.simulator.program import Collective, Loop, Operation, Program

_Items = tuple[Operation | Loop, ...]


def with_listed_gathers(program: Program, *, recomputes: bool) -> Program:
    """`program` whose collectives over fsdp hold up compute, with a copy for each device.

    Args:
        program: the compiled step, fully sharded; others are returned unchanged.
        recomputes: whether blocks are computed again before their backward pass.
    """
    return replace(program, operations=tuple(_listed(program.operations, recomputes=recomputes)))


def _listed(items: _Items, *, recomputes: bool) -> Iterator[Operation | Loop]:
    names = {item.name for item in items if isinstance(item, Operation) and _of_state(item)}
    is_backward = any(_scatters(item) for item in items)
    for item in items:
        if isinstance(item, Loop):
            inside = _listed(item.body, recomputes=recomputes)
            yield replace(item, body=tuple(inside))
        elif item.name in names and (collective := item.collective) is not None:
            yield from _alone(item, collective)
            if recomputes and is_backward and collective.name == "all_gather":
                yield from _alone(replace(item, name=f"{item.name}.again"), collective)
        elif item.waits_for not in names:
            yield item


def _alone(item: Operation, collective: Collective) -> Iterator[Operation | Loop]:
    """A collective that holds up compute, and the views and copies that its result, or operand, is
    made of: of each buffer one for each device."""
    count = collective.group.size * collective.buffer_count
    part = collective.payload_bytes // count
    # The device has been waited for, so that it waits for what the host does for a view, too.
    view = Operation(name=f"{item.name}.view", kind="copy", dtype=item.dtype)
    copy = Operation(
        name=f"{item.name}.copy", kind="copy", dtype=item.dtype, read_bytes=part, write_bytes=part
    )
    yield replace(item, collective=replace(collective, is_async=False))
    yield Loop(name=f"{item.name}.copies", trip_count=count, body=(view, copy))


def _of_state(item: Operation) -> bool:
    collective = item.collective
    return (
        collective is not None
        and collective.group.axes == (FSDP,)
        and collective.name in ("all_gather", "reduce_scatter")
    )


def _scatters(item: Operation | Loop) -> bool:
    return (
        isinstance(item, Operation)
        and item.collective is not None
        and item.collective.name == "reduce_scatter"
        and _of_state(item)
    )
