"""Measurements of several processes of one device each that share the cores of this machine.

Starts the workers and reads the output of the first. They communicate over loopback.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from tempfile import TemporaryFile
from threading import Event, Timer

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, plain
from scalejax.hardware import Chip
from scalejax.measure.devices.collectives import SIZES, MeasuredCollective
from scalejax.measure.devices.probes import Grid

TAG = "measured"
"""Prefix of the output line with the measurements."""
STAGE = "measuring"
"""Prefix of the output lines that name the current measurement."""
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measurements to make in the processes."""

    grid: Grid
    """Shapes to time on the chip."""
    calls: int
    """Number of timed calls of each all-reduce."""
    sizes: tuple[int, ...] = SIZES
    """Payloads of the all-reduces in bytes."""
    source: str
    """Source of the numbers, for the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Measurements of the processes."""

    chip: Chip
    """The device of one process while the others are under the same load."""
    collectives: tuple[MeasuredCollective, ...]
    """All-reduces between them."""


def between_processes(
    count: int, probe: Probe, on_stage: Callable[[str], None] = lambda name: None
) -> Between:
    """Measurements of `count` concurrent processes of one device each.

    Args:
        count: number of processes.
        probe: measurements to make.
        on_stage: called with the name of each stage as it begins.

    Raises:
        ConfigError: if they could not communicate, with their last output.
    """
    command = [
        sys.executable,
        "-m",
        "scalejax.measure.devices.worker",
        str(_free_port()),
        str(count),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with ExitStack() as files:
        logs = [files.enter_context(TemporaryFile("w+", errors="replace")) for _ in range(count)]
        workers = [
            subprocess.Popen(
                [*command, str(rank), json.dumps(plain(probe))],
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log,
                text=True,
            )
            for rank, log in enumerate(logs)
        ]
        answer = _answer(workers, on_stage)
        for worker, log in zip(workers, logs, strict=True):
            if worker.returncode:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["nothing"])[-1]
                raise ConfigError(
                    f"processes={count} is refused: the processes failed with {last!r}."
                )
    return build(Between, json.loads(answer))


def _answer(workers: Sequence["subprocess.Popen[str]"], on_stage: Callable[[str], None]) -> str:
    """Measurements printed by the first of `workers`, once all have ended.

    Raises:
        ConfigError: if they do not finish in time.
    """
    # Killing them on timeout closes their pipes, which ends the read.
    is_late = Event()

    def give_up() -> None:
        is_late.set()
        for worker in workers:
            worker.kill()

    timer, answer = Timer(_PATIENCE_SECONDS, give_up), ""
    timer.start()
    try:
        # The library that connects them prints on standard output too.
        with workers[0].stdout or nullcontext(()) as lines:
            for line in lines:
                if line.startswith(STAGE):
                    on_stage(line.removeprefix(STAGE).strip())
                elif line.startswith(TAG):
                    answer = line.removeprefix(TAG)
        for worker in workers:
            worker.wait()
    finally:
        timer.cancel()
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    if is_late.is_set():
        raise ConfigError(
            f"processes={len(workers)} is refused: they did not finish in {_PATIENCE_SECONDS:g} s."
        )
    return answer


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
