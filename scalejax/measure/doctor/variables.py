"""Checks of environment variables that make runs fail or slow."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from scalejax.core.process_group import LOOPBACK
from scalejax.measure.doctor.finding import Finding, found

_LONGEST = 40
"""Most characters of a value that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts of the process on which the harm of a variable depends."""

    cores: int
    """Cores that this process may use."""
    gpus: int
    """NVIDIA GPUs known to the driver."""
    processes: int = 1
    """Number of processes of the run."""
    coordinator: str | None = None
    """Address of the coordinator, host and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """Condition under which a variable is harmful."""

    names: str
    """Regular expression of the names."""
    is_harmful: Callable[[str, Surroundings], bool]
    """Whether a value is harmful."""
    fix: str
    """Its effect, and what to do; {name} is the variable."""
    is_bad: bool = False
    """Whether runs surely fail or become very slow; else they may."""


def _is_on(value: str, around: Surroundings) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is_off(value: str, around: Surroundings) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off")


def _always(value: str, around: Surroundings) -> bool:
    return bool(value)


def _above_cores(value: str, around: Surroundings) -> bool:
    return value.isdecimal() and int(value) > around.cores


def _holds(part: str) -> Callable[[str, Surroundings], bool]:
    return lambda value, around: part in value


def _below_half(value: str, around: Surroundings) -> bool:
    return bool(re.fullmatch(r"0?\.\d+", value)) and float(value) < 0.5


_RULES = (
    _Rule(
        names="JAX_PLATFORMS|JAX_PLATFORM_NAME",
        is_harmful=lambda value, around: around.gpus > 0 and value == "cpu",
        fix="the GPUs stay idle: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="JAX_PLATFORMS|JAX_PLATFORM_NAME",
        is_harmful=lambda value, around: (
            not around.gpus and bool({"cuda", "gpu"} & {*value.split(",")})
        ),
        fix="there is no NVIDIA driver, and JAX will not start: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="CUDA_VISIBLE_DEVICES",
        is_harmful=lambda value, around: (
            around.gpus > 0 and value.strip() in ("", "-1", "NoDevFiles")
        ),
        fix="it hides all GPUs: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="CUDA_VISIBLE_DEVICES",
        is_harmful=lambda value, around: (
            bool(re.match(r"\w", value)) and len(value.split(",")) < around.gpus
        ),
        fix="it hides some GPUs; as it should where each process has its own",
    ),
    _Rule(
        names="JAX_DISABLE_JIT",
        is_harmful=_is_on,
        fix="every operation runs on its own, a hundred times slower: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="JAX_DEBUG_NANS|JAX_DEBUG_INFS|JAX_ENABLE_CHECKS|JAX_LOG_COMPILES",
        is_harmful=_is_on,
        fix="for debugging: every step waits for its results; unset {name}",
    ),
    _Rule(
        names="JAX_ENABLE_X64",
        is_harmful=_is_on,
        fix="arrays that do not say otherwise take twice the memory: unset {name}",
    ),
    _Rule(
        names="JAX_DEFAULT_MATMUL_PRECISION",
        is_harmful=lambda value, around: value in ("highest", "float32", "high", "tensorfloat32"),
        fix="products of f32 take up to 16 times as long on tensor cores: unset {name}",
    ),
    _Rule(
        names="JAX_COORDINATOR_ADDRESS|JAX_NUM_PROCESSES|JAX_PROCESS_ID|JAX_LOCAL_DEVICE_IDS",
        is_harmful=_always,
        fix="JAX believes it before any scheduler; left over from another run? unset {name}",
    ),
    _Rule(
        names="XLA_FLAGS",
        is_harmful=_holds("xla_force_host_platform_device_count"),
        fix="it divides the CPU into devices that share its cores; --cpu-devices does so per run",
    ),
    _Rule(
        names="XLA_FLAGS",
        is_harmful=_holds("xla_dump_"),
        fix="XLA writes every program it compiles to files: take the --xla_dump_ flags out",
    ),
    _Rule(
        names="XLA_FLAGS",
        is_harmful=lambda value, around: bool(
            re.search(r"autotune_level=0|backend_optimization_level=[01]\b|opt_set=", value)
        ),
        fix="kernels are chosen or optimised less, and steps take longer: take that flag out",
    ),
    _Rule(
        names="XLA_PYTHON_CLIENT_PREALLOCATE",
        is_harmful=_is_off,
        fix="memory is allocated piece by piece, and fragments: unset {name}",
    ),
    _Rule(
        names="XLA_PYTHON_CLIENT_ALLOCATOR",
        is_harmful=lambda value, around: value == "platform",
        fix="every array is allocated by the driver, which stalls the GPU: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="XLA_PYTHON_CLIENT_MEM_FRACTION",
        is_harmful=_below_half,
        fix="less than half of the GPU's memory may be used: unset {name}, or give 0.9",
    ),
    _Rule(
        names="TF_CPP_MIN_LOG_LEVEL",
        is_harmful=lambda value, around: value.isdecimal() and int(value) >= 3,
        fix="XLA's errors are not shown: unset {name}",
    ),
    _Rule(
        names="TF_FORCE_GPU_ALLOW_GROWTH|TF_GPU_ALLOCATOR|TF_XLA_FLAGS|TF_CUDNN_DETERMINISTIC",
        is_harmful=_always,
        fix="TensorFlow reads it and JAX does not: XLA_PYTHON_CLIENT_... and XLA_FLAGS are JAX's",
    ),
    _Rule(
        names="CUDA_LAUNCH_BLOCKING",
        is_harmful=_is_on,
        fix="the host waits for every kernel: unset {name}",
        is_bad=True,
    ),
    _Rule(
        names="NCCL_(P2P|SHM|IB|NVLS)_DISABLE",
        is_harmful=_is_on,
        fix="NCCL does not use the fast links between GPUs: unset {name}",
    ),
    _Rule(
        names="NCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS|NTHREADS)",
        is_harmful=_always,
        fix="NCCL's own choice by size is overruled: unset {name}",
    ),
    _Rule(
        names="NCCL_DEBUG",
        is_harmful=lambda value, around: value.upper() in ("INFO", "TRACE"),
        fix="every process fills its log: NCCL_DEBUG=WARN says what is wrong",
    ),
    _Rule(
        names="NCCL_SOCKET_IFNAME|GLOO_SOCKET_IFNAME",
        is_harmful=lambda value, around: value in ("lo", "docker0") and around.processes > 1,
        fix="other machines are not reached through it: name the interface that they see",
    ),
    _Rule(
        names="OMP_NUM_THREADS|OPENBLAS_NUM_THREADS|MKL_NUM_THREADS",
        is_harmful=_above_cores,
        fix="more threads than cores wait for each other: unset {name}",
    ),
    _Rule(
        names="LD_LIBRARY_PATH",
        is_harmful=lambda value, around: bool(re.search(r"cuda|cudnn|nccl", value.lower())),
        fix="its CUDA, cuDNN or NCCL is loaded before the one that came with JAX: unset {name}",
    ),
    _Rule(
        names="LD_PRELOAD",
        is_harmful=_always,
        fix="it is loaded into every process, workers of the input too: unset it if in doubt",
    ),
)
_NEAREST = f"{LOOPBACK}:0"
"""Coordinator address of a run on this machine only."""
_PROXY = re.compile(r"(https?|all|grpc)_proxy", re.IGNORECASE)


