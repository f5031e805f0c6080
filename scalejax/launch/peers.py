"""The watch that the processes of a group keep on each other's progress, whoever started them.

Each writes its heartbeat into the key-value store of JAX's coordination service; the first reads
all of them, and tells the others, through the same store, which one they wait for. Separate threads
do so, and continue while the main thread is in a collective. Knows nothing of training but
heartbeats.
"""

import faulthandler
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from scalejax.core.errors import ConfigError, ExitCode, refusal
from scalejax.core.heartbeat import Beat, latest_beat, packed, unpacked
from scalejax.core.process_group import SLURM, Place
from scalejax.launch.watchdog import STUCK_SECONDS, Loss, Watch, lost

_ALL, _TOLD = "scalejax/beats", "scalejax/told"
"""Folders of the store: the heartbeat of each process, which the first reads; and what the first
tells the others, its own heartbeat and which process they wait for. So each round takes the first
one message per process, and the others two."""
_FIRST, _VERDICT = "first", "verdict"
_ENDED = "ended"
"""Phase of a process that is no longer watched."""
_MOST_SECONDS_BETWEEN_LOOKS = 1.0
_ROUNDS_TO_LEAVE = 3
"""Rounds between a verdict and the exit, in which the others read it and write their stacks."""
_SECONDS_TO_KILL = 10.0


