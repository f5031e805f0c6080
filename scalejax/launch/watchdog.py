"""Which process of several is lost: dead by a signal, ended by an error, or hanging.

Arithmetic on exit codes and heartbeats; starts and stops nothing.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scalejax.core.heartbeat import Beat
from scalejax.core.process_group import MISSED_ANOTHER, REFUSED

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of processes that a signal asked to stop, after a checkpoint."""
_FOLLOWING = (MISSED_ANOTHER, -signal.SIGABRT)
"""Exit codes of processes that missed another: told by an error, or ended by JAX itself."""

_LONG_PHASES, _LONGER = ("starting", "compiling", "saving"), 6
"""At what a process may be for so many times as long without moving on."""
_UNBORN = Beat(breaths=0, moves=0, step=0, phase="starting")
"""Of a process that has not come so far as to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What became of a process without which the others cannot go on."""

    process: int
    """Which one."""
    reason: str
    """What happened to it, in words that follow its name."""
    step: int | None
    """Updates that it had begun, as far as it said."""

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step:,}"
        return f"process {self.process} {self.reason}{at}"


@dataclass(slots=True)
class Watch:
    """Keeps in mind since when each process is stopped, and when it last breathed and moved."""

    stopped_seconds: float
    """How long a process may be stopped (by SIGSTOP, or a debugger)."""
    stuck_seconds: float
    """How long none of them may move on: they wait for one that does not come. Six times as long
    while one compiles or saves."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since some moment; never set back."""
    _stopped: dict[int, float] = field(default_factory=dict)
    _breaths: dict[int, tuple[int, float]] = field(default_factory=dict)
    _moves: dict[int, tuple[int, float]] = field(default_factory=dict)

    def lost_by_code(
        self, codes: Sequence[int | None], beats: Sequence[Beat | None]
    ) -> Loss | None:
        """The first process that ended in a way in which it should not; None if none has.

        Args:
            codes: exit code of each process, negative for a signal; None while it runs.
            beats: what each has said last.
        """
        ended = [(number, code) for number, code in enumerate(codes) if code not in (None, 0)]
        meant = (REFUSED, *STOPPED)
        if any(code in meant for _, code in ended):  # no loss, and neither are those that missed it
            ended = [(number, code) for number, code in ended if code not in _FOLLOWING]
        # One that was killed is the cause, and none that only missed another.
        ended.sort(key=lambda each: (each[1] in _FOLLOWING, (each[1] or 0) >= 0))
        for number, code in ended:
            if code is None or code in meant:
                continue
            beat = beats[number]
            return Loss(
                process=number, reason=_in_words(code), step=None if beat is None else beat.step
            )
        return None

    def hanging(
        self,
        codes: Sequence[int | None],
        beats: Sequence[Beat | None],
        is_stopped: Sequence[bool],
    ) -> Loss | None:
        """The process that the others wait for, if they have waited too long.

        Args:
            codes: exit code of each process; None while it runs.
            beats: what each has said last.
            is_stopped: whether the system says that it is stopped.
        """
        now = self.clock()
        running = {
            number: beat or _UNBORN
            for number, (code, beat) in enumerate(zip(codes, beats, strict=True))
            if code is None
        }
        for number, beat in running.items():
            for seen, count in ((self._breaths, beat.breaths), (self._moves, beat.moves)):
                if number not in seen or seen[number][0] != count:
                    seen[number] = count, now
            if not is_stopped[number]:
                self._stopped.pop(number, None)
            elif now - self._stopped.setdefault(number, now) > self.stopped_seconds:
                reason = f"has been stopped for {self.stopped_seconds:.0f} s ({beat.phase})"
                return Loss(process=number, reason=reason, step=beat.step)
        waited = min((now - self._moves[number][1] for number in running), default=0.0)
        is_long = any(beat.phase in _LONG_PHASES for beat in running.values())
        if waited <= self.stuck_seconds * (_LONGER if is_long else 1):
            return None

        def order(number: int) -> tuple[bool, int, bool]:
            """The culprit first: it no longer breathes, or is behind, or at something else."""
            breathes = now - self._breaths[number][1] < self.stuck_seconds / 2
            return breathes, running[number].step, running[number].phase == "training"

        number = min(running, key=order)
        reason = f"has not moved on for {waited:.0f} s ({running[number].phase})"
        return Loss(process=number, reason=reason, step=running[number].step)


def _in_words(code: int) -> str:
    if code == MISSED_ANOTHER:
        return "lost contact with another one"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (by the system, if memory was short)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"
