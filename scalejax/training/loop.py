"""The training loop: feeds batches to the step, logs metrics, evaluates, saves checkpoints.

It keeps one update queued behind the one that runs, and waits for nothing else: metrics are
fetched only when a line is logged, once they are computed.

Every process runs this loop over its own devices; only the first writes files and reports.
"""

from contextlib import closing
from typing import Any

import jax

from scalejax.config.run import ResolvedRun
from scalejax.config.schedule import Phase
from scalejax.core.units import counted
from scalejax.data.loader.loader import Batches, training_batches
from scalejax.data.source import Source
from scalejax.training.checkpoint import Checkpoints, save_weights
from scalejax.training.compile import RunPrograms, measured_and_predicted, resume_command
from scalejax.training.evaluation_loop import RunEvaluation
from scalejax.training.features import open_examples
from scalejax.training.logger import MetricsLogger, UpdateClock, train_measurement
from scalejax.training.profiler import StepTraces
from scalejax.training.record import (
    DivergenceCause,
    EvaluationMeasurement,
    Measurement,
    Status,
    StatusChange,
)
from scalejax.training.run_folder import versions
from scalejax.training.signals import Interrupted, StopSignals
from scalejax.training.state import TrainState
from scalejax.training.step import Step
from scalejax.training.stopping import RunStatus
from scalejax.training.unreadable import SkippedExamples


