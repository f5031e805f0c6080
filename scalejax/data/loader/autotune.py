"""How many processes are to make the batches of this host: tried out before the run begins.

Why not Grain's `pick_performance_config` (0.2.18): it divides a memory budget by the size of an
element and takes that many, up to one a core; it measures no time, and never says "none".
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from scalejax.config.input import InputConfig
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError
from scalejax.core.units import format_count
from scalejax.data.loader.batching import LocalBatch
from scalejax.data.loader.prefetch import Feed, local_feed
from scalejax.data.loader.sampler import TrainingOrder
from scalejax.data.source import Source

_SECONDS = 0.7
"""For how long batches are counted with each number of processes, or until there are enough."""
_MOST_SECONDS = 10.0
"""For how long at most."""
_MARGIN = 1.25
"""Times what the devices take that is enough: they will share the cores with their input."""
_ALIKE = 0.9
"""Part of the best rate that is as good, for fewer processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """A number of processes, and what it was chosen by."""

    workers: int
    """Processes that are to make batches; 0 for threads of the one that trains."""
    measured: tuple[tuple[int, float], ...]
    """Samples a second by number of processes, those of this host."""
    needed: float | None
    """Samples a second that the devices of this host take; None if it is not known."""

    def __str__(self) -> str:
        """The choice in a sentence, with its reasons."""
        rates = ", ".join(
            f"{format_count(rate)} with {count or 'threads'}" for count, rate in self.measured
        )
        needed = "" if self.needed is None else f"; the devices take {format_count(self.needed)}"
        return f"input.workers = {self.workers} (samples/s: {rates}{needed})"


def choose_workers(
    order: TrainingOrder,
    source: Source,
    rows: np.ndarray,
    row_bytes: int,
    *,
    how: InputConfig,
    wrap: Callable[[Source], Source],
    step_seconds: float | None,
) -> WorkerChoice:
    """The fewest processes whose batches come as fast as steps need them, or nearly as fast as any.

    No more are tried than this host has cores and the two budgets of memory allow.

    Args:
        order: of the global batches.
        source: the examples.
        rows: of a global batch that are of this process.
        row_bytes: that one of them takes.
        how: batches are made.
        wrap: puts something around a source; can be pickled.
        step_seconds: time of a step whose batches are there; None if it is not known.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """

    def rate(workers: int) -> float | None:
        try:
            feed = local_feed(
                order, source, rows, row_bytes, start=0, how=how, workers=workers, wrap=wrap
            )
        except ConfigError:
            if not workers:
                raise
            return None  # the memory does not allow so many
        return len(rows) * _batches_per_second(feed, workers)

    needed = None if step_seconds is None else len(rows) / step_seconds
    return chosen(rate, most=machine_cores(), needed=needed)


def chosen(rate: Callable[[int], float | None], *, most: int, needed: float | None) -> WorkerChoice:
    """The choice by `rate`, samples a second of so many processes, None of too many.

    Args:
        rate: measures.
        most: processes to try at most.
        needed: samples a second that are enough; None if that is not known.
    """
    measured: dict[int, float] = {}
    enough = None if needed is None else _MARGIN * needed
    for count in _counts(most):
        found = rate(count)
        if found is None:
            break
        measured[count] = found
        if enough is not None and found >= enough:
            break
        if count > 1 and found * _ALIKE < measured[max(c for c in measured if c < count)]:
            break  # more would not make it faster either
    best = max(measured.values())
    wanted = enough if enough is not None and best >= enough else _ALIKE * best
    workers = next(count for count, found in measured.items() if found >= wanted)
    return WorkerChoice(workers=workers, measured=tuple(measured.items()), needed=needed)


def _counts(most: int) -> Iterator[int]:
    """0, the powers of two below `most`, and `most`."""
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def _batches_per_second(feed: Feed[LocalBatch], workers: int) -> float:
    """The rate at which batches come when no one keeps them waiting."""
    begin = time.perf_counter()
    try:
        # Until then processes start, and those that have begun to work are ahead.
        for _ in range(1 + 2 * workers):
            next(feed)
        counted_from, count = time.perf_counter(), 0
        while True:
            next(feed)
            count += 1
            now = time.perf_counter()
            has_enough = count >= 2 * max(1, workers) and now - counted_from >= _SECONDS
            if has_enough or now - begin >= _MOST_SECONDS:
                return count / (now - counted_from)
    finally:
        feed.close()
