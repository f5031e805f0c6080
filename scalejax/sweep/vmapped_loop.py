"""Training loop of several runs in one vmapped program, which writes the record of each run.

Knows nothing of the sweep.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from scalejax.config.run import ResolvedRun
from scalejax.core.heartbeat import Heartbeat
from scalejax.data.loader.loader import evaluation_batches_of_seeds, training_batches_of_seeds
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Split
from scalejax.sweep.results import is_finished
from scalejax.sweep.vmapped import MappedPrograms
from scalejax.training.checkpoint import Checkpoints, save_weights
from scalejax.training.data_fingerprints import refuse_other_files
from scalejax.training.features import open_examples
from scalejax.training.logger import evaluation_measurement, train_measurement
from scalejax.training.record import (
    DivergenceCause,
    EvaluationMeasurement,
    Measurement,
    MeasurementLog,
    RunFolder,
    RunRecord,
    Status,
    StatusChange,
    TrainMeasurement,
    finite,
)
from scalejax.training.reporter import Reporter
from scalejax.training.run_folder import describe_run, versions
from scalejax.training.signals import Interrupted, StopSignals
from scalejax.training.state import PyTree, TrainState
from scalejax.training.stopping import Divergence, is_skipped
from scalejax.training.unreadable import unreadable_examples

_SECONDS_BETWEEN_CHECKPOINTS = 20.0
"""Time between checkpoints: at most this much training is repeated after a kill."""


class Loop:
    """One session of runs that train in one program."""

    def __init__(
        self,
        runs: Sequence[ResolvedRun],
        folders: Sequence[RunFolder],
        saved: Checkpoints,
        signals: StopSignals,
        heartbeat: Heartbeat,
        reporter: Reporter,
        begin: int,
        programs: MappedPrograms,
    ) -> None:
        self._runs, self._run, self._folders = runs, runs[0], folders
        self._saved, self._signals, self._reporter = saved, signals, reporter
        self._heartbeat = heartbeat
        self._step = begin
        self._programs = programs
        self._tests = [
            open_examples(_of_seed(self._run, seed), "test", reporter)
            for seed in self._programs.seeds
        ]
        self._logs = [MeasurementLog(folder.measurements, after_step=begin) for folder in folders]
        self._zero = time.perf_counter() - self._logs[0].elapsed_seconds * len(runs)
        self._open = [index for index, folder in enumerate(folders) if not is_finished(folder)]
        """Runs that have not ended yet: all, unless a kill happened between the ends of two."""
        self._last: list[dict[str, float | None]] = [{} for _ in runs]
        seeds = self._programs.seeds
        self._skipped = {part: [Skipped() for _ in seeds] for part in ("train", "test")}
        self._divergences = [Divergence(run.config.train.divergence) for run in runs]
        self._evaluated_step: int | None = None
        self._last_checkpoint = time.perf_counter()

    def close(self) -> None:
        """Close the records."""
        self._reporter.end()
        for log in self._logs:
            log.close()

    @property
    def _elapsed_seconds(self) -> float:
        """A run's share of the time since they began."""
        return (time.perf_counter() - self._zero) / len(self._runs)

    def train(self) -> None:
        """Update all runs until they end."""
        run, begin, total_steps = self._run, self._step, self._run.total_steps
        state = self._programs.initial_state()
        if begin:
            state = self._saved.restore(begin, state)
            self._restore_last_metrics()
        self._signals.begin()
        self._reporter.begin(begin, total_steps)
        words = f"with {len(self._runs) - 1} others in one program; {versions()}"
        self._change_status("resumed" if begin else "started", words)
        config, queued = run.config.train, None
        self._restart_clock()
        if begin and self._open and run.is_evaluated(begin) and self._evaluated_step != begin:
            if signal_number := self._evaluate(state):  # a signal arrived during the evaluation
                self._pause(state, signal_number)
            self._close_diverged(state, self._open)
        for batches in self._batches(begin):
            self._heartbeat.at("training", self._step)
            state, metrics = self._programs.update(self._programs.rates, state, batches)
            if queued is not None:
                jax.block_until_ready(queued["loss"])  # as in `train`
            self._step += 1
            queued = metrics
            # Runs found diverged in their last line end one update later, as in `train`.
            ending = tuple(index for index in self._open if self._divergences[index].cause)
            every = config.checkpoint_every_steps
            is_epoch = self._step % run.steps_per_epoch == 0
            is_pause = self._step % every == 0 if every else is_epoch
            is_evaluated = run.is_evaluated(self._step)
            if self._step % config.log_every_steps == 0 or is_pause or is_evaluated:
                self._note_update(metrics)
            if is_pause or is_evaluated:
                self._log_unreadable("train")
            self._close_diverged(state, ending)
            if is_pause or is_evaluated:
                self._close_diverged(state, self._open)
            signal_number = 0
            if is_evaluated and self._open:
                signal_number = self._evaluate(state)
                self._close_diverged(state, self._open)
            if not self._open:
                break
            self._pause(state, signal_number)
        self._finish(state)

    def _batches(self, begin: int) -> Iterator[PyTree]:
        """For each step, the batches of all seeds."""
        config, seeds = self._run.config, self._programs.seeds
        return training_batches_of_seeds(
            [open_examples(_of_seed(self._run, seed), "train", self._reporter) for seed in seeds],
            self._programs.batch,
            seeds=seeds,
            start_step=begin,
            stop_step=self._run.total_steps,
            how=config.input,
            skipped=self._skipped["train"],
        )

    def _restart_clock(self) -> None:
        self._window_begin, self._window_step = time.perf_counter(), self._step

    def _note_update(self, metrics: PyTree) -> None:
        """Log the metrics of an update, or only check them for divergence."""
        is_written = not self._step % self._run.config.train.log_every_steps or self._is_last
        values = jax.device_get(metrics)
        step_seconds = self._window_seconds() / len(self._runs) if is_written else 0.0
        for index in self._open:
            one = {name: value[index] for name, value in values.items()}
            if is_written:
                line = train_measurement(
                    self._runs[index],
                    one,
                    step=self._step,
                    step_seconds=step_seconds,
                    elapsed_seconds=self._elapsed_seconds,
                )
                self._write(index, line)
            else:
                loss, loss_scale = finite(float(one["loss"])), one.get("loss_scale")
                self._keep_loss(index, loss, loss_scale)
                self._divergences[index].see_loss(self._step, loss, loss_scale)

    def _window_seconds(self) -> float:
        """Mean time of an update of all runs since the last line; restarts the clock."""
        seconds = (time.perf_counter() - self._window_begin) / (self._step - self._window_step)
        self._restart_clock()
        return seconds

    def _write(self, index: int, line: Measurement) -> None:
        """Write a line of one run; lines of the first run go to the reporter too."""
        self._logs[index].append(line)
        self._note(index, line)
        if index == 0:
            self._reporter.measured(line)

    def _note(self, index: int, line: Measurement) -> None:
        """Store the last metrics of a run, which decide its final status."""
        self._divergences[index].update(line)
        if isinstance(line, TrainMeasurement):
            self._keep_loss(index, line.loss, line.loss_scale)
        elif isinstance(line, EvaluationMeasurement):
            self._last[index]["evaluation"] = line.test_loss
            self._evaluated_step = line.step

    def _keep_loss(self, index: int, loss: float | None, loss_scale: float | None) -> None:
        if not is_skipped(loss, loss_scale):
            self._last[index]["train"] = loss

    def _evaluate(self, state: PyTree) -> int:
        """Evaluate all runs, and log it for the active ones. Returns the number of a signal that
        arrived during the evaluation, which is then not logged; 0 otherwise."""
        begin, sums = time.perf_counter(), []
        weights = self._programs.weights(state)
        shapes = self._programs.evaluation_batch
        how = self._run.config.input
        for batches in evaluation_batches_of_seeds(self._tests, shapes, how, self._skipped["test"]):
            self._heartbeat.at("evaluating", self._step)
            if len(sums) > 1:
                jax.block_until_ready(sums[-2])
            sums.append(self._programs.evaluate(weights, batches))
            if signal_number := self._signals.agreed("evaluating"):
                return signal_number
        self._log_unreadable("test")
        parts = jax.device_get(sums)
        took = (time.perf_counter() - begin) / len(self._runs)
        for index in self._open:
            line = evaluation_measurement(
                self._runs[index],
                [{name: value[index] for name, value in part.items()} for part in parts],
                step=self._step,
                seconds=took,
                elapsed_seconds=self._elapsed_seconds,
            )
            self._write(index, line)
        self._restart_clock()
        return 0

    def _log_unreadable(self, part: Split) -> None:
        """Log the examples of `part` that could not be read since the last call."""
        found = [skipped.taken() for skipped in self._skipped[part]]
        for index in self._open:
            of_seed = found[self._programs.seeds.index(self._runs[index].config.seed)]
            line = unreadable_examples(
                self._runs[index],
                part,
                [of_seed],
                step=self._step,
                elapsed_seconds=self._elapsed_seconds,
            )
            if line is not None:
                self._write(index, line)

    def _restore_last_metrics(self) -> None:
        """Read the last metrics of resumed runs from their records."""
        for index in self._open:
            for line in RunRecord.load(self._folders[index].path).measurements:
                self._note(index, line)

    @property
    def _is_last(self) -> bool:
        return self._step == self._run.total_steps

    def _pause(self, state: PyTree, signal_number: int) -> None:
        """Save a checkpoint if due; stop on a signal."""
        run = self._run
        every = run.config.train.checkpoint_every_steps or run.steps_per_epoch
        signal_number = signal_number or self._signals.agreed("training")
        is_due = time.perf_counter() > self._last_checkpoint + _SECONDS_BETWEEN_CHECKPOINTS
        if signal_number or (is_due and self._step % every == 0 and not self._is_last):
            self._log_unreadable("train")
            self._heartbeat.at("saving", self._step)
            self._saved.save(self._step, state)
            self._restart_clock()
            self._last_checkpoint = time.perf_counter()
        if signal_number:
            self._saved.wait()
            self._change_status("interrupted", f"at step {self._step}; resume the sweep to go on")
            raise Interrupted(128 + signal_number)

    def _finish(self, state: TrainState) -> None:
        """Save the final state of each run, and close its record."""
        self._heartbeat.at("saving", self._step)
        self._saved.save(self._step, state)  # a kill between two ends must not repeat training
        self._saved.wait()
        for index in self._open:
            if None in self._last[index].values():
                self._close(index, state, "diverged", "the loss is not finite", "not_finite")
            else:
                self._close(index, state, "completed")
        self._open = []

    def _close_diverged(self, state: TrainState, indices: Sequence[int]) -> None:
        """End diverged runs among `indices`; the program continues for the others."""
        for index in tuple(indices):
            found = self._divergences[index]
            if found.cause is not None:
                self._close(index, state, "diverged", found.message, found.cause)
                self._open.remove(index)

    def _close(
        self,
        index: int,
        state: TrainState,
        status: Status,
        why: str = "",
        cause: DivergenceCause | None = None,
    ) -> None:
        """Save the final state of a run, and append its status."""
        params, model_state = self._programs.weights(state)
        weights = jax.tree.map(
            lambda leaf: np.asarray(leaf[index]), {"params": params, "model_state": model_state}
        )
        save_weights(self._folders[index].weights, weights)
        ended = f"{self._step} steps, with {len(self._runs) - 1} others in one program"
        self._append_status(index, status, f"{why}; {ended}" if why else ended, cause)

    def _change_status(self, status: Status, message: str) -> None:
        for index in self._open:
            self._append_status(index, status, message)

    def _append_status(
        self, index: int, status: Status, message: str, cause: DivergenceCause | None = None
    ) -> None:
        change = StatusChange(
            step=self._step,
            status=status,
            message=message,
            elapsed_seconds=self._elapsed_seconds,
            cause=cause,
        )
        self._logs[index].append(change)


