"""Scale-out of a program: few devices and microbatches are compiled, many are derived.

Each device of a data axis runs the same operations on its own samples, and then sums gradients
with the others; each microbatch passes through one loop. The compiled program is therefore the same
for any size of the axis from two upwards except for the size of the groups, and for any number of
microbatches from two upwards except for the trip count of the loop. If state is sharded over the
axis (ZeRO), this holds from the size at which one shard is negligible.
`tests/validation/test_programs.py` checks this against programs that were compiled in full.
Independent of hardware.
"""

import math
from dataclasses import replace
from functools import partial

from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun, resolve
from scalejax.simulator.program import Loop, Operation, Program, each_changed

REDUCED_SIZE = 2
"""Size of the data axis, and number of microbatches, of a reduced program."""
REDUCED_SHARDS = 16
"""Size of the data axis of a reduced program with sharded state. A step on more devices updates
less than predicted, by less than a sixteenth of the parameters. The ledger's rows with ZeRO divide
a flat buffer over any number of devices (Megatron-LM, DeepSpeed); the trainer divides dimensions,
and replicates arrays that its number of devices does not divide."""
_TOKEN_BYTES = 4


def reduced(run: ResolvedRun, *, has_server: bool = False) -> ResolvedRun:
    """`run` on the fewest devices and microbatches whose program can be scaled out to it.

    The microbatch per device is unchanged. The number of microbatches is kept for images, as
    their bytes outside the loop are not negligible, and for a pipeline.

    Args:
        run: the run whose program is wanted.
        has_server: whether gradients go through a parameter server. Then even a single device sends
            them, and its program is that of two devices, each of which sends.
    """
    config, split = run.config, run.split
    # Stages loop over ticks, not over microbatches.
    is_reducible = run.dataset.is_text and run.layout.pipeline == 1
    microbatches = min(split.microbatches, REDUCED_SIZE) if is_reducible else split.microbatches
    data = REDUCED_SIZE if has_server else min(run.layout.data, _reduced_data_size(run))
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
    return resolve(replace(config, batch=batch, layout=layout), facts=run.dataset)


def _reduced_data_size(run: ResolvedRun) -> int:
    return REDUCED_SHARDS if run.config.layout.zero_stage else REDUCED_SIZE


def scaled_out(program: Program, reduced_run: ResolvedRun, run: ResolvedRun) -> Program | None:
    """`program` of `reduced_run` scaled out to `run`; None if it cannot be.

    It cannot be if state is replicated and collectives other than sums cross the data axis, or if
    the loop over microbatches is not found.
    """
    if reduced_run == run:
        return program
    old, new = reduced_run.layout.data, run.layout.data
    is_sharded = run.config.layout.zero_stage > 0
    operations = _on_more_devices(program, old, new, is_sharded=is_sharded)
    if operations is not None:
        trips = (reduced_run.split.microbatches, run.split.microbatches)
        operations = _with_more_trips(operations, *trips)
    if operations is None:
        return None
    batch = run.split.global_batch
    added = run.split.per_device_batch - reduced_run.split.per_device_batch
    facts = run.dataset
    # Held once as an argument, and again divided into microbatches.
    places = math.prod(facts.input_shape) + math.prod(facts.target_shape)
    added_bytes = added * places * _TOKEN_BYTES
    memory = program.memory
    if is_sharded:  # all but the tokens, and a counter
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
        model_flop=_of_samples(program.model_flop, reduced_run.split.global_batch, batch),
    )


def _of_samples(flop: int | None, old: int, new: int) -> int | None:
    """FLOP of `new` samples, given the FLOP of `old` samples."""
    return None if flop is None else flop * new // old


_Operations = tuple[Operation | Loop, ...]


def _with_more_trips(operations: _Operations, old: int, new: int) -> _Operations | None:
    """Operations with the microbatch loop run `new` times; None if there is no such loop."""
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
    program: Program, old: int, new: int, *, is_sharded: bool
) -> _Operations | None:
    """Operations with the groups of the data axis resized; None if replicated state has collectives
    other than sums there."""
    if old == new:
        return program.operations
    major = next((axis for axis in program.mesh_axes if axis[1] > 1), None)
    if major != (DATA, old):
        return None
    crossing = [operation for operation, _ in program.walk() if _crosses(operation)]
    if not all(_has_known_group(each) for each in crossing):
        return None
    if not is_sharded and not all(_is_sum(each) for each in crossing):
        return None
    return each_changed(program.operations, partial(_with_group_size, old=old, new=new))


def _crosses(operation: Operation) -> bool:
    collective = operation.collective
    return collective is not None and (not collective.group.axes or DATA in collective.group.axes)


def _has_known_group(operation: Operation) -> bool:
    return operation.collective is not None and operation.collective.group.axes[:1] == (DATA,)


def _is_sum(operation: Operation) -> bool:
    """Whether an operation is a sum, whose payload does not grow with the group."""
    return operation.collective is not None and operation.collective.name == "all_reduce"


def _with_group_size(item: Operation, old: int, new: int) -> Operation:
    collective = item.collective
    if collective is None or not _crosses(item):
        return item
    # The data axis is the major one: it is in the first extent, alone or before its neighbours.
    (size, stride), *others = collective.group.extents
    group = replace(collective.group, extents=((size // old * new, stride), *others))
    return replace(item, collective=replace(collective, group=group))
