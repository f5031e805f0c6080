"""Quick measurement of the local devices as a `Cluster`, in a second or two.

`train` predicts its own step with it, so that every run folder holds a prediction beside the
measurement. All devices are measured at once, as they will run: virtual devices of one CPU share
its cores. Knows no program and no model.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalejax.hardware import (
    Attainable,
    Chip,
    Cluster,
    CollectiveMethod,
    CommunicationLibrary,
    Link,
    RateType,
)

NAME = "this-machine"

_CALLS = 9  # a count, not a duration: all processes must make equally many calls
_SOURCE = "measured by scalejax.measure.devices.quick just before the run"
_WIDTH = 256  # a product of this size takes 1 ms, far more than its launch
_STREAM_BYTES = 2**22  # per device: beyond the caches of a core
_STREAM_PASSES = 8  # within one program, so that no memory is allocated while it runs
_REDUCED_BYTES = 2**20
_CHAIN = 17  # products so small that only their launch takes time


def local_cluster(mesh: Mesh) -> Cluster:
    """The devices of `mesh` as a cluster of one node, with rates measured now.

    The first call for a set of devices measures; later calls in the process return the cached
    result. With several processes, all measure together.

    Ignores the cost of launching a program, which overlaps with the step before.
    """
    return _measured(tuple(mesh.devices.flat))


@cache
def _measured(devices: tuple[Any, ...]) -> Cluster:
    mesh = Mesh(devices, ("all",), axis_types=(AxisType.Auto,))
    matmul: dict[RateType, float] = {
        name: _matmul_rate(mesh, dtype) for name, dtype in _rate_types(devices[0]).items()
    }
    small, large = (_all_reduce_seconds(mesh, size) for size in (4, _REDUCED_BYTES))
    memory_rate = _memory_rate(mesh)
    count = len(devices)
    sent_bytes = 2 * (count - 1) / count * _REDUCED_BYTES  # by each device of a ring
    link_rate = sent_bytes / max(large - small, 1e-9) if count > 1 else memory_rate
    chip = Chip(
        name=devices[0].platform,
        title=devices[0].device_kind,
        peak_flop_per_second=matmul,
        memory_bytes=_memory_bytes(devices),
        memory_bytes_per_second=memory_rate,
        attainable=Attainable(
            matmul_fraction=1.0,
            matmul_ramp_seconds=0.0,
            convolution_fraction=min(1.0, _convolution_rate(mesh) / matmul["f32"]),
            memory_fraction=1.0,
            launch_seconds=_launch_seconds(mesh),
        ),
        runtime_reserve_bytes=0,
        sources={"*": _SOURCE},
    )
    return Cluster(
        name=NAME,
        title=f"{count} x {chip.title}, as measured",
        chip=chip,
        devices_per_node=count,
        link=Link(kind="host", bytes_per_second=link_rate),
        library=_library(start_seconds=small if count > 1 else 0.0),
        max_device_count=count,
        sources={"*": _SOURCE},
    )


def _library(*, start_seconds: float) -> CommunicationLibrary:
    ring = CollectiveMethod(
        algorithm="ring",
        protocol="simple",
        bandwidth_fraction=1.0,
        base_seconds=start_seconds,
        link_hop_seconds=0.0,  # in the base: a small all-reduce was measured whole
        network_hop_seconds=0.0,
    )
    title = "all-reduce of this machine, as measured"
    return CommunicationLibrary(name=NAME, title=title, methods=(ring,), sources={"*": _SOURCE})


def _rate_types(device: Any) -> dict[RateType, Any]:
    """Data types to measure: a CPU computes bf16 in f32, so not both."""
    if device.platform == "cpu":
        return {"f32": jnp.float32}
    return {"f32": jnp.float32, "bf16": jnp.bfloat16}


def _memory_bytes(devices: tuple[Any, ...]) -> int:
    """Memory of one device: its own, or its share of the host memory."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    statistics = local[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)


def _matmul_rate(mesh: Mesh, dtype: Any) -> float:
    """FLOP/s of one device in square matrix products."""
    operands = _filled(mesh, (_WIDTH, _WIDTH), dtype)
    seconds = _seconds(lambda x: jnp.einsum("dij,djk->dik", x, x), operands)
    return 2 * _WIDTH**3 / seconds


def _convolution_rate(mesh: Mesh) -> float:
    """FLOP/s of one device in 3 x 3 convolutions, 64 channels to 64."""
    samples, size, channels = 4, 14, 64
    images = _filled(mesh, (samples, size, size, channels), jnp.float32)
    kernel = jnp.ones((3, 3, channels, channels), jnp.float32)

    def convolve(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, size, size, channels)
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return 2 * samples * size**2 * 9 * channels**2 / _seconds(convolve, images)


def _memory_rate(mesh: Mesh) -> float:
    """Memory bandwidth of one device in bytes/s, reads plus writes."""
    values = _filled(mesh, (_STREAM_BYTES // 4,), jnp.float32)

    def passes(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _STREAM_PASSES, lambda _, y: y + 1, x)

    return 2 * _STREAM_BYTES * _STREAM_PASSES / _seconds(passes, values)


def _launch_seconds(mesh: Mesh) -> float:
    """Seconds of launching one empty operation within a program."""
    operands = _filled(mesh, (4, 4), jnp.float32)

    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(_CHAIN):
            y = jnp.einsum("dij,djk->dik", y, x)
        return y

    one = _seconds(lambda x: jnp.einsum("dij,djk->dik", x, x), operands)
    return max(_seconds(chain, operands) - one, 0.0) / (_CHAIN - 1)


def _all_reduce_seconds(mesh: Mesh, size_bytes: int) -> float:
    """Seconds of an all-reduce of `size_bytes` per device."""
    values = _filled(mesh, (size_bytes // 4,), jnp.float32)
    whole = NamedSharding(mesh, PartitionSpec())
    return _seconds(lambda x: x.sum(axis=0), values, out_shardings=whole)


def _filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of ones with a row of `shape` on each device."""
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    return jax.jit(lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=sharding)()


def _seconds(function: Callable, argument: jax.Array, **options: Any) -> float:
    """Median seconds of one blocking call, without the first two."""
    compiled = jax.jit(function, **options).lower(argument).compile()
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(argument))
        times.append(time.perf_counter() - start)
    return median(times[2:])
