"""Quick measurement of the local devices as a `Cluster`, in a second or two.

`train` predicts its own step with it, so that every run folder holds a prediction beside the
measurement. All devices are measured at once, as they will run: virtual devices of one CPU share
its cores. Knows no program and no model.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.hardware import Attainable, Chip, Cluster, Link, RateType
from scalejax.measure.devices import NAME, probes
from scalejax.measure.devices.collectives import Ring, library_of
from scalejax.measure.devices.machine import memory_bytes, mesh_of, rate_types
from scalejax.measure.devices.probes import Convolution
from scalejax.measure.devices.timing import ALL, seconds_of_function

_CALLS = 7
_SOURCE = "measured by scalejax.measure.devices.quick just before the run"
_PRODUCTS = {"cpu": (1, 256, 256, 256), "gpu": (1, 4096, 4096, 4096)}  # 1 ms; 0.2 ms on an H100
_CONVOLUTION = Convolution(samples=4, size=14, channels_in=64, channels_out=64, window=3, stride=1)
_LARGE_CONVOLUTION = replace(_CONVOLUTION, samples=256, size=28, channels_in=128, channels_out=128)
_STREAM_BYTES = {"cpu": 2**22, "gpu": 2**30}  # read and written: beyond the caches
_REDUCED_BYTES = 2**20


def local_cluster(mesh: Mesh) -> Cluster:
    """The devices of `mesh` as a cluster of one node, with rates measured now.

    The first call for a set of devices measures; later calls in the process return the cached
    result. With several processes, all measure together.

    Ignores the cost of launching a program, which overlaps with the step before.
    """
    return _measured(tuple(mesh.devices.flat))


@cache
def _measured(devices: tuple[Any, ...]) -> Cluster:
    mesh = mesh_of(devices)
    kind = "cpu" if devices[0].platform == "cpu" else "gpu"
    image = _CONVOLUTION if kind == "cpu" else _LARGE_CONVOLUTION
    # On a CPU the calls are long beside what they cost; on a GPU that is a good part.
    empty = 0.0 if kind == "cpu" else probes.call_seconds(mesh, _CALLS)
    launch = probes.launch_seconds(mesh, 1)
    matmul: dict[RateType, float] = {
        name: probes.matmul_row(mesh, _PRODUCTS[kind], dtype, empty, _CALLS, launch)[-1]
        for name, dtype in rate_types(devices[0]).items()
    }
    convolution = probes.convolution_row(mesh, image, "forward", empty, _CALLS)[-1]
    memory_rate = probes.stream_rate(mesh, _STREAM_BYTES[kind], empty, _CALLS, [probes.scale])
    small, large = (_all_reduce_seconds(mesh, size) for size in (4, _REDUCED_BYTES))
    count = len(devices)
    sent_bytes = 2 * (count - 1) / count * _REDUCED_BYTES  # by each device of a ring
    link_rate = sent_bytes / max(large - small, 1e-9) if count > 1 else memory_rate
    chip = Chip(
        name=devices[0].platform,
        title=devices[0].device_kind,
        peak_flop_per_second=matmul,
        memory_bytes=memory_bytes(devices),
        memory_bytes_per_second=memory_rate,
        attainable=Attainable(
            matmul_fraction=1.0,
            matmul_ramp_seconds=0.0,
            convolution_fraction=min(1.0, convolution / matmul["f32"]),
            memory_fraction=1.0,
            launch_seconds=launch,
        ),
        runtime_reserve_bytes=0,
        sources={"*": _SOURCE},
    )
    # A small all-reduce is measured whole, so that its messages are in the base.
    base = small if count > 1 else 0.0
    ring = Ring(base_seconds=base, hop_seconds=0.0, bytes_per_second=link_rate)
    return Cluster(
        name=NAME,
        title=f"{count} x {chip.title}, as measured",
        chip=chip,
        devices_per_node=count,
        link=Link(kind="host", bytes_per_second=link_rate),
        library=library_of(NAME, "all-reduce of this machine, as measured", ring, _SOURCE),
        max_device_count=count,
        sources={"*": _SOURCE},
    )


def _all_reduce_seconds(mesh: Mesh, size_bytes: int) -> float:
    """Seconds of an all-reduce of `size_bytes` per device, alone: `probes` times one in a step."""
    return seconds_of_function(
        lambda x: jax.lax.psum(x, ALL), mesh, [(size_bytes // 4,)], calls=_CALLS
    )
