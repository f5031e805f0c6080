"""The heartbeat of a process: liveness, progress and phase, read by its launcher and peers.

Holds counters and durations, but no times, so that clock changes have no effect. Knows nothing of
training.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scalejax.core.errors import ConfigError

VARIABLE = "SCALEJAX_HEARTBEAT"
"""Environment variable with the path of the heartbeat file; absent without a launcher."""

_FORMAT = struct.Struct("<QQQdd40s")
_SECONDS_BETWEEN_BEATS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last heartbeat of a process."""

    liveness_count: int
    """Incremented twice a second by a separate thread: stops only with the whole process."""
    progress_count: int
    """Incremented by the training loop: also stops while the loop hangs."""
    step: int
    """Updates begun."""
    phase: str
    """Phase of the loop, such as "compiling" or "training"."""
    slowest_seconds: float = 0.0
    """Longest time without progress in this phase so far; 0 until it has ended twice, because a
    first update is only queued, and waited for in the second."""
    store_seconds: float = 0.0
    """How long a read of its data is retried; 0 if the data are not in a store."""


_latest: list[Beat] = []


def latest_beat() -> Beat | None:
    """The last progress of this process, whichever run it trains; None before any."""
    return _latest[-1] if _latest else None


class Heartbeat:
    """Writes the heartbeat of this process to a file."""

    def __init__(self, path: Path | None) -> None:
        """Start the heartbeat in `path`; none if it is None.

        Raises:
            ConfigError: if it cannot be written.
        """
        self._liveness_count = self._progress_count = self._step = 0
        self._phase = "starting"
        self._store_seconds = 0.0
        self._since = time.monotonic()
        self._ended: dict[str, tuple[int, float]] = {}
        self._map: mmap.mmap | None = None
        self._end = threading.Event()
        if path is None:
            return
        try:
            # Not truncated: an earlier run of this process may still write its heartbeat to the
            # file, and would be killed on touching a page that is gone.
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                # Written, not only truncated to size: on a full disk, a page without a block would
                # kill the process when first touched.
                file.write(bytes(_FORMAT.size))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
        self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> Self:
        """A heartbeat in the file that the environment names, if it names one."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path else None)

    def at(self, phase: str, step: int) -> None:
        """Record progress of the loop: now in `phase` (at most 40 bytes), after `step` updates."""
        now = time.monotonic()
        times, slowest = self._ended.get(self._phase, (0, 0.0))
        self._ended[self._phase] = times + 1, max(slowest, now - self._since)
        self._since = now
        self._progress_count += 1
        self._step, self._phase = step, phase
        _latest[:] = [self._beat_now()]
        self._write()

    def reads_a_store(self, seconds: float) -> None:
        """Say that the loop may wait for a store, whose reads are retried for `seconds`."""
        self._store_seconds = seconds

    @property
    def phase(self) -> str:
        """Current phase of the loop."""
        return self._phase

    def close(self) -> None:
        """Stop the heartbeat."""
        self._end.set()

    def _beat(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_BEATS):
            self._liveness_count += 1
            self._write()

    def _beat_now(self) -> Beat:
        times, slowest = self._ended.get(self._phase, (0, 0.0))
        return Beat(
            liveness_count=self._liveness_count,
            progress_count=self._progress_count,
            step=self._step,
            phase=self._phase,
            slowest_seconds=slowest if times > 1 else 0.0,
            store_seconds=self._store_seconds,
        )

    def _write(self) -> None:
        if self._map is not None:
            self._map[:] = packed(self._beat_now())


def packed(beat: Beat) -> bytes:
    """`beat` as bytes, which `unpacked` reads."""
    counts = beat.liveness_count, beat.progress_count, beat.step
    seconds = beat.slowest_seconds, beat.store_seconds
    return _FORMAT.pack(*counts, *seconds, beat.phase.encode())


def unpacked(content: bytes) -> Beat | None:
    """The heartbeat in `content`; None if it is incomplete."""
    if len(content) != _FORMAT.size:
        return None
    *counts, slowest_seconds, store_seconds, phase = _FORMAT.unpack(content)
    liveness_count, progress_count, step = counts
    return Beat(
        liveness_count=liveness_count,
        progress_count=progress_count,
        step=step,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        slowest_seconds=slowest_seconds,
        store_seconds=store_seconds,
    )


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat in `path`; None if there is no file yet."""
    try:
        return unpacked(path.read_bytes())
    except FileNotFoundError:
        return None
