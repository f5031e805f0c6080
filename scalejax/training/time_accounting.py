"""Wall-time accounting of a run: each second of all its sessions attributed to one activity.

A session is one start of the run's processes. While it runs, its first process writes one line
for each interval that ends in a pause (an evaluation or a checkpoint). The sums of these lines and
the time between sessions are the time account, and give the goodput. `RunClock` at the end of the
file measures and writes the intervals of a session; the rest is arithmetic on them.
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
from typing import Literal, Self, get_args

from scalejax.core.environment import process_fields
from scalejax.core.errors import ConfigError, require_at_least
from scalejax.core.serialization import build, plain
from scalejax.core.units import UNKNOWN, counted, format_fraction, format_seconds

Part = Literal["startup", "compile", "input_wait", "step", "evaluation", "checkpoint"]
"""Activities of a session."""
PARTS: tuple[Part, ...] = get_args(Part)

LINE_BYTES = 512
"""Length of every line: the last one is rewritten in place as time passes. It divides the page
size, so that no line crosses a page boundary: the system writes a page whole, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activities:
    """Time of one or several sessions by activity."""

    startup_seconds: float = 0.0
    """Process start, imports, connecting to the other processes, opening and restoring."""
    compile_seconds: float = 0.0
    """Compiling the programs."""
    input_wait_seconds: float = 0.0
    """Time that devices waited for a batch."""
    step_seconds: float = 0.0
    """Updates, without their waits for input."""
    evaluation_seconds: float = 0.0
    """Evaluations."""
    checkpoint_seconds: float = 0.0
    """Time that training was blocked by a checkpoint, or by the last one at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(Activities):
    """Time of a session from one pause to the end of the next, or until its last write."""

    session: int
    """Sessions of the run before this one."""
    began_unix_seconds: float
    """When the session began, by the system's clock."""
    boot_id: str | None = None
    """Linux's id of the boot of the machine that the session ran in; None if unknown."""
    began_boot_seconds: float | None = None
    """When the session began, in seconds since boot: a monotonic clock."""
    first_step: int | None = None
    """Updates of the run at the start of the session; None until known."""
    step: int = 0
    """Updates of the run so far, this interval included."""
    is_finished: bool = False
    """Whether it ended in a pause or with its session; else it is open, or was cut off."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if value is not None and name != "boot_id":
                require_at_least(name, value, 0)

    @property
    def seconds(self) -> float:
        """Duration of the interval."""
        return math.fsum(getattr(self, f"{part}_seconds") for part in PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount(Activities):
    """Wall time of a run by activity; each second is counted once.

    Lost time is in `wasted_seconds`, and in none of the other activities.
    """

    sessions: int
    """How often the run's processes were started."""
    repeated_steps: int
    """Updates that were lost and repeated: those after the step at which a later session began."""
    wasted_seconds: float
    """Lost time: updates, waits for input, evaluations and checkpoints after the step at which a
    later session began."""
    down_seconds: float
    """Time between the last write of one session and the start of the next. It includes sessions
    that were killed before training: they have written nothing."""

    @property
    def seconds(self) -> float:
        """Time from the start of the first session to the last write of the last one."""
        return math.fsum(seconds for _, seconds in self.parts)

    @property
    def goodput(self) -> float | None:
        """Fraction of the time spent in steps that counted, 0..1; None if no time has passed.

        A step includes its wait for input, as `step_seconds` does in a record, a prediction and
        the failure model (`simulator.reliability.goodput`), which predicts this fraction. That
        model has no evaluations: they are lost time here.
        """
        counted_seconds = self.step_seconds + self.input_wait_seconds
        return counted_seconds / self.seconds if self.seconds else None

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and seconds of each activity, useful ones first."""
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
    """The time account of a run from its intervals, at least one, in their order.

    The time between two sessions is by the monotonic clock, if the machine was not rebooted
    between them; else by the system's clock. If by the latter a session began before the end of an
    earlier one, because the clock was set back, the time between them is 0.
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
    """Whether the updates of each interval counted: no later session began before its end.

    An interval that was cut off does not count either, however few updates it had made.
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
    """Number of updates made in each interval."""
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
    """Seconds from the start of one session to that of another."""
    begins = earlier.began_boot_seconds, later.began_boot_seconds
    is_same_boot = earlier.boot_id is not None and earlier.boot_id == later.boot_id
    if is_same_boot and begins[0] is not None and begins[1] is not None:
        return begins[1] - begins[0]
    return later.began_unix_seconds - earlier.began_unix_seconds


def time_account_in_words(account: TimeAccount) -> str:
    """The time account on one line, without parts below 0.1 %."""
    shares = [
        f"{name} {format_fraction(seconds / account.seconds)}"
        for name, seconds in account.parts
        if seconds > 0 and seconds >= 0.001 * account.seconds
    ]
    repeated = account.repeated_steps
    again = f", {counted(repeated, 'step')} repeated" if repeated else ""
    return (
        f"goodput {format_fraction(account.goodput)} of {format_seconds(account.seconds)} in "
        f"{counted(account.sessions, 'session')}{again}: {', '.join(shares) or UNKNOWN}"
    )


def load_intervals(path: Path) -> tuple[Interval, ...]:
    """The intervals in a file, none if it does not exist; a truncated last line is ignored, as are
    zeros at the end, which a power cut leaves.

    Raises:
        ConfigError: if a line is damaged (with its number).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    whole = len(data.rstrip(b"\0")) // LINE_BYTES
    lines = [data[number * LINE_BYTES : (number + 1) * LINE_BYTES] for number in range(whole)]
    return tuple(
        _parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)
    )


