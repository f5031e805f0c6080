"""Scheduler of the jobs of a sweep on worker processes, as many as fit on this machine.

A job is done when the records of its runs say so; a resumed sweep continues with the other jobs.
Knows processes and jobs; the workers train.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scalejax.core.environment import has_accelerator, terminated_as_interrupted
from scalejax.core.errors import ScalejaxError, require_at_least
from scalejax.core.folder import locked
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.workers import Pool, Worker, WorkerFailed
from scalejax.launch.slurm import SlurmResources
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import SweepPlan, begin_sweep
from scalejax.sweep.results import read_rows
from scalejax.sweep.slurm import train_by_slurm
from scalejax.sweep.worker import PART_FOR_PROGRAMS, JobTrainer
from scalejax.xla.worker_pool import free_bytes, worker_count

_SECONDS_TO_STOP = 60.0
"""Time for workers to save a checkpoint."""
_SECONDS_FOR_LOCK = 10.0
"""Time for workers of a killed sweep to end: they notice at once, and exit within milliseconds."""


def run_sweep(
    plan: SweepPlan,
    folder: SweepFolder,
    *,
    processes: int | None = None,
    cores: int | None = None,
    slurm: SlurmResources | None = None,
    on_progress: OnProgress = no_display,
) -> list[str]:
    """Train every unfinished run of `plan`; returns error messages.

    Args:
        plan: the plan, as written in `folder`.
        folder: folder of the sweep, not in use by another process.
        processes: concurrent jobs; if None, as many as cores and memory allow, and one
            with an accelerator; through SLURM, as many as it runs.
        cores: cores of each process, no matter how many there are, so that a repeated sweep has the
            same bits: XLA's order of summation depends on them. If None, an equal share of all.
        slurm: resources of each job through SLURM; None to train on this machine.
        on_progress: receives the progress of jobs, each of which is a part.

    Returns:
        Error messages, one for each failed job; the others are done.

    Raises:
        ConfigError: if another process is using `folder`.
        KeyboardInterrupt: on SIGINT or SIGTERM, after the workers have saved checkpoints.
    """
    require_at_least("processes", processes, 1)
    refused = f"another process is at work on the sweep in {str(folder.path)!r}: "
    refused += "wait for it, or stop it."
    with (
        locked(folder.lock, refused, seconds=_SECONDS_FOR_LOCK) as lock,  # workers inherit it
        terminated_as_interrupted(),
    ):
        is_finished = [row.is_finished for row in read_rows(plan, folder)]
        waiting = []
        for position, job in enumerate(plan.jobs):
            if all(is_finished[index] for index in job):
                on_progress(Progress(part=_title(plan, position), done=1))
                # Left if a kill came after the last run ended, before its checkpoints were removed.
                shutil.rmtree(folder.shared_checkpoints(job[0]), ignore_errors=True)
            else:
                waiting.append(position)
        if not waiting:
            return []
        if slurm is not None:
            return _train_by_slurm(plan, folder, slurm, processes, waiting, on_progress)
        if processes is None:
            processes = 1 if has_accelerator() else worker_count(len(waiting))
        count = min(processes, len(waiting))
        return _train(plan, folder, lock, count, cores, waiting, on_progress)


def _train(
    plan: SweepPlan,
    folder: SweepFolder,
    lock: int,
    count: int,
    cores: int | None,
    positions: Sequence[int],
    on_progress: OnProgress,
) -> list[str]:
    """Train the jobs at `positions` in `count` workers; returns error messages."""
    problems = []
    with Pool(_starter(plan, folder, count, cores, (lock,)), count) as pool:
        try:
            for index, kind, value in pool.work([plan.jobs[each] for each in positions]):
                title = _title(plan, positions[index])
                if kind == "progress":
                    on_progress(Progress(part=title, done=value))
                    continue
                if kind != "answer":
                    problems.append(f"{title}: {_reason(value)}")
                on_progress(Progress(part=title, done=1))
        except BaseException:
            pool.stop(signal.SIGTERM, _SECONDS_TO_STOP)  # a second interrupt kills them
            raise
    return problems


def _starter(
    plan: SweepPlan,
    folder: SweepFolder,
    count: int,
    cores: int | None,
    descriptors: Sequence[int] = (),
) -> Callable[[int], Worker]:
    """A function that starts one of `count` workers by number; each inherits the descriptors."""
    memory_bytes = int(PART_FOR_PROGRAMS * free_bytes() / count)
    trainer = JobTrainer(folder, memory_bytes, plan.modules)
    environment = _environment(plan)

    def start(number: int) -> Worker:
        log = folder.log(number)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            worker = Worker(
                trainer,
                name=str(log),
                environment=environment,
                log=file.fileno(),
                descriptors=descriptors,
            )
        if hasattr(os, "sched_setaffinity"):
            # Each on its own cores: workers that share cores wait for each other's threads.
            os.sched_setaffinity(worker.pid, _share(number, count, cores))
        return worker

    return start


# How long jobs take, inferred from their first seconds.

_SECONDS_WATCHED = 2.0
"""How long a job is watched after its first measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """How long a job takes."""

    startup_seconds: float
    """Time until its first update: the process, the data, the compiler."""
    training_seconds: float
    """Time from its first update to its end."""


