"""Trains the run of a config and records it: checks it, compiles it, then trains.

The step is compiled once, ahead of time; a caller that predicts it first, as `scalejax.train` does,
gets the same program that is then run.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh

from scalejax.config.advice import idle_notes, notes_of
from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core import serialization
from scalejax.core.heartbeat import Heartbeat
from scalejax.core.serialization import plain
from scalejax.data.facts import resolve
from scalejax.data.source import UnreadableExample
from scalejax.models.pretrained import require_weights
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.compile import (
    RunPrograms,
    compile_run,
    refusing_without_memory,
    resume_command,
)
from scalejax.training.copies import copies_here
from scalejax.training.input_tuning import tuned_input
from scalejax.training.logger import MetricsLogger
from scalejax.training.loop import TrainingLoop
from scalejax.training.manifest import Manifest, digest
from scalejax.training.mesh import build_mesh
from scalejax.training.multihost import (
    broadcast_from_first,
    is_first,
    require_same_checkpoint,
    require_same_run,
    require_same_state,
)
from scalejax.training.profiler import StepTraces, TraceSchedule, require_room
from scalejax.training.record import EMPTY_RECORD, RunFolder, RunRecord
from scalejax.training.reporter import Reporter, Silent, reporter_for
from scalejax.training.resume import RunIdentity, checkpoint_to_resume_from
from scalejax.training.run_folder import (
    RunLock,
    changed_notes,
    describe_run,
    refuse_fewer_epochs,
    refuse_other_run,
)
from scalejax.training.signals import StopSignals
from scalejax.training.start import start_of
from scalejax.training.state import TrainState
from scalejax.training.step import init_state
from scalejax.training.time_accounting import RunClock, load_time_account, time_account_in_words
from scalejax.training.trackers import require_trackers

OnCompiled = Callable[[RunFolder, ResolvedRun, Mesh, RunPrograms, Reporter, int], None]
"""Called in every process with the compiled programs of a run, before it trains from a step; for
example `scalejax.measure.own_prediction.predict_run`."""


def train(
    config: RunConfig,
    folder: Path,
    *,
    device_count: int | None = None,
    resume: bool = False,
    start_over: bool = False,
    reporter: Reporter | None = None,
    traces: TraceSchedule | None = None,
    on_compiled: OnCompiled | None = None,
    startup_seconds: float = 0.0,
    leave: Callable[[int], None] | None = None,
) -> RunRecord:
    """Train the run that `config` describes, and return its record.

    Everything that may be refused is checked before any file is written.

    Args:
        config: the run.
        folder: where its files go; it may hold a run only with `resume`.
        device_count: devices to use; if None, those that the config's layout asks for, or all.
        resume: continue from the newest checkpoint of the run in `folder` that verifies.
        start_over: with `resume`, begin at step 0 instead of refusing if steps are recorded but no
            checkpoint verifies.
        reporter: where progress is reported; if None, standard error.
        traces: which steps to record with the profiler; None for none.
        on_compiled: called with the compiled programs before the first step; None for nothing.
        startup_seconds: time this session has taken so far, for its time accounting.
        leave: a function that ends this process, such as `os._exit`, called if it hangs for 20 s
            after a signal (before training, 5 s); if None, the process is never ended, as it serves
            others too.

    Raises:
        ConfigError: if the config cannot work here, or the folder holds another run or cannot
            be written.
        DoesNotFit: if the layout needs more devices, or the run more memory, than there is.
        Damaged: if steps are recorded but no checkpoint verifies.
        CheckpointMismatch: if the checkpoint to resume from holds a different state.
        Unavailable: if that checkpoint or its manifest cannot be read at present.
        Interrupted: when SIGINT or SIGTERM asked it to stop, after a checkpoint or before training.
    """
    clock = RunClock(startup_seconds)
    with (
        refusing_without_memory(),
        closing(Heartbeat.from_environment()) as heartbeat,
        StopSignals(heartbeat, leave=leave) as signals,
        clock,
        RunLock() as lock,
    ):
        heartbeat.at("compiling", 0)
        reporter = (reporter or reporter_for(sys.stderr)) if is_first() else Silent()
        serialization.require_writable_folder("folder", folder)
        available = jax.device_count() if device_count is None else device_count
        if device_count is None and config.layout.data is None:
            device_count = available
        run = resolve(config, device_count)
        require_trackers(config.tracking)
        require_same_run(run, resume=resume)
        mesh = build_mesh(run.layout)
        files = _open_run_folder(folder, run, resume=resume)
        start = None if resume else start_of(run)  # a checkpoint has its own weights
        notes = (*notes_of(run), *idle_notes(run, available))
        for note in (*notes, *(changed_notes(files, run) if resume else ())):
            reporter.say(f"Note: {note}.")
        if resume:  # before checkpoints are opened, which removes unfinished ones
            lock.take(folder)
        with reporter.compiling(), clock.within("compile"):
            programs = compile_run(run, mesh)  # refuses what cannot work before a file is written
        with Checkpoints(files.checkpoints, keep=config.train.keep_checkpoints) as checkpoints:
            copies = copies_here(reporter.say)
            resumed, source = checkpoint_to_resume_from(
                checkpoints,
                [(RunIdentity.of(run, files), files)],
                say=reporter.say,
                is_resumed=resume,
                starts_over=start_over,
                copies=copies and copies.store,
            )
            begin = resumed.step if resumed else 0
            state = _first_state(run, mesh, programs, source, traces, resumed)
            if is_first():  # after the last check that may refuse the run
                describe_run(files, run, resume_command(files, run))
                if start is not None:
                    serialization.save(start, files.start)
                clock.open(files.time)
            lock.take(folder)
            checkpoints.resume_from(begin)
            if copies is not None:
                copies.resume_from(begin)
            if on_compiled is not None:
                on_compiled(files, run, mesh, programs, reporter, begin)
            run, tuned = tuned_input(run, programs.step, files, reporter)
            clock.begin(begin)
            signals.begin()
            proved = resumed.runs[0].record if resumed else EMPTY_RECORD
            with (
                closing(
                    MetricsLogger(
                        files,
                        reporter,
                        heartbeat,
                        clock,
                        after_step=begin,
                        proved=proved,
                        config=run.config,
                    )
                ) as logger,
                closing(StepTraces(files.traces, traces)) as recorder,
                _suggesting_to_skip(),
            ):
                loop = TrainingLoop(
                    [run],
                    programs,
                    checkpoints,
                    [logger],
                    signals,
                    recorder,
                    resume_command=resume_command(files, run),
                    identities=[RunIdentity.of(run, files)],
                    resumed=resumed,
                    copies=copies,
                )
                loop.train(state, begin, tuned, start.words if start else "")
    if is_first() and (account := load_time_account(files.time)) and account.sessions > 1:
        reporter.say(time_account_in_words(account))
    sync_global_devices("the record is whole")
    return RunRecord.load(folder)


def _open_run_folder(folder: Path, run: ResolvedRun, *, resume: bool) -> RunFolder:
    """The folder of the run.

    Raises:
        ConfigError: if it holds another run, or any run without `resume`.
    """
    files = RunFolder(path=folder)
    if broadcast_from_first(files.holds_run) and not resume:
        files.refuse_second_run()
    if resume:
        refuse_other_run(files, run)
    else:  # a checkpoint has its own weights
        require_weights(run.config.model)
    return files


def _first_state(
    run: ResolvedRun,
    mesh: Mesh,
    programs: RunPrograms,
    checkpoints: Checkpoints,
    traces: TraceSchedule | None,
    resumed: Manifest | None,
) -> TrainState:
    """The state to train from: that of the checkpoint, or the initial one.

    Raises:
        ConfigError: if too few updates are left.
        CheckpointMismatch: if the checkpoint holds a different state.
        Unavailable: if the checkpoint cannot be read at present.
    """
    begin = resumed.step if resumed else 0
    require_same_checkpoint(begin, digest(plain(resumed)) if resumed else "")
    refuse_fewer_epochs(begin, run)
    if traces is not None:
        require_room(traces, run.total_steps - begin)
    state = checkpoints.restore(begin, programs.step.state) if begin else init_state(run, mesh)
    require_same_state(run, mesh, state, step=begin)
    return state


@contextmanager
def _suggesting_to_skip() -> Iterator[None]:
    """Add to the error of an unreadable example the field that skips such examples."""
    try:
        yield
    except UnreadableExample as error:
        hint = 'input.unreadable = "skip" leaves such examples out, and counts them.'
        raise UnreadableExample(f"{error} {hint}") from error
