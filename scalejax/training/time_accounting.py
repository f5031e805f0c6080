"""Where the wall time of a run went, over all its sessions, with nothing left over.

A session is one start of the run's processes. While it lasts, the first of them writes where its
time goes, a line for each stretch of it that ends in a pause (an evaluation, a checkpoint); the
sums of the lines and of the time between sessions are the ledger. Knows lines and their sums; no
clock and no loop.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from scalejax.core.errors import ConfigError, require_at_least
from scalejax.core.serialization import build, plain
from scalejax.core.units import UNKNOWN, counted, format_fraction, format_seconds

Part = Literal["startup", "compile", "input_wait", "step", "evaluation", "checkpoint"]
"""What a session can be at."""
PARTS: tuple[Part, ...] = ("startup", "compile", "input_wait", "step", "evaluation", "checkpoint")

LINE_BYTES = 512
"""Length of every line: the last is written anew in its place as time passes. A whole number of
them fills a page of memory, so that none lies in two: the system writes a page whole, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What a session did from one pause to the end of the next, or until it was last seen."""

    session: int
    """Sessions of the run before this one."""
    began_unix_seconds: float
    """When the session began, by the clock of the system."""
    boot_id: str | None = None
    """Which start of which machine the session ran in, by Linux; None if it is not known."""
    began_boot_seconds: float | None = None
    """When the session began, since then: by a clock that nobody sets."""
    first_step: int | None = None
    """Updates of the run that the session began with; None until it knows."""
    step: int = 0
    """Updates of the run that were made, this stretch included."""
    is_finished: bool = False
    """Whether it ended in a pause, or the session by itself; else it goes on, or was cut off."""
    startup_seconds: float = 0.0
    """Start of the process, imports, meeting the other processes, opening and restoring."""
    compile_seconds: float = 0.0
    """Compiling the programs."""
    input_wait_seconds: float = 0.0
    """For which devices had nothing to do, for want of a batch."""
    step_seconds: float = 0.0
    """Updates, their waiting for input left out."""
    evaluation_seconds: float = 0.0
    """Evaluations."""
    checkpoint_seconds: float = 0.0
    """For which training stood still for a checkpoint, or for the last of them at the end."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if value is not None and name != "boot_id":
                require_at_least(name, value, 0)

    @property
    def seconds(self) -> float:
        """The whole stretch."""
        return math.fsum(getattr(self, f"{part}_seconds") for part in PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """The wall time of a run, each second of it in one place."""

    sessions: int
    """How often the run's processes were started."""
    repeated_steps: int
    """Updates that were made for nothing: those after the step at which a later session began."""
    startup_seconds: float
    """Starting processes, imports, meeting the others, opening and restoring."""
    compile_seconds: float
    """Compiling the programs."""
    input_wait_seconds: float
    """Of updates that counted: devices had nothing to do, for want of a batch."""
    step_seconds: float
    """Updates that counted, their waiting for input left out."""
    evaluation_seconds: float
    """Evaluations, but those made for nothing."""
    checkpoint_seconds: float
    """For which training stood still for checkpoints, but those made for nothing."""
    wasted_seconds: float
    """All that sessions did after the step at which a later one began: updates, their waiting,
    evaluations and checkpoints."""
    down_seconds: float
    """Between the last sign of one session and the start of the next. So is what a session did
    that was killed before it came to train: one that is refused writes nothing."""

    @property
    def seconds(self) -> float:
        """From the start of the first session to the last sign of the last one."""
        return math.fsum(seconds for _, seconds in self.parts)

    @property
    def goodput(self) -> float | None:
        """Share of the time that went into steps that count, 0..1; None if no time has passed.

        A step holds its waiting for input, as `step_seconds` does in a record, a prediction and
        the failure model (`simulator.reliability.goodput`), whose share this is. That model
        knows no evaluations: they are lost time here.
        """
        counted_seconds = self.step_seconds + self.input_wait_seconds
        return counted_seconds / self.seconds if self.seconds else None

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Names of the parts in words and their seconds, what counts first."""
        return (
            ("steps", self.step_seconds),
            ("input wait", self.input_wait_seconds),
            ("evaluation", self.evaluation_seconds),
            ("checkpoint", self.checkpoint_seconds),
            ("start-up", self.startup_seconds),
            ("compile", self.compile_seconds),
            ("wasted", self.wasted_seconds),
            ("down", self.down_seconds),
        )


def time_account(intervals: Sequence[Interval]) -> TimeAccount:
    """The sums of the stretches of a run, in their order; there must be one at least.

    The time between two sessions is by a clock that nobody sets, where the machine was not started
    anew between them; else by the clock of the system. Where a session began before the end of an
    earlier one by that, which someone has set back then, no time has passed between the two.
    """
    kept = dict.fromkeys(PARTS, 0.0)
    wasted_seconds, repeated_steps = 0.0, 0
    made = steps_made(intervals)
    for each, steps, is_counted in zip(intervals, made, which_counted(intervals), strict=True):
        for part in PARTS:
            seconds = getattr(each, f"{part}_seconds")
            if is_counted or part in ("startup", "compile"):
                kept[part] += seconds
            else:
                wasted_seconds += seconds
        if not is_counted:
            repeated_steps += steps
    return TimeAccount(
        sessions=len({each.session for each in intervals}),
        repeated_steps=repeated_steps,
        wasted_seconds=wasted_seconds,
        down_seconds=math.fsum(_down_times(intervals)),
        **{f"{part}_seconds": seconds for part, seconds in kept.items()},
    )


def which_counted(intervals: Sequence[Interval]) -> list[bool]:
    """Whether the updates of each stretch counted: no later session began before its end.

    One that was cut off counts neither, however few updates it had finished.
    """
    resumed_at, counted_ones = math.inf, []
    for index in range(len(intervals) - 1, -1, -1):
        each = intervals[index]
        is_cut_off = each.step == resumed_at and not each.is_finished
        counted_ones.append(each.step <= resumed_at and not is_cut_off)
        is_first_of_session = index == 0 or intervals[index - 1].session != each.session
        if is_first_of_session and each.first_step is not None:
            resumed_at = min(resumed_at, each.first_step)
    return counted_ones[::-1]


def steps_made(intervals: Sequence[Interval]) -> list[int]:
    """Updates that were made in each stretch."""
    made = []
    for before, each in zip((None, *intervals), intervals, strict=False):
        is_same = before is not None and before.session == each.session
        made.append(each.step - (before.step if before and is_same else each.first_step or 0))
    return made


def _down_times(intervals: Sequence[Interval]) -> list[float]:
    """Seconds between each session and the next."""
    first: dict[int, Interval] = {}
    spent: dict[int, float] = {}
    for each in intervals:
        first.setdefault(each.session, each)
        spent[each.session] = spent.get(each.session, 0.0) + each.seconds
    return [
        max(0.0, _between(first[earlier], first[later]) - spent[earlier])
        for earlier, later in pairwise(sorted(first))
    ]


def _between(earlier: Interval, later: Interval) -> float:
    """Seconds from the begin of one session to that of another."""
    begins = earlier.began_boot_seconds, later.began_boot_seconds
    is_same_boot = earlier.boot_id is not None and earlier.boot_id == later.boot_id
    if is_same_boot and begins[0] is not None and begins[1] is not None:
        return begins[1] - begins[0]
    return later.began_unix_seconds - earlier.began_unix_seconds


def ledger_in_words(ledger: TimeAccount) -> str:
    """The ledger on one line, parts that are next to nothing left out."""
    shares = [
        f"{name} {format_fraction(seconds / ledger.seconds)}"
        for name, seconds in ledger.parts
        if seconds > 0 and seconds >= 0.001 * ledger.seconds
    ]
    again = f", {counted(ledger.repeated_steps, 'step')} again" if ledger.repeated_steps else ""
    return (
        f"goodput {format_fraction(ledger.goodput)} of {format_seconds(ledger.seconds)} in "
        f"{counted(ledger.sessions, 'session')}{again}: {', '.join(shares) or UNKNOWN}"
    )


def load_intervals(path: Path) -> tuple[Interval, ...]:
    """The lines of a file; a last line that was cut off is passed over, and no file has none.

    Raises:
        ConfigError: if a line is damaged (with its number).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    whole = len(data) // LINE_BYTES
    lines = [data[number * LINE_BYTES : (number + 1) * LINE_BYTES] for number in range(whole)]
    return tuple(
        _parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    )


def load_ledger(path: Path) -> TimeAccount | None:
    """The ledger of the lines in a file; None if it has none.

    Raises:
        ConfigError: if a line is damaged (with its number).
    """
    intervals = load_intervals(path)
    return time_account(intervals) if intervals else None


def line_of(interval: Interval) -> bytes:
    """A stretch as its line: JSON, filled with blanks."""
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in plain(interval).items()  # type: ignore[union-attr]  a dataclass is a table
    }
    return json.dumps(values).encode().ljust(LINE_BYTES - 1) + b"\n"