class Store(Protocol):
    """The key-value store of JAX's coordination service; every call may wait forever."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = ...) -> Any:
        """Set the value of a key."""

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """All keys of a folder and their values."""
        ...


class PeerWatch:
    """Watches all processes of a group, or this one alone, until it is closed.

    If none makes progress for `Watch.limit_seconds`, or one is silent for `stuck_seconds`, the one
    that the others wait for is named on standard error; every process writes the stacks of its
    threads there, and exits with `ExitCode.LOST`. A frozen process cannot: mpirun, `launch` and
    JobSets kill it when the others have left, and SLURM is asked to do so.
    """

    def __init__(
        self,
        place: Place | None,
        stuck_seconds: float | None = None,
        *,
        has_progress: bool = True,
        store: Store | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Start to watch, once `process_group.join` has returned.

        Args:
            place: the place of this process in its group; None if it is the only one.
            stuck_seconds: as `Watch.stuck_seconds`; None for 60, 0 for no watch.
            has_progress: whether the processes report progress; else they are watched only for
                silence.
            store: the store; None for that of JAX.
            leave: ends this process.

        Raises:
            ConfigError: if `stuck_seconds` is negative.
        """
        seconds = STUCK_SECONDS if stuck_seconds is None else stuck_seconds
        require_stuck_seconds(seconds)
        self._process = 0 if place is None else place.process
        self._count = 1 if place is None else place.processes
        self._is_step_of_slurm = place is not None and place.told_by == SLURM
        self._seconds = seconds or math.inf
        self._has_progress = has_progress
        self._leave = leave
        self._every = min(_MOST_SECONDS_BETWEEN_LOOKS, self._seconds / 5)
        self._rounds = 0
        self._beats: list[Beat | None] = [None] * self._count
        self._verdict = ""
        self._last_round = time.monotonic()
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._store = store
        if not seconds:
            return
        if self._count > 1:
            self._store = store or _store_of_jax()
            self._start(self._exchange_rounds, "exchange of heartbeats")
        self._start(self._judge_rounds, "watch of peers")

    def __enter__(self) -> "PeerWatch":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch; the others then no longer wait for this process."""
        self._end.set()
        for thread in self._threads:
            thread.join(_ROUNDS_TO_LEAVE * self._every)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # The exchange, which may wait for a store that does not answer.

    def _exchange_rounds(self) -> None:
        while not self._end.wait(self._every):
            with suppress(Exception):  # noticed by the time since the last round
                self._exchange()
        with suppress(Exception):
            self._tell(packed(replace(self._own_beat(), phase=_ENDED)))

    def _exchange(self) -> None:
        store = self._joined
        self._rounds += 1
        self._tell(packed(self._own_beat()))
        if self._process == 0:
            for key, content in store.key_value_dir_get_bytes(_ALL):
                self._beats[int(key.rpartition("/")[2])] = unpacked(content)
        else:
            for key, content in store.key_value_dir_get_bytes(_TOLD):
                if key.rpartition("/")[2] == _VERDICT:
                    self._verdict = content.decode()
                else:
                    self._beats[0] = unpacked(content)
        self._last_round = time.monotonic()

    def _tell(self, content: bytes) -> None:
        store = self._joined
        store.key_value_set_bytes(f"{_ALL}/{self._process}", content, allow_overwrite=True)
        if self._process == 0:
            store.key_value_set_bytes(f"{_TOLD}/{_FIRST}", content, allow_overwrite=True)

    @property
    def _joined(self) -> Store:
        if self._store is None:
            raise ConfigError("the process group was not joined.")
        return self._store

    def _own_beat(self) -> Beat:
        beat = latest_beat() or Beat(liveness_count=0, progress_count=0, step=0, phase="starting")
        return replace(beat, liveness_count=self._rounds)

    # The judgement, which never waits.

    def _judge_rounds(self) -> None:
        watch, last = self._new_watch(), time.monotonic()
        while not self._end.wait(self._every):
            now = time.monotonic()
            was_away = now - last > self._seconds / 2 + self._every
            if was_away or (self._count == 1 and _is_in_debugger()):
                # This process itself was stopped or starved, and saw nothing meanwhile; or a person
                # is debugging it.
                watch, self._last_round = self._new_watch(), now
            last = now
            if (words := self._judged(watch, now)) is not None and not self._end.is_set():
                self._go(words)
                return

    def _new_watch(self) -> Watch:
        stuck = self._seconds if self._has_progress else math.inf
        return Watch(math.inf, stuck, silent_seconds=self._seconds)

    def _judged(self, watch: Watch, now: float) -> str | None:
        """Which process all wait for, in words; None if none hangs."""
        if self._verdict:
            return self._verdict
        if self._count > 1:
            if now - self._last_round > self._seconds and not self._has_ended(0):
                beat = self._beats[0]
                phase = "starting" if beat is None else beat.phase
                reason = f"has not answered for {now - self._last_round:.0f} s ({phase})"
                return str(lost(0, reason, [beat]))
            if self._process:
                return self._judged_silent(watch)
        beats = [self._own_beat(), *self._beats[1:]]
        codes = [0 if self._has_ended(number) else None for number in range(self._count)]
        alone = replace(self._own_beat(), liveness_count=int(now * 1e3))  # alive, as it runs this
        loss = watch.hanging(codes, [alone, *beats[1:]], [False] * self._count)
        if loss is not None and 0 in codes:
            loss = lost(codes.index(0), "has ended, and others still wait", beats)
        return None if loss is None else str(loss)

    def _judged_silent(self, watch: Watch) -> str | None:
        """In words, that the first process, which judges the others, is silent; None if not."""
        code, beat = 0 if self._has_ended(0) else None, self._beats[0]
        if beat is not None:
            beat = replace(beat, progress_count=beat.liveness_count)
        loss: Loss | None = watch.hanging([code], [beat], [False])
        return None if loss is None else str(loss)

    def _has_ended(self, number: int) -> bool:
        beat = self._beats[number]
        return beat is not None and beat.phase == _ENDED

    def _go(self, words: str) -> None:
        """Tell the others, write the stacks of all threads, and exit."""
        if self._process == 0 and self._count > 1:
            told = threading.Thread(target=self._tell_verdict, args=(words,), daemon=True)
            told.start()
            told.join(self._every)
        who = f"process {self._process} of {self._count}"
        print(f"stacks of all threads of {who}:", file=sys.stderr, flush=True)
        with suppress(Exception):  # a stream without a file
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        print(f"error: {words}; {who} exits.", file=sys.stderr, flush=True)
        # The first process holds the store, from which the others read its verdict.
        time.sleep(self._every * _ROUNDS_TO_LEAVE * (1 if self._process else 2))
        is_first_left = self._process == (1 if words.startswith("process 0 ") else 0)
        # Only if the tasks of the step are the processes: else they are a shell or a launcher.
        if self._is_step_of_slurm and is_first_left:
            _kill_step()
        self._leave(ExitCode.LOST)

    def _tell_verdict(self, words: str) -> None:
        with suppress(Exception):
            self._joined.key_value_set_bytes(
                f"{_TOLD}/{_VERDICT}", words.encode(), allow_overwrite=True
            )


def require_stuck_seconds(seconds: float) -> None:
    """Refuse a limit that is negative, infinite or NaN; 0 means no watch.

    Raises:
        ConfigError: naming the field.
    """
    if not 0 <= seconds < math.inf:
        accepted = "it must be a number of seconds, or 0 for no watch"
        raise ConfigError(refusal("stuck_seconds", seconds, accepted))


def _is_in_debugger() -> bool:
    """Whether the main thread is at a breakpoint of pdb or another debugger built on bdb, or of
    debugpy, as in VS Code and PyCharm."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "bdb" or name.startswith(("_pydevd_bundle.", "pydevd")):
            return True
        frame = frame.f_back
    return False


def _store_of_jax() -> Store:
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise ConfigError("the process group was not joined.")
    return client


def _kill_step() -> None:
    """Have SLURM kill the step of this process: a frozen task would keep it running forever."""
    job, step = (os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if job and step and shutil.which("scancel"):
        with suppress(OSError, subprocess.SubprocessError):
            command = ["scancel", "--signal=KILL", f"{job}.{step}"]
            subprocess.run(command, timeout=_SECONDS_TO_KILL, check=False)
