"""An emulated run in a folder: refused, timed, emulated, its record written while it is made.

The folder is that of a run, whose seconds are virtual, so that reports and sweeps read it as they
read any; `emulation.json` says the rest.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path

from scalejax.config.run import RunConfig, load_kept_config
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.core.progress import OnCase, nothing_said
from scalejax.emulation.checks import emulated_run, require_progress
from scalejax.emulation.durations import durations_of
from scalejax.emulation.event_log import read_events, write_events
from scalejax.emulation.record import EMULATION, Emulation, in_words, outcome
from scalejax.emulation.replay import replay
from scalejax.emulation.run import emulate_run
from scalejax.hardware import Cluster, load_cluster
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
)
from scalejax.training.reporter import Reporter
from scalejax.training.run_folder import RunLock, resolved_config, versions

_README = """\
A run that scalejax emulated: real gradients, virtual time.

run.toml             what was asked for, [emulation] included
measurements.jsonl   losses and accuracies, a line each; all seconds in it are virtual
emulation.json       virtual time, staleness, traffic, failures
events.parquet       every instruction of the arithmetic with its virtual time, if asked for

Read it as one page:  scalejax report {path}
Compute it again:     scalejax emulate {path}/run.toml --replay {path}   (needs events.parquet)
"""
_EVENTS = "events.parquet"


def emulate(
    config: RunConfig,
    folder: Path,
    *,
    cluster: Cluster | None = None,
    reporter: Reporter,
    begins_anew: bool = False,
    keeps_events: bool = False,
    compiling: Callable[[], AbstractContextManager[OnCase]] = lambda: nullcontext(nothing_said),
) -> Emulation:
    """The emulation of the run that `config` describes, recorded in `folder`.

    Args:
        config: the run, with an [emulation].
        folder: where its files go; it may hold no run, but an emulation that was cut off, which
            is begun anew.
        cluster: whose times it goes by; if None, the one that `emulation` names, if any.
        reporter: whom to tell how it goes.
        begins_anew: whether a run that was cut off in `folder` is written over.
        keeps_events: whether to write down what is computed, for `replay_folder`.
        compiling: shows that the step is compiled, as long as it takes.

    Raises:
        ConfigError: if it cannot be emulated, or the folder holds a run or cannot be written.
        DoesNotFit: if the cluster has fewer devices than workers.
    """
    files = RunFolder(path=folder)
    run, emulation = emulated_run(config)
    serialization.require_writable_folder("folder", folder)
    if files.holds_run and not (begins_anew or _was_cut_off(files)):
        raise ConfigError(f"{str(folder)!r} holds a run already: give another --folder.")
    if cluster is None and emulation.cluster is not None:
        cluster = load_cluster(emulation.cluster)
    with compiling() as on_case:
        durations = durations_of(run, emulation, cluster, on_case=on_case)
    require_progress(run, emulation, durations)
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock() as lock:
        lock.take(folder)
        files.measurements.unlink(missing_ok=True)
        serialization.save_toml(resolved_config(run), files.config)
        serialization.save_text(_README.format(path=folder), files.readme)
        events = write_events(folder / _EVENTS) if keeps_events else nullcontext()
        with (
            closing(MeasurementLog(files.measurements)) as log,
            events as kept,
            _noting_interrupts() as interrupts,
        ):
            record = _Record(log, reporter, interrupts)
            record.turn("started", f"{in_words(emulation)}, in virtual time; {versions()}")
            reporter.begin(0, run.total_steps)
            try:
                found = emulate_run(
                    run,
                    emulation,
                    durations,
                    cluster=cluster and cluster.name,
                    write=record.write,
                    log=kept.write if kept else None,
                )
            except (KeyboardInterrupt, ScalejaxError):
                record.turn("interrupted", "an emulation does not go on: begin it again")
                raise
            finally:
                reporter.end()
            serialization.save(found, folder / EMULATION)
            record.end(outcome(found))
    return found


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """The SIGINTs that come within; each raises KeyboardInterrupt as ever, which is lost where it
    meets a callback of XLA's garbage collection."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield received
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _was_cut_off(files: RunFolder) -> bool:
    """Whether the folder holds an emulation that did not come to its end: it begins anew there."""
    if not files.config.is_file() or load_kept_config(files.config).emulation is None:
        return False
    return not files.measurements.is_file() or RunRecord.load(files.path).status in (
        None,
        "started",
        "interrupted",
    )


def replay_folder(config: RunConfig, folder: Path) -> int:
    """How many lines of the record in `folder` come out the same, bit for bit, when what its log
    says is computed again, with neither workers nor time.

    Args:
        config: the run that is there.
        folder: of a run that kept its events.

    Raises:
        ConfigError: if it is no such folder, or naming the first line that comes out another.
    """
    run, emulation = emulated_run(config)
    record, events = RunRecord.load(folder), folder / _EVENTS
    if not events.is_file():
        raise ConfigError(f"{folder} has no {_EVENTS}: emulate the run with --events.")
    wanted = [line for line in record.measurements if not isinstance(line, StatusChange)]
    again: list[Measurement] = []
    replay(run, emulation, read_events(events), again.append)
    for before, now in zip(wanted, again, strict=False):
        for name in (field.name for field in fields(before)):
            was, found = getattr(before, name), getattr(now, name, None)
            if was != found:
                raise ConfigError(
                    f"{record.folder.measurements} does not follow from {events}: at step "
                    f"{before.step} {name} was {was}, and is {found} now."
                )
    if len(again) != len(wanted):
        raise ConfigError(
            f"{record.folder.measurements} has {len(wanted)} lines of losses and accuracies, and "
            f"{events} gives {len(again)}."
        )
    return len(again)


class _Record:
    """The record of the run while it is made."""

    def __init__(
        self, log: MeasurementLog, reporter: Reporter, interrupts: Sequence[int] = ()
    ) -> None:
        self._log, self._reporter, self._interrupts = log, reporter, interrupts
        self._step, self._seconds = 0, 0.0
        self._losses: dict[str, float | None] = {}

    def write(self, measurement: Measurement) -> None:
        """Put down one line, and say it.

        Raises:
            KeyboardInterrupt: if one was raised before where nobody could catch it.
        """
        if self._interrupts and not isinstance(measurement, StatusChange):
            raise KeyboardInterrupt
        self._step, self._seconds = measurement.step, measurement.elapsed_seconds
        if isinstance(measurement, TrainMeasurement):
            self._losses["train"] = measurement.loss
        if isinstance(measurement, EvaluationMeasurement):
            self._losses["test"] = measurement.test_loss
        self._log.append(measurement)
        self._reporter.measured(measurement)

    def end(self, message: str) -> None:
        """Put down how the run ended: it has diverged if its last losses are no numbers."""
        if None in self._losses.values():
            self.turn("diverged", f"{message}; the loss is not finite", "not_finite")
        else:
            self.turn("completed", message)

    def turn(self, status: Status, message: str, cause: DivergenceCause | None = None) -> None:
        """Put down where the run stands from here on."""
        self.write(
            StatusChange(
                step=self._step,
                status=status,
                message=message,
                elapsed_seconds=self._seconds,
                cause=cause,
            )
        )
