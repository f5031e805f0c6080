"""The local devices measured as a chip: every rate is timed, none assumed.

Virtual devices of one CPU share its cores, so the chip is timed with one device under load, and
again with as many as there are cores. Knows no program and no model.
"""

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.hardware import Attainable, Chip, MeasuredRates, RateType
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
    products = len(grid.matmul) * len(rate_types(device))
    memory = len(grid.stream_bytes) + len(grid.touched_bytes)
    return products + len(PASSES) * len(grid.convolutions) + memory + 3


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
        (size, timed("memory", probes.stream_rate, mesh, size, empty, calls))
        for size in grid.stream_bytes
    )
    matmul: dict[str, tuple[probes.MatmulRow, ...]] = {
        name: tuple(
            timed("matrix products", probes.matmul_row, mesh, shape, dtype, empty, calls)
            for shape in grid.matmul
        )
        for name, dtype in rate_types(device).items()
    }
    convolution = {
        kind: tuple(
            timed("convolutions", probes.convolution_row, mesh, each, kind, empty, calls)
            for each in grid.convolutions
        )
        for kind in PASSES
    }
    touch = [
        (size, timed("fresh memory", probes.first_touch_seconds, mesh, size, empty, calls))
        for size in grid.touched_bytes
    ]
    measured = MeasuredRates(
        matmul=matmul, convolution=convolution, stream=stream, first_touch=tuple(touch)
    )
    return _chip(mesh, measured, launch=launch, overhead=overhead, source=source)


def _chip(
    mesh: Mesh, measured: MeasuredRates, *, launch: float, overhead: float, source: str
) -> Chip:
    device = mesh.devices.flat[0]
    products = {name: [row[-1] for row in rows] for name, rows in measured.matmul.items()}
    images = [row[-1] for rows in measured.convolution.values() for row in rows]
    # The peak is the highest rate measured in any operation.
    peak: dict[RateType, float] = {
        name: max(products[name] + (images if name == "f32" else [])) for name in rate_types(device)
    }
    memory = max(rate for _, rate in measured.stream)
    return Chip(
        name=device.platform,
        title=device.device_kind,
        peak_flop_per_second=peak,
        memory_bytes=memory_bytes(mesh.devices.flat),
        memory_bytes_per_second=memory,
        attainable=Attainable(
            matmul_fraction=median(products["f32"]) / peak["f32"],
            matmul_ramp_seconds=0.0,
            convolution_fraction=median(images) / peak["f32"] if images else 1.0,
            memory_fraction=measured.stream[-1][1] / memory,
            launch_seconds=launch,
            step_overhead_seconds=overhead,
        ),
        runtime_reserve_bytes=0,
        measured=measured,
        sources={"*": source},
    )


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
