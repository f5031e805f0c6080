"""Pool of compile workers: their environment, their number, and reports of failures.

Knows processes; nothing of what is compiled.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

from scalejax.core.environment import (
    GPU_FLAGS,
    compiler_settings,
    machine_cores,
    required_flags,
    text_of,
)
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.units import GIB
from scalejax.core.workers import Pool, Worker, WorkerFailed
from scalejax.xla.cuda_toolkit import toolkit
from scalejax.xla.job import Compiled, FunctionJob, RunJob
from scalejax.xla.worker import compile_job

WORKER_BYTES = 2 * GIB
"""Memory to set aside for one worker: the goal that `experiments/profile_speed` checks."""

_FLAGS = (
    *GPU_FLAGS,
    # Library calls, which tuned programs have too for large products: tile sizes of XLA's own
    # kernels need a device to tune on, and for odd shapes (head size 96) none is found.
    "--xla_gpu_enable_triton_gemm=false",
    # No device to time candidates on; the program is the same, in two thirds of the time.
    "--xla_gpu_autotune_level=0",
    # What follows the program that is read is discarded.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
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
        on_error: called with the position of each job that fails, while the others continue.

    Raises:
        ScalejaxError: of the first job that fails, if there is no `on_error`; the others are
            stopped.
    """
    is_for_gpus = any(job.target.backend == "cuda" for job in jobs)
    with toolkit() if is_for_gpus else nullcontext() as cuda:

        def start(number: int) -> Worker:
            return Worker(compile_job, name="compile_job", environment=_environment(cuda))

        # A process for each job: JAX can be set up for only one number of devices.
        with Pool(start, worker_count(len(jobs)), is_reused=False) as pool:
            for position, kind, value in pool.work(jobs):
                if kind == "answer":
                    on_done(position, value)
                    continue
                error = value if kind == "refused" else _failure(jobs[position], value)
                if on_error is None:
                    raise error
                on_error(position, error)


def worker_count(job_count: int) -> int:
    """Number of jobs to run at once, limited by `job_count`, cores and memory."""
    return max(1, min(job_count, machine_cores(), free_bytes() // WORKER_BYTES))


def free_bytes(root: Path = Path("/")) -> int:
    """Memory available without swapping and within this process's control groups, in bytes.

    If neither is known, enough for two workers.

    Args:
        root: folder of `proc` and `sys`.
    """
    found = _control_group_free_bytes(root)
    match = re.search(r"MemAvailable:\s+(\d+) kB", text_of(root / "proc/meminfo"))
    if match:
        found.append(int(match[1]) * 1024)
    return max(0, min(found, default=2 * WORKER_BYTES))


def _control_group_free_bytes(root: Path) -> list[int]:
    """Free bytes within the limit of each control group above this process that has one.

    Inactive page cache counts as used there, though the kernel reclaims it.

    Source: cgroups(7); the kernel's admin guide on memory, cgroup-v2 and cgroup-v1.
    """
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, limit, taken, idle = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, taken = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        # A container may see its own group as the root, under a name that does not exist there.
        group = PurePosixPath(name.lstrip("/"))
        for part in (group, *group.parents):
            folder = root / "sys/fs/cgroup" / top / part
            most, used = (text_of(folder / file).strip() for file in (limit, taken))
            if most.isdigit() and used.isdigit():  # "max" is no limit
                kept = re.search(rf"^{idle} (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
                found.append(int(most) - int(used) + (int(kept[1]) if kept else 0))
    return found


def _environment(cuda: Path | None) -> dict[str, str]:
    """This process's environment, without the variables that select devices of its own JAX; `cuda`
    is the folder of `toolkit`."""
    settings, flags = compiler_settings(), (*required_flags(), *_FLAGS)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "TF_CPP_"))
    }
    return kept | {
        "JAX_PLATFORMS": "cpu",  # of the worker itself; what it compiles for is another matter
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the CUDA libraries are not needed to compile
        # libtpu: several workers at a time, none of which looks for a TPU on the network.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **({} if cuda is None else {"CUDA_HOME": str(cuda)}),
        **settings,
        # The user's flags come last and have the last word, as when the step trains.
        "XLA_FLAGS": " ".join((*flags, settings.get("XLA_FLAGS", ""))).strip(),
    }


def _failure(job: RunJob | FunctionJob, failed: WorkerFailed) -> ProfileError:
    """Why a worker failed, from the end of its output."""
    if failed.was_killed:
        return ProfileError(
            f"{job.title}: the compiler was killed, most likely because memory ran out "
            f"({WORKER_BYTES // GIB} GiB are usually enough)."
        )
    # The error follows a traceback; what was printed before it does not matter.
    last = failed.said.rpartition("Traceback (most recent call last)")[2]
    useful = [line for line in last.splitlines() if line.strip() and not _NOISE.match(line)]
    words = (
        " | ".join(line.strip() for line in useful[-3:]) or f"it ended with {failed.return_code}"
    )
    return ProfileError(f"{job.title} does not compile: {words}")
