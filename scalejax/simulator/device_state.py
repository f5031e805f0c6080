"""Device state under the load of one program: its framework's rates, busy devices, first-touched
memory, CUDA graphs.

Devices that are parts of one machine, such as virtual devices of a CPU, share cores and memory.
Depends on a program's size and backend, not on its operations.
"""

from dataclasses import replace

from scalejax.hardware import Chip, Cluster
from scalejax.simulator.frameworks import XLA, known_framework
from scalejax.simulator.program import Program

GRAPH_LAUNCH_SECONDS = 1.3e-6
"""Time per operation of a CUDA graph of minimal kernels: additions of 1024 numbers, 2000 of them
in a graph, take 1.1 to 1.3 us each (pytorch/pytorch#161104, 2025; the GPU is not named). The time
of the addition itself is included."""


def under_load(cluster: Cluster, program: Program) -> Cluster:
    """`cluster` with its chip as loaded by `program`; `cluster` itself if nothing changes.

    Idempotent: effects that were applied are removed from the description of the returned cluster.
    """
    cluster = with_software(cluster, program.framework)
    chip = _shared_chip(cluster, program.device_count)
    if program.backend == "cpu" and chip.attainable.unaligned_fraction is not None:
        chip = _aligned(chip)
    if cluster.launch_mode == "graph":
        chip = _in_graph(chip)
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


def with_software(cluster: Cluster, framework: str) -> Cluster:
    """`cluster` with a framework's effects on its chip, if the chip has the rates of XLA's
    programs; rates that were measured here already belong to the framework that ran."""
    chip, known = cluster.chip, known_framework(framework)
    if chip.rates_of != XLA.name or chip.measured is not None or known in (None, XLA):
        return cluster
    assert known is not None  # noqa: S101
    chip = replace(known.software.applied(chip), rates_of=known.name)
    return replace(cluster, chip=chip)


def with_routing(cluster: Cluster) -> Cluster:
    """`cluster` with its hosts' dispatch times for a step that sends tokens to experts."""
    attainable = cluster.chip.attainable
    if attainable.routed_dispatch_seconds <= attainable.dispatch_seconds:
        return cluster
    routed = replace(attainable, dispatch_seconds=attainable.routed_dispatch_seconds)
    return replace(cluster, chip=replace(cluster.chip, attainable=routed))


def in_graph(cluster: Cluster) -> Cluster:
    """`cluster` with the launches of CUDA graphs if it uses them; the part of `under_load` that
    needs no program."""
    if cluster.launch_mode != "graph":
        return cluster
    return replace(cluster, chip=_in_graph(cluster.chip))


def _aligned(chip: Chip) -> Chip:
    """`chip` without the penalty for unaligned products, as XLA's CPU compiler does not pad."""
    return replace(chip, attainable=replace(chip.attainable, unaligned_fraction=None))


def _in_graph(chip: Chip) -> Chip:
    """`chip` whose operations are launched from a CUDA graph, without the host."""
    attainable = chip.attainable
    launch = min(attainable.launch_seconds, GRAPH_LAUNCH_SECONDS)
    graphed = replace(
        attainable,
        launch_seconds=launch,
        dispatch_seconds=0.0,
        collective_dispatch_seconds=0.0,
        member_dispatch_seconds=0.0,
        routed_dispatch_seconds=0.0,
    )
    return chip if graphed == attainable else replace(chip, attainable=graphed)


def _shared_chip(cluster: Cluster, device_count: int) -> Chip:
    """Chip as measured with `device_count` busy devices.

    Between two measured device counts, the larger one applies; beyond the largest, times grow in
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
            collective_dispatch_seconds=attainable.collective_dispatch_seconds * factor,
            member_dispatch_seconds=attainable.member_dispatch_seconds * factor,
            routed_dispatch_seconds=attainable.routed_dispatch_seconds * factor,
            step_overhead_seconds=attainable.step_overhead_seconds * factor,
        ),
    )
