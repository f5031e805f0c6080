"""Scheduler of the jobs of a sweep on worker processes, as many as fit on this machine.

A job is done when the records of its runs say so: a resumed sweep continues with the other jobs.
Knows processes and jobs; the workers train.
"""

import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from scalejax.core.environment import has_accelerator, terminated_as_interrupted
from scalejax.core.errors import ConfigError, require_at_least
from scalejax.sweep.folder import SweepFolder
from scalejax.sweep.plan import SweepPlan
from scalejax.sweep.results import read_rows
from scalejax.xla.worker_pool import free_bytes, worker_count

OnPart = Callable[[int, float], None]
"""Called with the index of a job in the plan, and the fraction of it that is done."""

_PART_FOR_PROGRAMS = 0.75
"""Share of the free memory for the programs of the workers. The memory analysis of a compiled
program lacks the interpreter with JAX (350 MB per worker, observed), batches in flight, the
compiler and other processes; that a quarter suffices for them is an estimate, not measured."""
_SECONDS_TO_STOP = 60.0
"""Time for workers to save a checkpoint."""
_SECONDS_FOR_LOCK = 10.0
"""Time for workers of a killed sweep to end: they notice at once, and exit in milliseconds."""


def run_sweep(
    plan: SweepPlan,
    folder: SweepFolder,
    *,
    processes: int | None = None,
    on_part: OnPart = lambda job, part: None,
) -> list[str]:
    """Train every unfinished run of `plan`; returns error messages.

    Args:
        plan: the plan, as written in `folder`.
        folder: folder of the sweep, not in use by another process.
        processes: concurrent jobs; if None, as many as cores and memory allow, and one
            with an accelerator.
        on_part: receives the progress of jobs.

    Returns:
        Error messages, one for each failed job; the others are done.

    Raises:
        ConfigError: if another process is using `folder`.
        KeyboardInterrupt: on SIGINT or SIGTERM, after the workers have saved checkpoints.
    """
    if processes is not None:
        require_at_least("processes", processes, 1)
    with _locked(folder) as lock, terminated_as_interrupted():
        is_finished = [row.is_finished for row in read_rows(plan, folder)]
        waiting = []
        for position, job in enumerate(plan.jobs):
            if all(is_finished[index] for index in job):
                on_part(position, 1.0)
                # Left by a kill between the end of the last run and the removal of its checkpoints.
                shutil.rmtree(folder.shared_checkpoints(job[0]), ignore_errors=True)
            else:
                waiting.append(position)
        if not waiting:
            return []
        count = _process_count(len(waiting), processes)
        return _Pool(plan, folder, lock, count, on_part).work(waiting)


def _process_count(jobs: int, wanted: int | None) -> int:
    if wanted is not None:
        return min(wanted, jobs)
    return 1 if has_accelerator() else worker_count(jobs)


@contextlib.contextmanager
def _locked(folder: SweepFolder) -> Iterator[int]:
    """Hold the lock of the sweep in `folder`; workers inherit the file, and with it the lock."""
    folder.lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _SECONDS_FOR_LOCK
    with folder.lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process is at work on the sweep in {str(folder.path)!r}: "
                        "wait for it, or stop it."
                    ) from error
                time.sleep(0.1)
        yield file.fileno()


