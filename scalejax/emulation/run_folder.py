"""Emulation of a run into a folder: checks it, predicts durations, emulates, writes the record.

The folder has the format of a run, with virtual seconds, so that reports and sweeps read it like
any other; `emulation.json` holds the rest.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path

from scalejax.config.run import RunConfig, load_kept_config
from scalejax.core import serialization
from scalejax.core.environment import handling
from scalejax.core.errors import ConfigError, ScalejaxError, prefixed
from scalejax.core.progress import OnProgress, no_display
from scalejax.emulation.checks import emulated_run, require_progress
from scalejax.emulation.durations import durations_of
from scalejax.emulation.event_log import EventLog, read_events
from scalejax.emulation.record import EMULATION, Emulation, in_words, outcome
from scalejax.emulation.replay import replay
from scalejax.emulation.run import emulate_run
from scalejax.hardware import NO_SITE, Cluster, Site, load_cluster_and_site
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
    ValidationMeasurement,
)
from scalejax.training.reporter import Reporter
from scalejax.training.run_folder import RunLock, resolved_config, versions
from scalejax.training.stopping import divergence_at_end

_README = """\
A run that scalejax emulated: real gradients, virtual time.

run.toml             the config, [emulation] included
facts.json           counts and shapes of the data
measurements.jsonl   losses and accuracies, a line each; all seconds in it are virtual
emulation.json       virtual time, staleness, bytes sent, failures
events.parquet       every executed instruction with its virtual time (with --events)

Read it as one page:  scalejax report {path}
Compute it again:     scalejax emulate {path}/run.toml --replay {path}   (needs events.parquet)
"""
_EVENTS = "events.parquet"


def emulate(
    config: RunConfig,
    folder: Path,
    *,
    cluster: Cluster | None = None,
    site: Site = NO_SITE,
    reporter: Reporter,
    begins_anew: bool = False,
    keeps_events: bool = False,
    compiling: Callable[[], AbstractContextManager[OnProgress]] = lambda: nullcontext(no_display),
) -> Emulation:
    """Emulate the run of `config`, recorded in `folder`.

    Args:
        config: the run, with an [emulation].
        folder: output folder; it must hold no run, except an interrupted emulation, which is
            started again.
        cluster: hardware that determines the times; if None, the one that `emulation` names, if
            any, with the site of its file.
        site: conditions and input of the hosts of `cluster`.
        reporter: receives progress.
        begins_anew: whether an interrupted run in `folder` is overwritten.
        keeps_events: whether to write the event log, for `replay_folder`.
        compiling: context manager that shows progress during compilation.

    Raises:
        ConfigError: if the run cannot be emulated, or the folder holds a run or cannot be written.
        DoesNotFit: if the cluster has fewer devices than workers.
    """
    files = RunFolder(path=folder)
    run, emulation = emulated_run(config)
    serialization.require_writable_folder("folder", folder)
    if files.holds_run and not (begins_anew or _was_cut_off(files)):
        raise ConfigError(f"{str(folder)!r} already holds a run: give another --folder.")
    if cluster is None and emulation.cluster is not None:
        cluster, site = load_cluster_and_site(emulation.cluster)
    with compiling() as on_progress:
        durations = durations_of(run, emulation, cluster, site=site, on_progress=on_progress)
    require_progress(run, emulation, durations)
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock() as lock:
        lock.take(folder)
        files.measurements.unlink(missing_ok=True)
        serialization.save(run.dataset, files.facts)
        serialization.save_toml(resolved_config(run), files.config)
        serialization.save_text(_README.format(path=folder), files.readme)
        events = closing(EventLog(folder / _EVENTS)) if keeps_events else nullcontext()
        with (
            closing(MeasurementLog(files.measurements)) as log,
            events as kept,
            _noting_interrupts() as interrupts,
        ):
            record = _Record(log, reporter, interrupts, classes=run.dataset.classes)
            record.change_status("started", f"{in_words(emulation)}, in virtual time; {versions()}")
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
                record.change_status(
                    "interrupted", "an emulation cannot be resumed: start it again"
                )
                raise
            finally:
                reporter.end()
            serialization.save(found, folder / EMULATION)
            record.end(outcome(found))
    return found


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Record SIGINTs inside the block; each raises KeyboardInterrupt as usual, which is lost if
    raised inside a callback of XLA's garbage collection."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling(note, signal.SIGINT) if is_usual else nullcontext():
        yield received


def _was_cut_off(files: RunFolder) -> bool:
    """Whether the folder holds an unfinished emulation, which is started again."""
    if not files.config.is_file() or load_kept_config(files.config).emulation is None:
        return False
    return not files.measurements.is_file() or RunRecord.load(files.path).status in (
        None,
        "started",
        "interrupted",
    )


def replay_folder(config: RunConfig, folder: Path) -> int:
    """Replay the log in `folder`; returns the number of record lines, all reproduced bitwise.

    Args:
        config: the run in the folder.
        folder: folder of a run with an event log.

    Raises:
        ConfigError: if it is not such a folder, or a line differs, naming the first.
    """
    run, emulation = emulated_run(config)
    record, events = RunRecord.load(folder), folder / _EVENTS
    if not events.is_file():
        raise ConfigError(f"{folder} has no {_EVENTS}: emulate the run with --events.")
    wanted = [line for line in record.measurements if not isinstance(line, StatusChange)]
    again: list[Measurement] = []
    instructions = read_events(events)
    with prefixed(f"{events}: "):
        replay(run, emulation, instructions, again.append)
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
    """Writer of the record of the run."""

    def __init__(
        self,
        log: MeasurementLog,
        reporter: Reporter,
        interrupts: Sequence[int] = (),
        *,
        classes: int,
    ) -> None:
        self._log, self._reporter, self._interrupts = log, reporter, interrupts
        self._classes, self._logged = classes, list[float | None]()
        self._step, self._seconds = 0, 0.0
        self._losses: dict[str, float | None] = {}

    def write(self, measurement: Measurement) -> None:
        """Write one line, and report it.

        Raises:
            KeyboardInterrupt: if an earlier interrupt was lost.
        """
        if self._interrupts and not isinstance(measurement, StatusChange):
            raise KeyboardInterrupt
        self._step, self._seconds = measurement.step, measurement.elapsed_seconds
        if isinstance(measurement, TrainMeasurement):
            self._losses["train"] = measurement.loss
            self._logged.append(measurement.loss)
        if isinstance(measurement, EvaluationMeasurement | ValidationMeasurement):
            self._losses["evaluation"] = measurement.loss
        self._log.append(measurement)
        self._reporter.measured(measurement)

    def end(self, message: str) -> None:
        """Write the final run status: diverged by the same rule as in training."""
        lost = divergence_at_end(self._losses, self._logged, self._classes)
        if lost is not None:
            cause, said = lost
            self.change_status("diverged", f"{message}; {said}", cause)
        else:
            self.change_status("completed", message)

    def change_status(
        self, status: Status, message: str, cause: DivergenceCause | None = None
    ) -> None:
        """Write the new run status."""
        self.write(
            StatusChange(
                step=self._step,
                status=status,
                message=message,
                elapsed_seconds=self._seconds,
                cause=cause,
            )
        )
