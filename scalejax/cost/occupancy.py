"""The cluster as one program finds it: how many of its devices are busy, what memory it asks for.

Devices that are parts of one machine, such as virtual devices of a CPU, share cores and memory.
"""

from dataclasses import replace

from scalejax.hardware import Chip, Cluster
from scalejax.program import Program


def as_used(cluster: Cluster, program: Program) -> Cluster:
    """`cluster` with its chip as it is while `program` runs; itself where nothing is shared.

    What is taken into account is taken out, so that doing it again changes nothing.
    """
    chip = _shared_chip(cluster, program.device_count)
    if program.backend == "cpu" and chip.attainable.unaligned_fraction is not None:
        chip = _aligned(chip)
    if chip.measured is not None and chip.measured.first_touch:
        seconds = chip.measured.first_touch_seconds(program.memory.temporary_bytes)
        overhead = chip.attainable.step_overhead_seconds + seconds
        chip = replace(
            chip,
            attainable=replace(chip.attainable, step_overhead_seconds=overhead),
            measured=replace(chip.measured, first_touch=()),
        )
    if chip is cluster.chip and not cluster.shared:
        return cluster
    return replace(cluster, chip=chip, shared=())


def _aligned(chip: Chip) -> Chip:
    """`chip` for programs of the CPU's compiler, which does not pad sides that the chip's does."""
    return replace(chip, attainable=replace(chip.attainable, unaligned_fraction=None))


def _shared_chip(cluster: Cluster, device_count: int) -> Chip:
    """The chip when `device_count` devices are busy.

    Between two measured numbers of devices, as with the larger; beyond the largest, slower in
    proportion, since all cores are then busy.
    """
    known = [(1, cluster.chip), *((each.device_count, each.chip) for each in cluster.shared)]
    if len(known) == 1 or device_count == 1:
        return cluster.chip
    for count, chip in known:
        if device_count <= count:
            return chip
    count, chip = known[-1]
    return slowed(chip, device_count / count)


def slowed(chip: Chip, factor: float) -> Chip:
    """`chip` with every operation taking `factor` times as long."""
    measured = chip.measured
    if measured is not None:
        measured = replace(
            measured,
            compute_scale=measured.compute_scale * factor,
            memory_scale=measured.memory_scale * factor,
        )
    attainable = chip.attainable
    return replace(
        chip,
        measured=measured,
        attainable=replace(
            attainable,
            launch_seconds=attainable.launch_seconds * factor,
            dispatch_seconds=attainable.dispatch_seconds * factor,
            step_overhead_seconds=attainable.step_overhead_seconds * factor,
        ),
    )
