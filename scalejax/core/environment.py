"""The environment of this process: JAX's platform, glibc's allocator, cores, its parent, the user's
own modules.

The platform is chosen before JAX is first used, from environment variables and device files; JAX is
only imported to reconfigure it, if it has been imported already.
"""

import contextlib
import ctypes
import importlib
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from scalejax.core.errors import (
    ConfigError,
    in_one_line,
    refusal,
    require_at_least,
    unknown_name,
)
from scalejax.core.units import counted

GPU_FLAGS = (
    # Off by default: gradients are then reduced after the backward pass instead of during it.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    # Collectives in flight at once; the default is one.
    "--xla_gpu_experimental_parallel_collective_overlap_limit=8",
)
"""XLA flags that schedule a step for NVIDIA GPUs, both to train it and to cost it."""

_OLDER_SHARDINGS = "--xla_enable_hlo_sharding_v3=false"

MAX_CPU_DEVICES = 512
"""Most virtual devices on one machine: 100,000 took 14,000 threads and 19 GB."""

_NVIDIA_DRIVER = "/dev/nvidiactl"

_ACCELERATOR_FILES = (_NVIDIA_DRIVER, "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of the drivers of NVIDIA (Linux, WSL), AMD and Google."""


def compiler_settings() -> dict[str, str]:
    """Environment variables set by the user that change how XLA compiles a step."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
    found = {name: os.environ.get(name, "") for name in names}
    for flag in required_flags():
        found["XLA_FLAGS"] = found["XLA_FLAGS"].replace(flag, "").strip()
    return {name: value for name, value in found.items() if value}


def required_flags() -> tuple[str, ...]:
    """XLA flags without which the installed compiler aborts the process on some steps.

    The compiler of jax 0.12 has a new form of shardings (HloShardingV3), and aborts if a
    `shard_map` is nested in another whose axis comes later in the mesh, with further axes left to
    the compiler (named_sharding.cc: "Manual axes must be sorted by mesh axis index"; 0.12.0.1, on
    CPUs and GPUs alike): pipeline stages within shards of the batch. It still accepts the form of
    jax 0.10. Other versions may not know the flag, and would end.
    """
    return (_OLDER_SHARDINGS,) if version("jaxlib").startswith("0.12.") else ()


def set_required_flags() -> None:
    """Have XLA, which reads its flags once, when JAX starts, also read `required_flags`; no effect
    on a JAX that already runs."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if has_required_flags() or (bridge is not None and bridge.backends_are_initialized()):
        return
    flags = (*required_flags(), os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def has_required_flags() -> bool:
    """Whether the environment has all `required_flags`, if there are any."""
    return set(required_flags()) <= set(os.environ.get("XLA_FLAGS", "").split())


def nvidia_gpus() -> int:
    """Number of NVIDIA GPUs in this machine or container; 0 under WSL, whose driver has no device
    files for them."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


def has_accelerator() -> bool:
    """Whether JAX will look for an accelerator here, without importing it."""
    wanted = os.environ.get("JAX_PLATFORMS")
    is_there = any(Path(name).exists() for name in _ACCELERATOR_FILES)
    return is_there if wanted is None else wanted != "cpu"


def avoid_absent_accelerator() -> None:
    """Have JAX, once it starts, use the CPU if there is no accelerator: see `choose_platform`."""
    if not any(Path(name).exists() for name in _ACCELERATOR_FILES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


class _AbsentGPUInOneLine(logging.Filter):
    """Shortens to one line the traceback that JAX logs for the plug-in for NVIDIA GPUs if there are
    none, and changes nothing else: JAX continues with the available devices, as it would have."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a record of JAX, shortened."""
        plugin = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        error = record.exc_info[1] if record.exc_info else None
        is_of_plugin = plugin.startswith("jax_plugins.xla_cuda")
        if is_of_plugin and isinstance(error, Exception) and not _has_nvidia_driver():
            record.msg = (
                "JAX's plug-in %s could not be initialized: no NVIDIA driver (there is no %s); JAX "
                "goes on without NVIDIA GPUs (%s)"
            )
            record.args = (plugin, _NVIDIA_DRIVER, in_one_line(error))
            record.exc_info = None
        return True


def _has_nvidia_driver() -> bool:
    return any(Path(name).exists() for name in (_NVIDIA_DRIVER, "/dev/dxg"))


def shorten_absent_plugin() -> None:
    """Have JAX say in one line that the plug-in for NVIDIA GPUs has no GPU, if it is installed only
    to compile.

    The package jax-cuda13-pjrt registers itself with every JAX in its environment (entry point
    `jax_plugins`), looks for cuDNN as JAX starts, and fails: twenty lines, in a session that
    requested no GPU. In its own processes scalejax has JAX look only for the CPU
    (`choose_platform`); a user's session keeps its platforms, and the line says why it has no GPU.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    if not any(isinstance(each, _AbsentGPUInOneLine) for each in logger.filters):
        logger.addFilter(_AbsentGPUInOneLine())


def choose_platform(cpu_devices: int | None = None) -> None:
    """Have JAX use the accelerator here, or else the CPU, without logged errors.

    A compiler plug-in for GPUs without a driver logs an error at every start of JAX, so without a
    driver JAX_PLATFORMS is set to the CPU. The user's JAX_PLATFORMS is kept, unless virtual devices
    are requested.

    Args:
        cpu_devices: virtual devices into which to divide the CPU; None for no division.

    Raises:
        ConfigError: if JAX already runs with another number of devices.
    """
    if cpu_devices is None:
        avoid_absent_accelerator()
        if Path(_NVIDIA_DRIVER).exists():
            # The user's own flags come last and override ours.
            flags = (*GPU_FLAGS, os.environ.get("XLA_FLAGS", ""))
            os.environ["XLA_FLAGS"] = " ".join(flags).strip()
        return
    require_at_least("cpu_devices", cpu_devices, 1)
    if cpu_devices > MAX_CPU_DEVICES:
        accepted = f"it must be at most {MAX_CPU_DEVICES}; each is a thread or more of this machine"
        raise ConfigError(refusal("cpu_devices", cpu_devices, accepted))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if "jax" in sys.modules:
        import jax

        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            accepted = f"JAX already runs here with {counted(jax.device_count(), 'device')}"
            raise ConfigError(refusal("cpu_devices", cpu_devices, accepted)) from error


# Options of glibc's allocator; no effect with another C library.

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # <malloc.h>
_LEAST_ARENAS = 4
"""Measured on 2 cores: experiments/memory_flat."""


def keep_pages() -> None:
    """Have the allocator keep freed pages of arrays for the next ones, since mapping new pages
    takes time."""
    _set_option(_MMAP_THRESHOLD, 2**26)
    _set_option(_TRIM_THRESHOLD, 2**27)


def release_pages() -> None:
    """Return freed memory to the system: arenas of many threads together keep gigabytes."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def limit_arenas() -> None:
    """Limit the allocator to one arena per core, at least four, unless the environment sets a
    limit.

    Every checkpoint is written by new threads. With the default of eight arenas per core, their
    freed memory is spread over ever more arenas, and the memory of a long run grows although its
    use does not. No effect once there are more than eight.
    """
    is_chosen = "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_chosen and "MALLOC_ARENA_MAX" not in os.environ:
        _set_option(_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def _set_option(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(option, value)


# Cores of this process, and its end with its parent.

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def machine_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def text_of(path: str | Path) -> str:
    """Content of a system file, such as one in /proc; "" if there is no such file."""
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def process_fields(process: int | str = "self") -> list[str]:
    """The fields of /proc/PID/stat after the process name, which may contain spaces: proc(5).

    Raises:
        OSError: if there is no such process, or no /proc.
    """
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def end_with_caller(caller: int) -> None:
    """Have the kernel kill this process when its parent exits for any reason (Linux only).

    Args:
        caller: process id of the parent, which may have exited already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Have `handler` handle these signals within; only in the main thread, as Python requires."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {n: signal.signal(n, handler) for n in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def terminated_as_interrupted() -> contextlib.AbstractContextManager[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does; only in the main thread."""
    return handling(_interrupt, signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Cores that this process may use to make batches.

_limits: list[int] = []


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, or the limit if one was set."""
    return _limits[-1] if _limits else machine_cores()


def limit_cores(count: int) -> None:
    """Limit this process to `count` cores: other processes make batches on the rest."""
    _limits.append(count)


# The user's own code.


def own_module(field: str, path: str) -> ModuleType:
    """The module of an import path "module:name" that `field` gives, imported from Python's search
    path or the working directory.

    Raises:
        ConfigError: if there is no such module, or its code fails.
    """
    name = path.partition(":")[0]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        said = in_one_line(error)
        accepted = f"{name!r}, installed or in {os.getcwd()}, must import, but {said}"
        raise ConfigError(refusal(field, path, accepted)) from error


def own_function(field: str, path: str, takes: str) -> Callable[..., Any]:
    """The function of an import path "module:function" that `field` gives.

    Args:
        field: the field.
        path: the import path.
        takes: description of the function's arguments.

    Raises:
        ConfigError: if there is no such module or function, or its code fails.
    """
    module = own_module(field, path)
    module_name, _, name = path.partition(":")
    function = getattr(module, name, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            unknown_name(field, path, [f"{module_name}:{each}" for each in functions])
        )
    if not callable(function):
        raise ConfigError(refusal(field, path, f"{name} must be a function of {takes}"))
    return function
