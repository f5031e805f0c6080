"""Checks of the devices that JAX sees and their rates, against a cluster of the catalogue."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalejax.core.environment import nvidia_gpus
from scalejax.core.errors import ScalejaxError
from scalejax.core.progress import OnProgress, Progress
from scalejax.core.units import TFLOP, counted, format_bytes, format_bytes_per_second
from scalejax.hardware import Chip, Cluster, RateType, chip_names, load_chip
from scalejax.measure.doctor.finding import Finding, found
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Collective, DeviceGroup, Operation

GOOD, BAD = 0.8, 0.5
"""Shares of the expected rate: "ok" from the first upwards, "bad" below the second, at which a run
would take twice as long."""
STAGES = 4
"""Most calls of `on_progress` by `measure`."""

# Width of products, bytes of the stream and of an all-reduce.
_SIZES, _CPU_SIZES = (8192, 2**30, 2**26), (1024, 2**24, 2**22)
_CALLS = 5
_GPU_FIX = (
    "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER says whether it is throttled; nvidia-smi whether "
    "another program runs on it"
)
_CPU_FIX = "other programs at work? Else scalejax calibrate measures what this machine now does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices that JAX sees."""

    platform: str
    """JAX platform name: "cpu", "gpu", "tpu"."""
    kind: str
    """Device kind as reported by the device."""
    count: int
    """Device count over all processes."""
    local_count: int
    """Device count of this process."""
    processes: int
    """Number of processes of the run."""
    memory_bytes: int | None
    """Memory of one device; None if it shares the host memory."""
    driver_gpus: int
    """NVIDIA GPUs known to the driver of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """A timed all-reduce over a group of devices."""

    axis: str
    """Group of devices in words."""
    group: DeviceGroup
    """Group of devices on the cluster."""
    seconds: float
    """Time until every member has the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates of the devices."""

    rate_type: RateType
    """Data type of the matrix products."""
    width: int
    """Rows and columns of the products."""
    flop_per_second: float
    """Matmul rate of one device, with all devices of the process under the same load."""
    moved_bytes: int
    """Bytes read and written by the timed operation."""
    memory_bytes_per_second: float
    """Memory bandwidth of one device (read plus write), under the same load."""
    reduced_bytes: int
    """Payload of the all-reduces."""
    collectives: tuple[MeasuredCollective, ...]
    """Timed all-reduces, by group."""


def driver_gpus() -> int:
    """Number of NVIDIA GPUs that the driver offers; in a container, those assigned to it."""
    return nvidia_gpus() or int(Path("/dev/dxg").exists())  # WSL does not tell the number


def read_devices() -> Devices:
    """The devices of this process, and the counts over all processes."""
    import jax

    first = jax.local_devices()[0]
    statistics = first.memory_stats() or {}
    return Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=jax.device_count(),
        local_count=jax.local_device_count(),
        processes=jax.process_count(),
        memory_bytes=statistics.get("bytes_limit"),
        driver_gpus=driver_gpus(),
    )


def measure(on_progress: OnProgress) -> Rates:
    """Measured rates of the devices of this process, and of all-reduces between them."""
    import jax
    import jax.numpy as jnp

    from scalejax.measure.devices import machine, probes

    mesh = machine.mesh_of(jax.local_devices())
    width, stream, reduced = _CPU_SIZES if jax.default_backend() == "cpu" else _SIZES
    rate_type = _rate_type(jax.local_devices()[0])
    dtype = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}[rate_type]
    on_progress(Progress(part="launches"))
    empty = probes.call_seconds(mesh, _CALLS)
    on_progress(Progress(part="matrix products"))
    row = probes.matmul_row(mesh, (1, width, width, width), dtype, empty, _CALLS)
    on_progress(Progress(part="memory"))
    memory = probes.stream_rate(mesh, stream, empty, _CALLS)
    on_progress(Progress(part="all-reduces"))
    within = _all_reduce("devices of a process", mesh, reduced, 1) if mesh.size > 1 else None
    return Rates(
        rate_type=rate_type,
        width=width,
        flop_per_second=row[-1],
        moved_bytes=stream,
        memory_bytes_per_second=memory,
        reduced_bytes=reduced,
        collectives=() if within is None else (within,),
    )


def measure_all_reduce(rates: Rates) -> Rates:
    """`rates` with the all-reduce between processes; every process must call it."""
    import jax

    from scalejax.measure.devices import machine

    by_process = {device.process_index: device for device in reversed(jax.devices())}
    firsts = machine.mesh_of([by_process[index] for index in range(jax.process_count())])
    between = _all_reduce("processes", firsts, rates.reduced_bytes, jax.local_device_count())
    return replace(rates, collectives=(*rates.collectives, between))


def _all_reduce(axis: str, mesh: Any, size_bytes: int, stride: int) -> MeasuredCollective:
    """A timed all-reduce over `mesh`, whose devices lie `stride` apart on the cluster."""
    from scalejax.measure.devices import probes

    group = DeviceGroup(extents=((mesh.size, stride),), axes=())
    seconds = probes.all_reduce_seconds(mesh, size_bytes, _CALLS)
    return MeasuredCollective(axis=axis, group=group, seconds=seconds)


def no_rates(reason: str) -> Finding:
    """Finding that the timed operations failed, with JAX's reason."""
    said = (reason.strip().splitlines() or ["JAX does not say why."])[0]
    return found("rates", "devices at work", "failed", "a rate", bad=True, fix=said)


