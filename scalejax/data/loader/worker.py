"""The work of an input worker: `BatchReader`, rows in, arrays out.

Arrays are passed through memory shared with the caller. Imports no JAX.
"""

import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from scalejax.core.environment import keep_pages, limit_cores
from scalejax.data.datasets import Opening
from scalejax.data.loader.batching import LocalBatch, timed_batches
from scalejax.data.loader.sampler import Rows
from scalejax.data.source import Source
from scalejax.data.stage_clock import STAGE_SECONDS, STAGES

_ALIGNMENT = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of an array in the shared memory."""

    begin: int
    """Offset in bytes."""
    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: np.dtype
    """Data type of its elements."""


PlacedBatches = tuple[dict[str, Place | np.ndarray], ...]
"""Location of each array of each batch; the array itself if it did not fit."""


class BatchReader:
    """Reads batches of a source, which it opens in the worker."""

    def __init__(
        self,
        source: Source | Opening,
        wrap: Callable[[Source], Source],
        *,
        memory: int,
        slots: int,
    ) -> None:
        """Settings of a worker.

        Args:
            source: the source, or how to open it.
            wrap: wraps the source.
            memory: descriptor of the shared memory file; the worker sets its size.
            slots: number of equal slots in the shared memory, one per request.
        """
        self._source = source
        self._wrap = wrap
        self._opened: Source | None = None
        self._memory = _Memory(memory, slots)

    def __call__(self, request: tuple[int, Sequence[Rows]]) -> PlacedBatches:
        """Read the batches of `request` into the slot that it names, overwriting its contents."""
        slot, batches = request
        if self._opened is None:
            self._opened = self._open()
        taken = timed_batches(self._opened, batches)
        begin = time.perf_counter()
        placed = self._memory.put(slot, taken)
        seconds = (time.perf_counter() - begin) / len(taken)
        for batch in taken:  # its array of seconds is in the answer, not in the shared memory
            batch[STAGE_SECONDS][STAGES.index("hand over")] += seconds
        return placed

    def _open(self) -> Source:
        for number in (signal.SIGINT, signal.SIGTERM):  # the caller decides when to end
            signal.signal(number, signal.SIG_IGN)
        limit_cores(1)
        keep_pages()
        source = self._source
        opened = self._wrap(source() if isinstance(source, partial) else source)
        if "pyarrow" in sys.modules:
            sys.modules["pyarrow"].set_cpu_count(1)
        return opened


class _Memory:
    """The shared memory file, divided into slots of the size of the first request."""

    def __init__(self, file: int, slots: int) -> None:
        self._file = file
        self._slots = slots
        self._slot_bytes = 0
        self._map: mmap.mmap | None = None

    def put(self, slot: int, batches: Sequence[LocalBatch]) -> PlacedBatches:
        """Copy `batches` into `slot`; arrays that do not fit are returned as they are."""
        if self._map is None:
            arrays = [values for batch in batches for values in batch.values()]
            self._slot_bytes = sum(_aligned(values.nbytes) for values in arrays)
            size_bytes = max(1, self._slots * self._slot_bytes)
            os.ftruncate(self._file, size_bytes)
            self._map = mmap.mmap(self._file, size_bytes)
        begin, end = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        places = []
        for batch in batches:
            placed: dict[str, Place | np.ndarray] = {}
            for name, values in batch.items():
                is_no_row = values.dtype.hasobject or name == STAGE_SECONDS
                if is_no_row or begin + values.nbytes > end:
                    placed[name] = values
                    continue
                place = Place(begin=begin, shape=values.shape, dtype=values.dtype)
                array_at(self._map, place)[...] = values
                placed[name] = place
                begin += _aligned(values.nbytes)
            places.append(placed)
        return tuple(places)


def array_at(memory: mmap.mmap, place: Place) -> np.ndarray:
    """The array at `place`, not copied."""
    values = np.frombuffer(memory, place.dtype, math.prod(place.shape), place.begin)
    return values.reshape(place.shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
