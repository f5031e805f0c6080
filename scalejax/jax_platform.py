"""On which devices JAX runs in this process: decided before it is first used.

Knows environment variables and device files, and imports JAX only to correct one that has
already been imported.
"""

import os
import sys
from pathlib import Path

from scalejax.errors import ConfigError, refusal, require_at_least
from scalejax.units import counted

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
