"""Times of single input stages: reading rows, decoding images, copying batches to devices.

Measures seconds; the rates are fitted in `measure.input.bench`.
"""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalejax.config.data import DataConfig
from scalejax.config.input import InputConfig
from scalejax.config.parallelism import DATA
from scalejax.core.environment import limit_cores
from scalejax.core.errors import ScalejaxError
from scalejax.core.workers import Worker, WorkerFailed
from scalejax.data.datasets import open_source
from scalejax.data.formats.parquet import ParquetFiles, RowGroup, read_columns
from scalejax.data.loader.loader import InputSeconds, training_batches
from scalejax.data.source import Source

Times = tuple[float, float]
"""Seconds of wall time, and of CPU time of all threads."""

_LEAST_BATCHES = 4
_LEAST_CALLS = 3


def read_times(
    files: ParquetFiles, groups: list[RowGroup], columns: tuple[str, ...], repeats: int
) -> tuple[Times, Times, Times]:
    """Median times of reading a row group over `groups` and repeats: from storage, from the page
    cache (or storage if there is none, as for a URL), and only its class column."""

    def seconds(group: RowGroup, wanted: tuple[str, ...]) -> Times:
        begin, of_processor = time.perf_counter(), time.process_time()
        read_columns(files.field, group, wanted)
        return time.perf_counter() - begin, time.process_time() - of_processor

    cold, warm, least = [], [], []
    for _ in range(repeats):
        for group in groups:
            forget(group.file.path)
            cold.append(seconds(group, columns))
            warm.append(seconds(group, columns))
            least.append(seconds(group, columns[-1:]))
    cold, warm, least = (tuple(np.median(each, axis=0).tolist()) for each in (cold, warm, least))
    return cold, warm, least


def forget(path: str) -> None:
    """Ask the system to drop the pages of a local file from memory."""
    if "://" in path:
        return
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sample_seconds(source: Source, workers: int, samples: int, seconds: float) -> float:
    """Seconds per sample, delivered in batches of `samples` on the first device.

    Args:
        source: the examples.
        workers: worker processes; 0 for threads of this process.
        samples: samples per batch, at most the whole source.
        seconds: duration of the measurement, after every process has delivered some and the
            prefetched batches are used up.
    """
    samples = min(samples, len(source))
    shapes = on_first_device(source.take(np.arange(1), 0), samples)
    how = InputConfig(workers=workers)
    batches = training_batches(source, shapes, seed=0, start_step=0, stop_step=10**9, how=how)
    try:
        for _ in range(8 + 4 * max(1, workers)):
            jax.block_until_ready(next(batches))
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds or count < _LEAST_BATCHES:
            jax.block_until_ready(next(batches))
            count += 1
        return (time.perf_counter() - begin) / count / samples
    finally:
        batches.close()


def batch_seconds(
    source: Source, how: InputConfig, samples: int, seconds: float
) -> tuple[InputSeconds, bool]:
    """Time by stage of batches of `samples` delivered on the first device, measured for `seconds`
    after the prefetched ones are used up; and whether that device is the CPU."""
    shapes = on_first_device(source.take(np.arange(1), 0), samples)
    batches = training_batches(source, shapes, seed=0, start_step=0, stop_step=10**9, how=how)
    with closing(batches):
        for _ in range(8 + 4 * max(1, int(how.workers))):
            jax.block_until_ready(next(batches))
        batches.taken_seconds()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds or count < _LEAST_BATCHES:
            jax.block_until_ready(next(batches))
            count += 1
        return batches.taken_seconds(), jax.devices()[0].platform == "cpu"


def on_first_device(
    examples: Mapping[str, np.ndarray], samples: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `samples` such examples, all on the first device."""
    mesh = Mesh(tuple(jax.devices()[:1]), (DATA,), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    return {
        name: jax.ShapeDtypeStruct((samples, *each.shape[1:]), each.dtype, sharding=sharding)
        for name, each in examples.items()
    }


def side_by_side(count: int, data: DataConfig, seconds: float) -> float:
    """Samples per second of `count` processes that read examples concurrently.

    Args:
        count: number of processes.
        data: the data set.
        seconds: duration.

    Raises:
        ScalejaxError: if a process ends.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with ExitStack() as leaving:
        workers = [
            leaving.enter_context(closing(Worker(_Throughput(data), environment=environment)))
            for _ in range(count)
        ]
        rates: list[float] = []
        for duration in (0.0, seconds):  # all are ready before they are timed
            for worker in workers:
                worker.send(duration)
            try:
                rates = [worker.answer() for worker in workers]
            except WorkerFailed as failed:
                if failed.return_code is None:  # a bug, with its traceback
                    raise
                said = f"A process that reads examples ended: {failed.reason}."
                raise ScalejaxError(said) from failed
        return sum(rates)


TAKEN = 64
"""Examples read per call."""
_READY = 8


class ReadyBatches:
    """A source whose examples cost nothing: cycles through a few batches larger than the caches."""

    def __init__(self, example_bytes: int) -> None:
        self._bytes = example_bytes
        self._ready: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._taken = 0

    def __len__(self) -> int:
        """A practically endless number of examples."""
        return 2**20

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """A ready batch of the requested size."""
        self._taken += 1
        which = len(indices), self._taken % _READY
        if which not in self._ready:
            inputs = np.full((len(indices), self._bytes), 7, np.uint8)
            self._ready[which] = {"inputs": inputs, "targets": np.zeros(len(indices), np.int32)}
        return self._ready[which]


class _Throughput:
    """Examples per second that one core reads, as one input worker does."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._source: Source | None = None

    def __call__(self, seconds: float) -> float:
        """The rate over `seconds`, for at least three calls."""
        if self._source is None:
            limit_cores(1)
            self._source = open_source(self._data, "train", seed=0)
        generator = np.random.default_rng(os.getpid())
        begin = now = time.perf_counter()
        calls = 0
        while now - begin < seconds or calls < _LEAST_CALLS:
            self._source.take(generator.integers(0, len(self._source), TAKEN))
            calls, now = calls + 1, time.perf_counter()
        return TAKEN * calls / (now - begin)
