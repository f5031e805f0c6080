"""The local launcher: starts, watches and stops several processes of one command together.

Each process has its own log file, and output is forwarded as it is written. When a process is lost,
the others are stopped, since they would wait for it forever, and all are restarted if requested. An
elastic run continues with the remaining processes, and with those that come back. Knows nothing of
training but the flag that resumes it.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TextIO

from scalejax.core import elastic, heartbeat, process_group
from scalejax.core.elastic import Change, SharedFolder, shared_folder
from scalejax.core.environment import handling, process_fields
from scalejax.core.errors import ConfigError, ExitCode, ScalejaxError, require_at_least
from scalejax.core.heartbeat import Beat, read_beat
from scalejax.core.serialization import make_folder
from scalejax.launch.gpus import share
from scalejax.launch.nodes import Nodes, code_of_task, says_that_a_node_failed
from scalejax.launch.places import Elastic, Places
from scalejax.launch.watchdog import OF_MEMORY, STOPPED, STUCK_SECONDS, Loss, Watch, lost

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 10.0
"""Grace period of processes that should exit, before they are killed."""
_SECONDS_TO_SAVE = 600.0
"""Grace period of processes that save a checkpoint first, as long as they make progress."""
_SECONDS_TO_FOLLOW = 5.0
"""Time that the other processes have to report why one has failed."""
_SECONDS_TO_CANCEL = 120.0
"""Time that SLURM has to end the processes of one start before the next."""
_SECONDS_TO_ASK_AGAIN = 15.0
"""Time between two requests to SLURM to end them."""
LINES_AT_END = 8
"""Number of last log lines of a failed process that are shown, unless all output is."""
_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_GLOO_BEGINS, _GLOO_ENDS = b"[Gloo] Rank ", b"connected peer ranks"
"""Beginning and end of the line that gloo prints for every connection."""
_GLOO_PIECES = re.compile(
    rb"(\[Gloo\] Rank|\d|\s|is connected to|peer ranks\.|Expected number of|connected|:)*"
)
"""Pieces of such a line that was interrupted by another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command and number of processes to start, restarts, and timeouts of the watchdog."""

    command: tuple[str, ...]
    """Command of each process."""
    once: tuple[str, ...] = ()
    """Arguments added to the command at the first start only."""
    again: Callable[[], tuple[str, ...]] = tuple
    """Returns the arguments added to the command on a restart."""
    processes: int
    """Number of processes."""
    elastic: Elastic | None = None
    """How far their number may fall and rise; None for a fixed number."""
    nodes: Nodes | None = None
    """The nodes of a SLURM job with the places of an elastic run; None for this machine."""
    can_train: Callable[[int], bool] = bool
    """Whether so many processes can train the run, such as divide its global batch."""
    save_copy: Callable[[Path], int | None] = lambda _: None
    """Saves the newest copy in an in-memory folder, which ends with the launcher, as a checkpoint;
    returns its step, or None if a checkpoint on the disk is as new."""
    shows_all: bool = False
    """Whether to forward the output of all processes, or only that of the first, and the end of
    that of one that fails."""
    folder: Path
    """Folder of logs and heartbeats."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the processes, besides those of this process."""
    most_restarts: int = 0
    """Largest number of restarts; in an elastic run, of restarts in a row that brought no new step.
    """
    stopped_seconds: float = 15.0
    """How long a process may be stopped before it counts as lost."""
    stuck_seconds: float = STUCK_SECONDS
    """As `Watch.stuck_seconds`."""

    def __post_init__(self) -> None:
        require_at_least("processes", self.processes, 1)
        require_at_least("max_restarts", self.most_restarts, 0)


