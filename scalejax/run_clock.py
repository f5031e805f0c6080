"""Tells where the time of a session goes, and writes it down while it passes.

A thread writes twice a second, so that a kill at any moment leaves all but the last half second.
Knows the parts of a session and the file of their times; nothing of what they do.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from scalejax.errors import ConfigError
from scalejax.time_ledger import LINE_BYTES, PARTS, Part, Stretch, line_of, load_stretches

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
        self._blank = Stretch(
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
        earlier = load_stretches(path)
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

    def finish_stretch(self) -> None:
        """End a stretch, in a pause; the next one begins.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._lock:
            self._close_stretch()

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
                self._close_stretch()
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

    def _close_stretch(self) -> None:
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
        stretch = replace(
            self._blank,
            first_step=self._first_step,
            step=self._step,
            is_finished=is_finished,
            **{f"{part}_seconds": value for part, value in seconds.items()},
        )
        os.pwrite(self._file, line_of(stretch), self._line * LINE_BYTES)


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