def load_time_account(path: Path) -> TimeAccount | None:
    """The time account of the intervals in a file; None if it has none.

    Raises:
        ConfigError: if a line is damaged (with its number).
    """
    intervals = load_intervals(path)
    return time_account(intervals) if intervals else None


def line_of(interval: Interval) -> bytes:
    """An interval as a line of JSON, padded with blanks."""
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in plain(interval).items()  # type: ignore[union-attr]  a dataclass is a table
    }
    return json.dumps(values).encode().ljust(LINE_BYTES - 1) + b"\n"


def _parse(line: bytes, where: str) -> Interval:
    try:
        value = json.loads(line)
    except ValueError as error:
        hint = "delete that file to continue without it"
        raise ConfigError(f"{where} is damaged ({error}); {hint}.") from error
    try:
        return build(Interval, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# The clock of a session, which writes its intervals while they run.

_SECONDS_BETWEEN_WRITES = 0.5
_IMPORTED = time.perf_counter()


class RunClock:
    """Attributes the time of one session to its current activity, and writes it to a file."""

    def __init__(self, began_seconds_ago: float = 0.0) -> None:
        """Begin a session, with start-up as its activity.

        Args:
            began_seconds_ago: time that its start-up has taken already.
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
        """Append to `path` from now on, after the lines of earlier sessions of the run.

        Raises:
            ConfigError: if the file is damaged or cannot be written.
        """
        earlier = load_intervals(path)
        if earlier:
            self._blank = replace(self._blank, session=earlier[-1].session + 1)
        self._line, self._path = len(earlier), path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, self._line * LINE_BYTES)  # drops a truncated line
            self._write(time.perf_counter())
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
        self._thread.start()

    def begin(self, step: int) -> None:
        """Note that the session begins after `step` updates of the run."""
        self._first_step = self._step = step

    def at(self, step: int) -> None:
        """Note that `step` updates of the run are made."""
        self._step = step

    def enter(self, part: Part) -> Part:
        """Switch to the activity `part`; returns the previous one."""
        with self._lock:
            now, before = time.perf_counter(), self._part
            self._seconds[before] += now - self._since
            self._part, self._since = part, now
        return before

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Context in which the activity is `part`; then the previous one again."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def waited(self, seconds: float) -> None:
        """Move `seconds` of the step time to input wait."""
        with self._lock:
            self._seconds["step"] -= seconds
            self._seconds["input_wait"] += seconds

    def finish_interval(self) -> None:
        """End the interval, in a pause, and begin the next.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._lock:
            self._close_interval()

    def close(self) -> None:
        """End the session.

        Raises:
            ConfigError: if its last interval cannot be written.
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:  # else the first error is reported, often of the same cause
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
            with self._lock, contextlib.suppress(OSError):  # the loop's own writes report it
                self._write(time.perf_counter())

    def _write(self, now: float, *, is_finished: bool = False) -> None:
        """Write the interval as of `now`, in place."""
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
    """Linux's boot id and the seconds since boot; None on other systems."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot_id, time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return None, None


def process_seconds() -> float:
    """Seconds since this process was started; since this module was imported, without /proc."""
    try:
        started_ticks = int(process_fields()[19])  # proc(5): starttime
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED
    return since_boot - started_ticks / os.sysconf("SC_CLK_TCK")