def launch(job: Launch, out: TextIO = sys.stderr, signals: "Signals | None" = None) -> int:
    """The joint exit code of the processes of `job`, once they have ended.

    0 if all succeeded; 2 if their input was refused; 3 if the run diverged; 128 + n if signal n
    stopped them, after a checkpoint. Once `most_restarts` are used up: 75 if the network or a store
    failed, else 5, as one of them was lost; 4 if stored data are damaged, even in a second try,
    which takes what was stored before. Signals to this process are forwarded to them; the second
    one kills them. The newest state that an elastic run has only in memory is saved.

    Args:
        job: the processes to start.
        out: stream for their output and for messages about lost processes.
        signals: signals that the caller already collects; None to collect them here.

    Raises:
        ConfigError: if the folder cannot be written, or the GPUs cannot be divided among them.
    """
    with (
        contextlib.nullcontext(signals) if signals else Signals() as signals,
        _shared_folder(job, out) as shared,
    ):
        code = None
        try:
            code = _joint_code(job, out, signals, shared)
            return code
        finally:
            if shared is not None and code not in (ExitCode.COMPLETED, ExitCode.DIVERGED):
                _save_copy(job, shared, out)


def _shared_folder(
    job: Launch, out: TextIO
) -> contextlib.AbstractContextManager[SharedFolder | None]:
    """What the processes of an elastic run share: memory, or on several machines a folder that all
    see."""
    if job.elastic is None:
        return contextlib.nullcontext()
    if job.nodes is None:
        return shared_folder(say=lambda text: print(text, file=out))
    try:
        make_folder(job.folder)
    except OSError as error:
        raise ConfigError(f"folder: {job.folder} cannot be written ({error}).") from error
    return shared_folder(job.folder)


def _save_copy(job: Launch, shared: SharedFolder, out: TextIO) -> None:
    """Save the newest state in memory; if that fails, keep it there, and say where."""
    try:
        step = job.save_copy(shared.copies)
    except (OSError, ScalejaxError) as error:
        print(
            f"The newest state could not be saved ({str(error).removesuffix('.')}): it is kept in "
            f"{shared.keep() / shared.copies.name}. Move the folder of the highest step there to "
            "the checkpoints of the run, and --resume continues from it.",
            file=out,
        )
        return
    if step is not None:
        print(f"saved the copy of step {step} in memory; --resume continues from it", file=out)


def _joint_code(job: Launch, out: TextIO, signals: "Signals", shared: SharedFolder | None) -> int:
    """The result of `launch`."""
    restarts, futile, was_damaged, most_steps = 0, 0, False, 0
    bounds = job.elastic or Elastic(
        least=job.processes, most=job.processes, rejoin_seconds=0, copy_seconds=0
    )
    places = Places(bounds, job.processes, job.can_train if job.elastic else bool)
    if job.nodes is not None:
        places.answers = job.nodes.answers
    chosen = _free_places(places, bounds, signals, out)
    if not chosen:
        return 128 + signals.received[-1]
    while True:
        command = job.command + (job.again() if restarts else job.once)
        may_restart = futile < job.most_restarts or (job.elastic and job.most_restarts > 0)
        attempt = _Attempt(job, command, chosen, places, shared, out, signals, bool(may_restart))
        ended = attempt.ended()
        if isinstance(ended, int):
            return ended
        if isinstance(ended, Loss):
            on = "" if job.nodes is None else f" (on {job.nodes.name(chosen[ended.process])})"
            print(f"{ended}{on}; the others were stopped. Logs: {job.folder}", file=out)
            if job.elastic is not None and attempt.step > most_steps:
                futile = 0
            may_restart = futile < job.most_restarts
            is_damaged = ended.exit_code == ExitCode.DAMAGED
            # A restart skips damaged data; if it ends in the same way, a person must look.
            if not may_restart or signals.received or (is_damaged and was_damaged):
                return ended.exit_code
            was_damaged = is_damaged
            if ended.exit_code == ExitCode.LOST:
                places.lose(chosen[each] for each in (ended.process, *ended.others))
            futile += 1
        most_steps = max(most_steps, attempt.step)
        restarts += 1
        before, chosen = chosen, _free_places(places, bounds, signals, out)
        if not chosen:
            return 128 + signals.received[-1]
        words = f"{len(chosen)} process{'es' if len(chosen) > 1 else ''}"
        of = f"restart {restarts} of {job.most_restarts}"
        print(f"{f'restart {restarts}' if job.elastic else of}, {words}", file=out)
        if shared is not None:
            shared.set_change(_change(shared.change, before, chosen, attempt, ended))


