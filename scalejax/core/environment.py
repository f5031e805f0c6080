"""On which devices JAX runs in this process: decided before it is first used.

Knows environment variables and device files, and imports JAX only to correct one that has
already been imported.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.units import counted

GPU_FLAGS = (
    # Off by default, and then gradients are reduced after the backward pass and not during it.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    # How many collectives may be under way at once; the default is one, the next then waits.
    "--xla_gpu_experimental_parallel_collective_overlap_limit=8",
)
"""How XLA schedules a step for NVIDIA GPUs, where it trains and where it is only costed."""

MAX_CPU_DEVICES = 512
"""Virtual devices that one machine can still train on: 100,000 took 14,000 threads and 19 GB."""

_NVIDIA_DRIVER = "/dev/nvidiactl"

_ACCELERATOR_FILES = (_NVIDIA_DRIVER, "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""What the drivers of NVIDIA (Linux, WSL), AMD and Google put in /dev."""


def compiler_settings() -> dict[str, str]:
    """What the user has set that changes the program XLA makes of a step, by variable."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def nvidia_gpus() -> int:
    """NVIDIA GPUs that the driver offers here; in a container, those that were given to it. None
    are seen where Windows has the driver, which does not say how many."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


def has_accelerator() -> bool:
    """Whether JAX is to look for an accelerator here, as far as can be told without it."""
    wanted = os.environ.get("JAX_PLATFORMS")
    is_there = any(Path(name).exists() for name in _ACCELERATOR_FILES)
    return is_there if wanted is None else wanted != "cpu"


def choose_platform(cpu_devices: int | None = None) -> None:
    """Let JAX use what accelerator there is, or else the CPU, quietly.

    A compiler plug-in for GPUs without a driver logs an error at every start of JAX; so where
    there is no driver, JAX is told to look for the CPU alone. What the user has set in
    JAX_PLATFORMS is left as it is, unless virtual devices are asked for.

    Args:
        cpu_devices: virtual devices into which to divide the CPU; if None, no division.

    Raises:
        ConfigError: if JAX already runs with another number of devices.
    """
    if cpu_devices is None:
        if not any(Path(name).exists() for name in _ACCELERATOR_FILES):
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        elif Path(_NVIDIA_DRIVER).exists():
            # The user's own flags come last, and so have the last word.
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


# What glibc's allocator is asked to do in a process of its own; with another C library, nothing.

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # <malloc.h>
_LEAST_ARENAS = 4
"""Measured on 2 cores: experiments/memory_flat."""


def keep_pages() -> None:
    """Keep what arrays leave free for the next ones, as small blocks are kept: the system takes
    time to give pages anew."""
    _set_option(_MMAP_THRESHOLD, 2**26)
    _set_option(_TRIM_THRESHOLD, 2**27)


def limit_arenas() -> None:
    """Let threads share an arena for each core, at least four, unless the environment says how
    many.

    Every checkpoint is written by new threads. With eight arenas for each core, as is the default,
    what they free comes to lie in ever other ones, and a long run takes more and more memory of
    which it uses no more than at its beginning. Without effect once there are more than eight.
    """
    is_chosen = "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_chosen and "MALLOC_ARENA_MAX" not in os.environ:
        _set_option(_ARENA_MAX, max(_LEAST_ARENAS, os.cpu_count() or 1))


def _set_option(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another library of C
        ctypes.CDLL(None).mallopt(option, value)


# What the system grants this process: the cores it may run on, and an end with its caller.

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def machine_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_caller(caller: int | None = None) -> None:
    """Have the kernel kill this process when its caller ends, however that ends (Linux only).

    Args:
        caller: its process; where that is known, a caller that is gone already counts, too.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if caller is not None and os.getppid() != caller:
        os.kill(os.getpid(), signal.SIGKILL)


# How many cores this process may use to make batches.

_limits: list[int] = []


def usable_cores() -> int:
    """Cores that this process may run on, or fewer if it was told so."""
    return _limits[-1] if _limits else machine_cores()


def limit_cores(count: int) -> None:
    """Use no more than `count` cores: other processes make batches on the rest."""
    _limits.append(count)
