"""The host: its name as a source, rates of its storage, and of copies to and from its devices."""

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from scalejax.core.errors import ConfigError

_REPEATS = 3


def source_of(command: str, libraries: Sequence[str]) -> str:
    """Source of numbers that `command` now measures on this host, with versions of `libraries`."""
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    return (
        f"{command}, {now}, {platform.machine()} with {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, {versions}"
    )


def storage_bytes_per_second(folder: Path, size_bytes: int) -> float:
    """Rate of writing a file in `folder`, including fsync.

    Raises:
        ConfigError: if nothing can be written there.
    """
    block = os.urandom(min(size_bytes, 2**20))
    times = []
    try:
        for _ in range(_REPEATS):
            start = time.perf_counter()
            with tempfile.NamedTemporaryFile(prefix=".scalejax-", dir=folder) as file:
                for _ in range(max(1, size_bytes // len(block))):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be written: {error}.") from error
    return max(1, size_bytes // len(block)) * len(block) / min(times)


def copy_bytes_per_second(size_bytes: int) -> tuple[float, float]:
    """Rates of copies of `size_bytes` (to the device, from the device)."""
    values = np.ones(size_bytes // 4, np.float32)
    to_device, to_host = [], []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        there = jax.device_put(values, jax.devices()[0], may_alias=False)
        jax.block_until_ready(there)
        middle = time.perf_counter()
        np.array(there, copy=True)
        to_device.append(middle - start)
        to_host.append(time.perf_counter() - middle)
    return size_bytes / min(to_device), size_bytes / min(to_host)
