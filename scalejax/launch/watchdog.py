"""The watchdog of a process group: finds a process that was killed, failed or hangs.

Arithmetic on exit codes and heartbeats; starts and stops nothing.
"""

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scalejax.core.errors import FINAL_CODES, ExitCode
from scalejax.core.heartbeat import Beat

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of processes that a signal stopped, after a checkpoint."""
_FOLLOWING = (ExitCode.LOST, -signal.SIGABRT)
"""Exit codes of processes that lost a peer: after an error, or aborted by JAX itself."""

OF_MEMORY = " (by the system, if memory was short)"
"""Added to the reason if a process was killed by SIGKILL."""
_IN_WORDS = {
    ExitCode.DAMAGED: "found what is stored damaged",
    ExitCode.LOST: "lost contact with another one",
    ExitCode.TRANSIENT: "could not reach the network or a store",
}

STUCK_SECONDS = 60.0
"""Default least time without progress after which processes count as hanging."""
_SLOWER = 10
"""A phase may go without progress for its slowest time so far, multiplied by this."""
_FIRST, _SAVING = 30, 5
"""Multiples of `stuck_seconds` that a phase may take if it has not ended twice before (start-up,
compiling, the first batches, updates and checkpoints, the end), and that each later checkpoint may
take."""
_READING = ("waiting for input", "evaluating")
"""Phases that read data."""
_NO_BEAT = Beat(liveness_count=0, progress_count=0, step=0, phase="starting")
"""Heartbeat of a process that has not written one yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A lost process, without which the others cannot continue."""

    process: int
    """Rank of the process."""
    reason: str
    """How it was lost, as a phrase that follows its name."""
    step: int | None
    """Updates that it had begun, according to its last heartbeat; None without one."""
    others: tuple[int, ...] = ()
    """Ranks of the other processes that were lost with it."""
    exit_code: ExitCode = ExitCode.LOST
    """Exit code of the process, if that tells why it ended."""

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step:,}"
        others = f", and {len(self.others)} more" if self.others else ""
        return f"process {self.process} {self.reason}{at}{others}"


def lost(
    process: int,
    reason: str,
    beats: Sequence[Beat | None],
    exit_code: ExitCode = ExitCode.LOST,
    others: Iterable[int] = (),
) -> Loss:
    """The loss of `process`, at the step of its heartbeat, and of `others`, which may hold it."""
    beat = beats[process]
    step = None if beat is None else beat.step
    others = tuple(sorted({*others} - {process}))
    return Loss(process=process, reason=reason, step=step, others=others, exit_code=exit_code)


@dataclass(slots=True)
class Watch:
    """Tracks since when each process is stopped, and when it last was alive and made progress."""

    stopped_seconds: float
    """How long a process may be stopped (by SIGSTOP, or a debugger)."""
    stuck_seconds: float
    """Least time without progress of any process after which they hang; see `limit_seconds`."""
    silent_seconds: float = math.inf
    """How long a process may go without writing any heartbeat."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    _stopped: dict[int, float] = field(default_factory=dict)
    _alive: dict[int, tuple[int, float]] = field(default_factory=dict)
    _progress: dict[int, tuple[int, float]] = field(default_factory=dict)

    def lost_by_code(
        self, codes: Sequence[int | None], beats: Sequence[Beat | None]
    ) -> Loss | None:
        """The first process that was killed or failed; None if there is no such process.

        Args:
            codes: exit code of each process, negative for a signal; None while it runs.
            beats: last heartbeat of each.
        """
        ended = [(number, code) for number, code in enumerate(codes) if code not in (None, 0)]
        meant = (*FINAL_CODES, *STOPPED)
        if any(code in meant for _, code in ended):  # not a loss; nor are peers that lost it
            ended = [(number, code) for number, code in ended if code not in _FOLLOWING]
        if None in codes and all(code in _FOLLOWING for _, code in ended) and ended:
            # They have left behind the one that they waited for: frozen, it could not leave itself.
            return lost(codes.index(None), "no longer answers the others", beats)
        # The cause is a killed process, not one that only lost its peer.
        ended.sort(key=lambda each: (each[1] in _FOLLOWING, (each[1] or 0) >= 0))
        for number, code in ended:
            if code is not None and code not in meant:
                told = ExitCode(code) if code in _IN_WORDS else ExitCode.LOST
                killed = [each for each, end in ended if (end or 0) < 0 and end not in _FOLLOWING]
                return lost(number, _in_words(code), beats, told, killed)
        return None

    def hanging(
        self,
        codes: Sequence[int | None],
        beats: Sequence[Beat | None],
        is_stopped: Sequence[bool],
    ) -> Loss | None:
        """The process to blame if the run hangs; None if it does not.

        That is one that has been stopped for `stopped_seconds`, or silent for `silent_seconds`;
        else, if none has made progress for too long, the one that the others wait for.

        Args:
            codes: exit code of each process; None while it runs.
            beats: last heartbeat of each.
            is_stopped: whether each is stopped (SIGSTOP, or a debugger).
        """
        now = self.clock()
        running = {
            number: beat or _NO_BEAT
            for number, (code, beat) in enumerate(zip(codes, beats, strict=True))
            if code is None
        }
        for number, beat in running.items():
            for seen, count in (
                (self._alive, beat.liveness_count),
                (self._progress, beat.progress_count),
            ):
                if number not in seen or seen[number][0] != count:
                    seen[number] = count, now
            if not is_stopped[number]:
                self._stopped.pop(number, None)
            elif now - self._stopped.setdefault(number, now) > self.stopped_seconds:
                reason = f"has been stopped for {self.stopped_seconds:.0f} s ({beat.phase})"
                return lost(number, reason, beats, others=self._stopped)
            if (silent := now - self._alive[number][1]) > self.silent_seconds:
                reason = f"has been silent for {silent:.0f} s ({beat.phase})"
                return lost(number, reason, beats)
        waited = min((now - self._progress[number][1] for number in running), default=0.0)
        if waited <= max(map(self.limit_seconds, running.values()), default=math.inf):
            return None

        def order(number: int) -> tuple[bool, int, bool]:
            """Sort key that puts the culprit first: not alive, or behind, or in another phase."""
            is_alive = now - self._alive[number][1] < self.stuck_seconds / 2
            return is_alive, running[number].step, running[number].phase == "training"

        number = min(running, key=order)
        is_alone = len(running) == 1 or any(order(each) != order(number) for each in running)
        others = "" if is_alone else "and all others "
        have = "has" if is_alone else "have"
        phase = running[number].phase
        reason = f"{others}{have} made no progress for {waited:.0f} s ({phase})"
        return lost(number, reason, beats)

    def limit_seconds(self, beat: Beat) -> float:
        """How long a process may stay at `beat` without progress: ten times the slowest of its
        phase so far, but at least `stuck_seconds`, or five times that for a checkpoint; thirty
        times `stuck_seconds` until the phase has ended twice. A process that reads a store has
        longer, so that an outage ends it first, with its own message."""
        store_seconds = beat.store_seconds if beat.phase in _READING else 0.0
        if not beat.slowest_seconds:
            return max(self.stuck_seconds * _FIRST, self.stuck_seconds + store_seconds)
        least = self.stuck_seconds * (_SAVING if beat.phase == "saving" else 1)
        return max(least + store_seconds, beat.slowest_seconds * _SLOWER)


def _in_words(code: int) -> str:
    if code in _IN_WORDS:
        return _IN_WORDS[ExitCode(code)]
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}{OF_MEMORY if -code == signal.SIGKILL else ''}"
    return f"ended with exit code {code}"
