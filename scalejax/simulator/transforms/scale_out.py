"""The program of a long step on many devices, from that of a short one on few.

Each device of a data axis does the same to its own samples, and then sums gradients with the
others; each microbatch passes through the same loop. The compiler therefore makes the same
program for any size of the axis from two upwards but for the size of the groups, and for any
number of microbatches from two upwards but for the trips of the loop. Where the axis keeps state
in parts (ZeRO), it does so from the size on at which a part hardly counts.
`tests/validation/test_programs.py` holds this against programs that were compiled in full.
"""

import math
from dataclasses import replace

from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun, resolve
from scalejax.simulator.program import Loop, Operation, Program

NARROW = 2
"""Devices along the data axis, and microbatches, of the program that stands for all more."""
NARROW_PARTS = 16
"""Devices along the data axis, where state is in parts. A step on more updates less than it says,
by less than a sixteenth of the parameters. Those of the ledger that say ZeRO divide a flat buffer
over any number of devices (Megatron-LM, DeepSpeed); the trainer divides dimensions, and leaves
whole what its number of devices does not divide."""
_TOKEN_BYTES = 4


def reduced(run: ResolvedRun, *, has_server: bool = False) -> ResolvedRun:
    """`run` on the fewest devices and microbatches whose program widens to its own.

    Each device sees as many samples at a time. Microbatches of images are left alone, as their
    bytes outside the loop are no longer small.

    Args:
        run: of which the program is wanted.
        has_server: whether gradients go through a parameter server. Then a single device sends
            them too, and its program is that of two, each of which sends.
    """
    config, split = run.config, run.split
    microbatches = min(split.microbatches, NARROW) if run.dataset.is_text else split.microbatches
    data = NARROW if has_server else min(run.layout.data, _narrowest(run))
    if (data, microbatches) == (run.layout.data, split.microbatches):
        return run
    samples = split.microbatch * microbatches
    batch = replace(
        config.batch,
        global_batch=None,
        per_device_batch=samples,
        microbatches=microbatches,
    )
    layout = replace(config.layout, data=data)
    return resolve(replace(config, batch=batch, layout=layout))


def _narrowest(run: ResolvedRun) -> int:
    return NARROW_PARTS if run.config.layout.zero_stage else NARROW


def scaled_out(program: Program, narrow: ResolvedRun, run: ResolvedRun) -> Program | None:
    """`program` of `narrow`, which is `run` narrowed, as that of `run`; None if it cannot be told.

    That is, if more than sums crosses the data axis though state is whole, or the loop over
    microbatches is not found.
    """
    if narrow == run:
        return program
    old, new = narrow.layout.data, run.layout.data
    is_in_parts = run.config.layout.zero_stage > 0
    operations = _on_more_devices(program, old, new, is_in_parts=is_in_parts)
    if operations is not None:
        trips = (narrow.split.microbatches, run.split.microbatches)
        operations = _with_more_trips(operations, *trips)
    if operations is None:
        return None
    batch = run.split.global_batch
    added = run.split.per_device_batch - narrow.split.per_device_batch
    facts = run.dataset
    # Kept once as an argument, and once again divided into microbatches.
    places = math.prod(facts.input_shape) + math.prod(facts.target_shape)
    added_bytes = added * places * _TOKEN_BYTES
    memory = program.memory
    if is_in_parts:  # but for the tokens, and a counter
        kept = memory.alias_bytes - memory.alias_bytes * old // new
        memory = replace(
            memory,
            argument_bytes=memory.argument_bytes - kept,
            output_bytes=memory.output_bytes - kept,
            alias_bytes=memory.alias_bytes - kept,
        )
    memory = replace(
        memory,
        argument_bytes=memory.argument_bytes + added_bytes,
        temporary_bytes=memory.temporary_bytes + added_bytes,
    )
    return replace(
        program,
        mesh_axes=tuple(
            (axis, run.layout.data if axis == DATA else size) for axis, size in program.mesh_axes
        ),
        operations=operations,
        memory=memory,
        global_batch=batch,
        model_flop=_of_samples(program.model_flop, narrow.split.global_batch, batch),
    )


def _of_samples(flop: int | None, old: int, new: int) -> int | None:
    """The FLOP of `new` samples, where `old` take `flop`."""
    return None if flop is None else flop * new // old


_Operations = tuple[Operation | Loop, ...]


def _with_more_trips(operations: _Operations, old: int, new: int) -> _Operations | None:
    """The operations with the loop over microbatches run `new` times; None if there is no one."""
    if old == new:
        return operations
    loops = [item for item in operations if isinstance(item, Loop) and item.trip_count == old]
    if len(loops) != 1:
        return None
    return tuple(
        replace(item, trip_count=new) if isinstance(item, Loop) and item is loops[0] else item
        for item in operations
    )


def _on_more_devices(
    program: Program, old: int, new: int, *, is_in_parts: bool
) -> _Operations | None:
    """The operations with groups of the data axis grown; None if one does more than sum there,
    unless that is how state in parts is used."""
    if old == new:
        return program.operations
    major = next((axis for axis in program.mesh_axes if axis[1] > 1), None)
    if major != (DATA, old):
        return None
    crossing = [operation for operation, _ in program.walk() if _crosses(operation)]
    if not all(_has_known_group(each) for each in crossing):
        return None
    if not is_in_parts and not all(_is_sum(each) for each in crossing):
        return None
    return tuple(_grown(item, old, new) for item in program.operations)


def _crosses(operation: Operation) -> bool:
    collective = operation.collective
    return collective is not None and (not collective.group.axes or DATA in collective.group.axes)


def _has_known_group(operation: Operation) -> bool:
    return operation.collective is not None and operation.collective.group.axes[:1] == (DATA,)


def _is_sum(operation: Operation) -> bool:
    """Whether it is a sum, whose payload does not grow with the group."""
    return operation.collective is not None and operation.collective.name == "all_reduce"


def _grown(item: Operation | Loop, old: int, new: int) -> Operation | Loop:
    if isinstance(item, Loop):
        return replace(item, body=tuple(_grown(each, old, new) for each in item.body))
    collective = item.collective
    if collective is None or not _crosses(item):
        return item
    # The data axis is the major one: it is in the first extent, alone or before its neighbours.
    (size, stride), *others = collective.group.extents
    group = replace(collective.group, extents=((size // old * new, stride), *others))
    return replace(item, collective=replace(collective, group=group))
