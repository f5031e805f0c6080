"""The program of a long step on many devices, from that of a short one on few.

Each device of a data axis does the same to its own samples, and then sums gradients with the
others; each microbatch passes through the same loop. The compiler therefore makes the same
program for any size of the axis from two upwards but for the size of the groups, and for any
number of microbatches from two upwards but for the trips of the loop. Where the axis keeps state
in parts (ZeRO), what a device does is of a whole and of a part of it: figures that follow, of any
size, from those of two sizes. `tests/validation/test_programs.py` holds all three against
programs that were compiled in full.
"""

import math
from dataclasses import asdict, replace

from scalejax.config import ResolvedRun, resolve
from scalejax.layout import DATA
from scalejax.program import Loop, Operation, Program

NARROW = 2
"""Devices along the data axis, and microbatches, of the program that stands for all more."""
WIDER = 4
"""Devices along it of the second program, where state is in parts."""
_TOKEN_BYTES = 4

_Operations = tuple[Operation | Loop, ...]


def narrowed(run: ResolvedRun, *, has_server: bool = False) -> ResolvedRun:
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
    data = NARROW if has_server else min(run.layout.data, NARROW)
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


def second_narrowed(run: ResolvedRun) -> ResolvedRun | None:
    """`run` on the devices of the second program that its own follows from; None if one will do."""
    if not run.config.layout.zero_stage or run.layout.data <= WIDER:
        return None
    narrow = narrowed(run)
    batch = replace(narrow.config.batch, global_batch=None)
    layout = replace(narrow.config.layout, data=WIDER)
    return resolve(replace(narrow.config, batch=batch, layout=layout))


def in_more_parts(first: Program, second: Program, parts: int) -> Program | None:
    """What `first`, which keeps state in `NARROW` parts, would be with `parts`, but for the groups
    that exchange; None if `second`, with `WIDER`, does not do the same operations.

    A figure is a + b / parts, of which the two programs tell a and b.
    """
    operations = _between(first.operations, second.operations, parts)
    if operations is None:
        return None
    old, new = asdict(first.memory), asdict(second.memory)
    memory = {name: _of_parts(old[name], new[name], parts) for name in old}
    return replace(first, operations=operations, memory=replace(first.memory, **memory))


def _of_parts(of_narrow: int, of_wider: int, parts: int) -> int:
    by_part = (of_narrow - of_wider) / (1 / NARROW - 1 / WIDER)
    return max(0, round(of_wider + by_part * (1 / parts - 1 / WIDER)))


def _between(first: _Operations, second: _Operations, parts: int) -> _Operations | None:
    if len(first) != len(second):
        return None
    pairs = [_of_pair(one, other, parts) for one, other in zip(first, second, strict=True)]
    found = tuple(each for each in pairs if each is not None)
    return found if len(found) == len(first) else None


def _of_pair(one: Operation | Loop, other: Operation | Loop, parts: int) -> Operation | Loop | None:
    if isinstance(one, Loop) or isinstance(other, Loop):
        if not isinstance(one, Loop) or not isinstance(other, Loop):
            return None
        body = _between(one.body, other.body, parts)
        if body is None or one.trip_count != other.trip_count:
            return None
        return replace(one, body=body)
    if (one.kind, one.dtype, one.shape) != (other.kind, other.dtype, other.shape):
        return None
    collective = one.collective
    if collective is not None:
        if other.collective is None or collective.name != other.collective.name:
            return None
        payload = _of_parts(collective.payload_bytes, other.collective.payload_bytes, parts)
        collective = replace(collective, payload_bytes=payload)
    return replace(
        one,
        read_bytes=_of_parts(one.read_bytes, other.read_bytes, parts),
        write_bytes=_of_parts(one.write_bytes, other.write_bytes, parts),
        collective=collective,
    )


def widened(
    program: Program, narrow: ResolvedRun, run: ResolvedRun, second: Program | None = None
) -> Program | None:
    """`program` of `narrow`, which is `run` narrowed, as that of `run`; None if it cannot be told.

    That is, if more than sums crosses the data axis and `second` is not given or does otherwise,
    or the loop over microbatches is not found.

    Args:
        program: of `narrow`.
        narrow: what `narrowed` made of `run`.
        run: of which the program is wanted.
        second: that of what `second_narrowed` made of `run`, where it is not None.
    """
    if narrow == run:
        return program
    if second is not None:
        in_parts = in_more_parts(program, second, run.layout.data)
        if in_parts is None:
            return None
        program = in_parts
    old, new = narrow.layout.data, run.layout.data
    operations = _on_more_devices(program, old, new, is_in_parts=second is not None)
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
    memory = replace(
        program.memory,
        argument_bytes=program.memory.argument_bytes + added_bytes,
        temporary_bytes=program.memory.temporary_bytes + added_bytes,
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
    and state is not in parts."""
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
