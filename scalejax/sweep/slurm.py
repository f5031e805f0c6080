"""Jobs of a sweep as SLURM jobs: submitted, followed, and asked to stop.

Each is one process on a node, which runs `sweep.worker.train_slurm_job`. If a job outlives the
process that submitted it, a resumed sweep follows it and does not submit it again.
Knows jobs, but not what they train.
"""

import json
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from scalejax.core.errors import ConfigError, ExitCode, refusal
from scalejax.core.serialization import JsonValue, save_text
from scalejax.launch import slurm
from scalejax.launch.slurm import SlurmResources, SlurmRun
from scalejax.sweep.folder import SweepFolder

_TRAIN = "from scalejax.sweep.worker import train_slurm_job; train_slurm_job()"


@dataclass(frozen=True, slots=True)
class _Job:
    """One job of a sweep."""

    position: int
    """Its place in the plan."""
    indices: tuple[int, ...]
    """Runs that it trains."""
    folder: Path
    """Where scripts and logs of all jobs are."""

    def file(self, kind: str) -> Path:
        """The file of this kind, such as the id of the SLURM job, or why it was refused."""
        return self.folder / f"{self.indices[0]:04d}.{kind}"

    def problem(self, job_id: str, about: tuple[str, int, int]) -> str | None:
        """Why the job failed; None if it did not."""
        state, code, signal_number = about
        if state == "COMPLETED":
            return None
        has_told = code in (ExitCode.REFUSED, ExitCode.DAMAGED, ExitCode.TRANSIENT)
        if has_told and self.file("refused").is_file():
            return self.file("refused").read_text(encoding="utf-8")
        ended = f"its SLURM job {job_id} ended: {state.lower()} (exit code {code}:{signal_number})"
        return f"{ended}; its log is {self.folder / f'{job_id}_0_log.out'}"


def train_by_slurm(
    folder: SweepFolder,
    jobs: Sequence[tuple[int, tuple[int, ...]]],
    resources: SlurmResources,
    *,
    most: int,
    asked: Mapping[str, JsonValue],
    on_end: Callable[[int, str | None], None],
    seconds_to_stop: float,
) -> None:
    """Train jobs to their end, each as a SLURM job.

    Args:
        folder: the sweep.
        jobs: position and runs of each job.
        resources: what each job requests.
        most: maximum number of jobs in the queue at a time.
        asked: arguments of `train_slurm_job` besides the runs.
        on_end: called with the position of each job as it ends, and why it failed, or None.
        seconds_to_stop: time for jobs to save a checkpoint if this is interrupted.

    Raises:
        ConfigError: if there is no SLURM or no submitit, or SLURM refuses a job.
    """
    if shutil.which("sbatch") is None:
        accepted = "there is no SLURM on this machine (no sbatch); leave it out to train here"
        raise ConfigError(refusal("through", "slurm", accepted))
    place = folder.path.absolute() / "slurm"
    waiting = deque(_Job(position, indices, place) for position, indices in jobs)
    under_way: dict[str, _Job] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < most:
                job = waiting.popleft()
                job_id = _under_way(job) or _submitted(job, folder, resources, asked)
                under_way[job_id] = job
            for job_id, about in _ended(list(under_way)):
                job = under_way.pop(job_id)
                job.file("id").unlink(missing_ok=True)
                on_end(job.position, job.problem(job_id, about))
            time.sleep(slurm.SECONDS_BETWEEN_LOOKS if under_way else 0)
    except BaseException:
        _stop(list(under_way), seconds_to_stop)
        raise


def _submitted(
    job: _Job,
    folder: SweepFolder,
    resources: SlurmResources,
    asked: Mapping[str, JsonValue],
) -> str:
    job.file("refused").unlink(missing_ok=True)
    run = SlurmRun(
        command=(
            *(
                sys.executable,
                "-c",
                _TRAIN,
                str(folder.path.absolute()),
                json.dumps({**asked, "indices": job.indices}),
            ),
            str(job.file("refused")),
        ),
        run_marker=None,
        processes=1,
        folder=job.folder,
        name=f"{folder.path.name}-{job.indices[0]:04d}",
        **asdict(resources),
    )
    job_id, _ = slurm.submit(run)
    save_text(job_id, job.file("id"))
    return job_id


def _under_way(job: _Job) -> str | None:
    """The SLURM job that an earlier process submitted for `job`, if it has not ended."""
    with suppress(FileNotFoundError):
        job_id = job.file("id").read_text(encoding="utf-8")
        about = slurm.about(job_id)
        if about is not None and about[0] in slurm.UNDER_WAY:
            return job_id
    return None


def _ended(job_ids: Sequence[str]) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """The jobs that have ended, with state, exit code and signal."""
    for job_id in job_ids:
        about = slurm.about(job_id)
        if about is not None and about[0] not in slurm.UNDER_WAY:
            yield job_id, about


def _stop(job_ids: list[str], seconds: float) -> None:
    """Cancel jobs that are waiting, have the others save and stop, and cancel those that do not."""
    deadline = time.monotonic() + seconds
    for flags in (["--state=PENDING"], ["--signal=TERM"]):
        _cancel([*flags, *job_ids])
    while job_ids and time.monotonic() < deadline:
        for job_id, _ in _ended(job_ids):
            job_ids.remove(job_id)
        time.sleep(slurm.SECONDS_BETWEEN_LOOKS)
    _cancel(job_ids)


def _cancel(words: Sequence[str]) -> None:
    if words:
        subprocess.run(["scancel", "--quiet", *words], check=False, capture_output=True)
