"""The program of a step on many devices, from that on two: what data parallelism does not change.

Each device of a data axis does the same to its own samples, and then sums gradients with the
others. The compiler therefore makes the same program for any size of the axis from two upwards,
but for the size of the groups; `tests/test_validation.py` holds the two against each other.
"""

from dataclasses import replace

from scalejax.config import ResolvedRun, resolve
from scalejax.layout import DATA
from scalejax.program import Loop, Operation, Program

NARROW = 2
"""Devices along the data axis of the program that stands for all wider ones."""


def narrowed(run: ResolvedRun) -> ResolvedRun:
    """`run` on the fewest devices whose program widens to its own, each with the same samples."""
    config = run.config
    if run.layout.data <= NARROW:
        return run
    samples = run.split.per_device_batch
    return resolve(
        replace(
            config,
            batch=replace(config.batch, global_batch=None, per_device_batch=samples),
            layout=replace(config.layout, data=NARROW),
        )
    )


def widened(program: Program, data: int) -> Program | None:
    """`program` with another size of its data axis; None if more than sums crosses that axis.

    Args:
        program: of a step on two or more devices along the data axis.
        data: devices along that axis.
    """
    sizes = dict(program.mesh_axes)
    if sizes.get(DATA) == data:
        return program
    if sizes.get(DATA, 1) < NARROW or program.mesh_axes[0][0] != DATA:
        return None
    if not all(_is_sum(operation) for operation, _ in program.walk() if _crosses(operation)):
        return None
    old = sizes[DATA]

    def scaled(number: int | None) -> int | None:
        return None if number is None else number // old * data

    return replace(
        program,
        mesh_axes=((DATA, data), *program.mesh_axes[1:]),
        operations=tuple(_widened(item, old, data) for item in program.operations),
        global_batch=scaled(program.global_batch),
        model_flop=scaled(program.model_flop),
    )


def _crosses(operation: Operation) -> bool:
    collective = operation.collective
    return collective is not None and (not collective.group.axes or DATA in collective.group.axes)


def _is_sum(operation: Operation) -> bool:
    """Whether it is a sum over known axes, whose payload does not grow with the group."""
    collective = operation.collective
    return (
        collective is not None
        and collective.name == "all_reduce"
        and collective.group.axes[:1] == (DATA,)
    )


def _widened(item: Operation | Loop, old: int, new: int) -> Operation | Loop:
    if isinstance(item, Loop):
        return replace(item, body=tuple(_widened(each, old, new) for each in item.body))
    collective = item.collective
    if collective is None or not _crosses(item):
        return item
    # The data axis is the major one: it is in the first extent, alone or before its neighbours.
    (size, stride), *others = collective.group.extents
    group = replace(collective.group, extents=((size // old * new, stride), *others))
    return replace(item, collective=replace(collective, group=group))
