"""Prefetching of batches by a thread or by worker processes, within the input memory budget.

Measures the time that consumers wait. Knows neither the contents of batches nor how they are read.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import grain
import numpy as np

from scalejax.config.input import InputConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import format_bytes
from scalejax.data.datasets import for_process
from scalejax.data.loader.batching import LocalBatch, timed_batches, unchanged
from scalejax.data.loader.sampler import EvaluationSampler, Rows, TrainingSampler
from scalejax.data.loader.worker_pool import Workers
from scalejax.data.source import Grouped, Source

Made = TypeVar("Made")

_POLL_SECONDS = 1e-3
"""Polling interval for idle devices, while there is no batch for them."""


def _nothing() -> None:
    pass


class Prefetcher(Generic[Made]):
    """Elements of `groups` one by one, with up to `ahead` groups prefetched by a thread."""

    def __init__(
        self,
        groups: Iterator[Sequence[Made]],
        *,
        ahead: int,
        interrupt: Callable[[], None] = _nothing,
        release: Callable[[], None] = _nothing,
    ) -> None:
        """Start prefetching.

        Args:
            groups: groups of elements that are produced together; consumed in a thread.
            ahead: most groups that are prefetched or in progress.
            interrupt: makes a waiting `groups` fail soon; called from another thread.
            release: releases resources of `groups`; called when it is no longer consumed.
        """
        self._made: SimpleQueue[Sequence[Made] | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._group: Iterator[Made] = iter(())
        self._has_ended = False
        is_closed = threading.Event()
        # The thread must not reference `self`, so that garbage collection of `self` ends it.
        self._thread = threading.Thread(
            target=_fill,
            args=(groups, self._made, self._room, is_closed, release),
            name="read ahead",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _end, is_closed, self._room, interrupt)
        self._thread.start()

    def __iter__(self) -> Iterator[Made]:
        return self

    def __next__(self) -> Made:
        return self.next_beside(lambda: False)[0]

    def next_beside(self, is_busy: Callable[[], bool]) -> tuple[Made, float]:
        """The next element, and the seconds for which there was none while `is_busy` was false.

        Args:
            is_busy: whether the devices still have other work.

        Raises:
            StopIteration: after the last element.
            Exception: an exception raised while the element was produced.
        """
        for element in self._group:
            return element, 0.0
        if self._has_ended:
            raise StopIteration
        made, waited_seconds = self._next_group(is_busy)
        if made is None or isinstance(made, BaseException):
            self.close()
            raise made or StopIteration
        self._room.release()
        self._group = iter(made)
        return next(self._group), waited_seconds

    def _next_group(
        self, is_busy: Callable[[], bool]
    ) -> tuple[Sequence[Made] | BaseException | None, float]:
        if not self._made.empty():
            return self._made.get(), 0.0
        while is_busy():
            try:
                return self._made.get(timeout=_POLL_SECONDS), 0.0
            except Empty:
                continue
        begin = time.perf_counter()
        made = self._made.get()
        return made, time.perf_counter() - begin

    def close(self) -> None:
        """Stop prefetching."""
        self._has_ended = True
        self._finalizer()
        self._thread.join(timeout=1.0)  # takes longer only if remote storage does not answer


def _fill(
    groups: Iterator[Sequence[Made]],
    made: "SimpleQueue[Sequence[Made] | BaseException | None]",
    room: threading.Semaphore,
    is_closed: threading.Event,
    release: Callable[[], None],
) -> None:
    try:
        while True:
            room.acquire()
            if is_closed.is_set():
                return
            group = next(groups, None)
            made.put(group)
            if group is None:
                return
    except BaseException as error:  # noqa: BLE001  raised again in the consumer
        made.put(error)
    finally:
        release()


def _end(
    is_closed: threading.Event, room: threading.Semaphore, interrupt: Callable[[], None]
) -> None:
    is_closed.set()
    room.release()
    interrupt()


# Batches of a sampler, prefetched by a thread or worker processes within the memory budget.

_COPIES = 2
"""Batches from workers copied into this process: one ready, one in progress."""


def prefetched_batches(
    order: TrainingSampler | EvaluationSampler,
    source: Source,
    rows: np.ndarray,
    row_bytes: int,
    *,
    start: int,
    how: InputConfig,
    workers: int,
    wrap: Callable[[Source], Source] = unchanged,
) -> Prefetcher[LocalBatch]:
    """Prefetched local batches: `rows` of each global batch of `order` from `start` on.

    Args:
        order: sampler of the global batches.
        source: the examples.
        rows: rows of a global batch that this process holds, int [rows].
        row_bytes: bytes of one row.
        start: index of the first batch.
        how: input settings, except the number of workers.
        workers: worker processes; 0 for a thread of this process.
        wrap: wraps the source; can be pickled.

    Raises:
        ConfigError: if the memory is too small for so many workers.
    """
    ahead = prefetch_depth(len(rows) * row_bytes, how, workers)
    share = for_process(source, workers + 1) if workers else source  # one share is for evaluations
    together = 1
    if isinstance(share, Grouped):
        together = max(1, share.rows_together // len(rows))

    def rows_from(first: int) -> list[Rows]:
        return [order[step].of(rows) for step in range(first, min(first + together, len(order)))]

    wanted = grain.MapDataset.range(start, len(order), together).map(rows_from)
    if not workers:
        reader = wrap(source)
        groups = one_by_one(wanted.map(lambda several: timed_batches(reader, several)))
        return Prefetcher(groups, ahead=ahead if together == 1 else 1)
    processes = Workers(share, workers, wrap=wrap, slots=ahead if together == 1 else 2)
    return Prefetcher(
        processes.groups(one_by_one(wanted)),
        ahead=_COPIES,
        interrupt=processes.interrupt,
        release=processes.release,
    )


def one_by_one(elements: grain.MapDataset) -> Iterator:
    """An iterator over `elements` without prefetching."""
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(elements.to_iter_dataset(reading))


def prefetch_depth(batch_bytes: int, how: InputConfig, workers: int) -> int:
    """Number of batches that this process, or each of `workers`, prefetches.

    Raises:
        ConfigError: if `how.memory_bytes` does not hold one batch of each.
    """
    room = how.memory_bytes // max(1, batch_bytes)
    if not workers:
        return max(1, min(how.read_ahead_batches, room))
    if room < workers + _COPIES:
        accepted = (
            f"each makes batches of {format_bytes(batch_bytes)}, of which "
            f"input.memory_bytes={how.memory_bytes} holds {room}; at most {max(0, room - _COPIES)}"
        )
        raise ConfigError(refusal("input.workers", workers, accepted))
    wanted = max(2, -(-how.read_ahead_batches // workers))  # one in progress, one ready
    return min(wanted, (room - _COPIES) // workers)
