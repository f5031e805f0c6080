"""Progress output of a run: a bar with the time left on a terminal, a line that changes in a
notebook's cell, plain lines elsewhere.

Knows measurements and streams; no devices and no files.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import TextWrapper
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from scalejax.core.progress import CellLine, is_in_cell
from scalejax.core.units import UNKNOWN, counted, format_count, format_fraction, format_seconds
from scalejax.training.input_stalls import wait_in_words, wait_share
from scalejax.training.record import (
    EvaluationMeasurement,
    InputMeasurement,
    Measurement,
    ProcessesChange,
    SharpnessMeasurement,
    StatusChange,
    Told,
    TrainMeasurement,
    UnreadableExamples,
    ValidationMeasurement,
)

_SECONDS_BETWEEN_LINES = 5.0
_WIDTH = 80
"""Columns of lines if there is no terminal, as in files and e-mails of schedulers."""

_AS_USUAL = ("started", "completed")
"""Statuses of a run to which nothing unusual happened."""
_OF_FIGURES = (
    TrainMeasurement,
    EvaluationMeasurement,
    ValidationMeasurement,
    SharpnessMeasurement,
)


class Reporter:
    """Reports the progress of a run; each method does nothing unless a subclass has its own."""

    def compiling(self) -> AbstractContextManager[None]:
        """Context in which the programs of the run are compiled, before the loop begins."""
        return nullcontext()

    def begin(self, step: int, total_steps: int) -> None:
        """Report that the loop begins after `step` of `total_steps` updates."""

    def say(self, text: str) -> None:
        """Report a line of text."""

    def measured(self, measurement: Measurement) -> None:
        """Report a measurement."""

    def end(self) -> None:
        """Report that the loop has ended, normally or not."""


def reporter_for(stream: TextIO) -> Reporter:
    """A bar if `stream` is a terminal, one line in a notebook's cell, else plain lines."""
    if is_in_cell():
        return Cell()
    return ProgressBar(stream) if stream.isatty() else PlainLines(stream)


def statistics_in_words(measurement: TrainMeasurement) -> str:
    """Gradient norm, noise scale and loss scale, as far as they are measured, as text to append to
    other figures; empty if none is."""
    words = ""
    if measurement.gradient_norm is not None:
        words += f", gradient norm {measurement.gradient_norm:.3g}"
    if measurement.noise_scale is not None:
        words += f", noise scale {measurement.noise_scale:,.0f} samples lately"
    if measurement.loss_scale is not None:
        skipped = measurement.skipped_updates
        updates = "update" if skipped == 1 else "updates"
        words += f", loss scale {measurement.loss_scale:g}, {skipped} {updates} skipped"
    return words


def unreadable_in_words(rows: int, part: str) -> str:
    """Number of unreadable examples of a part, in words."""
    return f"{rows:,} unreadable {part} example{'' if rows == 1 else 's'} skipped"


class Silent(Reporter):
    """Reports nothing: for processes other than the first, and for tests."""


class PlainLines(Reporter):
    """A line for every evaluation, and every few seconds in between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total_steps = self._begin_step = 0
        self._last_line = self._begin = 0.0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Write a line."""
        self.say("compiling ...")
        yield

    def begin(self, step: int, total_steps: int) -> None:
        """Store the progress so far."""
        self._total_steps = total_steps
        self._last_line = self._begin = time.monotonic()
        self._begin_step = step

    def say(self, text: str) -> None:
        """Write a line, wrapped between words, which stay whole."""
        self._write("\n".join(_broken(line, _WIDTH) for line in text.splitlines()))

    def _write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def measured(self, measurement: Measurement) -> None:
        """Write a line; for an update only if the last line is older than a few seconds."""
        if isinstance(measurement, InputMeasurement):
            return
        now = time.monotonic()
        if isinstance(measurement, TrainMeasurement):
            if now < self._last_line + _SECONDS_BETWEEN_LINES:
                return
            made = measurement.step - self._begin_step
            left = (self._total_steps - measurement.step) * (now - self._begin) / max(1, made)
            line = f"{_sentence(measurement, self._total_steps)}, {format_seconds(left)} left"
        else:
            line = _sentence(measurement, self._total_steps)
        # Other lines hold paths, reasons and commands that people search for: these stay whole.
        is_as_usual = isinstance(measurement, StatusChange) and measurement.status in _AS_USUAL
        put = self.say if is_as_usual or isinstance(measurement, _OF_FIGURES) else self._write
        put(line)
        self._last_line = now


