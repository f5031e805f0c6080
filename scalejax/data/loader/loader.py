"""Global batches on the mesh, in an order that (seed, epoch, position) alone decides.

A thread makes them ahead, or has processes of its own make them. One element is one step, so the
position in the data is the number of the step and nothing else need be kept to resume. Every
process of a run computes the same global order (`order`) and gathers only the rows that its own
devices hold, so the order does not depend on how many processes or devices there are.

Knows no network and no optimizer.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grain
import jax
import numpy as np

from scalejax.config.input import InputConfig
from scalejax.data.loader.autotune import WorkerChoice, choose_workers
from scalejax.data.loader.batching import LocalBatch, take_batches, unchanged
from scalejax.data.loader.prefetch import Feed, local_feed, made_ahead, one_by_one
from scalejax.data.loader.sampler import EvaluationOrder, TrainingOrder
from scalejax.data.loader.skip_unreadable import LOST, ReadableExamples, Skipped
from scalejax.data.source import Source

Batch = dict[str, jax.Array]
"""The rows of one global batch, laid out over the mesh."""
AS_USUAL = InputConfig()
"""How batches are made where nothing is said of it."""


class Batches:
    """Batches on the mesh, made ahead, and how long they were waited for.

    A batch is put on the devices when it is asked for, while these do the step before: one that
    waits and one that is used are there at a time, whatever is made ahead.
    """

    def __init__(self, feed: Feed[LocalBatch], put: Callable[[LocalBatch], Batch]) -> None:
        self._feed = feed
        self._put = put

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._put(next(self._feed))

    def next_beside(self, is_busy: Callable[[], bool]) -> tuple[Batch, float]:
        """The next batch, and for how many seconds the devices had to wait for it.

        Args:
            is_busy: whether the devices have work that does not need the batch.

        Raises:
            StopIteration: when there are no more.
            UnreadableExample: if an example cannot be read or decoded.
            ConfigError: if a file cannot be read.
        """
        local, waited_seconds = self._feed.next_beside(is_busy)
        return self._put(local), waited_seconds

    def close(self) -> None:
        """Make no more."""
        self._feed.close()


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
        shapes: shapes and shardings of "inputs" and "targets", and of "weights" where rows may
            count for nothing; the first dimension is the global batch.
        seed: decides the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: the step before which to end.
        first_epoch: the first epoch with this global batch.
        first_step: its first step.
        how: they are made.
        skipped: counts what this process finds unreadable, each row in one process alone.
    """
    order = TrainingOrder(
        source,
        _global_batch(shapes),
        seed=seed,
        steps=stop_step - first_step,
        first_epoch=first_epoch,
        is_filled=how.remainder == "pad",
        is_weighted="weights" in shapes,
    )
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
    """How many processes are to make the batches that `training_batches` gives, by measurement.

    Args:
        source: the examples.
        shapes: as of `training_batches`.
        seed: decides the shuffles.
        how: batches are made, but for the number of processes.
        step_seconds: time of a step whose batches are there; None if it is not known.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """
    order = TrainingOrder(
        source,
        _global_batch(shapes),
        seed=seed,
        steps=2**62,
        first_epoch=0,
        is_filled=how.remainder == "pad",
        is_weighted="weights" in shapes,
    )
    return choose_workers(
        order,
        source,
        _local_rows(shapes["inputs"]),
        _row_bytes(shapes),
        how=how,
        wrap=_wrap(shapes, how),
        step_seconds=step_seconds,
    )


def evaluation_batches(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
    skipped: Skipped | None = None,
) -> Batches:
    """Batches that hold every example once, in order, and the last one filled up.

    The "mask" of a batch is 1 for an example and 0 for a filling row, or one that is unreadable.
    """
    order = EvaluationOrder(len(source), _global_batch(shapes))
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
    """For each step the batches that `training_batches` gives for each seed, stacked: one more
    dimension in front, (seeds, global batch, ...). For a single device.

    Args:
        sources: the examples of each seed.
        shapes: as of `training_batches`, of one seed.
        seeds: decide the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: steps of the whole run.
        how: they are made.
        skipped: count what is unreadable, one for each seed.
    """
    orders = [
        TrainingOrder(
            source,
            _global_batch(shapes),
            seed=seed,
            first_epoch=0,
            steps=stop_step,
            is_filled=how.remainder == "pad",
            is_weighted="weights" in shapes,
        )
        for source, seed in zip(sources, seeds, strict=True)
    ]
    return _stacked(orders, sources, shapes, start_step, how, skipped)


def evaluation_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
    skipped: Sequence[Skipped] | None = None,
) -> Batches:
    """The batches that `evaluation_batches` gives for each source, stacked likewise."""
    orders = [EvaluationOrder(len(source), _global_batch(shapes)) for source in sources]
    return _stacked(orders, sources, shapes, 0, how, skipped)


def _stacked(
    orders: Sequence[TrainingOrder | EvaluationOrder],
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
    return Batches(Feed(groups, ahead=made_ahead(stacked_bytes, how, 0)), put)


def _batches(
    order: TrainingOrder | EvaluationOrder,
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    skipped: Skipped | None = None,
    workers: int = 0,
) -> Batches:
    """Batches of the elements of `order` from `start` on."""
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

    feed = local_feed(
        order,
        source,
        rows,
        _row_bytes(shapes),
        start=start,
        how=how,
        workers=workers,
        wrap=_wrap(shapes, how),
    )
    return Batches(feed, put)


def _wrap(
    shapes: Mapping[str, jax.ShapeDtypeStruct], how: InputConfig
) -> Callable[[Source], Source]:
    """What is put around a source to leave out of it what cannot be read; can be pickled."""
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
    """Which of `rows` no process before this one holds as well, bool."""
    of_others = [
        np.arange(*index[0].indices(shape.shape[0]))
        for device, index in shape.sharding.devices_indices_map(shape.shape).items()
        if device.process_index < jax.process_index()
    ]
    return ~np.isin(rows, np.concatenate(of_others)) if of_others else np.ones(len(rows), bool)
