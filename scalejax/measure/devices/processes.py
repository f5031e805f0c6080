"""Measurements of several processes of one device each that share the cores of this machine.

They communicate over loopback.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.process_group import LOOPBACK, free_port
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.workers import Pool, Worker, WorkerFailed, report
from scalejax.hardware import Chip
from scalejax.measure.devices.collectives import (
    ROUNDS,
    SIZES,
    MeasuredCollective,
    timed_in_rounds,
)
from scalejax.measure.devices.machine import measure_chip, mesh_of
from scalejax.measure.devices.probes import Grid, all_reduce_round, seconds_of_all_reduce
from scalejax.measure.devices.timing import slowest_process

_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Measurements by the processes."""

    chip: Chip
    """The device of one process, measured while the others are under the same load."""
    collectives: tuple[MeasuredCollective, ...]
    """All-reduces between them."""


def between_processes(
    count: int,
    grid: Grid,
    source: str,
    on_progress: OnProgress = no_display,
    *,
    sizes: Sequence[int] = SIZES,
) -> Between:
    """Measurements of `count` concurrent processes of one device each.

    Args:
        count: number of processes.
        grid: shapes to time on the chip, and how often.
        source: source of the numbers, for the file.
        on_progress: called with the name of each stage as it begins.
        sizes: payloads of the all-reduces in bytes.

    Raises:
        ConfigError: if they could not communicate; the message has their last output.
    """
    call = partial(_measured, f"{LOOPBACK}:{free_port()}", count, grid, source, sizes)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    measured: dict[int, Between] = {}
    with Pool(lambda rank: Worker(call, environment=environment), count) as pool:
        try:
            for rank, kind, value in pool.work(range(count), seconds=_PATIENCE_SECONDS):
                if kind == "progress":
                    on_progress(value)
                elif kind == "answer":
                    measured[rank] = value
                else:
                    reason = value.reason if isinstance(value, WorkerFailed) else str(value)
                    accepted = f"process {rank} of them failed: {reason}"
                    raise ConfigError(refusal("processes", count, accepted))
        except TimeoutError as error:
            accepted = f"they did not finish in {_PATIENCE_SECONDS:g} s"
            raise ConfigError(refusal("processes", count, accepted)) from error
    return measured[0]


def _measured(
    coordinator: str, processes: int, grid: Grid, source: str, sizes: Sequence[int], rank: int
) -> Between:
    """What one of the processes measures, together with the others; the first reports stages."""
    jax.distributed.initialize(coordinator, processes, rank)
    mesh = mesh_of(jax.devices())

    def begin(probe: Progress) -> None:
        if rank == 0:
            report(replace(probe, part=f"{probe.part} in {processes} processes"))

    rounds = {}
    for size in sizes:
        begin(Progress(part="collectives"))
        rounds[processes, size] = all_reduce_round(mesh, size, 4 * grid.calls // ROUNDS)
    seconds_of = partial(seconds_of_all_reduce, platform="cpu")
    collectives = timed_in_rounds(rounds, seconds_of, slowest_process)
    chip = measure_chip(mesh, grid, source, begin)
    jax.distributed.shutdown()
    return Between(chip=chip, collectives=tuple(collectives))
