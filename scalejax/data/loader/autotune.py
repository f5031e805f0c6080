"""Chooses the number of input workers of this host by measuring throughput before the run.

Grain's `pick_performance_config` (0.2.18) is not used: it divides a memory budget by the size of an
element and returns that many, up to one per core; it measures no time, and never returns 0.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scalejax.core.units import format_count
from scalejax.data.loader.batching import LocalBatch
from scalejax.data.loader.prefetch import Prefetcher

_SECONDS = 0.7
"""Time for which each number of workers is measured, if enough batches arrive in it."""
_MOST_SECONDS = 10.0
"""Longest time for which a number of workers is measured."""
_MARGIN = 1.25
"""Sufficient throughput relative to that of the devices, as training shares the cores with its
input."""
_ALIKE = 0.9
"""Fraction of the best throughput that is accepted from fewer workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """The chosen number of workers, with the measurements behind it."""

    workers: int
    """Worker processes; 0 for a thread of the training process."""
    measured: tuple[tuple[int, float], ...]
    """Numbers of workers and their throughput in samples per second, on this host."""
    needed: float | None
    """Samples per second that the devices of this host consume; None if unknown."""

    def __str__(self) -> str:
        """The choice in a sentence, with its reasons."""
        rates = ", ".join(
            f"{format_count(rate)} with {count or 'threads'}" for count, rate in self.measured
        )
        needed = "" if self.needed is None else f"; the devices take {format_count(self.needed)}"
        return f"input.workers = {self.workers} (samples/s: {rates}{needed})"


def chosen(rate: Callable[[int], float | None], *, most: int, needed: float | None) -> WorkerChoice:
    """The fewest workers that are as fast as steps consume batches, or nearly the fastest.

    Args:
        rate: measures samples per second for a number of workers; None if that is too many.
        most: largest number of workers to try.
        needed: samples per second that the devices consume; None if unknown.
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
            break  # more workers would not be faster either
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


def batches_per_second(prefetcher: Prefetcher[LocalBatch], workers: int) -> float:
    """Throughput of batches that are consumed at once."""
    begin = time.perf_counter()
    try:
        # The first batches include the start of processes and those already prefetched.
        for _ in range(1 + 2 * workers):
            next(prefetcher)
        counted_from, count = time.perf_counter(), 0
        while True:
            next(prefetcher)
            count += 1
            now = time.perf_counter()
            has_enough = count >= 2 * max(1, workers) and now - counted_from >= _SECONDS
            if has_enough or now - begin >= _MOST_SECONDS:
                return count / (now - counted_from)
    finally:
        prefetcher.close()
