"""Timing of the compiled training step on the devices of this process and its peers.

As in training, one update is queued behind the running one while the next batch is prepared.
A step time runs from the end of the previous step to its own end, both waited for.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from itertools import pairwise
from typing import Any

import jax

from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ProfileError
from scalejax.core.heartbeat import Heartbeat
from scalejax.core.serialization import build, plain
from scalejax.data.loader.loader import Batches, training_batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.measure.bench.monitor import Monitor, Usage
from scalejax.measure.bench.plan import Settings
from scalejax.measure.bench.results import BenchResult
from scalejax.simulator.program import Program
from scalejax.training.features import open_examples
from scalejax.training.mesh import build_mesh
from scalejax.training.multihost import all_gather_text, is_first
from scalejax.training.reporter import Silent
from scalejax.training.run_folder import versions
from scalejax.training.state import TrainState
from scalejax.training.step import Step, build_step, init_state
from scalejax.xla import read_step

NextBatch = Callable[[Callable[[], bool]], tuple[Any, float]]
"""Called with whether the devices are busy; returns a batch and the seconds waited for it."""


def measure(
    run: ResolvedRun,
    settings: Settings,
    *,
    monitor_seconds: float,
    heartbeat: Heartbeat,
    on_program: Callable[[Program], None] | None = None,
) -> BenchResult:
    """Measurements of one round of a benchmark; equal in every process.

    Args:
        run: the run whose steps are timed.
        settings: devices and number of steps.
        monitor_seconds: sampling period of the usage of this process; 0 for none.
        heartbeat: notified of every step.
        on_program: called in the first process with the program of the compiled step, if it can
            be read.

    Raises:
        ConfigError: if the data cannot be read.
        DoesNotFit: if there are too few devices.
    """
    heartbeat.at("compiling", 0)
    load_average, started = os.getloadavg()[0], datetime.now().astimezone()
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    begin = time.perf_counter()
    update = step.lower().compile()
    compile_seconds = time.perf_counter() - begin
    if on_program is not None and is_first():
        with suppress(ProfileError):  # the step is timed anyway
            on_program(read_step(update, mesh, run))
    total = settings.warmup_steps + settings.steps
    monitor = Monitor(monitor_seconds, process=jax.process_index(), device_bytes=_device_bytes)
    with closing(_batches(run, step, total, settings)) as batches:
        next_batch = _next_batch(batches, settings)
        state = init_state(run, mesh)
        with monitor.sampling():
            stamps, waits = _timed(update, state, next_batch, total, heartbeat)
    seconds = [after - before for before, after in pairwise(stamps)]
    usage = monitor.samples(stamps[settings.warmup_steps])
    device = mesh.devices.flat[0]
    return BenchResult(
        platform=device.platform,
        device_kind=device.device_kind,
        versions=versions(),
        started=started.isoformat(timespec="seconds"),
        load_average=load_average,
        compile_seconds=compile_seconds,
        global_batch=run.split.global_batch,
        warmup_seconds=tuple(seconds[: settings.warmup_steps]),
        step_seconds=tuple(seconds[settings.warmup_steps :]),
        wait_seconds=tuple(waits[settings.warmup_steps :]),
        usage=_of_all_processes(usage),
    )


def _batches(run: ResolvedRun, step: Step, total: int, settings: Settings) -> Batches:
    return training_batches(
        open_examples(run, "train", Silent()),
        step.batch,
        seed=run.config.seed,
        start_step=0,
        stop_step=total if settings.batches == "real" else 1,
        how=run.config.input,
        skipped=Skipped(),
    )


def _next_batch(batches: Batches, settings: Settings) -> NextBatch:
    """Source of batches: those of training, or the first of them repeated."""
    if settings.batches == "real":
        return batches.next_beside
    kept = jax.block_until_ready(next(batches))
    batches.close()
    return lambda is_busy: (kept, 0.0)


def _timed(
    update: Any, state: TrainState, next_batch: NextBatch, total: int, heartbeat: Heartbeat
) -> tuple[list[float], list[float]]:
    """When the first of `total` steps began and each ended; seconds waited for batches."""
    queued: jax.Array | None = None

    def is_busy() -> bool:
        return queued is not None and not queued.is_ready()  # type: ignore[attr-defined]  untyped

    waits: list[float] = []
    stamps = [time.perf_counter()]
    for index in range(total):
        heartbeat.at("training", index)
        batch, waited_seconds = next_batch(is_busy)
        waits.append(waited_seconds)
        state, metrics = update(state, batch)
        if queued is not None:
            jax.block_until_ready(queued)
            stamps.append(time.perf_counter())
        queued = metrics["loss"]
    jax.block_until_ready((queued, state))
    stamps.append(time.perf_counter())
    return stamps, waits


def _of_all_processes(usage: tuple[Usage, ...]) -> tuple[Usage, ...]:
    said = all_gather_text(json.dumps([plain(each) for each in usage]))
    return tuple(build(Usage, each) for one in said for each in json.loads(one))


def _device_bytes() -> int | None:
    """Memory in use on the fullest device of this process; None if not reported."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(
        (each["bytes_in_use"] for each in statistics if "bytes_in_use" in each), default=None
    )