def no_devices(reason: str) -> Finding:
    """Finding that JAX did not start, with its reason."""
    said = (reason.strip().splitlines() or ["JAX found none that it can use."])[0]
    fix = f"{said} See JAX_PLATFORMS and the CUDA plug-in in this table, or unset JAX_PLATFORMS"
    return found("devices", "devices", "none", "some", bad=True, fix=fix)


def device_findings(devices: Devices, cluster: Cluster | None) -> Iterator[Finding]:
    """Findings on the kind, number and memory of the devices."""
    per_process = f", {devices.local_count} in each process" if devices.processes > 1 else ""
    value = f"{devices.count} x {devices.kind}{per_process}"
    expected, is_missing, fix = None, False, ""
    if devices.driver_gpus and devices.platform == "cpu":
        is_missing = True
        expected = counted(devices.driver_gpus, "GPU")
        fix = "JAX does not use them: see JAX_PLATFORMS and the CUDA plug-in in this table"
    elif cluster is not None:
        expected = f"{cluster.devices_per_node} x {cluster.chip.title} a node"
        is_other = not _is_of(devices, cluster.chip)
        # Fewer are normal with one process per device, or with part of a calibrated machine.
        few = devices.platform != "cpu" and devices.count < cluster.devices_per_node
        is_missing = is_other or few
        fix = (
            f"{cluster.name} has other devices: give --cluster what is here (scalejax hardware)"
            if is_other
            else "see CUDA_VISIBLE_DEVICES, what the scheduler gave, and nvidia-smi -L"
        )
    yield found("devices", "devices", value, expected, bad=is_missing, fix=fix)
    if devices.memory_bytes is not None:
        least = None if cluster is None else cluster.chip.memory_bytes
        yield found(
            "devices",
            "memory of each",
            format_bytes(devices.memory_bytes),
            None if least is None else f"of {format_bytes(least)}",
            # JAX preallocates three quarters by default.
            warn=least is not None and devices.memory_bytes < 0.7 * least,
            fix="another program holds memory, or XLA_PYTHON_CLIENT_MEM_FRACTION is small",
        )


