"""The pool of input worker processes, as used by the training process.

Grain's workers (0.2.18) are not used: they import JAX and the parent's main program, pass every
array through a new block of shared memory, and do not end if the parent is killed.

A batch does not depend on the worker that reads it. Knows no devices, and needs no JAX.
"""

import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

import numpy as np

from scalejax.core.errors import ScalejaxError
from scalejax.core.workers import Worker, WorkerFailed
from scalejax.data.datasets import Opening
from scalejax.data.loader.batching import LocalBatch, unchanged
from scalejax.data.loader.sampler import Rows
from scalejax.data.loader.worker import BatchReader, PlacedBatches, array_at
from scalejax.data.source import Source
from scalejax.data.stage_clock import STAGE_SECONDS, STAGES


class Workers:
    """`count` worker processes that read batches of `source`, each up to `slots` requests ahead."""

    def __init__(
        self,
        source: Source | Opening,
        count: int,
        *,
        slots: int,
        wrap: Callable[[Source], Source] = unchanged,
    ) -> None:
        self._slots = slots
        self._workers = [_InputWorker(source, wrap, slots) for _ in range(count)]

    def groups(self, wanted: Iterator[Sequence[Rows]]) -> Iterator[Sequence[LocalBatch]]:
        """The batches of `wanted`, in order; those of one element are read together.

        Raises:
            UnreadableExample: if an example cannot be read or decoded.
            ConfigError: if a file cannot be read.
            ScalejaxError: if a worker died.
        """
        asked: deque[tuple[_InputWorker, int]] = deque()
        free = deque((worker, slot) for slot in range(self._slots) for worker in self._workers)
        for batches in wanted:
            if not free:
                yield from self._take(asked, free)
            worker, slot = free.popleft()
            worker.send((slot, batches))  # the worker writes them to the slot
            asked.append((worker, slot))
        while asked:
            yield from self._take(asked, free)

    def _take(
        self, asked: "deque[tuple[_InputWorker, int]]", free: "deque[tuple[_InputWorker, int]]"
    ) -> Iterator[Sequence[LocalBatch]]:
        worker, slot = asked.popleft()
        for batch in worker.batches():
            yield [batch]
        free.append((worker, slot))

    def interrupt(self) -> None:
        """End the workers; may be called from any thread, even while `groups` waits for them."""
        for worker in self._workers:
            worker.kill()

    def release(self) -> None:
        """End the workers and release their resources once `groups` is no longer consumed."""
        for worker in self._workers:
            worker.close()


class _InputWorker(Worker):
    """One worker process; it answers requests in order."""

    def __init__(
        self, source: Source | Opening, wrap: Callable[[Source], Source], slots: int
    ) -> None:
        self._file = _memory_file()
        self._map: mmap.mmap | None = None
        super().__init__(
            BatchReader(source, wrap, memory=self._file.fileno(), slots=slots),
            name="input worker",
            # A source that uses JAX must not take the devices.
            environment=os.environ | {"JAX_PLATFORMS": "cpu"},
            log=2,
            descriptors=[self._file.fileno()],
        )

    def batches(self) -> Iterator[LocalBatch]:
        """The batches of the oldest request, each copied when it is consumed.

        They are copied because a JAX array on a CPU may alias this memory, which is reused.
        """
        try:
            answer: PlacedBatches = self.answer()
        except WorkerFailed as failed:
            raise _explained(failed) from failed
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0)  # all that the worker has allocated
        for batch in answer:
            begin = time.perf_counter()
            copied = {
                name: place
                if isinstance(place, np.ndarray)
                else np.array(array_at(self._map, place))
                for name, place in batch.items()
            }
            seconds = time.perf_counter() - begin
            copied[STAGE_SECONDS][STAGES.index("hand over")] += seconds
            yield copied

    def close(self) -> None:
        """End the process, and close its connection and shared memory."""
        super().close()
        self._file.close()


def _explained(failed: WorkerFailed) -> Exception:
    """The exception to raise for a worker that failed."""
    if failed.return_code is None:  # a bug, with its traceback
        return RuntimeError(f"in a process of input.workers:\n{failed}")
    if not failed.was_killed:
        return ScalejaxError(
            f"A process of input.workers ended with code {failed.return_code}; its output is above."
        )
    return ScalejaxError(
        "A process of input.workers was killed, most likely because memory ran out; fewer of "
        "them, or a smaller input.memory_bytes or data.reading.memory_bytes, need less memory."
    )


def _memory_file() -> IO[bytes]:
    """An anonymous file in memory, which disappears with its users, however they end.

    Not in /dev/shm, which containers often limit to 64 MB.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("scalejax batches"), "w+b")
    return tempfile.TemporaryFile()
