"""The local devices measured as a chip: every rate is timed, none assumed.

Virtual devices of one CPU share its cores, so the chip is timed with one device under load, and
again with as many as there are cores. What a compiler must know of an NVIDIA GPU is read from the
catalogue. Knows no program and no model.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.hardware import (
    Attainable,
    Chip,
    CudaArchitecture,
    MeasuredRates,
    RateType,
    chip_names,
    load_chip,
)
from scalejax.hardware.chip import SLOWEST_UNIT
from scalejax.measure.devices import probes
from scalejax.measure.devices.probes import Grid
from scalejax.measure.devices.timing import ALL

PASSES = ("forward", "input_gradient", "filter_gradient")
"""Passes of a convolution."""

T = TypeVar("T")
P = ParamSpec("P")


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A one-dimensional mesh of `devices`."""
    return Mesh(tuple(devices), (ALL,), axis_types=(AxisType.Auto,))


def probe_count(grid: Grid, device: Any) -> int:
    """Number of probes that `measure_chip` runs."""
    each = len(grid.matmul) + len(PASSES) * len(grid.convolutions)
    memory = len(grid.stream_bytes) + len(grid.touched_bytes)
    return each * len(rate_types(device)) + memory + len(grid.attention) + 3


def convolution_key(convolution_pass: str, rate_type: RateType) -> str:
    """Key of `MeasuredRates.convolution`."""
    return convolution_pass if rate_type == "f32" else f"{convolution_pass}_{rate_type}"


def measure_chip(mesh: Mesh, grid: Grid, source: str, on_progress: OnProgress = no_display) -> Chip:
    """The chip description of one device of `mesh`, measured while all of them are under load.

    Args:
        mesh: the devices, from `mesh_of`.
        grid: shapes to time.
        source: source of the numbers, for the file.
        on_progress: called with the name of each probe as it begins.
    """
    device, calls = mesh.devices.flat[0], grid.calls

    def timed(what: str, probe: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
        on_progress(Progress(part=what))
        return probe(*arguments, **options)

    empty = timed("launches", probes.call_seconds, mesh, calls)
    launch = timed("launches", probes.launch_seconds, mesh, calls)
    overhead = timed("launches", probes.step_overhead_seconds, mesh, launch, calls)
    stream = tuple(
        (size, timed("memory", probes.stream_rate, mesh, size, empty, calls, launch=launch))
        for size in grid.stream_bytes
    )
    matmul: dict[str, tuple[probes.MatmulRow, ...]] = {
        name: tuple(
            timed("matrix products", probes.matmul_row, mesh, shape, dtype, empty, calls, launch)
            for shape in grid.matmul
        )
        for name, dtype in rate_types(device).items()
    }
    convolution = {
        convolution_key(kind, name): tuple(
            timed(
                *("convolutions", probes.convolution_row),
                *(mesh, each, kind, empty, calls, dtype, launch),
            )
            for each in grid.convolutions
        )
        for kind in PASSES
        for name, dtype in rate_types(device).items()
    }
    attention = [
        timed("attention", probes.attention_rate, mesh, shape, empty, calls)
        for shape in grid.attention
    ]
    touch = [
        (size, timed("fresh memory", probes.first_touch_seconds, mesh, size, empty, calls))
        for size in grid.touched_bytes
    ]
    measured = MeasuredRates(
        matmul=matmul, convolution=convolution, stream=stream, first_touch=tuple(touch)
    )
    return _chip(mesh, measured, attention, launch=launch, overhead=overhead, source=source)


def _chip(
    mesh: Mesh,
    measured: MeasuredRates,
    attention: Sequence[float],
    *,
    launch: float,
    overhead: float,
    source: str,
) -> Chip:
    device = mesh.devices.flat[0]
    products = {name: [row[-1] for row in rows] for name, rows in measured.matmul.items()}
    images = {
        name: [
            row[-1]
            for kind in PASSES
            for row in measured.convolution.get(convolution_key(kind, name), ())
        ]
        for name in rate_types(device)
    }
    # The peak is the highest rate measured in any operation.
    peak: dict[RateType, float] = {
        name: max(SLOWEST_UNIT, *products[name], *images[name]) for name in rate_types(device)
    }
    memory = max(rate for _, rate in measured.stream)
    if device.platform != "cpu":  # rates at fewer bytes are those of its caches
        memory = measured.stream[-1][1]
    attainable = Attainable(
        matmul_fraction=median(products["f32"]) / peak["f32"],
        matmul_ramp_seconds=0.0,
        convolution_fraction=median(images["f32"]) / peak["f32"] if images["f32"] else 1.0,
        memory_fraction=measured.stream[-1][1] / memory,
        launch_seconds=launch,
        step_overhead_seconds=overhead,
    )
    if attention:
        # A product that other programs disturbed can be slower than attention.
        fraction = min(1.0, fmean(attention) / peak["bf16"])
        attainable = replace(attainable, attention_fraction=fraction)
    return Chip(
        name=device.platform,
        title=device.device_kind,
        peak_flop_per_second=peak,
        memory_bytes=memory_bytes(mesh.devices.flat),
        memory_bytes_per_second=memory,
        attainable=attainable,
        runtime_reserve_bytes=0,
        cuda=architecture(device),
        measured=measured,
        sources={"*": source},
    )


def architecture(device: Any) -> CudaArchitecture | None:
    """What a compiler must know of `device` and JAX does not say, from the catalogue's chip of the
    same compute capability and multiprocessors; None if there is none, or it is not a GPU."""
    said = str(getattr(device, "compute_capability", "") or "")
    for name in chip_names() if said else ():
        found = load_chip(name).cuda
        if found is None or found.stands_in or found.sm_count != device.core_count:
            continue
        if said == ".".join(map(str, found.compute_capability)):
            return found
    return None


def rate_types(device: Any) -> dict[RateType, Any]:
    """Data types to measure: a CPU computes bf16 in f32, so not both."""
    if device.platform == "cpu":
        return {"f32": jnp.float32}
    return {"f32": jnp.float32, "bf16": jnp.bfloat16}


def memory_bytes(devices: Any) -> int:
    """Memory of one device: its own, or its share of the host memory."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    statistics = local[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)