def _free_places(
    places: Places, bounds: Elastic, signals: "Signals", out: TextIO
) -> tuple[int, ...]:
    """The places to continue in, once there are enough; none if a signal came first."""
    while not (chosen := places.chosen()):
        if seconds := places.seconds_to_wait():
            too_few = f"too few places are free for a run of at least {bounds.least}"
            print(f"{too_few}: the next is in {seconds:.0f} s", file=out)
        end = time.monotonic() + (seconds or _SECONDS_BETWEEN_LOOKS)
        while (left := end - time.monotonic()) > 0:
            if signals.received:
                return ()
            time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
    return chosen


def _change(
    untold: Change | None,
    before: Sequence[int],
    after: Sequence[int],
    attempt: "_Attempt",
    ended: Loss | None,
) -> Change:
    """The change to record, merged with a change that is not recorded yet."""
    # The possible cause is given only once, when the process is lost.
    reason = "others joined" if ended is None else str(ended).replace(OF_MEMORY, "")
    change = Change(
        before=len(before),
        after=len(after),
        reason=reason,
        step=attempt.step,
        since_seconds=attempt.noticed_seconds,
    )
    if untold is None:
        return change
    return replace(
        change,
        before=untold.before,
        reason=f"{untold.reason}; {reason}",
        step=max(untold.step, change.step),
        since_seconds=untold.since_seconds,
    )