def rate_findings(rates: Rates, chip: Chip | None, cluster: Cluster | None) -> Iterator[Finding]:
    """Findings that compare each rate with the one that predictions use.

    Args:
        rates: measured rates.
        chip: expected chip, under the same load; None if unknown.
        cluster: expected cluster, for the all-reduces; None if unknown.
    """
    width, kind = rates.width, rates.rate_type
    element_bytes = 4 if kind == "f32" else 2
    product = Operation(
        name="product",
        kind="matmul",
        dtype=kind,
        flop=2 * width**3,
        read_bytes=2 * width**2 * element_bytes,
        write_bytes=width**2 * element_bytes,
        shape=(1, width, width, width),
    )
    stream = Operation(
        name="stream",
        kind="fusion",
        dtype="f32",
        read_bytes=rates.moved_bytes // 2,
        write_bytes=rates.moved_bytes // 2,
    )
    fix = _CPU_FIX if kind == "f32" else _GPU_FIX
    expected = _rate_of(product, chip, product.flop)
    name = f"{kind} products of {width:,}"
    yield _rate(name, rates.flop_per_second, expected, _flop, fix)
    expected = _rate_of(stream, chip, rates.moved_bytes)
    rate = rates.memory_bytes_per_second
    yield _rate("memory", rate, expected, format_bytes_per_second, fix)
    for measured in rates.collectives:
        # Bytes that each device sends, for any device count: the rate of its link.
        count = measured.group.size
        sent = 2 * (count - 1) / count * rates.reduced_bytes
        seconds = _expected_seconds(measured, rates.reduced_bytes, cluster)
        yield _rate(
            f"all-reduce, {count} {measured.axis}",
            sent / measured.seconds,
            seconds and sent / seconds,
            format_bytes_per_second,
            fix
            if kind == "f32"
            else "NCCL_DEBUG=INFO shows the transport: look for NVLS or P2P within a node and "
            "for IB between nodes; nvidia-smi topo -m, ibstat",
        )


def detected_chip(devices: Devices) -> Chip | None:
    """The chip of the catalogue that matches the devices by name and memory; None if none does."""
    chips = [load_chip(name) for name in chip_names()]
    alike = [chip for chip in chips if _is_of(devices, chip)]
    if not alike or devices.memory_bytes is None:
        return None
    # By default JAX preallocates three quarters of the memory.
    total = devices.memory_bytes / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    return min(alike, key=lambda chip: abs(chip.memory_bytes - total))


def chip_when_busy(cluster: Cluster, count: int) -> Chip:
    """The chip with its rates while `count` devices of a machine are under load."""
    larger = [each.chip for each in cluster.shared if each.device_count >= count]
    if count == 1 or not cluster.shared:
        return cluster.chip
    return larger[0] if larger else cluster.shared[-1].chip


def _rate(
    name: str, rate: float, expected: float | None, worded: Callable[[float], str], fix: str
) -> Finding:
    part = None if expected is None else rate / expected
    return found(
        "rates",
        name,
        worded(rate),
        None if expected is None else f"{worded(expected)} ({part:.0%})",
        warn=part is not None and part < GOOD,
        bad=part is not None and part < BAD,
        fix=fix,
    )


def _rate_of(operation: Operation, chip: Chip | None, amount: float) -> float | None:
    return None if chip is None else amount / operation_time(operation, chip).busy_seconds


def _expected_seconds(
    measured: MeasuredCollective, size: int, cluster: Cluster | None
) -> float | None:
    if cluster is None:
        return None
    collective = Collective(
        name="all_reduce", payload_bytes=size, group=measured.group, is_async=False
    )
    try:
        return collective_seconds(collective, cluster) or None
    except ScalejaxError:  # the cluster is a single node, but this is not
        return None


def _is_of(devices: Devices, chip: Chip) -> bool:
    """Whether a device may be `chip`, by the device kind it reports."""
    if devices.platform == "cpu":
        return chip.name == "cpu"
    words = devices.kind.lower().replace("-", " ").split()
    parts = chip.name.split("-")
    # GPUs of one name differ in memory, which comes last in the name here: a100-40gb.
    return set(parts if parts[0] == "tpu" else parts[:1]) <= {*words}


def _rate_type(device: Any) -> RateType:
    """Data type that training uses on the device: GPUs before Ampere have no bf16."""
    if device.platform == "cpu":
        return "f32"
    # AMD GPUs have a name there, such as gfx90a; JAX supports none without bf16.
    generation = re.match(r"\d+", str(getattr(device, "compute_capability", "")))
    return "f16" if generation and int(generation[0]) < 8 else "bf16"


def _flop(rate: float) -> str:
    tera = rate / TFLOP
    return f"{tera:,.0f} TFLOP/s" if tera >= 100 else f"{tera:.3g} TFLOP/s"