def _of_seed(run: ResolvedRun, seed: int) -> ResolvedRun:
    return replace(run, config=replace(run.config, seed=seed))


# Entry point: train several runs in one program.


def train_together(
    runs: Sequence[ResolvedRun],
    folders: Sequence[RunFolder],
    checkpoints: Path,
    reporter: Reporter,
    *,
    memory_bytes: int | None = None,
    leave: Callable[[int], None] | None = None,
) -> None:
    """Train `runs` in one program to their end, with the record of each in its folder.

    Resumes at the latest checkpoint of their common state, if there is one.

    Args:
        runs: equal except for seed and schedule, each on one device.
        folders: the folder of each run.
        checkpoints: folder of the common checkpoints during training.
        reporter: receives the progress of the first run.
        memory_bytes: memory limit of the program; if exceeded, halves of the runs train one
            after the other. None: no limit.
        leave: as in `train`.

    Raises:
        Interrupted: when SIGINT or SIGTERM asked to stop, after a checkpoint.
    """
    halves = checkpoints / "halves"  # once halved, always: a resumed job may find more memory
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
    shutil.rmtree(checkpoints)  # each run has its own weights; no resume is needed


def _has_state(checkpoints: Path) -> bool:
    """Whether a checkpoint exists; a job killed before the first leaves an empty folder."""
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
