"""Pool of compile workers: their environment, their number, and reports of failures.

Knows processes; nothing of what is compiled.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from threading import Lock

from pydantic import TypeAdapter

from scalejax.core import errors
from scalejax.core.environment import GPU_FLAGS, compiler_settings, machine_cores
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.units import GIB
from scalejax.xla.job import Compiled, FunctionJob, Refused, RunJob

WORKER_BYTES = 2 * GIB
"""Memory to set aside for one worker: the goal that `experiments/profile_speed` checks."""

_FLAGS = (
    *GPU_FLAGS,
    # Library calls, as tuned programs end up with for large products: tile sizes of XLA's own
    # kernels need a device to tune on, and for odd shapes (head size 96) none is found.
    "--xla_gpu_enable_triton_gemm=false",
    # No device to time candidates on; the program is unchanged in two thirds of the time.
    "--xla_gpu_autotune_level=0",
)

_NOISE = re.compile(r"[IWE]\d{4} |WARNING|\d{4}-\d\d-\d\d|\s|:$|For simplicity|-{5}")
"""Start of lines that do not explain a failure: logs, the frames of a traceback."""


def run_jobs(
    jobs: Sequence[RunJob | FunctionJob],
    on_done: Callable[[int, Compiled], None],
    on_error: Callable[[int, ScalejaxError], None] | None = None,
) -> None:
    """Compile `jobs`, as many at a time as this machine has cores and memory for.

    Args:
        jobs: jobs to compile.
        on_done: called with the position of each job that is done, as soon as it is.
        on_error: called with the position of each job that fails, while the others go on.

    Raises:
        ScalejaxError: of the first job that fails, if there is no `on_error`; the others are
            stopped.
    """
    workers = _Workers()
    with ThreadPoolExecutor(max_workers=worker_count(len(jobs))) as pool:
        futures: dict[Future[Compiled], int] = {
            pool.submit(workers.run, job): position for position, job in enumerate(jobs)
        }
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    if on_error is not None and isinstance(error, ScalejaxError):
                        on_error(futures[future], error)
                    else:
                        on_done(futures[future], future.result())
        except BaseException:  # also Ctrl-C: no worker outlives its caller
            workers.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def worker_count(job_count: int) -> int:
    """Number of jobs to run at once, limited by `job_count`, cores and memory."""
    return max(1, min(job_count, machine_cores(), free_bytes() // WORKER_BYTES))


def free_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping and within this process's control groups, in bytes.

    Where neither is known, enough for two workers.

    Args:
        root: folder of `proc` and `sys`.
    """
    found = _control_group_free_bytes(root)
    match = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    if match:
        found.append(int(match[1]) * 1024)
    return max(0, min(found, default=2 * WORKER_BYTES))


def _control_group_free_bytes(root: Path) -> list[int]:
    """Free bytes within the limit of each control group above this process that has one.

    Inactive page cache counts as used there, though the kernel reclaims it.

    Source: cgroups(7); the kernel's admin guide on memory, cgroup-v2 and cgroup-v1.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, limit, taken, idle = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, taken = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        # A container may see its own group in place of the root, by a name that is not there.
        group = PurePosixPath(name.lstrip("/"))
        for part in (group, *group.parents):
            folder = root / "sys/fs/cgroup" / top / part
            most, used = (_text(folder / file).strip() for file in (limit, taken))
            if most.isdigit() and used.isdigit():  # "max" is none
                kept = re.search(rf"^{idle} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                found.append(int(most) - int(used) + (int(kept[1]) if kept else 0))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


class _Workers:
    """The workers that are running, so that all can be stopped at once."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopping = False
        self._lock = Lock()

    def run(self, job: RunJob | FunctionJob) -> Compiled:
        """Result of `job`, compiled in a worker process."""
        text = TypeAdapter(type(job)).dump_json(job).decode()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            process = self._start(job, log.fileno())
            try:
                answer, _ = process.communicate(text)
            finally:
                with self._lock:
                    self._running.discard(process)
            log.seek(0)
            if process.returncode != 0:
                raise ProfileError(_failure(job, process.returncode, log.read()))
        return _result(answer)

    def _start(self, job: RunJob | FunctionJob, log: int) -> "subprocess.Popen[str]":
        with self._lock:
            if self._is_stopping:
                raise ProfileError(f"{job.title} was not compiled: another job failed.")
            process = subprocess.Popen(
                # -P: the working folder may hold a json.py of the user's.
                [sys.executable, "-P", "-m", "scalejax.xla.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=_environment(),
                # Ctrl-C reaches the caller alone, which then stops its workers in silence.
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def stop(self) -> None:
        """Kill all workers, and start no more."""
        with self._lock:
            self._is_stopping = True
            for process in self._running:
                process.kill()


def _environment() -> dict[str, str]:
    """This process's environment, without the variables that select devices of its own JAX."""
    settings = compiler_settings()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_CPP_"))
    }
    return kept | {
        "JAX_PLATFORMS": "cpu",  # of the worker itself; what it compiles for is another matter
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the CUDA libraries are not needed to compile
        # libtpu: as many workers as there are, none of which looks for a TPU on the network.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **settings,
        # The user's flags come last and have the last word, as when the step trains.
        "XLA_FLAGS": " ".join((*_FLAGS, settings.get("XLA_FLAGS", ""))).strip(),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _result(answer: str) -> Compiled:
    result = TypeAdapter(Compiled | Refused).validate_json(answer)
    if isinstance(result, Compiled):
        return result
    error = getattr(errors, result.error, ScalejaxError)
    raise error(result.message)


def _failure(job: RunJob | FunctionJob, return_code: int, log: str) -> str:
    """Message on why a worker failed, from the end of its log."""
    if return_code == -signal.SIGKILL:
        return (
            f"{job.title}: the compiler was killed, most likely because memory ran out "
            f"({WORKER_BYTES // GIB} GiB are usually enough)."
        )
    # After a traceback stands the error; what was printed before it does not matter.
    last = log.rpartition("Traceback (most recent call last)")[2]
    useful = [line for line in last.splitlines() if line.strip() and not _NOISE.match(line)]
    words = " | ".join(line.strip() for line in useful[-3:]) or f"it ended with {return_code}"
    return f"{job.title} does not compile: {words}"