def variable_findings(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """A finding for each harmful variable, or one finding if there is none."""
    bitten = False
    for name in sorted(environment):
        value = environment[name]
        rules = [rule for rule in _RULES if re.fullmatch(rule.names, name)]
        rules = [rule for rule in rules if rule.is_harmful(value, around)]
        for rule in rules:
            bitten = True
            yield found(
                "variables",
                name,
                _shortened(value),
                "unset",
                warn=not rule.is_bad,
                bad=rule.is_bad,
                fix=rule.fix.format(name=name),
            )
    proxies = [name for name in sorted(environment) if _PROXY.fullmatch(name) and environment[name]]
    if proxies and not _is_spared(environment, around.coordinator or _NEAREST):
        bitten = True
        host = _host(around.coordinator or _NEAREST)
        yield found(
            "variables",
            proxies[0],
            _without_secret(environment[proxies[0]]),
            "not for other processes",
            warn=True,
            fix=f"processes would be looked for behind the proxy: add {host} to no_proxy",
        )
    if not bitten:
        yield found("variables", "harmful", "none set", "none", fix="")


def _is_spared(environment: Mapping[str, str], coordinator: str) -> bool:
    """Whether no_proxy exempts the coordinator from the proxy."""
    spared = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    names = [name.strip().lstrip(".*") for name in spared.split(",")]
    if spared.strip() == "*":
        return True
    return any(name and _host(coordinator).endswith(name) for name in names)


def _host(coordinator: str) -> str:
    return coordinator.rpartition(":")[0]


def _without_secret(url: str) -> str:
    """`url` without user name and password."""
    return _shortened(re.sub(r"//[^/@]*@", "//", url))


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
