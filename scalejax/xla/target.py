"""Compilation targets: descriptions of a cluster for ahead-of-time compilation without devices.

Knows chips and clusters, and XLA's text for them (GpuTargetConfigProto); compiles nothing.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

from scalejax.core.errors import ProfileError
from scalejax.hardware import Chip, Cluster, CudaArchitecture, TpuArchitecture, load_chip
from scalejax.simulator.collectives.torus import slices

Backend = Literal["cuda", "tpu", "cpu"]

OLDEST_CAPABILITY = (8, 0)
"""Oldest compute capability that can be compiled for. Older chips are compiled for as if they were
this one, and costed at their own rates (tried with the plug-ins of jax 0.10.2 and 0.12.0)."""
OLDEST_SUBSTITUTE = "v100"
"""Chip whose sizes are used to compile for all older chips. The program is a substitute anyway and
depends little on these sizes; with a single chip for all, they share programs."""
_OLDEST_SHARED_MEMORY = (167_936, 166_912)
"""Shared memory per multiprocessor, and per block at most, of compute capability 8.0 (XLA's
GPU target descriptions, Apache-2.0)."""

_CUDNN_VERSIONS = {(10, 3): (9, 15), (0, 0): (9, 10)}
"""The cuDNN that is compiled for, by oldest compute capability: 9.10 is contemporary with CUDA
12.8; for 10.3 it is 9.15 (XLA's GPU target description of GB300, Apache-2.0): 9.10 lacks it."""

MAX_CPU_DEVICES = 2048
"""Virtual CPU devices that compile; 4096 do not (tried with jax 0.10.2 and 0.12.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The devices that a program is compiled for."""

    backend: Backend
    """Compiler backend."""
    name: str
    """Instruction set: "sm_90", "v5e", "cpu"."""
    device_count: int
    """Devices in the mesh."""
    topology: str = ""
    """Topology in XLA's notation, nodes and devices per node: "1x32x8"; for TPUs, the chips along
    each side of the torus: "v5e:4x4"; "" for a CPU."""
    description: str = ""
    """Text of XLA's GpuTargetConfigProto; for a TPU, the name of its core configuration; "" for a
    CPU."""


def target_for(cluster: Cluster, device_count: int, backend: Backend | None = None) -> Target:
    """Compilation target of `device_count` devices of `cluster`.

    Args:
        cluster: the cluster to compile for.
        device_count: devices in the mesh.
        backend: compiler backend; if None, that of the cluster's chip where it is installed, else
            the CPU's, whose FLOP carry over (see `Program.backend`).

    Raises:
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler is not installed, or does not support as many devices.
    """
    cluster.require_devices(device_count)
    architecture, tpu = cluster.chip.cuda, cluster.chip.tpu
    if backend is None:
        backend = _own_backend(cluster.chip)
    if backend == "tpu" and tpu is not None:
        return Target(
            backend="tpu",
            name=tpu.generation,
            device_count=device_count,
            topology=f"{tpu.generation}:{'x'.join(map(str, _torus(tpu, device_count)))}",
            description=tpu.cores,
        )
    if backend != "cuda" or architecture is None:
        if device_count > MAX_CPU_DEVICES:
            raise ProfileError(
                f"devices={device_count} is refused: the CPU substitute compiles for at most "
                f"{MAX_CPU_DEVICES}. The compiler for NVIDIA GPUs takes any number: "
                "pip install 'scalejax[gpu-target]'."
            )
        return Target(backend="cpu", name="cpu", device_count=device_count)
    per_node = min(cluster.devices_per_node, device_count)
    nodes = -(-device_count // per_node)
    major, minor = _capability(architecture)
    return Target(
        backend="cuda",
        name=f"sm_{major}{minor}",
        device_count=device_count,
        topology=f"1x{nodes}x{per_node}",
        description=_describe(cluster.chip, architecture),
    )


def _own_backend(chip: Chip) -> Backend:
    """Backend of the compiler for `chip`, if it is installed; otherwise the CPU's."""
    if chip.cuda is not None and has_cuda_compiler():
        return "cuda"
    return "tpu" if chip.tpu is not None and has_tpu_compiler() else "cpu"


def _torus(tpu: TpuArchitecture, device_count: int) -> tuple[int, ...]:
    """Chips along each side of a slice of `device_count` devices, shortest first.

    The slice is as cubic as possible. From four chips on, two sides are even: hosts hold 2 x 2.
    """
    chips, odd_core = divmod(device_count, tpu.devices_per_chip)
    tori = [] if odd_core else list(slices(chips, tpu.torus_dimensions))
    if not tori:
        per_chip = tpu.devices_per_chip
        fours = 4 * per_chip
        below = max(2 * per_chip, device_count // fours * fours)
        raise ProfileError(
            f"devices={device_count} is refused: slices of TPU {tpu.generation} have {per_chip}, "
            f"{2 * per_chip} or multiples of {fours} devices "
            f"(nearest: {below} or {(device_count // fours + 1) * fours})."
        )
    return min(tori, key=lambda sides: (max(sides), sum(sides)))


def has_tpu_compiler() -> bool:
    """Whether libtpu, the compiler for TPUs, is installed (no TPU is needed)."""
    return importlib.util.find_spec("libtpu") is not None


def has_cuda_compiler() -> bool:
    """Whether a compiler plug-in for NVIDIA GPUs is installed (no GPU is needed)."""
    try:
        return any(
            importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None
            for version in (13, 12)
        )
    except ModuleNotFoundError:  # there is no plug-in of any kind
        return False


def _describe(chip: Chip, architecture: CudaArchitecture) -> str:
    """The text of XLA's GpuTargetConfigProto for `chip`, or for the substitute of older chips.

    The numbers that are equal for all chips since 2012 are CUDA's own limits (CUDA C
    programming guide, "Compute capabilities"); library versions are those of CUDA 12.8.
    """
    major, minor = _capability(architecture)
    cudnn = cudnn_version((major, minor))
    if architecture.compute_capability >= OLDEST_CAPABILITY:
        shared = architecture.shared_memory_per_sm_bytes
        shared_optin = architecture.shared_memory_per_block_optin_bytes
    else:
        shared, shared_optin = _OLDEST_SHARED_MEMORY
        chip = _substitute()
        architecture = chip.cuda or architecture
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
  core_count: {architecture.sm_count} fpus_per_core: {architecture.fpus_per_sm}
  clock_rate_ghz: {architecture.clock_hz / 1e9:.6g} l2_cache_size: {architecture.l2_bytes}
  memory_bandwidth: {chip.memory_bytes_per_second:.0f} device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {cudnn[0]} minor: {cudnn[1]} }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{chip.title}"
"""


@cache
def _substitute() -> Chip:
    return load_chip(OLDEST_SUBSTITUTE)


def cudnn_version(capability: tuple[int, int]) -> tuple[int, int]:
    """(major, minor) of the cuDNN that is compiled for on a GPU of `capability`."""
    return next(found for oldest, found in _CUDNN_VERSIONS.items() if capability >= oldest)


def _capability(architecture: CudaArchitecture) -> tuple[int, int]:
    return max(architecture.compute_capability, OLDEST_CAPABILITY)
