"""Batches made ahead by a thread, and how long they were waited for.

Knows neither what batches hold nor how they are made.
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
from scalejax.data.loader.batching import LocalBatch, take_batches, unchanged
from scalejax.data.loader.sampler import EvaluationOrder, Rows, TrainingOrder
from scalejax.data.loader.worker_pool import Workers
from scalejax.data.source import Grouped, Source

Made = TypeVar("Made")

_POLL_SECONDS = 1e-3
"""How often to look whether the devices have become idle, while there is no batch for them."""


def _nothing() -> None:
    pass


class Feed(Generic[Made]):
    """What `groups` give, one by one; up to `ahead` groups are made before they are asked for."""

    def __init__(
        self,
        groups: Iterator[Sequence[Made]],
        *,
        ahead: int,
        interrupt: Callable[[], None] = _nothing,
        release: Callable[[], None] = _nothing,
    ) -> None:
        """Begin to make them.

        Args:
            groups: elements that are made together; consumed in a thread.
            ahead: groups that are made, or being made, and not yet asked for.
            interrupt: has `groups` fail soon, if it waits; called from another thread.
            release: gives up what `groups` holds; called when it is no longer consumed.
        """
        self._made: SimpleQueue[Sequence[Made] | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._group: Iterator[Made] = iter(())
        self._has_ended = False
        is_closed = threading.Event()
        # The thread must not know `self`: one that is dropped ends it.
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
        """The next element, and for how many seconds there was none while `is_busy` was false.

        Args:
            is_busy: whether the devices have work that does not need the element.

        Raises:
            StopIteration: when there are no more.
            Exception: whatever was raised while it was made.
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
        """Make no more of them."""
        self._has_ended = True
        self._finalizer()
        self._thread.join(timeout=1.0)  # more if a store does not answer: not worth a wait


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
    except BaseException as error:  # noqa: BLE001  raised again where the element is asked for
        made.put(error)
    finally:
        release()


def _end(
    is_closed: threading.Event, room: threading.Semaphore, interrupt: Callable[[], None]
) -> None:
    is_closed.set()
    room.release()
    interrupt()


# From an order of examples to batches in this process's memory, made ahead by a thread here or
# by processes of their own, within the memory that there is for them.

_COPIES = 2
"""Batches of processes that lie in this one: one that waits to be asked for, one on its way."""


def local_feed(
    order: TrainingOrder | EvaluationOrder,
    source: Source,
    rows: np.ndarray,
    row_bytes: int,
    *,
    start: int,
    how: InputConfig,
    workers: int,
    wrap: Callable[[Source], Source] = unchanged,
) -> Feed[LocalBatch]:
    """`rows` of the elements of `order` from `start` on, with their examples of `source`.

    Args:
        order: of the global batches.
        source: the examples.
        rows: of a global batch that are wanted, int [rows].
        row_bytes: that one of them takes.
        start: the first element.
        how: batches are made, but for the number of processes.
        workers: processes that make them; 0 for a thread of this one.
        wrap: puts something around a source; can be pickled.

    Raises:
        ConfigError: if there is too little memory for so many processes.
    """
    ahead = made_ahead(len(rows) * row_bytes, how, workers)
    share = for_process(source, workers + 1) if workers else source  # one is for evaluations
    together = 1
    if isinstance(share, Grouped):
        together = max(1, share.rows_together // len(rows))

    def rows_from(first: int) -> list[Rows]:
        return [order[step].of(rows) for step in range(first, min(first + together, len(order)))]

    wanted = grain.MapDataset.range(start, len(order), together).map(rows_from)
    if not workers:
        reader = wrap(source)
        groups = one_by_one(wanted.map(lambda several: take_batches(reader, several)))
        return Feed(groups, ahead=ahead if together == 1 else 1)
    processes = Workers(share, workers, wrap=wrap, slots=ahead if together == 1 else 2)
    return Feed(
        processes.groups(one_by_one(wanted)),
        ahead=_COPIES,
        interrupt=processes.interrupt,
        release=processes.release,
    )


def one_by_one(elements: grain.MapDataset) -> Iterator:
    """`elements`, each made when it is asked for."""
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(elements.to_iter_dataset(reading))


def made_ahead(batch_bytes: int, how: InputConfig, workers: int) -> int:
    """Batches that this process, or each of `workers`, makes before they are asked for.

    Raises:
        ConfigError: if `how.memory_bytes` does not hold one of each.
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
    wanted = max(2, -(-how.read_ahead_batches // workers))  # one is made while one waits
    return min(wanted, (room - _COPIES) // workers)
