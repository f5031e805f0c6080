"""What holds for every prediction, whatever the program and the cluster.

Random small programs on clusters of the catalogue, with random residuals, contention and
overheads: physics bounds a step from below, better hardware never makes it longer, and more
devices never make collectives faster.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.hardware import Chip, Cluster, Residuals, cluster_names, load_cluster
from scalejax.simulator.predict import predict
from scalejax.simulator.program import (
    Collective,
    CollectiveName,
    DeviceGroup,
    Loop,
    MemoryUse,
    Operation,
    OperationKind,
    Program,
)
from scalejax.simulator.timeline.timeline import timeline

EXACT = 1 + 1e-9  # for sums in another order
CLUSTERS = {name: load_cluster(name) for name in cluster_names()}
LARGE = ("dgx-h100", "selene", "aws-p4d", "big-basin-goyal2017", "gb200-nvl72", "tpu-v5p")


def operation(draw: st.DrawFn, name: str) -> Operation:
    """Work of any kind, up to milliseconds on a current chip."""
    kinds: list[OperationKind] = ["matmul", "convolution", "fusion", "copy", "custom"]
    kind = draw(st.sampled_from(kinds))
    multiplies = kind in ("matmul", "convolution")
    return Operation(
        name=name,
        kind=kind,
        dtype=draw(st.sampled_from(["bf16", "f16", "f32", "f8e4m3fn", "s32"])),
        flop=draw(st.integers(1, 10**12)) if multiplies else 0,
        read_bytes=draw(st.integers(0, 10**9)),
        write_bytes=draw(st.integers(0, 10**9)),
    )


def collective(draw: st.DrawFn, name: str, devices: int) -> Operation:
    """A collective between all devices, or between those of one of two axes."""
    inner = draw(st.sampled_from([size for size in (1, 2, 4, 8) if devices % size == 0]))
    extents, axis = draw(
        st.sampled_from([(((devices // inner, inner),), "data"), (((inner, 1),), "tensor")])
    )
    collective = Collective(
        name=draw(
            st.sampled_from(
                ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"]
            )
        ),
        payload_bytes=draw(st.integers(1, 10**9)),
        group=DeviceGroup(extents=extents, axes=(axis,)),
        is_async=draw(st.booleans()),
    )
    return Operation(name=name, kind="collective", dtype="bf16", collective=collective)


def body(draw: st.DrawFn, prefix: str, devices: int) -> list[Operation | Loop]:
    """Operations in any order; some asynchronous collectives are waited for, some not."""
    items: list[Operation | Loop] = []
    for index in range(draw(st.integers(1, 5))):
        name = f"{prefix}{index}"
        if draw(st.booleans()):
            items.append(operation(draw, name))
            continue
        started = collective(draw, name, devices)
        items.append(started)
        if started.collective is not None and started.collective.is_async and draw(st.booleans()):
            items.append(operation(draw, f"{name}-beside"))
            items.append(Operation(name=f"{name}-done", kind="wait", dtype="", waits_for=name))
    return items


@st.composite
def programs(draw: st.DrawFn, devices: int | None = None) -> Program:
    """A step of a few operations and perhaps a loop, on 1 to 256 devices."""
    count = devices or draw(st.sampled_from([1, 2, 8, 64, 256]))
    items = body(draw, "a", count)
    if draw(st.booleans()):
        inner = Loop(
            name="layers",
            trip_count=draw(st.integers(0, 5)),
            body=tuple(body(draw, "b", count)),
        )
        items.insert(draw(st.integers(0, len(items))), inner)
    items.append(Operation(name="last", kind="fusion", dtype="f32", read_bytes=10**6))
    return Program(
        name="any step",
        backend="closed_form",
        target="any",
        compiler="none",
        mesh_axes=(("data", count),),
        operations=tuple(items),
        memory=MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A cluster of the catalogue, uncalibrated or with any residuals, contention and overhead."""
    cluster = CLUSTERS[draw(st.sampled_from(LARGE))]
    attainable = replace(
        cluster.chip.attainable,
        contention_fraction=draw(st.sampled_from([0.0, 0.05, 0.5])),
        dispatch_seconds=draw(st.sampled_from([0.0, 30e-6])),
        step_overhead_seconds=draw(st.sampled_from([0.0, 1e-3])),
    )
    sigma = st.floats(0, 0.5)
    spread = Residuals(
        compute=draw(sigma), memory=draw(sigma), launch=draw(sigma), step=draw(sigma)
    )
    library = replace(cluster.library, residual=draw(sigma))
    chip = replace(cluster.chip, attainable=attainable, residuals=spread)
    return replace(cluster, chip=chip, library=library)


