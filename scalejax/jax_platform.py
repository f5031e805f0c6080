"""On which devices JAX runs in this process: decided before it is first used.

Knows environment variables and device files, and imports JAX only to correct one that has
already been imported.
"""

import os
import sys
from pathlib import Path

from scalejax.errors import ConfigError, refusal, require_at_least

_ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""What the drivers of NVIDIA (Linux, WSL), AMD and Google put in /dev."""


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
        return
    require_at_least("cpu_devices", cpu_devices, 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if "jax" in sys.modules:
        import jax

        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            accepted = f"JAX already runs here with {jax.device_count()} devices"
            raise ConfigError(refusal("cpu_devices", cpu_devices, accepted)) from error
