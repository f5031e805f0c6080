"""The training loop: batches in, updates out, everything of note in the run folder.

The step is compiled once, ahead of time; what is costed for `prediction.json` is the very
program that is then run. The loop keeps one update queued behind the one that runs, and waits
for nothing else: metrics are fetched only for the lines of the record, once they are there.

Every process runs this loop over its own devices; the first alone writes and talks.
"""

import math
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from jax.experimental.multihost_utils import sync_global_devices

from scalejax import documents
from scalejax.batch_ramp import Phase
from scalejax.checkpoint import Checkpoints, save_weights
from scalejax.config import ResolvedRun, RunConfig, resolve
from scalejax.data import Batches, Source, training_batches
from scalejax.data.cores import machine_cores
from scalejax.data.source import UnreadableExample
from scalejax.divergence import Divergence, is_skipped
from scalejax.early_stopping import EarlyStopping
from scalejax.features import open_examples
from scalejax.heartbeat import Heartbeat
from scalejax.input_tuning import tuned_input
from scalejax.input_wait import wait_with_advice
from scalejax.journal import Journal
from scalejax.measuring import UpdateClock, train_measurement
from scalejax.mesh import build_mesh
from scalejax.pretrained import require_weights
from scalejax.processes import StopSignals, first_says, is_first
from scalejax.progress import (
    Reporter,
    Silent,
    reporter_for,
    statistics_in_words,
)
from scalejax.record import (
    DivergenceCause,
    EvaluationMeasurement,
    Measurement,
    RunFolder,
    RunRecord,
    Status,
    StatusChange,
    TrainMeasurement,
    finite,
)
from scalejax.run_evaluation import RunEvaluation
from scalejax.run_folder import (
    describe_run,
    refuse_fewer_epochs,
    refuse_other_run,
    refuse_second_run,
    versions,
)
from scalejax.run_notes import notes_of
from scalejax.run_programs import RunPrograms, beside_predicted, compile_run, predict_run
from scalejax.skipped_examples import SkippedExamples
from scalejax.step import Step, init_state
from scalejax.step_traces import StepTraces, TraceSchedule, require_room
from scalejax.train_state import TrainState
from scalejax.units import counted, format_seconds


class Interrupted(SystemExit):
    """A signal ended the run, after a finished update and a checkpoint; exits 128 + signal."""


def train(
    config: RunConfig,
    folder: Path,
    *,
    device_count: int | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    traces: TraceSchedule | None = None,
    predicts: bool = True,
) -> RunRecord:
    """The record of the run that `config` describes, made here and now.

    The order counts: what may be refused comes before what is written.

    Args:
        config: the run.
        folder: where its files go; it may hold a run only with `resume`.
        device_count: devices to use; if None, those that the config's layout asks for, or all.
        resume: go on at the latest checkpoint of the run in `folder`.
        reporter: whom to tell how it goes; if None, standard error.
        traces: which steps to record with the profiler; None for none.
        predicts: write a prediction first, for which these devices are measured for a second.

    Raises:
        ConfigError: if the config cannot work here, or the folder holds another run or cannot
            be written.
        DoesNotFit: if the layout takes more devices than there are.
        CheckpointMismatch: if the checkpoint to resume from is damaged or cannot be read.
        Interrupted: when SIGINT or SIGTERM asked to stop, after a checkpoint.
    """
    heartbeat = Heartbeat.from_environment()
    heartbeat.at("compiling", 0)
    reporter = (reporter or reporter_for(sys.stderr)) if is_first() else Silent()
    documents.require_writable_folder("folder", folder)
    if device_count is None and config.layout.data is None:
        device_count = jax.device_count()
    run = resolve(config, device_count)
    mesh = build_mesh(run.layout)
    files = _admitted(folder, run, resume=resume)
    if not resume:  # a checkpoint has its own
        require_weights(config.model)
    for note in notes_of(run):
        reporter.say(f"Note: {note}.")
    with reporter.compiling():
        programs = compile_run(run, mesh)  # refuses what cannot work before anything is written
    with (
        Checkpoints(files.checkpoints, keep=config.train.keep_checkpoints) as checkpoints,
        StopSignals() as signals,
    ):
        begin = checkpoints.latest_step or 0
        refuse_fewer_epochs(begin, run)
        if traces is not None:
            require_room(traces, run.total_steps - begin)
        state = checkpoints.restore(begin, programs.step.state) if begin else init_state(run, mesh)
        if is_first():  # after the last that may be refused
            describe_run(files, run)
        if predicts:
            predict_run(files, run, mesh, programs, reporter)
        run, tuned = tuned_input(run, programs.step, files, reporter)
        journal = Journal(files, reporter, heartbeat, after_step=begin)
        recorder = StepTraces(files.traces, traces)
        try:
            loop = _Loop(run, programs, checkpoints, journal, signals, recorder)
            loop.train(state, begin, tuned)
        except UnreadableExample as error:
            hint = 'input.unreadable = "skip" leaves such examples out, and counts them.'
            raise UnreadableExample(f"{error} {hint}") from error
        finally:
            recorder.close()
            journal.close()
    sync_global_devices("the record is whole")
    return RunRecord.load(folder)


