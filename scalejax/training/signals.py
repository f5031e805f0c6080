"""Handling of SIGINT and SIGTERM: all processes stop at the same step, within a time limit.

While a run is set up, a signal ends it at once: there is nothing to save. While it trains or
evaluates, the loop polls for signals after every update and every batch of an evaluation; a loop
that hangs is killed after the limit, if the process serves this run alone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from scalejax.core.heartbeat import Heartbeat
from scalejax.core.process_group import LAUNCHER

HONOUR_SECONDS = 20.0
"""Time limit after a signal for the current update or evaluation batch; beyond it the run ends
without saving. A scheduler gives 30 s."""
SETUP_SECONDS = 5.0
"""Time limit after a signal for a run that has not begun to train."""
_SYNC_SECONDS = 1.0
"""Interval at which processes synchronise signals: each time they wait for all queued work."""
_MOST_CALLS = 50
"""Most calls between two synchronisations, however fast they are: updates that slow down to 0.4 s
are still polled within `HONOUR_SECONDS`. With updates of 1 ms, processes synchronise every
50 ms."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal ended the run; exits 128 + signal."""


@dataclass(slots=True)
class _Pace:
    """When processes synchronise signals in one kind of work."""

    kind: str
    last_call: float
    calls: int = 0
    every: int = 1
    slowest_seconds: float = 0.0
    """Slowest call since the last synchronisation."""


class StopSignals:
    """Records the first SIGINT or SIGTERM as a request to stop; the second one ends the process."""

    def __init__(
        self,
        heartbeat: Heartbeat | None = None,
        *,
        honour_seconds: float = HONOUR_SECONDS,
        leave: Callable[[int], None] | None = None,
    ) -> None:
        """Create without installing signal handlers yet.

        Args:
            heartbeat: current phase of the run, for the message.
            honour_seconds: as `HONOUR_SECONDS`.
            leave: ends the process with a code at once; if None, `os._exit` if a launcher has
                started the process, else nothing, as the process may serve others too.
        """
        self._heartbeat = heartbeat or Heartbeat(None)
        self._honour_seconds = honour_seconds
        self._leave = leave or (os._exit if LAUNCHER in os.environ else None)
        self._is_training = False
        self._received = 0
        self._is_honoured = threading.Event()
        self._previous: dict[int, object] = {}
        self._pace: _Pace | None = None
        self.wish: Callable[[], int] = int
        """What this process wants to be done, as a small number; 0 for nothing."""
        self.agreed_wish = 0
        """The highest wish of all processes, if they have agreed in the last call; else 0."""
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1

    def begin(self) -> None:
        """Note that training begins: there is something to save, and the loop polls for signals.

        Raises:
            Interrupted: if a signal came before, and the exception raised then was swallowed.
        """
        if self._received:
            raise Interrupted(128 + self._received)
        self._is_training = True

    def restart_pace(self) -> None:
        """Reset the pace, as work may get slower now; all processes must call it."""
        self._pace = None

    def agreed(self, kind: str) -> int:
        """The signal that any process received, agreed between all processes; 0 if none.

        All processes must call it equally often for each `kind` of work, in the same order. As
        agreeing takes an all-gather, several processes do it about once a second or every 50
        calls. The slowest call of all processes decides after how many calls; a new kind of work
        begins with one. They agree on `agreed_wish` too.
        """
        self.agreed_wish = 0
        if jax.process_count() == 1:
            number, self.agreed_wish = self._received, self.wish()
        else:
            number = self._synchronised(kind)
        if number:
            self._is_honoured.set()
        return number

    def _synchronised(self, kind: str) -> int:
        now = time.monotonic()
        if self._pace is None or self._pace.kind != kind:
            self._pace = _Pace(kind, now)
        pace = self._pace
        pace.calls += 1
        pace.slowest_seconds = max(pace.slowest_seconds, now - pace.last_call)
        pace.last_call = now
        if pace.calls < pace.every:
            return 0
        notes = np.array([self._received, pace.slowest_seconds, self.wish()], np.float32)
        signals, slowest, wishes = multihost_utils.process_allgather(notes).max(axis=0)
        self.agreed_wish = int(wishes)
        # Grows by doubling: the first calls may be faster than those that follow.
        calls = min(2 * pace.every, int(_SYNC_SECONDS / max(float(slowest), 1e-9)))
        every = max(1, min(calls, _MOST_CALLS))
        self._pace = _Pace(kind, time.monotonic(), every=every)
        return int(signals)

    def __enter__(self) -> "StopSignals":
        # Python delivers signals to the main thread; in another thread, the caller handles them.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _NUMBERS:
            self._previous[number] = signal.signal(number, self._receive)
        if self._leave is None:
            return self
        # Python's handlers wait for the main thread, which may be in XLA; a wakeup pipe does not.
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, end == self._pipe[0])
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        listening = (self._pipe[0], self._leave)
        threading.Thread(target=self._listen, args=listening, daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None
        self._is_honoured.set()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()
        if not self._is_training:
            words = f"interrupted while {self._heartbeat.phase}: the run is as it was before"
            print(words, file=sys.stderr, flush=True)
            if self._leave and LAUNCHER in os.environ:
                # The process serves this run alone; JAX might swallow an exception.
                self._leave(128 + number)
            raise Interrupted(128 + number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  what `signal` returned
        self._previous.clear()

    def _listen(self, pipe: int, leave: Callable[[int], None]) -> None:
        """Enforce the time limit after the first signal."""
        number = 0
        while number not in _NUMBERS:
            content = os.read(pipe, 1)
            if not content:
                os.close(pipe)
                return
            number = content[0]
        is_training = self._is_training
        seconds = self._honour_seconds if is_training else SETUP_SECONDS
        if not self._is_honoured.wait(seconds):
            outcome = (
                "the run is left at its latest checkpoint" if is_training else "nothing was saved"
            )
            phase = self._heartbeat.phase
            words = f"interrupted, and {phase} did not end within {seconds:.0f} s: {outcome}"
            print(words, file=sys.stderr, flush=True)
            leave(128 + number)
