"""Several processes of one command on this machine: started, watched, stopped together.

Each writes to a log of its own, and what they say is passed on as they say it. When one is lost
the others are stopped, for they would wait for it without end; and all are started again, if that
is wanted. Knows nothing of training but how to ask for what was saved.
"""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from scalejax.core import heartbeat, process_group
from scalejax.core.errors import ConfigError, require_at_least
from scalejax.core.heartbeat import Beat, read_beat
from scalejax.core.process_group import REFUSED
from scalejax.launch.gpus import share
from scalejax.launch.watchdog import STOPPED, Loss, Watch

LOST = 75
"""Exit code when a process was lost: EX_TEMPFAIL of <sysexits.h>, to be tried again."""

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 10.0
"""For processes that were asked to end, before they are killed."""
_SECONDS_TO_SAVE = 600.0
"""For processes that save a checkpoint first, as long as they move on."""
_SECONDS_TO_FOLLOW = 5.0
"""For the others to say what they know when one has ended badly."""
_LINES_AT_END = 8
"""Of a process that failed, shown where only the first was heard."""
_GLOO_BEGINS, _GLOO_ENDS = b"[Gloo] Rank ", b"connected peer ranks"
"""In lines that the library which connects processes prints of every connection."""
_GLOO_PIECES = re.compile(
    rb"(\[Gloo\] Rank|\d|\s|is connected to|peer ranks\.|Expected number of|connected|:)*"
)
"""What is left of such a line where another was printed in its midst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start, and how it is watched."""

    command: tuple[str, ...]
    """What each process runs."""
    again: Callable[[], tuple[str, ...]] = tuple
    """Says what is added to it when it is started again."""
    processes: int
    """How many."""
    least_processes: int | None = None
    """Down to how many to go on without those that were lost; None: always as many."""
    shows_all: bool = False
    """Whether to pass on what all of them say; else the first alone speaks, and one that fails."""
    folder: Path
    """Where their logs and heartbeats go."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to set for them besides those of this process."""
    most_restarts: int = 0
    """How often to start again."""
    stopped_seconds: float = 15.0
    """How long a process may be stopped before it counts as lost."""
    stuck_seconds: float = 300.0
    """How long none may move on before they count as hanging; six times that while compiling."""

    def __post_init__(self) -> None:
        require_at_least("processes", self.processes, 1)
        require_at_least("max_restarts", self.most_restarts, 0)
        if self.least_processes is not None:
            require_at_least("least_processes", self.least_processes, 1)


def launch(job: Launch, out: TextIO = sys.stderr) -> int:
    """The exit code of all processes of `job` together, once they have ended.

    0 if they all succeeded; 2 if their input was refused; 128 + n if signal n asked them to stop,
    after they have saved; `LOST` if one of them was lost and `most_restarts` are used up. Signals
    that come here are passed on to them; the second one kills them.

    Args:
        job: what to start.
        out: where to pass on what they say, and to say which was lost.

    Raises:
        ConfigError: if the folder cannot be written, or they cannot share the GPUs.
    """
    processes, restarts = job.processes, 0
    with _Signals() as signals:
        while True:
            command = job.command + (job.again() if restarts else ())
            may_restart = restarts < job.most_restarts
            ended = _Attempt(job, command, processes, out, signals, may_restart).ended()
            if isinstance(ended, int):
                return ended
            print(f"{ended}; the others were stopped. Logs: {job.folder}", file=out)
            if not may_restart or signals.received:
                return LOST
            restarts += 1
            if job.least_processes is not None:
                processes = max(job.least_processes, processes - 1)
            words = f"{processes} process{'es' if processes > 1 else ''}"
            print(f"restart {restarts} of {job.most_restarts}, {words}", file=out)


