"""Processes of one device each, measured while they share this machine's cores.

Starts them and collects what the first says. They exchange over loopback.
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
"""First word of the line that holds what was."""
STAGE = "measuring"
"""First word of the lines that say what is being measured."""
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
    collectives: tuple[MeasuredCollective, ...]
    """All-reduces between them."""


def between_processes(
    count: int, probe: Probe, on_stage: Callable[[str], None] = lambda name: None
) -> Between:
    """What `count` processes of one device each measure together.

    Args:
        count: processes.
        probe: what they are to measure.
        on_stage: called with the name of each piece of work as it begins.

    Raises:
        ConfigError: if they could not exchange anything, with what they said.
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
                raise ConfigError(f"processes={count} is refused: they said {last!r}.")
    return build(Between, json.loads(answer))


def _answer(workers: Sequence["subprocess.Popen[str]"], on_stage: Callable[[str], None]) -> str:
    """What the first of `workers` says that they measured, once all have ended.

    Raises:
        ConfigError: if they are not done in time.
    """
    # Killed when their time is up, they leave nothing more to read.
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
            f"processes={len(workers)} is refused: they were not done in {_PATIENCE_SECONDS:g} s."
        )
    return answer


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
