"""SIGINT and SIGTERM: kept until all processes can stop at the same place, and bounded in time.

While a run is set up, a signal ends it at once: there is nothing to save. While it trains or
evaluates, the loop asks here after every update and every batch of an evaluation; one that has
hung is ended without its consent, if the process is there for it alone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

from scalejax.core.heartbeat import Heartbeat
from scalejax.core.process_group import LAUNCHER

HONOUR_SECONDS = 20.0
"""Within so many seconds of a signal the update or the batch of an evaluation that is being made
must end, or the run ends without saving: a scheduler gives 30."""
SETUP_SECONDS = 5.0
"""Within so many seconds of a signal a run ends that has not begun to train."""
_EXCHANGE_SECONDS = 1.0
"""How often processes tell each other: each time they wait for all that is queued."""
_MOST_CALLS = 50
"""Between two exchanges, however fast they are: updates that slow down to 0.4 s are still asked
within `HONOUR_SECONDS`. Of updates of 1 ms it makes an exchange every 50 ms."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal ended the run; exits 128 + signal."""


@dataclass(slots=True)
class _Pace:
    """When processes compare notes in one kind of work."""

    kind: str
    last_call: float
    calls: int = 0
    every: int = 1
    slowest_seconds: float = 0.0
    """Of the calls since the last exchange."""


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish; the second one ends the process as ever."""

    def __init__(
        self,
        heartbeat: Heartbeat | None = None,
        *,
        honour_seconds: float = HONOUR_SECONDS,
        leave: Callable[[int], None] | None = None,
    ) -> None:
        """Listen to none yet.

        Args:
            heartbeat: says what the run is at, for the message.
            honour_seconds: as `HONOUR_SECONDS`.
            leave: ends the process with a code, whatever it is doing; if None, nothing does, as
                the process is someone else's, or `os._exit` where a launcher has started it.
        """
        self._heartbeat = heartbeat or Heartbeat(None)
        self._honour_seconds = honour_seconds
        self._leave = leave or (os._exit if LAUNCHER in os.environ else None)
        self._is_training = False
        self._received = 0
        self._is_honoured = threading.Event()
        self._previous: dict[int, object] = {}
        self._pace: _Pace | None = None
        self._pipe: tuple[int, int] | None = None
        self._previous_fd = -1

    def begin(self) -> None:
        """From now on there is something to save, and the loop asks for signals.

        Raises:
            Interrupted: if one came before, and what was then at work caught what was raised.
        """
        if self._received:
            raise Interrupted(128 + self._received)
        self._is_training = True

    def restart_pace(self) -> None:
        """The work that follows may be slower than what was; all processes must call it."""
        self._pace = None

    def agreed(self, kind: str) -> int:
        """The signal that some process received, the same answer in all; 0 if none.

        All processes must call it equally often for each `kind` of work, in the same order. Several
        compare notes about once a second only, or every 50 calls: it takes an exchange. What the
        slowest call of all took decides after how many; a new kind of work begins with one.
        """
        found = self._received if jax.process_count() == 1 else self._synchronised(kind)
        if found:
            self._is_honoured.set()
        return found

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
        notes = np.array([self._received, pace.slowest_seconds], np.float32)
        signals, slowest = multihost_utils.process_allgather(notes).max(axis=0)
        # Not at once to the full: what comes first may be faster than what follows.
        calls = min(2 * pace.every, int(_EXCHANGE_SECONDS / max(float(slowest), 1e-9)))
        every = max(1, min(calls, _MOST_CALLS))
        self._pace = _Pace(kind, time.monotonic(), every=every)
        return int(signals)

    def __enter__(self) -> "StopSignals":
        # Python delivers signals to the main thread; in another, they stay with the host program.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _NUMBERS:
            self._previous[number] = signal.signal(number, self._receive)
        if self._leave is None:
            return self
        # Python's handlers wait for the main thread, which may be in XLA; this does not.
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, end == self._pipe[0])
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        listening = (self._pipe[0], self._leave)
        threading.Thread(target=self._listen, args=listening, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            words = f"interrupted while {self._phase}: the run stands where it was"
            print(words, file=sys.stderr, flush=True)
            if (
                self._leave and LAUNCHER in os.environ
            ):  # no one else's process; what is raised JAX may catch
                self._leave(128 + number)
            raise Interrupted(128 + number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  what `signal` returned
        self._previous.clear()

    @property
    def _phase(self) -> str:
        return self._heartbeat.phase

    def _listen(self, pipe: int, leave: Callable[[int], None]) -> None:
        """Keep the deadline of the first signal."""
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
                "the run stands at its latest checkpoint" if is_training else "nothing was saved"
            )
            print(
                f"interrupted, and {self._phase} did not end within {seconds:.0f} s: {outcome}",
                file=sys.stderr,
                flush=True,
            )
            leave(128 + number)