class Signals(contextlib.ExitStack):
    """Collects SIGINT and SIGTERM in place of their handlers, which are restored at the end.
    SIGHUP, the end of a terminal, counts as SIGTERM, unless it is ignored, as by nohup."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []
        """Signals received, in order."""

    def __enter__(self) -> "Signals":
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.enter_context(handling(self._note, *numbers))
        return self

    def _note(self, number: int, _: object) -> None:
        self.received.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def require_none(self) -> None:
        """Raise KeyboardInterrupt if any signal was received."""
        if self.received:
            raise KeyboardInterrupt


class _Attempt:
    """One start of all processes, until they have ended."""

    def __init__(
        self,
        job: Launch,
        command: Sequence[str],
        chosen: Sequence[int],
        places: Places,
        shared: SharedFolder | None,
        out: TextIO,
        signals: Signals,
        may_restart: bool,
    ) -> None:
        self._job = job
        self._command = command
        self._chosen = chosen
        self._places = places
        self._shared = shared
        self._is_asked = False
        """Whether the processes have been asked to stop so that others can join."""
        self.step = 0
        """Updates that any process has begun."""
        self.noticed_seconds = time.time()
        """When it was noticed that they have ended or that one is lost, seconds since 1970."""
        self._out = out
        self._signals = signals
        self._may_restart = may_restart
        self._watch = Watch(job.stopped_seconds, job.stuck_seconds)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._listeners: list[threading.Thread] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._without_node: list[int] = []
        """Processes whose node is gone, according to srun. A list, as threads append while it is
        read, which a set does not allow."""
        self._gone_nodes: set[str] = set()
        """Names of the nodes of lost processes, which may not answer."""
        self._speaking = threading.Lock()

    def ended(self) -> int | Loss | None:
        """The joint exit code, or the process that was lost; None if all have stopped so that
        others can join."""
        goes_on, left = False, []
        try:
            self._start()
            outcome = self._watched()
            self.noticed_seconds = time.time()
            if isinstance(outcome, Loss) and outcome.exit_code == ExitCode.LOST:
                outcome = self._with_stopped(outcome)
            if outcome in STOPPED and self._is_asked and not self._signals.received:
                outcome = None
            goes_on = not isinstance(outcome, int)
        finally:
            left = self._kill(_SECONDS_TO_CANCEL if goes_on else _SECONDS_TO_FOLLOW)
            for listener in self._listeners:
                listener.join()
        if left and goes_on:
            names = ", ".join(map(str, left))
            print(f"SLURM has not ended process {names}: no other is started", file=self._out)
            # The next processes would write to the same files.
            return int(ExitCode.LOST)
        if isinstance(outcome, Loss):
            self._show_end_of(outcome.process)
        elif outcome and outcome in (codes := self._codes()):
            self._show_end_of(codes.index(outcome))
        return outcome

    def _with_stopped(self, loss: Loss) -> Loss:
        """The loss, including processes that are stopped, which could not notice it; on several
        machines, including those that still run on the machine of the lost one."""
        running = {number for number, code in enumerate(self._codes()) if code is None}
        if nodes := self._job.nodes:
            name = nodes.name(self._chosen[loss.process])
            self._gone_nodes.add(name)
            others = {each for each in running if nodes.name(self._chosen[each]) == name}
        else:
            others = {each for each in running if _is_stopped(self._workers[each].pid)}
        return replace(loss, others=tuple(sorted({*loss.others, *others} - {loss.process})))

    def _start(self) -> None:
        folder = self._job.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("heartbeat-*"):
                path.unlink()
            if self._shared is not None:
                self._shared.ask_to_stop(asks=False)
        except OSError as error:
            raise ConfigError(f"folder: {folder} cannot be written ({error}).") from error
        bounds, nodes, command = self._job.elastic, self._job.nodes, self._command
        coordinator = f"{process_group.LOOPBACK}:{process_group.free_port()}"
        if nodes is not None:
            coordinator = nodes.coordinator(self._chosen[0])
            self._guard = nodes.guard(self._chosen, self._job.most_restarts)
        for number, place in enumerate(self._chosen):
            environment = os.environ | self._job.environment
            if nodes is not None:
                command = nodes.command(place, self._command)
                environment |= nodes.environment(place)
            else:
                # Whatever the number of processes, each has the GPUs of its place.
                count = bounds.most if bounds else len(self._chosen)
                environment |= share(place, count, environment)
                environment[process_group.LAUNCHER] = str(os.getpid())
            if self._shared is not None and bounds is not None:
                environment |= {
                    elastic.FOLDER: str(self._shared.path),
                    elastic.COPY_SECONDS: str(bounds.copy_seconds),
                }
                # With as many processes as before, nothing is compiled again.
                environment.setdefault(_PROGRAMS, str(self._shared.programs))
            environment |= {
                process_group.COORDINATOR: coordinator,
                process_group.PROCESSES: str(len(self._chosen)),
                process_group.PROCESS: str(number),
                heartbeat.VARIABLE: str(self._heartbeat_file(number)),
                "PYTHONUNBUFFERED": "1",
            }
            worker = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C arrives only here, and is forwarded once
            )
            self._workers.append(worker)
            listening = (number, worker.stdout)
            listener = threading.Thread(target=self._pass_on, args=listening, daemon=True)
            listener.start()
            self._listeners.append(listener)

    def _watched(self) -> int | Loss:
        """Watch the processes until all have ended, or one is lost."""
        passed_on, deadline = 0, math.inf
        while True:
            codes, beats = self._codes(), self._beats()
            self.step = max(self.step, *(beat.step for beat in beats if beat), 0)
            if all(code is not None for code in codes):
                return self._verdict(codes, beats)
            self._ask_for_more()
            if len(self._signals.received) > passed_on:
                passed_on = len(self._signals.received)
                if passed_on > 1:
                    return 128 + self._signals.received[-1]  # the processes are then killed
                self._ask_to_stop(self._signals.received[-1], beats)
                deadline = time.monotonic() + _SECONDS_TO_SAVE
            if self._watch.lost_by_code(codes, beats) is not None:
                self._wait(_SECONDS_TO_FOLLOW)
                codes = self._codes()
                return self._watch.lost_by_code(codes, self._beats()) or self._verdict(codes, beats)
            if any(code is not None for code in codes):
                # One has finished or was refused: the others will follow, or hang waiting for it.
                in_time = self._wait(_SECONDS_TO_FOLLOW + _SECONDS_TO_END)
                if not in_time and len(self._signals.received) == passed_on:
                    return self._left_behind()
                continue
            is_stopped = [not self._job.nodes and _is_stopped(each.pid) for each in self._workers]
            if (loss := self._watch.hanging(codes, beats, is_stopped)) is not None:
                return loss
            if time.monotonic() > deadline:
                reason = f"did not end within {_SECONDS_TO_SAVE:.0f} s of a signal"
                return lost(codes.index(None), reason, beats)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _ask_for_more(self) -> None:
        """Have the processes stop once more of them could continue the run."""
        if self._shared is None or self._is_asked or self._signals.received:
            return
        if len(self._places.chosen()) > len(self._chosen):
            with contextlib.suppress(OSError):  # memory is full: ask again at the next look
                self._shared.ask_to_stop(asks=True)
                self._is_asked = True

    def _verdict(self, codes: Sequence[int | None], beats: Sequence[Beat | None]) -> int | Loss:
        if (loss := self._watch.lost_by_code(codes, beats)) is not None:
            return loss
        if ExitCode.REFUSED in codes:
            return ExitCode.REFUSED
        stopped = [number for number, code in enumerate(codes) if code in STOPPED]
        is_wanted = self._is_asked or self._signals.received
        if stopped and not is_wanted and self._may_restart:
            # A signal from elsewhere, such as a scheduler, stopped a process: all have saved.
            reason = "or another one was asked to stop"
            return lost(stopped[0], reason, beats)
        if ExitCode.DIVERGED in codes:
            return ExitCode.DIVERGED
        return (codes[stopped[0]] if stopped else 0) or 0

    def _left_behind(self) -> int | Loss:
        """The outcome if one process finished or was refused, and others still run."""
        codes, beats = self._codes(), self._beats()
        for code in (ExitCode.REFUSED, ExitCode.DIVERGED):
            if code in codes:
                return code
        if stopped := [code for code in codes if code in STOPPED]:
            return stopped[0]
        return lost(codes.index(None), "did not end when the others did", beats)

    def _codes(self) -> list[int | None]:
        """Exit code of each process; death by a forwarded signal counts as an orderly stop."""
        received = self._signals.received
        passed_on = {-number: 128 + number for number in received}
        if received:  # processes still starting are sent SIGTERM
            passed_on.setdefault(-signal.SIGTERM, 128 + received[0])
        codes = [worker.poll() for worker in self._workers]
        if self._job.nodes is not None:
            codes = [code if code is None else code_of_task(code) for code in codes]
            for number in self._without_node:
                codes[number] = -signal.SIGKILL
        return [code if code is None else passed_on.get(code, code) for code in codes]

    def _beats(self) -> list[Beat | None]:
        return [read_beat(self._heartbeat_file(rank)) for rank in range(len(self._chosen))]

    def _heartbeat_file(self, number: int) -> Path:
        return self._job.folder.absolute() / f"heartbeat-{number}"

    def _log_file(self, number: int) -> Path:
        return self._job.folder / f"{number}.log"

    def _wait(self, seconds: float) -> bool:
        """Whether all end within `seconds`, and before a further signal."""
        end, signals = time.monotonic() + seconds, len(self._signals.received)
        while time.monotonic() < end and len(self._signals.received) == signals:
            if all(code is not None for code in self._codes()):
                return True
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)
        return False

    def _ask_to_stop(self, number: int, beats: Sequence[Beat | None]) -> None:
        """Forward a signal; SIGTERM to processes without a heartbeat, in which Python may still be
        starting: SIGINT would end it with a traceback."""
        if self._job.nodes is not None:
            self._job.nodes.signal_steps(signal.SIGTERM)
            return
        for worker, beat in zip(self._workers, beats, strict=True):
            _signal(worker, signal.SIGTERM if beat is None else number)

    def _kill(self, seconds: float) -> list[int]:
        """Kill all processes and those that they have started; returns those that SLURM has not
        ended within `seconds`, except those whose node is gone."""
        left = [] if self._job.nodes is None else self._kill_steps(self._job.nodes, seconds)
        if self._job.nodes is not None:
            self._job.nodes.stop_asking()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
        for worker in self._workers:
            _signal(worker, signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        return left

    def _kill_steps(self, nodes: Nodes, seconds: float) -> list[int]:
        """Have SLURM kill the tasks, as in `_kill`: killing only srun would leave them running."""
        is_on = {number: nodes.name(place) for number, place in enumerate(self._chosen)}
        begun, asked_at, signals = time.monotonic(), -math.inf, len(self._signals.received)
        while True:
            left = [number for number, each in enumerate(self._workers) if each.poll() is None]
            gone = self._gone_nodes | {is_on[number] for number in self._without_node}
            waited = time.monotonic() - begun
            if waited > _SECONDS_TO_FOLLOW:
                left = [number for number in left if is_on[number] not in gone]
            is_guarded = self._guard is not None and self._guard.poll() is None
            if not left and not (is_guarded and waited < _SECONDS_TO_FOLLOW):
                return []
            if waited > seconds or len(self._signals.received) > signals:
                return left
            # Ask again, as SLURM may not have answered, or not known a step that had just begun.
            if time.monotonic() - asked_at > _SECONDS_TO_ASK_AGAIN:
                asked_at = time.monotonic()
                nodes.signal_steps(signal.SIGKILL)
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)

    def _pass_on(self, number: int, lines: BinaryIO) -> None:
        """Copy the output of a process to its log, and forward it."""
        is_shown = number == 0 or self._job.shows_all
        prefix = f"[{number}] " if self._job.shows_all else ""
        with contextlib.ExitStack() as open_files:
            open_files.enter_context(lines)
            log = None
            with contextlib.suppress(OSError):
                log = open_files.enter_context(self._log_file(number).open("ab", buffering=0))
            gloo = GlooFilter()
            for line in lines:
                if self._job.nodes is not None and says_that_a_node_failed(line):
                    self._without_node.append(number)
                # A full disk must not prevent forwarding of output.
                with contextlib.suppress(OSError):
                    if log is not None:
                        log.write(line)
                if not gloo.holds_back(line) and is_shown:
                    # Nor must a closed terminal stop it: the process would wait for a reader.
                    with self._speaking, contextlib.suppress(OSError):
                        self._out.write(prefix + line.decode(errors="replace"))
                        self._out.flush()

    def _show_end_of(self, number: int) -> None:
        """Show the last lines of the log of a process, unless its output was forwarded."""
        if number and not self._job.shows_all:
            log = b""
            with contextlib.suppress(OSError):
                log = self._log_file(number).read_bytes()
            gloo = GlooFilter()
            lines = [
                line.decode(errors="replace")
                for line in log.splitlines()
                if not gloo.holds_back(line)
            ]
            for line in lines[-LINES_AT_END:]:
                print(f"[{number}] {line}", file=self._out)


def _signal(worker: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the process group of a worker, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


class GlooFilter:
    """Filters gloo's lines about connections out of the output, line by line; gloo's threads print
    concurrently, so that lines may be torn."""

    def __init__(self) -> None:
        self._missing_ends = 0

    def holds_back(self, line: bytes) -> bool:
        """Whether the next line is one of gloo's, to be dropped."""
        is_torn = self._missing_ends > 0 and _GLOO_PIECES.fullmatch(line) is not None
        if not (is_torn or _GLOO_BEGINS in line or _GLOO_ENDS in line):
            return False
        # Every beginning has one end of line: "is : 31" may hold the numbers of two lines, the
        # second of which then ends separately.
        self._missing_ends = max(0, self._missing_ends + line.count(_GLOO_BEGINS) - 1)
        return True


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped or traced; False if the system has no /proc."""
    try:
        return process_fields(process)[0] in ("T", "t")  # proc(5): stopped, traced
    except OSError:
        return False