class _Signals:
    """Those that ask to stop, kept for the loop to see; set back at the end."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(
                    number, lambda number, frame: self.received.append(number)
                )
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  what `signal` returned


class _Attempt:
    """The processes, from start to end."""

    def __init__(
        self,
        job: Launch,
        command: Sequence[str],
        processes: int,
        out: TextIO,
        signals: _Signals,
        may_restart: bool,
    ) -> None:
        self._job = job
        self._command = command
        self._count = processes
        self._out = out
        self._signals = signals
        self._may_restart = may_restart
        self._watch = Watch(job.stopped_seconds, job.stuck_seconds)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._listeners: list[threading.Thread] = []
        self._speaking = threading.Lock()

    def ended(self) -> int | Loss:
        """The exit code of all, or which was lost."""
        try:
            self._start()
            outcome = self._watched()
        finally:
            self._kill()
            for listener in self._listeners:
                listener.join()
        if isinstance(outcome, Loss):
            self._show_end_of(outcome.process)
        elif outcome and outcome in (codes := self._codes()):
            self._show_end_of(codes.index(outcome))
        return outcome

    def _start(self) -> None:
        folder = self._job.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("heartbeat-*"):
                path.unlink()
        except OSError as error:
            raise ConfigError(f"folder: {folder} cannot be written ({error}).") from error
        coordinator = f"{process_group.LOOPBACK}:{_free_port()}"
        for number in range(self._count):
            environment = os.environ | self._job.environment
            # Where fewer go on, each has as many as before: what they share may not divide.
            environment |= share(number, self._job.processes, environment)
            environment |= {
                process_group.LAUNCHER: str(os.getpid()),
                process_group.COORDINATOR: coordinator,
                process_group.PROCESSES: str(self._count),
                process_group.PROCESS: str(number),
                heartbeat.VARIABLE: str(self._heartbeat_file(number)),
                "PYTHONUNBUFFERED": "1",
            }
            worker = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C comes here alone, and is passed on once
            )
            self._workers.append(worker)
            listening = (number, worker.stdout)
            listener = threading.Thread(target=self._pass_on, args=listening, daemon=True)
            listener.start()
            self._listeners.append(listener)

    def _watched(self) -> int | Loss:
        """Look after them until all have ended, or one is lost."""
        passed_on, deadline = 0, math.inf
        while True:
            codes, beats = self._codes(), self._beats()
            if all(code is not None for code in codes):
                return self._verdict(codes, beats)
            if len(self._signals.received) > passed_on:
                passed_on = len(self._signals.received)
                if passed_on > 1:
                    return 128 + self._signals.received[-1]  # and they are killed
                self._ask_to_stop(self._signals.received[-1], beats)
                deadline = time.monotonic() + _SECONDS_TO_SAVE
            if self._watch.lost_by_code(codes, beats) is not None:
                self._wait(_SECONDS_TO_FOLLOW)
                codes = self._codes()
                return self._watch.lost_by_code(codes, self._beats()) or self._verdict(codes, beats)
            if any(code is not None for code in codes):
                # One is done, or was refused: the others will be, or will wait for it in vain.
                in_time = self._wait(_SECONDS_TO_FOLLOW + _SECONDS_TO_END)
                if not in_time and len(self._signals.received) == passed_on:
                    return self._left_behind()
                continue
            is_stopped = [_is_stopped(worker.pid) for worker in self._workers]
            if (loss := self._watch.hanging(codes, beats, is_stopped)) is not None:
                return loss
            if time.monotonic() > deadline:
                reason = f"did not end within {_SECONDS_TO_SAVE:.0f} s of a signal"
                return _loss(codes.index(None), reason, beats)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _verdict(self, codes: Sequence[int | None], beats: Sequence[Beat | None]) -> int | Loss:
        if (loss := self._watch.lost_by_code(codes, beats)) is not None:
            return loss
        if REFUSED in codes:
            return REFUSED
        stopped = [number for number, code in enumerate(codes) if code in STOPPED]
        if stopped and not self._signals.received and self._may_restart:
            # Someone else asked one of them to stop, as schedulers do: all have saved.
            reason = "or another one was asked to stop"
            return _loss(stopped[0], reason, beats)
        return (codes[stopped[0]] if stopped else 0) or 0

    def _left_behind(self) -> int | Loss:
        """One ended well or was refused, and others go on without it."""
        codes, beats = self._codes(), self._beats()
        if REFUSED in codes:
            return REFUSED
        if stopped := [code for code in codes if code in STOPPED]:
            return stopped[0]
        return _loss(codes.index(None), "did not end when the others did", beats)

    def _codes(self) -> list[int | None]:
        """How each ended; one that a signal passed on from here killed, as one that obeyed it."""
        received = self._signals.received
        passed_on = {-number: 128 + number for number in received}
        if received:  # to those that had not begun
            passed_on.setdefault(-signal.SIGTERM, 128 + received[0])
        codes = (worker.poll() for worker in self._workers)
        return [code if code is None else passed_on.get(code, code) for code in codes]

    def _beats(self) -> list[Beat | None]:
        return [read_beat(self._heartbeat_file(number)) for number in range(self._count)]

    def _heartbeat_file(self, number: int) -> Path:
        return self._job.folder.absolute() / f"heartbeat-{number}"

    def _log_file(self, number: int) -> Path:
        return self._job.folder / f"{number}.log"

    def _wait(self, seconds: float) -> bool:
        """Whether all end within so many seconds, and before a further signal."""
        end, signals = time.monotonic() + seconds, len(self._signals.received)
        while time.monotonic() < end and len(self._signals.received) == signals:
            if all(code is not None for code in self._codes()):
                return True
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)
        return False

    def _ask_to_stop(self, number: int, beats: Sequence[Beat | None]) -> None:
        """Pass on a signal. Python itself may still be starting where there is no sign of life: of
        SIGINT it would make a traceback and an error, and of SIGTERM nothing."""
        for worker, beat in zip(self._workers, beats, strict=True):
            _signal(worker, signal.SIGTERM if beat is None else number)

    def _kill(self) -> None:
        """Leave none: a process, what it has started, or a port."""
        for worker in self._workers:
            _signal(worker, signal.SIGKILL)
        for worker in self._workers:
            worker.wait()

    def _pass_on(self, number: int, lines: BinaryIO) -> None:
        """Write what a process says to its log, and say it here."""
        is_shown = number == 0 or self._job.shows_all
        prefix = f"[{number}] " if self._job.shows_all else ""
        with contextlib.ExitStack() as open_files:
            open_files.enter_context(lines)
            log = None
            with contextlib.suppress(OSError):
                log = open_files.enter_context(self._log_file(number).open("ab", buffering=0))
            gloo = GlooFilter()
            for line in lines:
                # A full disk must not keep what they say from being heard.
                with contextlib.suppress(OSError):
                    if log is not None:
                        log.write(line)
                if not gloo.holds_back(line) and is_shown:
                    with self._speaking:
                        self._out.write(prefix + line.decode(errors="replace"))
                        self._out.flush()

    def _show_end_of(self, number: int) -> None:
        """Pass on the last that a process said, if it was not heard before."""
        if number and not self._job.shows_all:
            said = b""
            with contextlib.suppress(OSError):
                said = self._log_file(number).read_bytes()
            gloo = GlooFilter()
            heard = [
                line.decode(errors="replace")
                for line in said.splitlines()
                if not gloo.holds_back(line)
            ]
            for line in heard[-_LINES_AT_END:]:
                print(f"[{number}] {line}", file=self._out)


def _signal(worker: "subprocess.Popen[bytes]", number: int) -> None:
    """Send it to a process and those that it has started, if there are any left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


def _loss(number: int, reason: str, beats: Sequence[Beat | None]) -> Loss:
    beat = beats[number]
    return Loss(process=number, reason=reason, step=None if beat is None else beat.step)


class GlooFilter:
    """Finds, line after line, what the library that connects processes says, which tells a user
    nothing: several threads of it print at once, and tear their lines."""

    def __init__(self) -> None:
        self._missing_ends = 0

    def holds_back(self, line: bytes) -> bool:
        """Whether the next line is of that library."""
        is_torn = self._missing_ends > 0 and _GLOO_PIECES.fullmatch(line) is not None
        if not (is_torn or _GLOO_BEGINS in line or _GLOO_ENDS in line):
            return False
        # Every beginning has one end of a line: "is : 31" may have the numbers of two, the second
        # of which then ends alone.
        self._missing_ends = max(0, self._missing_ends + line.count(_GLOO_BEGINS) - 1)
        return True


def _is_stopped(process: int) -> bool:
    """Whether the system says so; never, where it has no /proc."""
    try:
        about = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return about.rpartition(")")[2].split()[0] in ("T", "t")  # proc(5): stopped, traced


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((process_group.LOOPBACK, 0))
        return listener.getsockname()[1]
