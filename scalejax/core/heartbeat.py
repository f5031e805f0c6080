"""A file in which a process says that it lives, and what it is at; read by whoever started it.

Counts and no times: a clock that jumps changes nothing. Knows nothing of training.
"""

import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scalejax.core.errors import ConfigError

VARIABLE = "SCALEJAX_HEARTBEAT"
"""Names the file; where it is absent, nobody listens."""

_FORMAT = struct.Struct("<QQQ40s")
_SECONDS_BETWEEN_BEATS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a process has said last."""

    breaths: int
    """Counted up by a thread of its own, twice a second: they stop with the whole process."""
    moves: int
    """Counted up by the training loop: they stop also where it waits for something in vain."""
    step: int
    """Updates that it has begun."""
    phase: str
    """What it is at."""


class Heartbeat:
    """Says so in the file that the environment names, if it names one."""

    def __init__(self, path: Path | None) -> None:
        """Begin to breathe into `path`; into nothing if it is None.

        Raises:
            ConfigError: if it cannot be written.
        """
        self._breaths = self._moves = self._step = 0
        self._phase = b"starting"
        self._map: mmap.mmap | None = None
        self._end = threading.Event()
        if path is None:
            return
        try:
            # Never cut off: a run before this one in the same process may still breathe into it,
            # and would be ended where it touches a page that is not there.
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                # Written, not only made so long: a page that a full disk has no room for would end
                # the process where it is first touched.
                file.write(bytes(_FORMAT.size))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _FORMAT.size)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error
        self._write()
        self._thread = threading.Thread(target=self._breathe, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> Self:
        """One that breathes into the file that the environment names."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path else None)

    def at(self, phase: str, step: int) -> None:
        """The loop goes on: to `phase` (at most 40 bytes), after `step` updates."""
        self._moves += 1
        self._step, self._phase = step, phase.encode()
        self._write()

    @property
    def phase(self) -> str:
        """What the loop is at."""
        return self._phase.decode()

    def close(self) -> None:
        """Say no more."""
        self._end.set()

    def _breathe(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_BEATS):
            self._breaths += 1
            self._write()

    def _write(self) -> None:
        if self._map is not None:
            self._map[:] = _FORMAT.pack(self._breaths, self._moves, self._step, self._phase)


def read_beat(path: Path) -> Beat | None:
    """What the process that breathes into `path` has said last; None if nothing yet."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) != _FORMAT.size:
        return None
    breaths, moves, step, phase = _FORMAT.unpack(content)
    words = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(breaths=breaths, moves=moves, step=step, phase=words)
