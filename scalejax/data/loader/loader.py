"""Data loader: global batches on the mesh, in an order that depends on (seed, epoch, position).

Batches are prefetched by a thread or by worker processes. One element is one step, so the position
in the data is the step number, and resuming needs no other state. Every process of a run computes
the same global order (the sampler) and reads only the rows that its own devices hold, so the order
does not depend on the number of processes or devices.

Knows no network and no optimizer.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grain
import jax
import numpy as np

from scalejax.config.input import InputConfig
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError
from scalejax.data.loader.autotune import WorkerChoice, batches_per_second, chosen
from scalejax.data.loader.batching import LocalBatch, take_batches, unchanged
from scalejax.data.loader.prefetch import Prefetcher, one_by_one, prefetch_depth, prefetched_batches
from scalejax.data.loader.sampler import EvaluationSampler, TrainingSampler
from scalejax.data.loader.skip_unreadable import LOST, ReadableExamples, Skipped
from scalejax.data.source import Source
from scalejax.data.stage_clock import STAGE_SECONDS, STAGES

Batch = dict[str, jax.Array]
"""The arrays of one global batch, sharded over the mesh."""
AS_USUAL = InputConfig()
"""Default input settings."""


class InputSeconds:
    """Time of the batches used since the last `taken_seconds`, by stage of the input."""

    def __init__(self) -> None:
        self.batches = 0
        """Number of batches."""
        self.stages = np.zeros(len(STAGES) + 1)
        """Seconds in each of `STAGES`, measured where it ran, and processor seconds of reading."""
        self.copy = 0.0
        """Seconds in which the training process copied batches to its devices, or began to."""
        self.waited = 0.0
        """Seconds that the devices waited for batches."""


class Batches:
    """Prefetched batches on the mesh, with the time that devices waited for each.

    A batch is transferred to the devices when it is requested, while they run the previous step:
    at most two batches are on the devices at a time, however many are prefetched.
    """

    def __init__(
        self, prefetcher: Prefetcher[LocalBatch], put: Callable[[LocalBatch], Batch]
    ) -> None:
        self._prefetcher = prefetcher
        self._put = put
        self._seconds = InputSeconds()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._placed(*self._prefetcher.next_beside(lambda: False))

    def next_beside(self, is_busy: Callable[[], bool]) -> tuple[Batch, float]:
        """The next batch, and the seconds that the devices waited for it.

        Args:
            is_busy: whether the devices still have other work.

        Raises:
            StopIteration: after the last batch.
            UnreadableExample: if an example cannot be read or decoded.
            ConfigError: if a file cannot be read.
        """
        local, waited_seconds = self._prefetcher.next_beside(is_busy)
        return self._placed(local, waited_seconds), waited_seconds

    def _placed(self, local: LocalBatch, waited_seconds: float) -> Batch:
        """The batch on the mesh; its time is counted."""
        seconds = self._seconds
        seconds.stages += local.pop(STAGE_SECONDS, 0.0)
        begin = time.perf_counter()
        batch = self._put(local)
        seconds.copy += time.perf_counter() - begin
        seconds.waited += waited_seconds
        seconds.batches += 1
        return batch

    def taken_seconds(self) -> InputSeconds:
        """The time of the batches used since the last call."""
        found, self._seconds = self._seconds, InputSeconds()
        return found

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.close()


def training_batches(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int,
    start_step: int,
    stop_step: int,
    first_epoch: int = 0,
    first_step: int = 0,
    how: InputConfig = AS_USUAL,
    skipped: Skipped | None = None,
) -> Batches:
    """The batches of steps `start_step` to `stop_step` - 1 of a run.

    Args:
        source: the examples.
        shapes: shapes and shardings of "inputs" and "targets", and of "weights" if some rows may
            not count; the first dimension is the global batch.
        seed: seed of the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: the step before which to stop.
        first_epoch: the first epoch with this global batch.
        first_step: the first step of that epoch.
        how: input settings.
        skipped: counts unreadable rows, each in one process only.
    """
    order = _training_order(source, shapes, seed, stop_step - first_step, how, first_epoch)
    workers = how.workers
    if workers == "auto":
        workers = chosen_workers(source, shapes, seed=seed, how=how).workers
    return _batches(order, source, shapes, start_step - first_step, how, skipped, workers)


def chosen_workers(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int,
    how: InputConfig,
    step_seconds: float | None = None,
) -> WorkerChoice:
    """The number of input workers for `training_batches`, chosen by measurement.

    Tries no more workers than this host has cores and the two memory budgets allow.

    Args:
        source: the examples.
        shapes: as for `training_batches`.
        seed: seed of the shuffles.
        how: input settings, except the number of workers.
        step_seconds: time of a step without waiting for input; None if unknown.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """
    order = _training_order(source, shapes, seed, 2**62, how)
    rows = len(_local_rows(shapes["inputs"]))

    def rate(workers: int) -> float | None:
        try:
            prefetcher = _prefetcher(order, source, shapes, 0, how, workers)
        except ConfigError:
            if not workers:
                raise
            return None  # the memory does not allow that many
        return rows * batches_per_second(prefetcher, workers)

    needed = None if step_seconds is None else rows / step_seconds
    return chosen(rate, most=machine_cores(), needed=needed)


def evaluation_batches(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
    skipped: Skipped | None = None,
) -> Batches:
    """Batches of every example once, in order, with the last batch padded.

    The "mask" of a batch is 1 for an example and 0 for a padding or unreadable row.
    """
    order = EvaluationSampler(len(source), _global_batch(shapes))
    return _batches(order, source, shapes, 0, how, skipped)


def training_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seeds: Sequence[int],
    start_step: int,
    stop_step: int,
    how: InputConfig = AS_USUAL,
    skipped: Sequence[Skipped] | None = None,
) -> Batches:
    """The batches of `training_batches` for several seeds, stacked on a new first dimension:
    (seeds, global batch, ...). For a single device.

    Args:
        sources: the examples of each seed.
        shapes: as for `training_batches`, of one seed.
        seeds: seeds of the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: steps of the whole run.
        how: input settings.
        skipped: counters of unreadable rows, one for each seed.
    """
    orders = [
        _training_order(source, shapes, seed, stop_step, how)
        for source, seed in zip(sources, seeds, strict=True)
    ]
    return _stacked(orders, sources, shapes, start_step, how, skipped)


def evaluation_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
    skipped: Sequence[Skipped] | None = None,
) -> Batches:
    """The batches of `evaluation_batches` for several sources, stacked on a new first dimension."""
    orders = [EvaluationSampler(len(source), _global_batch(shapes)) for source in sources]
    return _stacked(orders, sources, shapes, 0, how, skipped)


def _training_order(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
    steps: int,
    how: InputConfig,
    first_epoch: int = 0,
) -> TrainingSampler:
    return TrainingSampler(
        source,
        _global_batch(shapes),
        seed=seed,
        steps=steps,
        first_epoch=first_epoch,
        is_filled=how.remainder == "pad",
        is_weighted="weights" in shapes,
    )


def _stacked(
    orders: Sequence[TrainingSampler | EvaluationSampler],
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    skipped: Sequence[Skipped] | None,
) -> Batches:
    wrap = _wrap(shapes, how)
    readers = [wrap(source) for source in sources]

    def gather(step: int) -> list[LocalBatch]:
        parts = [
            take_batches(reader, [order[step]])[0]
            for order, reader in zip(orders, readers, strict=True)
        ]
        return [{name: np.stack([part[name] for part in parts]) for name in parts[0]}]

    def put(local: LocalBatch) -> Batch:
        lost = local.pop(LOST, ())
        for each, source, of_seed in zip(skipped or (), sources, lost, strict=False):
            each.add(source, of_seed)
        return jax.device_put(local)

    groups = one_by_one(grain.MapDataset.range(start, len(orders[0])).map(gather))
    stacked_bytes = len(sources) * _global_batch(shapes) * _row_bytes(shapes)
    return Batches(Prefetcher(groups, ahead=prefetch_depth(stacked_bytes, how, 0)), put)


def _batches(
    order: TrainingSampler | EvaluationSampler,
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    skipped: Skipped | None = None,
    workers: int = 0,
) -> Batches:
    """Batches of the elements of the sampler `order` from `start` on."""
    rows = _local_rows(shapes["inputs"])
    is_counted = _are_counted_here(shapes["inputs"], rows)
    shardings = {name: shape.sharding for name, shape in shapes.items()}
    global_shapes = {name: shape.shape for name, shape in shapes.items()}

    def put(local: LocalBatch) -> Batch:
        if LOST in local:
            lost = local.pop(LOST)[is_counted]
            if skipped is not None:
                skipped.add(source, lost)
        return jax.make_array_from_process_local_data(shardings, local, global_shapes)

    return Batches(_prefetcher(order, source, shapes, start, how, workers), put)


def _prefetcher(
    order: TrainingSampler | EvaluationSampler,
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    workers: int,
) -> Prefetcher[LocalBatch]:
    return prefetched_batches(
        order,
        source,
        _local_rows(shapes["inputs"]),
        _row_bytes(shapes),
        start=start,
        how=how,
        workers=workers,
        wrap=_wrap(shapes, how),
    )


def _wrap(
    shapes: Mapping[str, jax.ShapeDtypeStruct], how: InputConfig
) -> Callable[[Source], Source]:
    """The wrapper that makes a source skip unreadable examples; can be pickled."""
    if how.unreadable == "refuse":
        return unchanged
    rows = {name: shape for name, shape in shapes.items() if name not in ("weights", "mask")}
    blank = {name: np.zeros(shape.shape[1:], shape.dtype) for name, shape in rows.items()}
    return partial(ReadableExamples, blank=blank)


def _row_bytes(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(shape.shape[1:]) * shape.dtype.itemsize for shape in shapes.values())


def _global_batch(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return shapes["inputs"].shape[0]


def _local_rows(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    return rows_held(shape, shape.sharding.addressable_devices)


def rows_held(shape: jax.ShapeDtypeStruct, devices: Collection[Any]) -> np.ndarray:
    """The rows of a global batch that `devices` hold, in order, each once."""
    indices = shape.sharding.devices_indices_map(shape.shape)
    held = {
        index[0].indices(shape.shape[0]) for device, index in indices.items() if device in devices
    }
    return np.concatenate([np.arange(*bounds) for bounds in sorted(held)])


def _are_counted_here(shape: jax.ShapeDtypeStruct, rows: np.ndarray) -> np.ndarray:
    """Which of `rows` no process of lower index also holds, bool: each row counts once."""
    of_others = [
        np.arange(*index[0].indices(shape.shape[0]))
        for device, index in shape.sharding.devices_indices_map(shape.shape).items()
        if device.process_index < jax.process_index()
    ]
    return ~np.isin(rows, np.concatenate(of_others)) if of_others else np.ones(len(rows), bool)
