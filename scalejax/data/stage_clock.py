"""Seconds that a batch spends in each stage of the input, taken where the stage runs.

A reader times its storage and augmentation with a few clock readings per batch; the rest of its
time is decoding. Each thread has its own sums, as evaluation may read while training does.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import numpy as np

Stage = Literal["storage", "decode", "augment", "hand over"]
"""Reading files or arrays; making examples of what was read; changing them at random; passing
batches from a worker process to the training process."""
STAGES: tuple[Stage, ...] = get_args(Stage)
STAGE_SECONDS = "stage_seconds"
"""Auxiliary array of a local batch until it is used: seconds in each of `STAGES`, and processor
seconds that all threads spent reading it, float64 [stages + 1]."""

Item = TypeVar("Item")


class _Sums(threading.local):
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.of_other_threads = 0.0  # processor seconds


_sums = _Sums()


def add_seconds(stage: Stage, seconds: float) -> None:
    """Count time that this thread spent in a stage of reading."""
    _sums.seconds[stage] += seconds


def add_processor_seconds(seconds: float) -> None:
    """Count processor time of other threads that work for this one."""
    _sums.of_other_threads += seconds


@contextmanager
def timed(stage: Stage) -> Iterator[None]:
    """Context whose time counts for a stage."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        add_seconds(stage, time.perf_counter() - begin)


def timed_items(stage: Stage, items: Iterable[Item]) -> Iterator[Item]:
    """`items`; the time taken to make each counts for a stage."""
    each_of = iter(items)
    while True:
        with timed(stage):
            item = next(each_of, None)
        if item is None:
            return
        yield item


@contextmanager
def reading(batches: int) -> Iterator[np.ndarray]:
    """Context in which this thread reads `batches` together. Gives the array of seconds of each of
    them (`STAGE_SECONDS`), which is filled at the end of the context."""
    _sums.seconds, _sums.of_other_threads = dict.fromkeys(STAGES, 0.0), 0.0
    found, processor, begin = np.zeros(len(STAGES) + 1), time.thread_time(), time.perf_counter()
    yield found
    seconds = _sums.seconds
    seconds["decode"] = time.perf_counter() - begin - seconds["storage"] - seconds["augment"]
    processor = time.thread_time() - processor + _sums.of_other_threads
    found[:] = [*(seconds[stage] / batches for stage in STAGES), processor / batches]