def _admitted(folder: Path, run: ResolvedRun, *, resume: bool) -> RunFolder:
    """The folder of the run.

    Raises:
        ConfigError: if it holds a run that this one does not go on with.
    """
    files = RunFolder(path=folder)
    if first_says(files.holds_run) and not resume:
        refuse_second_run(files)
    if resume:
        refuse_other_run(files, run)
    return files


class _Loop:
    """One session of a run, from a state to the end of the run or a signal."""

    def __init__(
        self,
        run: ResolvedRun,
        programs: RunPrograms,
        checkpoints: Checkpoints,
        journal: Journal,
        signals: StopSignals,
        recorder: StepTraces,
    ) -> None:
        self._run = run
        self._config = run.config.train
        self._programs = programs
        self._checkpoints = checkpoints
        self._journal = journal
        self._signals = signals
        self._recorder = recorder
        wanted = self._config.early_stopping
        self._stopping = EarlyStopping(wanted) if wanted else None
        self._divergence = Divergence(self._config.divergence)
        self._step = 0
        self._is_tuned = False
        self._queued: dict[str, jax.Array] | None = None
        self._last_losses: dict[str, float | None] = {}
        self._statistics = ""
        self._skipped = SkippedExamples(run)
        self._evaluation = RunEvaluation(
            run,
            programs.evaluation,
            programs.evaluate,
            self._skipped.of["test"],
            journal.reporter,
        )
        self._updates: list[TrainMeasurement] = []
        self._clock = UpdateClock()

    def train(self, state: TrainState, begin: int, remark: str = "") -> None:
        """Update `state`, the one after `begin` updates, until the run ends; `remark` is for the
        record."""
        self._step, self._is_tuned = begin, bool(remark)
        for measurement in self._journal.earlier:
            self._note(measurement)
        self._journal.reporter.begin(begin, self._run.total_steps)
        layout = self._run.layout
        spread = f" ({layout})" if layout.device_count > 1 else ""
        devices = f"on {counted(layout.device_count, 'device')}{spread}; {versions()}"
        if begin:
            self._change_status("resumed", f"at step {begin}, {devices}{remark}")
        else:
            changes = "".join(f"; {change}" for change in self._run.changes)
            self._change_status("started", devices + changes + remark)
        state = self._run_steps(state)
        save_weights(self._journal.files.weights, self._final_weights(state))
        self._change_status(*self._ending())

    def _run_steps(self, state: TrainState) -> TrainState:
        programs, phases = self._programs, self._run.phases
        # Once: files may appear while the run goes on, and are none of its data.
        source = open_examples(self._run, "train", self._journal.reporter)
        compiled = [(programs.step, programs.update), *programs.later]
        ends = [*(phase.first_step for phase in phases[1:]), self._run.total_steps]
        for phase, (step, update), end in zip(phases, compiled, ends, strict=True):
            if self._step < end:
                state = self._run_phase(state, source, phase, step, update, end)
        return state

    def _run_phase(
        self,
        state: TrainState,
        source: Source,
        phase: Phase,
        step: Step,
        update: Any,
        end: int,
    ) -> TrainState:
        """The updates of one batch, of which `end` updates of the run are the last."""
        run = self._run
        batches = training_batches(
            source,
            step.batch,
            seed=run.config.seed,
            start_step=self._step,
            stop_step=end,
            first_epoch=phase.first_epoch,
            first_step=phase.first_step,
            how=run.config.input,
            skipped=self._skipped.of["train"],
        )
        self._clock.restart(self._step)
        with closing(batches):
            state = self._run_batches(state, batches, update, end)
        self._settle()
        self._skipped.tell("train", self._journal, step=self._step)
        return state

    def _run_batches(
        self, state: TrainState, batches: Batches, update: Any, end: int
    ) -> TrainState:
        """Updates until `end`, or until something ends the run before."""
        while self._step < end and not self._has_ended_early:
            if self._recorder.is_boundary:
                self._settle()
                self._recorder.cross(self._step)
                self._clock.restart(self._step)
            self._journal.heartbeat.at("waiting for input", self._step)
            with self._recorder.step(self._step + 1):
                batch, waited_seconds = batches.next_beside(self._is_updating)
                self._clock.waited_seconds += waited_seconds
                self._journal.heartbeat.at("training", self._step)
                state, metrics = update(state, batch)
            self._settle()  # of the update before: this one is queued behind it
            self._step += 1
            self._queued = metrics
            if self._divergence.cause is not None:
                break
            signal_number = self._signals.agreed(self._step, every=self._config.log_every_steps)
            if self._is_pause or signal_number:
                self._settle()
                if self._divergence.cause is not None:
                    break
                self._pause(state)
            if signal_number:
                self._interrupt(signal_number)
        return state

    def _is_updating(self) -> bool:
        """Whether the queued update is still being made."""
        return self._queued is not None and not self._queued["loss"].is_ready()  # type: ignore[attr-defined]  untyped

    @property
    def _has_stopped_early(self) -> bool:
        return self._stopping is not None and self._stopping.has_stopped

    @property
    def _has_ended_early(self) -> bool:
        return self._has_stopped_early or self._divergence.cause is not None

    @property
    def _is_last(self) -> bool:
        return self._step == self._run.total_steps

    @property
    def _is_pause(self) -> bool:
        """Whether there is something to do here that waits for the state."""
        every = self._config.checkpoint_every_steps
        is_due = self._step % every == 0 if every else self._run.epoch_of(self._step) % 1 == 0
        return is_due or self._run.is_evaluated(self._step)

    def _settle(self) -> None:
        """Wait for the queued update, and put its metrics down if they are due.

        Without the wait, a fast host would queue batches until memory ends; and XLA's virtual
        CPU devices can wait for each other for ever when many updates are queued.
        """
        if self._queued is None:
            return
        metrics, self._queued = self._queued, None
        jax.block_until_ready(metrics["loss"])
        if self._step % self._config.log_every_steps and not self._is_last:
            if (
                self._is_pause
            ):  # it is saved next, or early stopping ends the run, with no line of it
                self._see_loss(jax.device_get(metrics))
            return
        step_seconds, data_wait_seconds = self._clock.lap(self._step)
        measurement = train_measurement(
            self._run,
            jax.device_get(metrics),
            step=self._step,
            step_seconds=step_seconds,
            data_wait_seconds=data_wait_seconds,
            elapsed_seconds=self._journal.elapsed_seconds,
        )
        self._journal.write(measurement)
        self._note(measurement)

    def _see_loss(self, metrics: Mapping[str, Any]) -> None:
        loss, loss_scale = finite(float(metrics["loss"])), metrics.get("loss_scale")
        self._keep_loss(loss, loss_scale)
        self._divergence.see_loss(self._step, loss, loss_scale)

    def _keep_loss(self, loss: float | None, loss_scale: float | None) -> None:
        if not is_skipped(loss, loss_scale):
            self._last_losses["train"] = loss

    def _pause(self, state: TrainState) -> None:
        """Evaluate if it is time to, and save a checkpoint."""
        accuracy = None
        self._skipped.tell("train", self._journal, step=self._step)
        self._journal.heartbeat.at("evaluating, saving", self._step)
        if self._run.is_evaluated(self._step):
            evaluation = self._evaluation.measure(state, self._journal, step=self._step)
            accuracy = evaluation.test_accuracy
            self._skipped.tell("test", self._journal, step=self._step)
            self._journal.write(evaluation)
            self._note(evaluation)
        if self._divergence.cause is None:  # a checkpoint of it would push out a better one
            self._checkpoints.save(self._step, state, test_accuracy=accuracy)
        self._clock.restart(self._step)

    def _note(self, measurement: Measurement) -> None:
        """Keep in mind what later decisions rest on; a resumed run is told its record again."""
        self._divergence.update(measurement)
        self._skipped.note(measurement)
        if isinstance(measurement, TrainMeasurement):
            self._keep_loss(measurement.loss, measurement.loss_scale)
            self._updates.append(measurement)
            self._statistics = statistics_in_words(measurement)
        if isinstance(measurement, EvaluationMeasurement):
            self._last_losses["evaluation"] = measurement.test_loss
        wanted, stopping = self._config.early_stopping, self._stopping
        if isinstance(measurement, EvaluationMeasurement) and wanted and stopping:
            value = getattr(measurement, wanted.monitor)
            epoch = round(measurement.epoch) - 1
            stopping.update(epoch, math.nan if value is None else value)
            if stopping.best_epoch == epoch:
                self._checkpoints.pinned_step = measurement.step

    def _final_weights(self, state: TrainState) -> dict[str, Any]:
        """Parameters and running statistics to end with: of the best epoch, if so configured."""
        wanted, best_step = self._config.early_stopping, self._checkpoints.pinned_step
        if wanted and wanted.restores_best_weights and best_step not in (None, self._step):
            state = self._checkpoints.restore(best_step, self._programs.step.state)
        params, model_state = self._programs.evaluation.weights(state)
        return {"params": params, "model_state": model_state}

    def _interrupt(self, signal_number: int) -> None:
        self._checkpoints.wait()
        path, count = self._journal.files.path, self._run.layout.device_count
        virtual = f" --cpu-devices {count}" if jax.default_backend() == "cpu" and count > 1 else ""
        command = f"scalejax train {path / 'run.toml'} --folder {path}{virtual} --resume"
        self._change_status("interrupted", f"at step {self._step}; go on with: {command}")
        raise Interrupted(128 + signal_number)

    def _ending(self) -> tuple[Status, str, DivergenceCause | None]:
        """How the run ended, the same in words, and why if it diverged."""
        took = f"{counted(self._step, 'step')} in {format_seconds(self._journal.elapsed_seconds)}"
        stopping = self._stopping
        if stopping is not None and stopping.best_epoch is not None:
            took += f", best after epoch {stopping.best_epoch + 1}"
        took += beside_predicted(self._journal.files, [m.step_seconds for m in self._updates])
        took += self._statistics + self._skipped.in_words
        how, is_tuned = self._run.config.input, self._is_tuned
        took += wait_with_advice(self._updates, how, machine_cores(), is_tuned=is_tuned)
        if self._divergence.cause is not None:
            return "diverged", f"{self._divergence.message}; {took}", self._divergence.cause
        if None in self._last_losses.values():
            return "diverged", f"{took}; the loss is not finite", "not_finite"
        if self._has_stopped_early and not self._is_last:
            return "stopped_early", took, None
        return "completed", took, None

    def _change_status(
        self, status: Status, message: str, cause: DivergenceCause | None = None
    ) -> None:
        self._journal.write(
            StatusChange(
                step=self._step,
                status=status,
                message=message,
                elapsed_seconds=self._journal.elapsed_seconds,
                cause=cause,
            )
        )
