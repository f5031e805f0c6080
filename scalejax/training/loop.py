"""The training loop: feeds batches to the step, logs metrics, evaluates, saves checkpoints.

It trains one run, or several that are mapped together in one program: each has its own record and
status, and ends on its own.

It keeps one update queued behind the one that runs, and waits for nothing else: metrics are
fetched only when a line is logged, once they are computed.

Every process runs this loop over its own devices; only the first writes files and reports.
"""

import json
import math
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.config.data import DataConfig
from scalejax.config.run import ResolvedRun
from scalejax.config.schedule import Phase
from scalejax.core.errors import ConfigError, Damaged
from scalejax.core.filesystem import is_url
from scalejax.core.remote import deadlines
from scalejax.core.units import counted
from scalejax.data.loader.loader import Batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Source, Split
from scalejax.training.checkpoint import Checkpoints, save_weights
from scalejax.training.compile import RunPrograms, measured_and_predicted
from scalejax.training.copies import Copies, Wish
from scalejax.training.features import open_examples
from scalejax.training.input_tuning import share_memory_with_workers
from scalejax.training.logger import (
    MetricsLogger,
    UpdateClock,
    evaluation_measurement,
    input_measurement,
    train_measurement,
)
from scalejax.training.manifest import Manifest, RunAtStep
from scalejax.training.multihost import all_gather_text, is_first, require_equal_replicas
from scalejax.training.profiler import StepTraces
from scalejax.training.record import (
    DivergenceCause,
    Measurement,
    ProcessesChange,
    SharpnessMeasurement,
    Status,
    StatusChange,
    UnreadableExamples,
    ValidationMeasurement,
    finite,
)
from scalejax.training.resume import RunIdentity
from scalejax.training.run_folder import versions
from scalejax.training.sharpness import preconditioned_threshold, stability_threshold
from scalejax.training.signals import Interrupted, StopSignals
from scalejax.training.state import TrainState
from scalejax.training.step import Step
from scalejax.training.stopping import RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One run of the loop."""

    index: int
    """Its place in the state of several runs."""
    run: ResolvedRun
    """The run."""
    logger: MetricsLogger
    """Its record."""
    status: RunStatus
    """Whether it is to end, and how."""


def store_seconds(data: DataConfig) -> float:
    """How long a failed read of `data` is retried; 0 if none of it is at a URL."""
    is_remote = any(is_url(each) for each in data.locations)
    return deadlines().total_seconds if is_remote else 0.0


class TrainingLoop:
    """One session of one or more runs, from their state until the last one ends, or a signal."""

    def __init__(
        self,
        runs: Sequence[ResolvedRun],
        programs: RunPrograms,
        checkpoints: Checkpoints,
        loggers: Sequence[MetricsLogger],
        signals: StopSignals,
        recorder: StepTraces,
        *,
        resume_command: str,
        ended: Collection[int] = (),
        checkpoint_seconds: float = 0.0,
        identities: Sequence[RunIdentity] = (),
        resumed: Manifest | None = None,
        copies: Copies | None = None,
    ) -> None:
        """Open the data to evaluate on.

        Args:
            runs: one run, or several that differ only in what `programs` take as inputs.
            programs: the compiled programs of all of them together.
            checkpoints: where their common state is saved.
            loggers: the record of each; all share heartbeat and clock.
            signals: requests to stop.
            recorder: the profiler.
            resume_command: what to type after an interruption.
            ended: indices of runs that ended in an earlier session.
            checkpoint_seconds: minimum time between two checkpoints, except the last.
            identities: what the manifests of checkpoints say about each run.
            resumed: manifest of the checkpoint that they resume from; None at step 0.
            copies: where their state is copied to in memory; None if they are not elastic.
        """
        self._run = runs[0]
        self._config = self._run.config.train
        self._run_count = len(runs)
        self._programs = programs
        self._checkpoints = checkpoints
        self._logger = loggers[0]  # its heartbeat, clock and reporter are those of the loop
        self._logger.heartbeat.reads_a_store(store_seconds(self._run.config.data))
        self._signals = signals
        self._recorder = recorder
        self._resume_command = resume_command
        self._open = [
            _Member(index=index, run=run, logger=logger, status=RunStatus(run))
            for index, (run, logger) in enumerate(zip(runs, loggers, strict=True))
            if index not in ended
        ]
        self._loggers = loggers
        self._identities = identities
        self._resumed = resumed
        self._copies = copies
        self._untold = copies and copies.shared.change
        """The change of processes before this session; None once it is in the record."""
        self._step = self._begin = 0
        self._compared_step: int | None = None
        """The last checkpoint of this session before which replicas were compared."""
        self._is_tuned = False
        self._queued: dict[str, jax.Array] | None = None
        self._last_weights: tuple[TrainState, tuple[Any, Any]] | None = None
        self._of_seed = {run.config.seed: run for run in runs}
        self._skipped: dict[Split, list[Skipped]] = {
            part: [Skipped() for _ in self._of_seed] for part in ("train", "validation", "test")
        }
        self._has_validation = self._run.config.data.has_validation
        self._monitored: Split = "validation" if self._has_validation else "test"
        self._evaluated: dict[Split, list[Source]] = {
            part: self._evaluation_sources(part)
            for part in dict.fromkeys((self._monitored, "test"))
        }
        self._clock = UpdateClock()
        self._batches: Batches | None = None
        self._update_seconds = 0.0
        """Time of updates, with waits for their batches, since the life of a batch was logged."""
        self._checkpoint_seconds = checkpoint_seconds
        self._last_checkpoint = time.perf_counter()

    def train(self, state: TrainState, begin: int, remark: str = "", start: str = "") -> None:
        """Train from `state`, the state after `begin` updates, until the runs end; `remark`, on how
        input was tuned, and `start`, on initial weights, are added to the first status message."""
        self._step, self._begin, self._is_tuned = begin, begin, bool(remark)
        if self._copies is not None:
            self._copies.begin(state)
            self._signals.wish = self._copies.wish
        for each in self._open:
            for measurement in each.logger.earlier:
                self._note(each, measurement)
            self._require_same_stopping(each)
        self._logger.reporter.begin(begin, self._run.total_steps)
        layout = self._run.layout
        spread = f" ({layout})" if layout.device_count > 1 else ""
        devices = f"on {counted(layout.device_count, 'device')}{spread}{self._programs.together}"
        devices += f"; {versions()}"
        for each in self._open:
            if begin:
                self._change_status(each, "resumed", f"at step {begin}, {devices}{remark}")
            else:
                changes = "".join(f"; {change}" for change in each.run.changes)
                self._change_status(each, "started", devices + changes + start + remark)
        has_missed = any(each.status.evaluated_step != begin for each in self._open)
        if begin and self._run.is_evaluated(begin) and has_missed:
            self._pause(state)  # a signal had interrupted its evaluation
        if not begin:
            self._measure_sharpness(state)
        state = self._run_steps(state)
        if self._has_validation:
            self._test(state)
        self._logger.clock.enter("checkpoint")  # until the last one is complete
        self._logger.heartbeat.at("finishing", self._step)
        if len(self._open) > 1:
            self._checkpoints.wait()  # a kill between two ends must not repeat training
        for each in tuple(self._open):
            self._end(each, state)

    def _run_steps(self, state: TrainState) -> TrainState:
        programs, phases = self._programs, self._run.phases
        sources = self._training_sources
        compiled = [(programs.step, programs.update), *programs.later]
        ends = [*(phase.first_step for phase in phases[1:]), self._run.total_steps]
        for phase, (step, update), end in zip(phases, compiled, ends, strict=True):
            if self._step < end:
                state = self._run_phase(state, sources, phase, step, update, end)
        return state

    @cached_property
    def _training_sources(self) -> list[Source]:
        """Opened once: files that appear during the run are not part of its data."""
        return self._sources("train")

    def _sources(self, part: Split) -> list[Source]:
        """The examples of each seed."""
        return [open_examples(run, part, self._logger.reporter) for run in self._of_seed.values()]

    def _evaluation_sources(self, part: Split) -> list[Source]:
        """The examples to evaluate on, of each seed."""
        sources = self._sources(part)
        if self._programs.together:  # there are no input workers
            return sources
        return [share_memory_with_workers(each, self._run.config.input) for each in sources]

    def _run_phase(
        self,
        state: TrainState,
        sources: Sequence[Source],
        phase: Phase,
        step: Step,
        update: Any,
        end: int,
    ) -> TrainState:
        """The updates of one batch-size phase, up to step `end` of the run."""
        batches = self._programs.training_batches(
            self._run,
            sources,
            self._skipped["train"],
            step=step,
            phase=phase,
            start_step=self._step,
            stop_step=end,
        )
        self._clock.restart(self._step)
        self._signals.restart_pace()
        self._logger.clock.enter("step")
        self._batches, self._update_seconds = batches, 0.0
        with closing(batches):
            state = self._run_batches(state, batches, update, end)
        self._settle()
        self._tell_unreadable("train")
        return state

    def _run_batches(
        self, state: TrainState, batches: Batches, update: Any, end: int
    ) -> TrainState:
        """Train until step `end`, or until all runs are to end early."""
        goes_on = self._goes_on(state)
        while self._step < end and goes_on:
            if self._recorder.is_boundary:
                self._settle()
                self._logger.heartbeat.at("tracing", self._step)  # writing it may take minutes
                self._recorder.cross(self._step)
                self._clock.restart(self._step)
            self._logger.heartbeat.at("waiting for input", self._step)
            begin = time.perf_counter()
            with self._recorder.step(self._step + 1):
                batch, waited_seconds = batches.next_beside(self._is_updating)
                self._clock.waited_seconds += waited_seconds
                self._logger.clock.waited(waited_seconds)
                self._logger.heartbeat.at("training", self._step)
                state, metrics = update(state, batch)
            self._update_seconds += time.perf_counter() - begin
            self._settle()  # the previous update: this one is queued behind it
            self._step += 1
            self._logger.clock.at(self._step)
            self._queued = metrics
            if not self._goes_on(state):
                break
            every = self._config.compare_replicas_every_steps
            if every and self._step % every == 0:
                self._settle()
                self._compare_replicas(state)
            self._measure_sharpness(state)
            signal_number = self._signals.agreed("training")
            wanted = self._signals.agreed_wish
            if self._is_pause or signal_number:
                self._settle()
                if goes_on := self._goes_on(state):
                    self._pause(state, signal_number)
                    goes_on = self._goes_on(state)
            if wanted and goes_on and not self._is_last:
                self._settle()
                if goes_on := self._goes_on(state):
                    self._copy(state, Wish(wanted))
        return state

    def _goes_on(self, state: TrainState) -> bool:
        """Whether any run continues; if so, those that are to end early are ended here."""
        ending = [each for each in self._open if each.status.has_ended_early]
        if len(ending) == len(self._open):
            return False
        if ending:
            self._settle()
            self._tell_unreadable("train")
            self._logger.heartbeat.at("finishing", self._step)
            for each in ending:
                self._end(each, state)
            self._clock.restart(self._step)
        return True

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
        begin = time.perf_counter()
        jax.block_until_ready(metrics["loss"])
        self._update_seconds += time.perf_counter() - begin
        self._tell_change()
        if self._step % self._config.log_every_steps and not self._is_last:
            # A checkpoint is saved next, or the run stops early, with no line logged for this step.
            if self._is_pause:
                values = jax.device_get(metrics)
                for each in self._open:
                    each.status.see_loss(self._step, self._programs.of_run(each.index, values))
            return
        step_seconds, data_wait_seconds = self._clock.lap(self._step)
        values = jax.device_get(metrics)
        is_alone = not self._programs.together  # runs together have no input workers to advise on
        for each in self._open:
            measurement = train_measurement(
                each.run,
                self._programs.of_run(each.index, values),
                step=self._step,
                step_seconds=step_seconds / self._run_count,
                data_wait_seconds=data_wait_seconds if is_alone else None,
                elapsed_seconds=each.logger.elapsed_seconds,
            )
            self._write(each, measurement)

    def _pause(self, state: TrainState, signal_number: int = 0) -> None:
        """Evaluate if due, save a checkpoint, and end the session if a signal was received.

        A signal does not wait for an evaluation: the resumed run repeats it.
        """
        clock = self._logger.clock
        self._tell_unreadable("train")
        if self._is_last or signal_number or self._run.epoch_of(self._step) % 1 == 0:
            self._tell_input()
        if self._run.is_evaluated(self._step) and not signal_number:
            self._logger.heartbeat.at("evaluating", self._step)
            with clock.within("evaluation"):
                weights, signal_number = self._weights(state)
                signal_number = signal_number or self._evaluate(weights)
        self._logger.heartbeat.at("saving", self._step)
        is_due = time.perf_counter() >= self._last_checkpoint + self._checkpoint_seconds
        has_diverged = all(each.status.has_diverged for each in self._open)
        # The checkpoint of a diverged run would evict a better one.
        if (is_due or self._is_last or signal_number) and not has_diverged:
            with clock.within("checkpoint"):
                if self._config.compare_replicas_every_steps:
                    self._compare_replicas(state)
                    self._compared_step = self._step
                accuracy = self._checkpoints.rated.get(self._step)
                self._checkpoints.save(
                    self._step,
                    state,
                    validation_accuracy=accuracy,
                    runs=self._runs_at_step(),
                    records=self._records(),
                )
            self._last_checkpoint = time.perf_counter()
        clock.finish_interval()
        if signal_number:
            self._interrupt(signal_number)
        self._clock.restart(self._step)

    def _measure_sharpness(self, state: TrainState) -> None:
        """Measure and log the sharpness if it is due, before the checkpoint of the same step, so
        that a resumed run logs it only once."""
        wanted, program = self._config.sharpness, self._programs.sharpness
        if wanted is None or program is None or self._step % wanted.every_steps:
            return
        self._settle()
        if not self._goes_on(state):
            return
        self._logger.heartbeat.at("evaluating", self._step)
        with self._logger.clock.within("evaluation"):
            begin = time.perf_counter()
            values = program.measured(state, self._sharpness_batch)
            seconds = time.perf_counter() - begin
        for each in self._open:
            rate = program.learning_rate(self._step)
            measurement = SharpnessMeasurement(
                step=self._step,
                epoch=each.run.epoch_of(self._step),
                sharpness=finite(values["sharpness"]),
                sharpness_error=finite(values["error"]),
                learning_rate=rate,
                stability_threshold=stability_threshold(program.optimizer, rate),
                preconditioned_sharpness=finite(values.get("preconditioned_sharpness", math.nan)),
                preconditioned_error=finite(values.get("preconditioned_error", math.nan)),
                preconditioned_threshold=(
                    preconditioned_threshold(program.optimizer, rate)
                    if "preconditioned_sharpness" in values
                    else None
                ),
                seconds=seconds,
                elapsed_seconds=each.logger.elapsed_seconds,
            )
            self._write(each, measurement)
        self._clock.restart(self._step)

    @cached_property
    def _sharpness_batch(self) -> Any:
        """The samples of every measurement of sharpness, on the devices."""
        program = self._programs.sharpness
        assert program is not None  # noqa: S101  checked by the caller
        return program.samples(self._training_sources[0])

    def _copy(self, state: TrainState, wish: Wish) -> None:
        """Copy the state to memory, and end the session if other processes are to join."""
        if self._copies is None:
            return
        clock = self._logger.clock
        self._tell_unreadable("train")
        self._logger.heartbeat.at("copying", self._step)
        with clock.within("checkpoint"):
            if self._config.compare_replicas_every_steps:
                self._compare_replicas(state)
            runs = self._runs_at_step()
            if wish != Wish.SAVE_AND_STOP:
                self._copies.save(self._step, state, runs)
            is_stopping = wish != Wish.COPY
            if wish == Wish.SAVE_AND_STOP or (is_stopping and not self._copies.wait()):
                self._checkpoints.save(self._step, state, runs=runs, records=self._records())
                self._checkpoints.wait()
        clock.finish_interval()
        if is_stopping:
            self._logger.heartbeat.at("finishing", self._step)
            raise Interrupted(128 + signal.SIGTERM)
        self._clock.restart(self._step)

    def _tell_change(self) -> None:
        """Log the change of processes that this session began with, after its first update."""
        if self._untold is None or self._copies is None:
            return
        begin, change, self._untold = self._begin, self._untold, None
        for each in self._open:
            each.logger.write(
                ProcessesChange(
                    step=begin,
                    before=change.before,
                    after=change.after,
                    reason=change.reason,
                    repeated_steps=max(0, change.step - begin),
                    seconds=max(0.0, time.time() - change.since_seconds),
                    elapsed_seconds=each.logger.elapsed_seconds,
                )
            )
        if is_first():
            self._copies.shared.set_change(None)

    def _compare_replicas(self, state: TrainState) -> None:
        """Refuse to continue or to save if a device's replica differs from the others."""
        require_equal_replicas(state, step=self._step, way_back=self._way_back)

    def _way_back(self) -> str:
        """Which checkpoint a run with differing replicas may resume from; every process must call
        it."""
        with suppress(ConfigError):  # from a save that failed: the checkpoint before it counts
            self._checkpoints.wait()
        if (newest := self._checkpoints.latest_step) is None:
            return "there is no checkpoint to go back to"
        if newest == self._compared_step:
            return f"all agreed before the checkpoint of step {newest:,}: continue from it"
        return f"the newest checkpoint is of step {newest:,}"

    def _runs_at_step(self) -> list[RunAtStep]:
        """What the manifest of a checkpoint says about the runs; only in the first process."""
        stopping = {each.index: each.status.stopping for each in self._open}
        return [
            identity.at(self._step, position, stopping.get(index))
            for index, (identity, logger) in enumerate(
                zip(self._identities, self._loggers, strict=True)
            )
            if (position := logger.position) is not None
        ]

    def _records(self) -> list[Path]:
        """The files whose positions a checkpoint records."""
        return [logger.files.measurements for logger in self._loggers]

    def _require_same_stopping(self, member: _Member) -> None:
        """Refuse a record from which early stopping arrives at a state other than the checkpoint's.

        Raises:
            Damaged: naming the checkpoint.
        """
        if self._resumed is None:
            return
        saved, now = self._resumed.runs[member.index].stopping, member.status.stopping
        if saved is not None and saved != now:
            raise Damaged(
                f"{self._checkpoints.folder / str(self._resumed.step)}: early stopping was at "
                f"{saved}, and comes to {now} by the record in {member.logger.files.path}; delete "
                "this checkpoint, and the run continues from the one before."
            )

    def _evaluate(self, weights: Any) -> int:
        """Evaluate the runs on the whole split that is monitored during training. Returns the
        signal that interrupted this, or 0."""
        begin = time.perf_counter()
        parts, signal_number = self._evaluation_of(weights, self._monitored)
        if signal_number:
            return signal_number
        seconds = time.perf_counter() - begin
        evaluations = [
            evaluation_measurement(
                each.run,
                [self._programs.of_run(each.index, part) for part in parts],
                split=self._monitored,
                step=self._step,
                seconds=seconds / self._run_count,
                elapsed_seconds=each.logger.elapsed_seconds,
            )
            for each in self._open
        ]
        self._tell_unreadable(self._monitored)
        for each, evaluation in zip(self._open, evaluations, strict=True):
            if each.status.evaluated_step != self._step:  # else it was logged before a kill
                self._write(each, evaluation)
        return 0

    def _test(self, state: TrainState) -> None:
        """Evaluate the runs that did not diverge, with their final weights, on test data, which
        nothing has looked at before."""
        tested = [each for each in self._open if not each.status.is_lost]
        if not tested:
            return
        begin = time.perf_counter()
        self._logger.heartbeat.at("evaluating", self._step)
        with self._logger.clock.within("evaluation"):
            weights, signal_number = self._weights(self._final_state(tested[0], state))
            parts: list[Any] = []
            if not signal_number:
                parts, signal_number = self._evaluation_of(weights, "test")
        if signal_number:
            self._interrupt(signal_number)
        seconds = time.perf_counter() - begin
        for each in tested:
            measurement = evaluation_measurement(
                each.run,
                [self._programs.of_run(each.index, part) for part in parts],
                split="test",
                step=self._step,
                seconds=seconds / self._run_count,
                elapsed_seconds=each.logger.elapsed_seconds,
                chosen=each.status.chosen(self._step),
            )
            self._write(each, measurement)
        self._tell_unreadable("test")

    def _evaluation_of(self, weights: Any, split: Split) -> tuple[list[Any], int]:
        """The results of all batches of a part, and the signal that interrupted it, or 0."""
        sums = []
        batches = self._programs.evaluation_batches(
            self._run, self._evaluated[split], self._skipped[split]
        )
        with closing(batches):
            for batch in batches:
                self._logger.heartbeat.at("evaluating", self._step)
                if len(sums) > 1:
                    jax.block_until_ready(sums[-2])  # else a fast host queues unlimited batches
                sums.append(self._programs.evaluate(*weights, batch))
                if signal_number := self._signals.agreed("evaluating"):
                    return [], signal_number
        return jax.device_get(sums), 0

    def _tell_unreadable(self, part: Split) -> None:
        """Log the examples that any process failed to read since the last such line, if there are
        any; every process must call this."""
        if self._run.config.input.unreadable == "refuse":
            return
        found = {
            seed: [json.loads(said) for said in all_gather_text(json.dumps(skipped.taken()))]
            for seed, skipped in zip(self._of_seed, self._skipped[part], strict=True)
        }
        for each in self._open:
            of_processes = found[each.run.config.seed]
            if rows := sum(count for count, _ in of_processes):
                measurement = UnreadableExamples(
                    step=self._step,
                    epoch=each.run.epoch_of(self._step),
                    part=part,
                    rows=rows,
                    reasons=tuple(reason for _, reasons in of_processes for reason in reasons),
                    elapsed_seconds=each.logger.elapsed_seconds,
                )
                self._write(each, measurement)

    def _tell_input(self) -> None:
        """Log the life of a batch by stage, for the batches since the last such line."""
        if self._batches is None or self._programs.together:  # together there are no workers
            return
        seconds, of_updates = self._batches.taken_seconds(), self._update_seconds
        self._update_seconds = 0.0
        if not seconds.batches:
            return
        workers = self._run.config.input.workers
        for each in self._open:
            measurement = input_measurement(
                seconds,
                workers=workers if isinstance(workers, int) else 0,
                shares_cores=jax.devices()[0].platform == "cpu",
                step=self._step,
                epoch=each.run.epoch_of(self._step),
                of_updates_seconds=of_updates,
                elapsed_seconds=each.logger.elapsed_seconds,
            )
            self._write(each, measurement)

    def _write(self, member: _Member, measurement: Measurement) -> None:
        member.logger.write(measurement)
        self._note(member, measurement)

    def _note(self, member: _Member, measurement: Measurement) -> None:
        """Update the status of a run from a measurement; a resumed run replays its record here."""
        member.status.note(measurement)
        if self._programs.together:
            return  # their common checkpoint is not the best of each
        self._checkpoints.pinned_step = member.status.best_step
        if isinstance(measurement, ValidationMeasurement):
            self._checkpoints.rated[measurement.step] = measurement.validation_accuracy

    def _end(self, member: _Member, state: TrainState) -> None:
        """Save the final weights of a run, and append its final status.

        A run that diverged saves none, or those of its best epoch if so configured: nobody should
        take diverged weights for a result.
        """
        status, logger = member.status, member.logger
        measured = [update.step_seconds for update in status.updates]
        remarks = measured_and_predicted(logger.files, measured) + self._programs.together
        seconds = logger.elapsed_seconds
        ending = status.ending(self._step, seconds, remarks, is_tuned=self._is_tuned)
        if ending[0] != "diverged" or self._restored_step(member) is not None:
            save_weights(logger.files.weights, self._final_weights(member, state))
        elif is_first():  # nor keep those of an earlier session that completed
            shutil.rmtree(logger.files.weights, ignore_errors=True)
        self._checkpoints.wait()  # a run recorded as ended must be on disk
        self._change_status(member, *ending)
        self._open.remove(member)

    def _final_weights(self, member: _Member, state: TrainState) -> dict[str, Any]:
        """Final parameters and running statistics: of the best epoch, if so configured."""
        (params, model_state), signal_number = self._weights(self._final_state(member, state))
        if signal_number:
            self._interrupt(signal_number)
        weights = {"params": params, "model_state": model_state}
        return self._programs.of_run(member.index, weights)

    def _weights(self, state: TrainState) -> tuple[tuple[Any, Any], int]:
        """The parameters and statistics to evaluate, and the signal that interrupted this, or 0. If
        the weights are an average of samples of the run, BatchNorm statistics are the mean over the
        batches of an epoch (Izmailov et al. 2018, section 3.2; `torch.optim.swa_utils.update_bn`).
        At the last step they are computed once, for validation, test and saving."""
        evaluation = self._programs.evaluation
        params, model_state = evaluation.weights(state)
        if evaluation.statistics is None:
            return (params, model_state), 0
        if self._last_weights is not None and self._last_weights[0] is state:
            return self._last_weights[1], 0
        phase = self._run.phases[0]
        batches = self._programs.training_batches(
            self._run,
            self._training_sources,
            [Skipped() for _ in self._training_sources],
            step=self._programs.step,
            phase=phase,
            start_step=0,
            stop_step=phase.steps_per_epoch,
        )
        total = jax.tree.map(jnp.zeros_like, model_state)
        with closing(batches):
            for batch in batches:
                self._logger.heartbeat.at("evaluating", self._step)
                of_batch = evaluation.statistics(params, model_state, batch)
                total = jax.tree.map(jnp.add, total, of_batch)
                jax.block_until_ready(total)  # else a fast host queues unlimited batches
                if signal_number := self._signals.agreed("evaluating"):
                    return (params, model_state), signal_number
        weights = params, jax.tree.map(lambda leaf: leaf / phase.steps_per_epoch, total)
        if self._is_last:
            self._last_weights = state, weights
        return weights, 0

    def _final_state(self, member: _Member, state: TrainState) -> TrainState:
        """The state whose weights a run at `state` ends with."""
        if (earlier := self._restored_step(member)) is None:
            return state
        return self._checkpoints.restore(earlier, self._programs.step.state)

    def _restored_step(self, member: _Member) -> int | None:
        """Step of the best epoch if it gives the final weights and is not the last; else None."""
        wanted, best_step = self._config.early_stopping, member.status.best_step
        restores = wanted is not None and wanted.restores_best_weights
        return best_step if restores and best_step != self._step else None

    def _interrupt(self, signal_number: int) -> None:
        self._logger.heartbeat.at("finishing", self._step)
        with self._logger.clock.within("checkpoint"):
            self._checkpoints.wait()
        message = f"at step {self._step}; continue with: {self._resume_command}"
        for each in self._open:
            self._change_status(each, "interrupted", message)
        raise Interrupted(128 + signal_number)

    def _change_status(
        self, member: _Member, status: Status, message: str, cause: DivergenceCause | None = None
    ) -> None:
        member.logger.write(
            StatusChange(
                step=self._step,
                status=status,
                message=message,
                elapsed_seconds=member.logger.elapsed_seconds,
                cause=cause,
            )
        )
