"""Checks of environment variables that make runs fail or slow."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from scalejax.core.process_group import LOOPBACK
from scalejax.measure.doctor.finding import Finding, found

_LONGEST = 40
"""Most characters of a value that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about the process that decide whether a variable is harmful."""

    cores: int
    """Cores that this process may use."""
    gpus: int
    """NVIDIA GPUs known to the driver."""
    processes: int = 1
    """Number of processes of the run."""
    coordinator: str | None = None
    """Address of the coordinator, host and port."""


class _Rule(NamedTuple):
    """Condition under which a variable is harmful."""

    names: str
    """Regular expression of the names."""
    values: str
    """Regular expression of the harmful values."""
    fix: str
    """Their effect, and what to do; {name} is the variable."""
    is_bad: bool = False
    """Whether runs certainly fail or become very slow; otherwise they may."""
    where: Callable[[str, Surroundings], bool] = lambda value, around: True
    """Whether such a value is harmful in these surroundings."""


_ON, _OFF = r"(?i)(?!\s*(0|false|no|off)?\s*$).*", r"(?i)\s*(0|false|no|off)\s*"
_ANY = ".+"
_PLATFORM = "JAX_PLATFORMS|JAX_PLATFORM_NAME"
_RULES = (
    _Rule(
        _PLATFORM, "cpu", "the GPUs stay idle: unset {name}", True,
        lambda value, around: around.gpus > 0,
    ),
    _Rule(
        _PLATFORM, "(.*,)?(cuda|gpu)(,.*)?",
        "there is no NVIDIA driver, and JAX will not start: unset {name}", True,
        lambda value, around: not around.gpus,
    ),
    _Rule(
        "CUDA_VISIBLE_DEVICES", r"\s*(-1|NoDevFiles)?\s*", "it hides all GPUs: unset {name}", True,
        lambda value, around: around.gpus > 0,
    ),
    _Rule(
        "CUDA_VISIBLE_DEVICES", r"\w.*",
        "it hides some GPUs; as it should where each process has its own", False,
        lambda value, around: len(value.split(",")) < around.gpus,
    ),
    _Rule(
        "JAX_DISABLE_JIT", _ON,
        "every operation runs on its own, a hundred times slower: unset {name}", True,
    ),
    _Rule(
        "JAX_DEBUG_NANS|JAX_DEBUG_INFS|JAX_ENABLE_CHECKS|JAX_LOG_COMPILES", _ON,
        "for debugging: every step waits for its results; unset {name}",
    ),
    _Rule(
        "JAX_ENABLE_X64", _ON,
        "arrays that do not say otherwise take twice the memory: unset {name}",
    ),
    _Rule(
        "JAX_DEFAULT_MATMUL_PRECISION", "highest|float32|high|tensorfloat32",
        "products of f32 take up to 16 times as long on tensor cores: unset {name}",
    ),
    _Rule(
        "JAX_COORDINATOR_ADDRESS|JAX_NUM_PROCESSES|JAX_PROCESS_ID|JAX_LOCAL_DEVICE_IDS", _ANY,
        "JAX believes it before any scheduler; left over from another run? unset {name}",
    ),
    _Rule(
        "XLA_FLAGS", ".*xla_force_host_platform_device_count.*",
        "it divides the CPU into devices that share its cores; --cpu-devices does so per run",
    ),
    _Rule(
        "XLA_FLAGS", ".*xla_dump_.*",
        "XLA writes every program it compiles to files: take the --xla_dump_ flags out",
    ),
    _Rule(
        "XLA_FLAGS", r".*(autotune_level=0|backend_optimization_level=[01]\b|opt_set=).*",
        "kernels are chosen or optimised less, and steps take longer: take that flag out",
    ),
    _Rule(
        "XLA_PYTHON_CLIENT_PREALLOCATE", _OFF,
        "memory is allocated piece by piece, and fragments: unset {name}",
    ),
    _Rule(
        "XLA_PYTHON_CLIENT_ALLOCATOR", "platform",
        "every array is allocated by the driver, which stalls the GPU: unset {name}", True,
    ),
    _Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION", r"0?\.[0-4]\d*",
        "less than half of the GPU's memory may be used: unset {name}, or give 0.9",
    ),
    _Rule(
        "TF_CPP_MIN_LOG_LEVEL", r"0*([3-9]|[1-9]\d+)",
        "XLA's errors are not shown: unset {name}",
    ),
    _Rule(
        "TF_FORCE_GPU_ALLOW_GROWTH|TF_GPU_ALLOCATOR|TF_XLA_FLAGS|TF_CUDNN_DETERMINISTIC", _ANY,
        "TensorFlow reads it and JAX does not: XLA_PYTHON_CLIENT_... and XLA_FLAGS are JAX's",
    ),
    _Rule("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel: unset {name}", True),
    _Rule(
        "NCCL_(P2P|SHM|IB|NVLS)_DISABLE", _ON,
        "NCCL does not use the fast links between GPUs: unset {name}",
    ),
    _Rule(
        "NCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS|NTHREADS)", _ANY,
        "NCCL's own choice by size is overruled: unset {name}",
    ),
    _Rule(
        "NCCL_DEBUG", "(?i)info|trace",
        "every process fills its log: NCCL_DEBUG=WARN says what is wrong",
    ),
    _Rule(
        "NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME", "lo|docker0",
        "other machines are not reached through it: name the interface that they see", False,
        lambda value, around: around.processes > 1,
    ),
    _Rule(
        "OMP_NUM_THREADS|OPENBLAS_NUM_THREADS|MKL_NUM_THREADS", r"\d+",
        "more threads than cores wait for each other: unset {name}", False,
        lambda value, around: int(value) > around.cores,
    ),
    _Rule(
        "LD_LIBRARY_PATH", "(?i).*(cuda|cudnn|nccl).*",
        "its CUDA, cuDNN or NCCL is loaded before the one that came with JAX: unset {name}",
    ),
    _Rule(
        "LD_PRELOAD", _ANY,
        "it is loaded into every process, workers of the input too: unset it if in doubt",
    ),
)  # fmt: skip
_PROXY = re.compile(r"(https?|all|grpc)_proxy", re.IGNORECASE)


def variable_findings(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """A finding for each harmful variable, or one finding if there is none."""
    harmful = [
        found(
            "variables",
            name,
            _shortened(value),
            "unset",
            warn=True,
            bad=rule.is_bad,
            fix=rule.fix.format(name=name),
        )
        for name, value in sorted(environment.items())
        for rule in _RULES
        if re.fullmatch(rule.names, name)
        and re.fullmatch(rule.values, value, re.DOTALL)
        and rule.where(value, around)
    ]
    yield from harmful
    proxies = [name for name in sorted(environment) if _PROXY.fullmatch(name) and environment[name]]
    host = around.coordinator.rpartition(":")[0] if around.coordinator else LOOPBACK
    if proxies and not _is_spared(environment, host):
        url = re.sub(r"//[^/@]*@", "//", environment[proxies[0]])  # without name and password
        yield found(
            "variables",
            proxies[0],
            _shortened(url),
            "not for other processes",
            warn=True,
            fix=f"processes would be looked for behind the proxy: add {host} to no_proxy",
        )
    elif not harmful:
        yield found("variables", "harmful", "none set", "none", fix="")


def _is_spared(environment: Mapping[str, str], host: str) -> bool:
    """Whether no_proxy exempts the host from the proxy."""
    spared = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    names = [name.strip().lstrip(".*") for name in spared.split(",")]
    return spared.strip() == "*" or any(name and host.endswith(name) for name in names)


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
