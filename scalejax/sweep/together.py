"""Several runs in one program: the real `Step`, mapped over a leading axis of runs.

Runs that differ in seed and learning rates alone compile to the same step, so one program trains
them all: each with its own state, its own rates and the data in its own order, on one device.
The runs leave the records that they would leave one by one, equal within rounding; the state of
all is checkpointed as one.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from scalejax.checkpoint import Checkpoints
from scalejax.config import ResolvedRun
from scalejax.data_files import refuse_other_files
from scalejax.heartbeat import Heartbeat
from scalejax.progress import Reporter
from scalejax.record import RunFolder
from scalejax.run_folder import describe_run
from scalejax.stop_signals import StopSignals
from scalejax.sweep.mapped import MappedPrograms
from scalejax.sweep.results import is_finished
from scalejax.sweep.together_loop import Loop


def train_together(
    runs: Sequence[ResolvedRun],
    folders: Sequence[RunFolder],
    checkpoints: Path,
    reporter: Reporter,
    *,
    memory_bytes: int | None = None,
    leave: Callable[[int], None] | None = None,
) -> None:
    """Train `runs`, all to their end, and leave the record of each in its folder.

    Goes on at the latest checkpoint of their common state, if there is one.

    Args:
        runs: the same but for seed and schedule, each on one device.
        folders: where the record of each goes.
        checkpoints: where states of all go while they train.
        reporter: told of the first of them.
        memory_bytes: what the program of all may take; where it takes more, halves of the runs
            train one after the other. If None, as much as it takes.
        leave: as that of `train`.

    Raises:
        Interrupted: when SIGINT or SIGTERM asked to stop, after a checkpoint.
    """
    halves = checkpoints / "halves"  # once they are, they stay: a resumed job may find more room
    programs = None if halves.exists() else MappedPrograms(runs)
    limit = math.inf if memory_bytes is None or len(runs) == 1 else memory_bytes
    is_too_large = programs is not None and (programs.memory_bytes or 0) > limit
    if programs is None or (is_too_large and not _has_state(checkpoints)):
        halves.mkdir(parents=True, exist_ok=True)
        middle = (len(runs) + 1) // 2
        for number, part in enumerate((slice(None, middle), slice(middle, None))):
            if not all(is_finished(folder) for folder in folders[part]):
                train_together(
                    runs[part],
                    folders[part],
                    halves / str(number),
                    reporter,
                    memory_bytes=memory_bytes,
                    leave=leave,
                )
    else:
        _train_at_once(runs, folders, checkpoints, reporter, programs, leave)
    shutil.rmtree(checkpoints)  # each run has its weights, and nothing is left to go on with


def _has_state(checkpoints: Path) -> bool:
    """Whether a state was saved; a job that is killed before leaves an empty folder."""
    if not checkpoints.exists():
        return False
    with Checkpoints(checkpoints, keep=1) as saved:
        return saved.latest_step is not None


def _train_at_once(
    runs: Sequence[ResolvedRun],
    folders: Sequence[RunFolder],
    checkpoints: Path,
    reporter: Reporter,
    programs: MappedPrograms,
    leave: Callable[[int], None] | None,
) -> None:
    heartbeat = Heartbeat.from_environment()
    for run, folder in zip(runs, folders, strict=True):
        refuse_other_files(folder, run.config.data)
        describe_run(folder, run)
    signals = StopSignals(heartbeat, leave=leave)
    with Checkpoints(checkpoints, keep=1) as saved, signals:
        begin = saved.latest_step or 0
        loop = Loop(runs, folders, saved, signals, heartbeat, reporter, begin, programs)
        try:
            loop.train()
        finally:
            loop.close()