def time_jobs(
    plan: SweepPlan, positions: Sequence[int], *, processes: int, cores: int | None
) -> list[JobTime]:
    """How long the jobs at `positions` would take, `processes` at a time: each is started in a
    temporary folder, watched for two seconds of training, and stopped.

    Raises:
        ScalejaxError: if one fails before that.
    """
    found: list[JobTime] = []
    with TemporaryDirectory() as place:
        folder = SweepFolder(path=Path(place))
        begin_sweep(plan, folder, resume=False)
        for first in range(0, len(positions), processes):
            wave = positions[first : first + processes]
            start = _starter(plan, folder, processes, cores)
            with ExitStack() as stack:
                workers = []
                for number, position in enumerate(wave):
                    workers.append(stack.enter_context(closing(start(number))))
                    workers[-1].send(plan.jobs[position])
                found += _watched(workers)
    return found


def _watched(workers: Sequence[Worker]) -> list[JobTime]:
    """Times of the jobs that `workers` have just been sent."""
    begin = time.monotonic()
    seen: dict[Any, list[tuple[float, float]]] = {worker.connection: [] for worker in workers}
    by_connection = {worker.connection: worker for worker in workers}
    waiting = list(seen)
    while waiting:
        for connection in wait(waiting):
            kind, value = by_connection[connection].receive()  # type: ignore[index]
            if kind not in ("progress", "answer"):
                raise ScalejaxError(_reason(value))
            marks = seen[connection]
            marks.append((time.monotonic() - begin, value if kind == "progress" else 1.0))
            is_enough = len(marks) > 1 and marks[-1][0] - marks[0][0] >= _SECONDS_WATCHED
            if is_enough or kind == "answer":
                waiting.remove(connection)
    return [_job_time(marks) for marks in seen.values()]


def _job_time(marks: Sequence[tuple[float, float]]) -> JobTime:
    """The time of a job from pairs of seconds and the fraction done by then; the last may be its
    end."""
    (first, done), (last, end) = marks[0], marks[-1]
    whole = (last - first) / (end - done) if end > done else 0.0
    return JobTime(startup_seconds=max(0.0, first - done * whole), training_seconds=whole)


def _train_by_slurm(
    plan: SweepPlan,
    folder: SweepFolder,
    resources: SlurmResources,
    most: int | None,
    positions: Sequence[int],
    on_progress: OnProgress,
) -> list[str]:
    """Train the jobs at `positions` as SLURM jobs; returns error messages."""
    problems = []

    def ended(position: int, problem: str | None) -> None:
        title = _title(plan, position)
        if problem is not None:
            problems.append(f"{title}: {problem}")
        on_progress(Progress(part=title, done=1))

    train_by_slurm(
        folder,
        [(position, plan.jobs[position]) for position in positions],
        resources,
        most=most or len(positions),
        asked={"modules": [*plan.modules], "cpu_devices": plan.cpu_devices, "devices": _most(plan)},
        on_end=ended,
        seconds_to_stop=_SECONDS_TO_STOP,
    )
    return problems


def _most(plan: SweepPlan) -> int:
    """Number of devices of the run that has the most."""
    return max(planned.run.layout.device_count for planned in plan.runs)


def _environment(plan: SweepPlan) -> dict[str, str]:
    environment = dict(os.environ)
    if not has_accelerator() or plan.cpu_devices:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(plan.cpu_devices or _most(plan))
    return environment


def _title(plan: SweepPlan, position: int) -> str:
    names = [plan.runs[index].name for index in plan.jobs[position]]
    return f"run {names[0]}" if len(names) == 1 else f"runs {', '.join(names)}"


def _reason(error: ScalejaxError | WorkerFailed) -> str:
    """Why a job failed."""
    if isinstance(error, ScalejaxError):
        return str(error)
    why = " (most likely memory ran out)" if error.was_killed else ""
    return f"its process ended with {error.return_code}{why}; its log is {error.name}"


def _share(number: int, count: int, size: int | None) -> set[int]:
    """The cores of worker `number` of `count`, `size` of them or an equal share."""
    cores = sorted(os.sched_getaffinity(0))
    size = min(size or max(1, len(cores) // count), len(cores))
    first = number * size % (len(cores) - size + 1)
    return set(cores[first : first + size])
