"""Processes of one device each, measured while they share this machine's cores.

Starts them and collects what the first says. They exchange over loopback.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from scalejax.calibrate.exchange import SIZES, Exchange
from scalejax.calibrate.probes import Grid
from scalejax.documents import build, plain
from scalejax.errors import ConfigError
from scalejax.hardware import Chip

TAG = "measured"
"""First word of the line that holds what was."""
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the processes are to measure."""

    grid: Grid
    """Of the chip."""
    calls: int
    """How often each all-reduce is timed."""
    sizes: tuple[int, ...] = SIZES
    """Bytes of the all-reduces."""
    source: str
    """Where the numbers come from, for the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What they measured."""

    chip: Chip
    """The device of one process while the others are as busy."""
    exchanges: tuple[Exchange, ...]
    """All-reduces between them."""


def between_processes(count: int, probe: Probe) -> Between:
    """What `count` processes of one device each measure together.

    Raises:
        ConfigError: if they could not exchange anything, with what they said.
    """
    command = [sys.executable, "-m", "scalejax.calibrate.worker", str(_free_port()), str(count)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    workers = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(plain(probe))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    try:
        said = [worker.communicate(timeout=deadline - time.monotonic()) for worker in workers]
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"processes={count} is refused: they were not done in {_PATIENCE_SECONDS:g} s."
        ) from error
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (_, errors) in zip(workers, said, strict=True):
        if worker.returncode:
            last = (errors.strip().splitlines() or ["nothing"])[-1]
            raise ConfigError(f"processes={count} is refused: they said {last!r}.")
    # The library that connects them prints on standard output too.
    line = next(line for line in said[0][0].splitlines() if line.startswith(TAG))
    return build(Between, json.loads(line.removeprefix(TAG)))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