class _Pool:
    """Pool of workers with their current jobs."""

    def __init__(
        self, plan: SweepPlan, folder: SweepFolder, lock: int, count: int, on_part: OnPart
    ) -> None:
        self._plan, self._folder, self._lock = plan, folder, lock
        self._on_part = on_part
        self._count = count
        self._memory_bytes = int(_PART_FOR_PROGRAMS * free_bytes() / count)
        self._workers: list[subprocess.Popen[str]] = []
        self._at: dict[int, int] = {}
        self._said: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._problems: list[str] = []

    def work(self, positions: Sequence[int]) -> list[str]:
        """Run the jobs at `positions`; returns error messages."""
        waiting = list(positions)
        try:
            for number in range(self._count):
                self._start(number)
                self._give(number, waiting)
            while self._at:
                number, line = self._said.get()
                if line is None:
                    self._handle_death(number, waiting)
                else:
                    self._receive(number, json.loads(line), waiting)
        except BaseException:
            self._stop()
            raise
        self._stop()
        return self._problems

    def _start(self, number: int) -> None:
        """Start a worker on its share of the cores."""
        log = self._folder.log(number)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            worker = subprocess.Popen(
                # -P: the working folder may hold a json.py of the user's.
                [
                    *(sys.executable, "-P", "-m", "scalejax.sweep.worker"),
                    *(str(self._folder.path), str(self._memory_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                encoding="utf-8",
                env=self._environment(),
                pass_fds=(self._lock,),
                # Ctrl-C reaches only this process, which then asks its workers to save.
                start_new_session=True,
            )
        if hasattr(os, "sched_setaffinity"):
            # Each on its own cores: two that share cores wait for each other's threads.
            os.sched_setaffinity(worker.pid, _share(number, self._count))
        if number < len(self._workers):
            self._workers[number] = worker
        else:
            self._workers.append(worker)
        threading.Thread(target=self._listen, args=(number, worker), daemon=True).start()

    def _environment(self) -> dict[str, str]:
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        devices = self._plan.cpu_devices or max(
            planned.run.layout.device_count for planned in self._plan.runs
        )
        environment = os.environ | {"PYTHONPATH": search_path}
        if not has_accelerator() or self._plan.cpu_devices:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        return environment

    def _listen(self, number: int, worker: "subprocess.Popen[str]") -> None:
        if worker.stdout is not None:
            with worker.stdout as said:
                for line in said:
                    self._said.put((number, line))
        self._said.put((number, None))

    def _give(self, number: int, waiting: list[int]) -> None:
        """Send a worker its next job, or close its input so that it exits."""
        indices: tuple[int, ...] = ()
        self._at.pop(number, None)
        if waiting:
            self._at[number] = waiting.pop(0)
            indices = self._plan.jobs[self._at[number]]
        stdin = self._workers[number].stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it died, which its listener reports next
                stdin.write(json.dumps(indices) + "\n")
                stdin.flush()

    def _receive(self, number: int, message: dict[str, object], waiting: list[int]) -> None:
        position = self._at[number]
        part = message.get("part")
        if isinstance(part, float):
            self._on_part(position, part)
            return
        if "refused" in message:
            self._problems.append(f"{self._title(position)}: {message['refused']}")
        self._on_part(position, 1.0)
        self._give(number, waiting)

    def _handle_death(self, number: int, waiting: list[int]) -> None:
        """Record the failed job of a dead worker, and replace the worker."""
        position = self._at.pop(number, None)
        if position is None:
            return
        code = self._workers[number].wait()
        why = " (most likely memory ran out)" if code == -signal.SIGKILL else ""
        self._problems.append(
            f"{self._title(position)}: its process ended with {code}{why}; "
            f"its log is {self._folder.log(number)}"
        )
        self._on_part(position, 1.0)
        if waiting:
            self._start(number)
            self._give(number, waiting)

    def _title(self, position: int) -> str:
        names = [self._plan.runs[index].name for index in self._plan.jobs[position]]
        return f"run {names[0]}" if len(names) == 1 else f"runs {', '.join(names)}"

    def _stop(self) -> None:
        """Ask the workers to save and exit; kill those that do not within the timeout."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.terminate() if self._at else None
        deadline = time.monotonic() + _SECONDS_TO_STOP
        try:
            for worker in self._workers:
                worker.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # interrupted again: kill now
            pass
        finally:
            for worker in self._workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
                if worker.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        worker.stdin.close()


def _share(number: int, count: int) -> set[int]:
    """The cores of worker `number` of `count`."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // count)
    first = number * size % len(cores)
    return set(cores[first : first + size])
