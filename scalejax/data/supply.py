"""From an order of examples to batches in this process's memory, made ahead by a thread here or
by processes of their own, within the memory that there is for them.

Which of the two changes nothing in a batch. Knows no devices.
"""

from collections.abc import Callable, Iterator

import grain
import numpy as np

from scalejax.data.feed import Feed
from scalejax.data.making import LocalBatch, take_batches, unchanged
from scalejax.data.order import EvaluationOrder, Rows, TrainingOrder
from scalejax.data.source import Grouped, Source, for_process
from scalejax.data.workers import Workers
from scalejax.errors import ConfigError, refusal
from scalejax.input_config import InputConfig
from scalejax.units import format_bytes

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