class ProgressBar(Reporter):
    """A bar over the steps of the run, evaluations above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]:.2f}"),
            BarColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, epoch=0.0, figures="")
        self._total_steps = 0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show the time elapsed, and remove it at the end."""
        columns = (TextColumn("compiling"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task("", total=None)
            yield

    def begin(self, step: int, total_steps: int) -> None:
        """Draw the bar."""
        self._total_steps = total_steps
        self._progress.update(self._task, completed=step, total=total_steps)
        self._progress.start()

    def say(self, text: str) -> None:
        """Write a line above the bar, wrapped between words, which stay whole."""
        for line in text.splitlines():
            broken = _broken(line, self._console.width)
            self._console.print(broken, markup=False, soft_wrap=True)

    def measured(self, measurement: Measurement) -> None:
        """Move the bar, or write a line above it."""
        if isinstance(measurement, InputMeasurement):
            return
        if isinstance(measurement, TrainMeasurement):
            self._progress.update(
                self._task,
                completed=measurement.step,
                epoch=measurement.epoch,
                figures=_figures(measurement, is_short=True),
            )
        else:
            self.say(_sentence(measurement, self._total_steps))

    def end(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class Cell(Reporter):
    """One line below a notebook's cell, with current figures; it is removed when the run ends."""

    def __init__(self) -> None:
        self._line = CellLine()
        self._total_steps = 0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show that programs are being compiled."""
        self._line.show("compiling")
        try:
            yield
        finally:
            self._line.clear()

    def begin(self, step: int, total_steps: int) -> None:
        """Store how many updates there are."""
        self._total_steps = total_steps

    def measured(self, measurement: Measurement) -> None:
        """Change the line."""
        if isinstance(measurement, InputMeasurement):
            return
        words = _sentence(measurement, self._total_steps)
        self._line.show(words, measurement.step, self._total_steps)

    def end(self) -> None:
        """Remove it."""
        self._line.clear()


def _broken(line: str, width: int) -> str:
    """A line wrapped between words, which stay whole."""
    wrapper = TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(line)


def _sentence(measurement: Told, total_steps: int) -> str:
    if isinstance(measurement, TrainMeasurement):
        return f"step {measurement.step}/{total_steps}: {_figures(measurement)}"
    if isinstance(measurement, EvaluationMeasurement | ValidationMeasurement):
        is_test = isinstance(measurement, EvaluationMeasurement)
        part, chosen = "test" if is_test else "validation", ""
        if is_test and measurement.chosen_step is not None:
            by = str(measurement.chosen_by).replace("_", " ")
            why = "the last ones" if measurement.chosen_by == "last" else f"chosen by {by}"
            chosen = f", with the weights of step {measurement.chosen_step}, {why}"
        by_source = ""
        if measurement.loss_by_source is not None:
            by_source = f" (by source {', '.join(map(_loss, measurement.loss_by_source))})"
        return (
            f"epoch {measurement.epoch:g}, step {measurement.step}/{total_steps}: "
            f"{part} loss {_loss(measurement.loss)}{by_source}, "
            f"{part} accuracy {format_fraction(measurement.accuracy)}{chosen}"
        )
    if isinstance(measurement, SharpnessMeasurement):
        value, limit = measurement.sharpness, measurement.stability_threshold
        of_rate = "" if limit is None else f", stable below {limit:.4g}"
        if (of_steps := measurement.preconditioned_sharpness) is not None:
            of_rate += f", preconditioned {of_steps:.4g}"
            if measurement.preconditioned_threshold is not None:
                of_rate += f", stable below {measurement.preconditioned_threshold:.4g}"
        return (
            f"step {measurement.step}/{total_steps}: "
            f"sharpness {UNKNOWN if value is None else f'{value:.4g}'}{of_rate}"
        )
    if isinstance(measurement, UnreadableExamples):
        part = {"train": "training"}.get(measurement.part, measurement.part)
        return (
            f"epoch {measurement.epoch:g}, step {measurement.step}/{total_steps}: "
            f"{unreadable_in_words(measurement.rows, part)}: {_first_of(measurement)}"
        )
    if isinstance(measurement, ProcessesChange):
        processes = "process" if measurement.after == 1 else "processes"
        return (
            f"step {measurement.step}/{total_steps}: continued in {measurement.after} {processes}, "
            f"{measurement.before} before ({measurement.reason}), after "
            f"{format_seconds(measurement.seconds)}, "
            f"{counted(measurement.repeated_steps, 'step')} repeated"
        )
    return f"{measurement.status.replace('_', ' ')}: {measurement.message}"


def _figures(measurement: TrainMeasurement, *, is_short: bool = False) -> str:
    rate = format_count(measurement.samples_per_second)
    wait = wait_in_words([measurement])
    if wait and is_short:  # next to a bar, on a terminal of 80 columns
        wait = f", {format_fraction(wait_share([measurement]))} waiting"
    statistics = statistics_in_words(measurement)
    return f"loss {_loss(measurement.loss)}, {rate} samples/s{wait}{statistics}"


def _first_of(unreadable: UnreadableExamples) -> str:
    """The first reason in order of file and row; the record holds the others."""
    first, *others = sorted(unreadable.reasons)
    return f"{first.rstrip('.')}; ..." if others else first.rstrip(".")


def _loss(loss: float | None) -> str:
    return UNKNOWN if loss is None else f"{loss:.4f}"