# --- bounds --------------------------------------------------------------------------------


@given(programs(), clusters())
def test_no_step_beats_the_peak_or_the_memory(program: Program, cluster: Cluster):
    """Never faster than FLOP at the peak of their types, nor than bytes over the bandwidth."""
    chip = cluster.chip
    work = [(item, runs) for item, runs in program.walk() if item.collective is None]
    at_peak = math.fsum(runs * item.flop / chip.peak(item.dtype) for item, runs in work)
    moved = math.fsum(runs * (item.read_bytes + item.write_bytes) for item, runs in work)

    step_seconds = predict(program, cluster).step_seconds

    assert step_seconds * EXACT >= at_peak
    assert step_seconds * EXACT >= moved / chip.memory_bytes_per_second


@given(programs(), clusters())
def test_a_step_is_between_its_longest_stream_and_all_it_does(program: Program, cluster: Cluster):
    """At least compute, and half of communication, which is within nodes and between them at the
    same time; at most both in turn, with contention or not."""
    times = timeline(program, cluster)

    longest = max(times.device_seconds, times.communication_seconds / 2)
    assert longest <= times.step_seconds * EXACT
    assert times.step_seconds <= (times.device_seconds + times.communication_seconds) * EXACT


@given(programs(), clusters())
def test_p50_is_between_p10_and_p90(program: Program, cluster: Cluster):
    """Whatever the residuals."""
    predicted = predict(program, cluster)

    assert predicted.p10_step_seconds is not None
    assert predicted.p90_step_seconds is not None
    assert predicted.p10_step_seconds <= predicted.step_seconds <= predicted.p90_step_seconds


@given(programs(), clusters())
def test_the_waterfall_is_the_step(program: Program, cluster: Cluster):
    """No term is negative, and together they are the step."""
    predicted = predict(program, cluster)

    terms = [seconds for _, seconds in predicted.waterfall if seconds is not None]
    assert all(seconds >= 0 for seconds in terms)
    assert math.fsum(terms) == pytest.approx(predicted.step_seconds, rel=1e-9)


# --- better hardware -----------------------------------------------------------------------


def with_chip(cluster: Cluster, change: Callable[[Chip], Chip]) -> Cluster:
    """The cluster with another chip."""
    return replace(cluster, chip=change(cluster.chip))


def with_attainable(cluster: Cluster, **fields: float) -> Cluster:
    """The cluster with a chip that attains something else."""
    return with_chip(cluster, lambda c: replace(c, attainable=replace(c.attainable, **fields)))


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Wires within a node."""
    link = replace(cluster.link, bytes_per_second=cluster.link.bytes_per_second * factor)
    return replace(cluster, link=link)


def faster_network(cluster: Cluster, factor: float) -> Cluster:
    """Wires between nodes."""
    if cluster.network is None:
        return cluster
    rate = cluster.network.bytes_per_second * factor
    return replace(cluster, network=replace(cluster.network, bytes_per_second=rate))


def shorter_hops(cluster: Cluster, factor: float) -> Cluster:
    """Messages that cost less, however small."""
    methods = tuple(
        replace(
            method,
            base_seconds=method.base_seconds / factor,
            link_hop_seconds=method.link_hop_seconds / factor,
            network_hop_seconds=method.network_hop_seconds / factor,
        )
        for method in cluster.library.methods
    )
    return replace(cluster, library=replace(cluster.library, methods=methods))


def faster_arithmetic(cluster: Cluster, factor: float) -> Cluster:
    """Higher peaks of every type."""
    rates = {name: rate * factor for name, rate in cluster.chip.peak_flop_per_second.items()}
    return with_chip(cluster, lambda chip: replace(chip, peak_flop_per_second=rates))


def faster_memory(cluster: Cluster, factor: float) -> Cluster:
    """More bandwidth of the device's own memory."""
    rate = cluster.chip.memory_bytes_per_second * factor
    return with_chip(cluster, lambda chip: replace(chip, memory_bytes_per_second=rate))