class TrainingLoop:
    """One session of a run, from a state to the end of the run or a signal."""

    def __init__(
        self,
        run: ResolvedRun,
        programs: RunPrograms,
        checkpoints: Checkpoints,
        logger: MetricsLogger,
        signals: StopSignals,
        recorder: StepTraces,
    ) -> None:
        self._run = run
        self._config = run.config.train
        self._programs = programs
        self._checkpoints = checkpoints
        self._logger = logger
        self._signals = signals
        self._recorder = recorder
        self._status = RunStatus(run)
        self._step = 0
        self._is_tuned = False
        self._queued: dict[str, jax.Array] | None = None
        self._skipped = SkippedExamples(run)
        self._evaluation = RunEvaluation(
            run, programs.evaluation, programs.evaluate, self._skipped.of["test"], logger.reporter
        )
        self._clock = UpdateClock()

    def train(self, state: TrainState, begin: int, remark: str = "") -> None:
        """Train from `state`, which is after `begin` updates, until the run ends; `remark` is
        added to the first status message."""
        self._step, self._is_tuned = begin, bool(remark)
        for measurement in self._logger.earlier:
            self._note(measurement)
        self._logger.reporter.begin(begin, self._run.total_steps)
        layout = self._run.layout
        spread = f" ({layout})" if layout.device_count > 1 else ""
        devices = f"on {counted(layout.device_count, 'device')}{spread}; {versions()}"
        if begin:
            self._change_status("resumed", f"at step {begin}, {devices}{remark}")
        else:
            changes = "".join(f"; {change}" for change in self._run.changes)
            self._change_status("started", devices + changes + remark)
        if begin and self._run.is_evaluated(begin) and self._status.evaluated_step != begin:
            self._pause(state)  # a signal had interrupted its evaluation
        state = self._run_steps(state)
        self._logger.clock.enter("checkpoint")  # until the last of them is whole
        self._logger.heartbeat.at("saving", self._step)
        save_weights(self._logger.files.weights, self._final_weights(state))
        self._change_status(*self._ending())

    def _run_steps(self, state: TrainState) -> TrainState:
        programs, phases = self._programs, self._run.phases
        # Opened once: files that appear during the run are not part of its data.
        source = open_examples(self._run, "train", self._logger.reporter)
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
        """The updates of one batch-size phase, up to step `end` of the run."""
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
        self._signals.restart_pace()
        self._logger.clock.enter("step")
        with closing(batches):
            state = self._run_batches(state, batches, update, end)
        self._settle()
        self._skipped.tell("train", self._logger, step=self._step)
        return state

    def _run_batches(
        self, state: TrainState, batches: Batches, update: Any, end: int
    ) -> TrainState:
        """Train until step `end`, or until the run ends early."""
        while self._step < end and not self._status.has_ended_early:
            if self._recorder.is_boundary:
                self._settle()
                self._recorder.cross(self._step)
                self._clock.restart(self._step)
            self._logger.heartbeat.at("waiting for input", self._step)
            with self._recorder.step(self._step + 1):
                batch, waited_seconds = batches.next_beside(self._is_updating)
                self._clock.waited_seconds += waited_seconds
                self._logger.clock.waited(waited_seconds)
                self._logger.heartbeat.at("training", self._step)
                state, metrics = update(state, batch)
            self._settle()  # the previous update: this one is queued behind it
            self._step += 1
            self._logger.clock.at(self._step)
            self._queued = metrics
            if self._status.has_diverged:
                break
            signal_number = self._signals.agreed("training")
            if self._is_pause or signal_number:
                self._settle()
                if self._status.has_diverged:
                    break
                self._pause(state, signal_number)
        return state

    def _is_updating(self) -> bool:
        """Whether the queued update is still running."""
        return self._queued is not None and not self._queued["loss"].is_ready()  # type: ignore[attr-defined]  untyped

    @property
    def _is_last(self) -> bool:
        return self._step == self._run.total_steps

    @property
    def _is_pause(self) -> bool:
        """Whether a checkpoint or an evaluation is due at this step."""
        every = self._config.checkpoint_every_steps
        is_due = self._step % every == 0 if every else self._run.epoch_of(self._step) % 1 == 0
        return is_due or self._run.is_evaluated(self._step)

    def _settle(self) -> None:
        """Wait for the queued update, and log its metrics if they are due.

        Without the wait, a fast host would queue batches until it is out of memory; and XLA's
        virtual CPU devices can deadlock when many updates are queued.
        """
        if self._queued is None:
            return
        metrics, self._queued = self._queued, None
        jax.block_until_ready(metrics["loss"])
        if self._step % self._config.log_every_steps and not self._is_last:
            # A checkpoint is saved next, or the run stops early, with no logged line of this step.
            if self._is_pause:
                self._status.see_loss(self._step, jax.device_get(metrics))
            return
        step_seconds, data_wait_seconds = self._clock.lap(self._step)
        measurement = train_measurement(
            self._run,
            jax.device_get(metrics),
            step=self._step,
            step_seconds=step_seconds,
            data_wait_seconds=data_wait_seconds,
            elapsed_seconds=self._logger.elapsed_seconds,
        )
        self._logger.write(measurement)
        self._note(measurement)

    def _pause(self, state: TrainState, signal_number: int = 0) -> None:
        """Evaluate if due, save a checkpoint, and end the session if a signal was received.

        A signal does not wait for an evaluation: the resumed run repeats it.
        """
        accuracy, clock = None, self._logger.clock
        self._skipped.tell("train", self._logger, step=self._step)
        if self._run.is_evaluated(self._step) and not signal_number:
            self._logger.heartbeat.at("evaluating", self._step)
            with clock.within("evaluation"):
                accuracy, signal_number = self._evaluate(state)
        self._logger.heartbeat.at("saving", self._step)
        if not self._status.has_diverged:  # its checkpoint would evict a better one
            with clock.within("checkpoint"):
                self._checkpoints.save(self._step, state, test_accuracy=accuracy)
        clock.finish_interval()
        if signal_number:
            self._interrupt(signal_number)
        self._clock.restart(self._step)

    def _evaluate(self, state: TrainState) -> tuple[float | None, int]:
        """Test accuracy and 0, or None and the signal that interrupted the evaluation."""
        signal_number = 0

        def is_stopped() -> int:
            nonlocal signal_number
            signal_number = self._signals.agreed("evaluating")
            return signal_number

        evaluation = self._evaluation.measure(
            state, self._logger, step=self._step, is_stopped=is_stopped
        )
        if evaluation is None:
            return None, signal_number
        self._skipped.tell("test", self._logger, step=self._step)
        self._logger.write(evaluation)
        self._note(evaluation)
        return evaluation.test_accuracy, 0

    def _note(self, measurement: Measurement) -> None:
        """Update the run status from a measurement; a resumed run replays its record here."""
        self._status.note(measurement)
        self._skipped.note(measurement)
        self._checkpoints.pinned_step = self._status.best_step
        if isinstance(measurement, EvaluationMeasurement):
            self._checkpoints.rated[measurement.step] = measurement.test_accuracy

    def _final_weights(self, state: TrainState) -> dict[str, Any]:
        """Final parameters and running statistics: of the best epoch, if so configured."""
        wanted, best_step = self._config.early_stopping, self._status.best_step
        if wanted and wanted.restores_best_weights and best_step not in (None, self._step):
            state = self._checkpoints.restore(best_step, self._programs.step.state)
        params, model_state = self._programs.evaluation.weights(state)
        return {"params": params, "model_state": model_state}

    def _interrupt(self, signal_number: int) -> None:
        with self._logger.clock.within("checkpoint"):
            self._checkpoints.wait()
        command = resume_command(self._logger.files, self._run)
        self._change_status("interrupted", f"at step {self._step}; go on with: {command}")
        raise Interrupted(128 + signal_number)

    def _ending(self) -> tuple[Status, str, DivergenceCause | None]:
        measured = [update.step_seconds for update in self._status.updates]
        remarks = measured_and_predicted(self._logger.files, measured) + self._skipped.in_words
        return self._status.ending(
            self._step, self._logger.elapsed_seconds, remarks, is_tuned=self._is_tuned
        )

    def _change_status(
        self, status: Status, message: str, cause: DivergenceCause | None = None
    ) -> None:
        self._logger.write(
            StatusChange(
                step=self._step,
                status=status,
                message=message,
                elapsed_seconds=self._logger.elapsed_seconds,
                cause=cause,
            )
        )
