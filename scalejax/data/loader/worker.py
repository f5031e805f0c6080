"""An input worker process: `python -m scalejax.data.loader.worker`, rows in, arrays out.

Reads a `Task` from stdin and then a sequence of `Request`s; answers each on stdout with a `Made` or
a `Failed`, all as pickles. Arrays go through memory shared with the parent process. All other
output goes to stderr. Imports no JAX.
"""

import math
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from scalejax.core.environment import keep_pages, limit_cores
from scalejax.core.errors import ScalejaxError
from scalejax.data.datasets import Origin
from scalejax.data.loader.batching import LocalBatch, take_batches
from scalejax.data.loader.sampler import Rows
from scalejax.data.source import Source

_ALIGNMENT = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Initial settings of a worker."""

    source: Source | Origin
    """The source, or how to open it."""
    wrap: Callable[[Source], Source]
    """Wraps the source."""
    memory: int
    """Descriptor of the shared memory file; the worker sets its size."""
    slots: int
    """Number of equal slots in the shared memory, one per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Batches to be read together."""

    slot: int
    """Slot to write them to; its previous contents are no longer needed."""
    batches: tuple[Rows, ...]
    """Their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of an array in the shared memory."""

    begin: int
    """Offset in bytes."""
    shape: tuple[int, ...]
    """Shape of the array."""
    dtype: np.dtype
    """Data type of its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Successful answer to a request."""

    memory_bytes: int
    """Size of the shared memory file."""
    batches: tuple[dict[str, "Place | np.ndarray"], ...]
    """Location of each array of each batch; the array itself where it did not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Answer to a request that failed."""

    error: Exception
    """Exception to raise in the parent process."""


def main() -> None:
    """Answer requests until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to end
        signal.signal(number, signal.SIG_IGN)
    limit_cores(1)
    keep_pages()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: SimpleQueue[Request] = SimpleQueue()
    try:
        task: Task = pickle.load(sys.stdin.buffer)
    except EOFError:  # the parent has ended already
        return
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    examples = _Examples(task)
    while True:
        answer = examples.answer(requests.get())
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # the parent has ended, and nobody reads an error
            os._exit(0)


def _listen(requests: "SimpleQueue[Request]") -> None:
    """Queue requests from stdin; end this process when the parent ends."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except (
        EOFError,
        OSError,
        pickle.UnpicklingError,
    ):  # the last if the parent was killed while writing
        os._exit(0)


class _Examples:
    """The source, opened on first use."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._opened: Source | None = None
        self._memory = _Memory(task.memory, task.slots)

    def answer(self, request: Request) -> Made | Failed:
        """The batches of `request`, or the exception that prevented them."""
        try:
            batches = take_batches(self._reader(), request.batches)
            places = self._memory.put(request.slot, batches)
            return Made(memory_bytes=self._memory.size_bytes, batches=places)
        except ScalejaxError as error:
            return Failed(error=_portable(error))
        except Exception:  # noqa: BLE001  a bug: the parent raises its traceback
            text = traceback.format_exc()
            return Failed(error=RuntimeError(f"in a process of input.workers:\n{text}"))

    def _reader(self) -> Source:
        if self._opened is None:
            source = self._task.source
            self._opened = self._task.wrap(source.open() if isinstance(source, Origin) else source)
            if "pyarrow" in sys.modules:
                sys.modules["pyarrow"].set_cpu_count(1)
        return self._opened


def _portable(error: ScalejaxError) -> Exception:
    """`error`, or one with its message if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except (TypeError, AttributeError, pickle.PicklingError):
        return ScalejaxError(str(error))


class _Memory:
    """The shared memory file, divided into slots of the size of the first request."""

    def __init__(self, file: int, slots: int) -> None:
        self.size_bytes = 0
        self._file = file
        self._slots = slots
        self._slot_bytes = 0
        self._map: mmap.mmap | None = None

    def put(
        self, slot: int, batches: Sequence[LocalBatch]
    ) -> tuple[dict[str, Place | np.ndarray], ...]:
        """Copy `batches` into `slot`; arrays that do not fit are returned themselves."""
        if self._map is None:
            arrays = [values for batch in batches for values in batch.values()]
            self._slot_bytes = sum(_aligned(values.nbytes) for values in arrays)
            self.size_bytes = max(1, self._slots * self._slot_bytes)
            os.ftruncate(self._file, self.size_bytes)
            self._map = mmap.mmap(self._file, self.size_bytes)
        begin, end = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        places = []
        for batch in batches:
            placed: dict[str, Place | np.ndarray] = {}
            for name, values in batch.items():
                if values.dtype.hasobject or begin + values.nbytes > end:
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


if __name__ == "__main__":
    # Pickles name the classes above by this module's own name.
    from scalejax.data.loader import worker

    worker.main()