def _parse(line: bytes, where: str) -> Interval:
    try:
        value = json.loads(line)
    except ValueError as error:
        hint = "delete that file to go on without what it says"
        raise ConfigError(f"{where} is damaged ({error}); {hint}.") from error
    try:
        return build(Interval, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# Tells where the time of a session goes, and writes it down while it passes.

_SECONDS_BETWEEN_WRITES = 0.5
_IMPORTED = time.perf_counter()


class RunClock:
    """The parts of one session, one at a time, and the file of the run where they go."""

    def __init__(self, began_seconds_ago: float = 0.0) -> None:
        """Begin a session, at its start-up.

        Args:
            began_seconds_ago: how long its start-up has taken already.
        """
        boot_id, boot_seconds = _boot()
        self._blank = Interval(
            session=0,
            began_unix_seconds=time.time() - began_seconds_ago,
            boot_id=boot_id,
            began_boot_seconds=boot_seconds and max(0.0, boot_seconds - began_seconds_ago),
        )
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._seconds["startup"] = began_seconds_ago
        self._part: Part = "startup"
        self._since = time.perf_counter()
        self._first_step: int | None = None
        self._step = 0
        self._path: Path | None = None
        self._file: int | None = None
        self._line = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="run clock", daemon=True)

    def open(self, path: Path) -> None:
        """Write to `path` from now on, behind what earlier sessions of the run have written.

        Raises:
            ConfigError: if the file is damaged or cannot be written.
        """
        earlier = load_intervals(path)
        if earlier:
            self._blank = replace(self._blank, session=earlier[-1].session + 1)
        self._line, self._path = len(earlier), path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._line * LINE_BYTES)  # of a line that was cut off
            self._write(time.perf_counter())
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
        self._thread.start()

    def begin(self, step: int) -> None:
        """The session goes on after `step` updates of the run."""
        self._first_step = self._step = step

    def at(self, step: int) -> None:
        """So many updates of the run are made."""
        self._step = step

    def enter(self, part: Part) -> Part:
        """From now on the session is at `part`; returns what it was at."""
        with self._lock:
            now, before = time.perf_counter(), self._part
            self._seconds[before] += now - self._since
            self._part, self._since = part, now
        return before

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """The session is at `part` within, and then at what it was at before."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def waited(self, seconds: float) -> None:
        """So much of the time since the steps began was a wait for input."""
        with self._lock:
            self._seconds["step"] -= seconds
            self._seconds["input_wait"] += seconds

    def finish_interval(self) -> None:
        """End a stretch, in a pause; the next one begins.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._lock:
            self._close_interval()

    def close(self) -> None:
        """End the session.

        Raises:
            ConfigError: if its last stretch cannot be written.
        """
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._file is None:
                return
            try:
                self._close_interval()
            finally:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:  # else that is told, which is often the same
                raise

    def _close_interval(self) -> None:
        now = time.perf_counter()
        try:
            self._write(now, is_finished=True)
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be written: {error}.") from error
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since = now
        self._line += 1

    def _write_often(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_WRITES):
            with self._lock, contextlib.suppress(OSError):  # the loop's own writes will say so
                self._write(time.perf_counter())

    def _write(self, now: float, *, is_finished: bool = False) -> None:
        """Write the stretch as it is at `now`, in its place."""
        if self._file is None:
            return
        seconds = dict(self._seconds)
        seconds[self._part] += now - self._since
        interval = replace(
            self._blank,
            first_step=self._first_step,
            step=self._step,
            is_finished=is_finished,
            **{f"{part}_seconds": value for part, value in seconds.items()},
        )
        os.pwrite(self._file, line_of(interval), self._line * LINE_BYTES)


def _boot() -> tuple[str | None, float | None]:
    """Which start of which machine this is, and the seconds since; unknown but on Linux."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot_id, time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return None, None


def process_seconds() -> float:
    """How long ago this process was started; or this module imported, where there is no /proc."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started_ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED
    return since_boot - started_ticks / os.sysconf("SC_CLK_TCK")