def shorter_launches(cluster: Cluster, factor: float) -> Cluster:
    """Smaller gaps between operations."""
    gap = cluster.chip.attainable.launch_seconds / factor
    return with_attainable(cluster, launch_seconds=gap)


def less_contention(cluster: Cluster, factor: float) -> Cluster:
    """Collectives that take less from compute."""
    share = cluster.chip.attainable.contention_fraction / factor
    return with_attainable(cluster, contention_fraction=share)


@pytest.mark.parametrize(
    "improve",
    [
        faster_links,
        faster_network,
        shorter_hops,
        faster_arithmetic,
        faster_memory,
        shorter_launches,
        less_contention,
    ],
)
@settings(max_examples=40)  # of each of seven
@given(data=st.data(), factor=st.floats(1.0, 10.0))
def test_better_hardware_is_never_slower(
    improve: Callable[[Cluster, float], Cluster], data: st.DataObject, factor: float
):
    """Monotone in bandwidths, latencies and rates, and in contention."""
    program, cluster = data.draw(programs()), data.draw(clusters())

    here = timeline(program, cluster).step_seconds
    better = timeline(program, improve(cluster, factor)).step_seconds

    assert better <= here * EXACT


# --- more devices --------------------------------------------------------------------------


def communicating(name: CollectiveName, payload_bytes: int, devices: int) -> Program:
    """A step with a collective between all of its devices."""
    group = DeviceGroup(extents=((devices, 1),), axes=("data",))
    collective = Collective(name=name, payload_bytes=payload_bytes, group=group, is_async=False)
    return Program(
        name="a collective",
        backend="closed_form",
        target="any",
        compiler="none",
        mesh_axes=(("data", devices),),
        operations=(Operation(name="x", kind="collective", dtype="f32", collective=collective),),
        memory=MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0),
    )


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
@given(
    cluster=st.sampled_from(sorted(CLUSTERS)),
    payload_bytes=st.integers(1, 10**9),
    doublings=st.integers(0, 9),
    more=st.integers(1, 3),
)
def test_more_devices_never_communicate_less(
    name: CollectiveName, cluster: str, payload_bytes: int, doublings: int, more: int
):
    """The same bytes between 2, 4 or 8 times the devices: all together take no less time.

    Beyond a node each single device takes no less either. Within one it may: a switch that adds
    up and direct wires both serve eight better than four (measured on H100: 12 % at 1 GiB). Two
    V100 on one wire of their mesh even need more together than four on four rings: not checked.
    """
    hardware = CLUSTERS[cluster]
    few, many = 2**doublings, 2 ** (doublings + more)
    if hardware.link.wires is not None and few < hardware.devices_per_node:
        return
    most = hardware.max_device_count or (many if hardware.network else hardware.devices_per_node)
    if many > most:
        return

    fewer, larger = (
        timeline(communicating(name, payload_bytes, devices), hardware).communication_seconds
        for devices in (few, many)
    )

    assert few * fewer <= many * larger * EXACT
    if few >= hardware.devices_per_node:
        assert fewer <= larger * EXACT
