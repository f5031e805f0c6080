"""The pool of input worker processes, as used by the training process.

Grain's workers (0.2.18) are not used: they import JAX and the parent's main program, every array
goes through a new block of shared memory, and they do not end if the parent is killed.

A batch does not depend on the worker that reads it. Knows no devices, and needs no JAX.
"""

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO, cast

import numpy as np

from scalejax.core.errors import ScalejaxError
from scalejax.data.datasets import Origin
from scalejax.data.loader.batching import LocalBatch, unchanged
from scalejax.data.loader.sampler import Rows
from scalejax.data.loader.worker import Failed, Made, Request, Task, array_at
from scalejax.data.source import Source


class Workers:
    """`count` worker processes that read batches of `source`, each up to `slots` requests ahead."""

    def __init__(
        self,
        source: Source | Origin,
        count: int,
        *,
        slots: int,
        wrap: Callable[[Source], Source] = unchanged,
    ) -> None:
        self._slots = slots
        self._workers = [_Worker() for _ in range(count)]  # they start concurrently
        for worker in self._workers:
            worker.begin(source, wrap, slots)

    def groups(self, wanted: Iterator[Sequence[Rows]]) -> Iterator[Sequence[LocalBatch]]:
        """The batches of `wanted`, in order; those of one element are read together.

        Raises:
            UnreadableExample: if an example cannot be read or decoded.
            ConfigError: if a file cannot be read.
            ScalejaxError: if a worker died.
        """
        asked: deque[tuple[_Worker, int]] = deque()
        free = deque((worker, slot) for slot in range(self._slots) for worker in self._workers)
        for batches in wanted:
            if not free:
                yield from self._take(asked, free)
            worker, slot = free.popleft()
            worker.ask(slot, batches)
            asked.append((worker, slot))
        while asked:
            yield from self._take(asked, free)

    def _take(
        self, asked: "deque[tuple[_Worker, int]]", free: "deque[tuple[_Worker, int]]"
    ) -> Iterator[Sequence[LocalBatch]]:
        worker, slot = asked.popleft()
        for batch in worker.answer():
            yield [batch]
        free.append((worker, slot))

    def interrupt(self) -> None:
        """End the workers; may be called from any thread, also while `groups` waits for them."""
        for worker in self._workers:
            worker.interrupt()

    def release(self) -> None:
        """End the workers and release their resources, when `groups` is no longer consumed."""
        for worker in self._workers:
            worker.release()


class _Worker:
    """One worker process; it answers requests in order."""

    def __init__(self) -> None:
        self._file = _memory_file()
        self._map: mmap.mmap | None = None
        self._process = subprocess.Popen(
            # -P: the working folder may hold a json.py of the user's.
            [sys.executable, "-P", "-m", "scalejax.data.loader.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._file.fileno()],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",  # a source that uses JAX must not take the devices
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            # Ctrl-C reaches the parent only, which then ends its workers silently. No new session:
            # Linux schedules cores by sessions, and workers should have the parent's priority.
            process_group=0,
        )
        self._requests = cast(IO[bytes], self._process.stdin)
        self._answers = cast(IO[bytes], self._process.stdout)

    def begin(self, source: Source | Origin, wrap: Callable[[Source], Source], slots: int) -> None:
        """Send the source and settings to the worker."""
        self._send(Task(source=source, wrap=wrap, memory=self._file.fileno(), slots=slots))

    def ask(self, slot: int, batches: Sequence[Rows]) -> None:
        """Request `batches`, to be written to `slot`."""
        self._send(Request(slot=slot, batches=tuple(batches)))

    def answer(self) -> Iterator[LocalBatch]:
        """The batches of the oldest request, each copied when it is consumed.

        Copied, as a JAX array on a CPU may alias this memory, which is reused.
        """
        try:
            answer: Made | Failed = pickle.load(self._answers)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise self._death() from error
        if isinstance(answer, Failed):
            raise answer.error
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), answer.memory_bytes)
        for batch in answer.batches:
            yield {
                name: place
                if isinstance(place, np.ndarray)
                else np.array(array_at(self._map, place))
                for name, place in batch.items()
            }

    def interrupt(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()

    def release(self) -> None:
        """End the process, and close its pipes and shared memory."""
        self._process.kill()
        self._process.wait()
        for file in (self._requests, self._answers, self._file):
            with contextlib.suppress(BrokenPipeError):  # from unsent requests
                file.close()

    def _send(self, message: Task | Request) -> None:
        try:
            pickle.dump(message, self._requests)
            self._requests.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._death() from error

    def _death(self) -> ScalejaxError:
        code = self._process.wait()
        if code != -signal.SIGKILL:
            return ScalejaxError(
                f"A process of input.workers ended with code {code}; what it said is above."
            )
        return ScalejaxError(
            "A process of input.workers was killed, most likely because memory ran out; fewer of "
            "them, or a smaller input.memory_bytes or data.reading.memory_bytes, need less memory."
        )


def _memory_file() -> IO[bytes]:
    """An anonymous file in memory, which disappears however its users end.

    Not in /dev/shm, which containers often limit to 64 MB.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("scalejax batches"), "w+b")
    return tempfile.TemporaryFile()
