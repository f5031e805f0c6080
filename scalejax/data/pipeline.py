"""Global batches on the mesh, in an order that (seed, epoch, position) alone decides.

Grain reads ahead on a thread; one element is one step, so the position in the data is the number
of the step and nothing else need be kept to resume. Every process computes the same global order
(`order`) and gathers only the rows that its own devices hold, so the order does not depend on how
many processes or devices there are.

Knows no network and no optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import grain
import jax
import numpy as np

from scalejax.data.order import EvaluationOrder, Rows, TrainingOrder
from scalejax.data.readable import LOST, READABLE, ReadableExamples, Skipped, settled
from scalejax.data.source import Grouped, Source
from scalejax.input_config import InputConfig

Batch = dict[str, jax.Array]
"""The rows of one global batch, laid out over the mesh."""
AS_USUAL = InputConfig()
"""How batches are made where nothing is said of it."""


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
) -> Iterator[Batch]:
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
    together = 1
    if isinstance(source, Grouped):
        together = max(1, source.rows_together // len(_local_rows(shapes["inputs"])))
    return _batches(order, source, shapes, start_step - first_step, how, skipped, together)


def evaluation_batches(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
    skipped: Skipped | None = None,
) -> Iterator[Batch]:
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
) -> Iterator[Batch]:
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
) -> Iterator[Batch]:
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
) -> Iterator[Batch]:
    readers = [_reader(source, shapes, how) for source in sources]

    def gather(step: int) -> dict[str, np.ndarray]:
        parts = [
            _taken(reader, [order[step]])[0] for order, reader in zip(orders, readers, strict=True)
        ]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    elements = grain.MapDataset.range(start, len(orders[0])).map(gather)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=how.read_ahead_batches)
    for element in elements.to_iter_dataset(ahead):
        lost = element.pop(LOST, ())
        for each, source, of_seed in zip(skipped or (), sources, lost, strict=False):
            each.add(source, of_seed)
        yield jax.device_put(element)


def _batches(
    order: TrainingOrder | EvaluationOrder,
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    skipped: Skipped | None = None,
    together: int = 1,
) -> Iterator[Batch]:
    """Batches of the elements of `order` from `start` on, the rows of `together` taken at once."""
    rows, reader = _local_rows(shapes["inputs"]), _reader(source, shapes, how)
    is_counted = _are_counted_here(shapes["inputs"], rows)
    shardings = {name: shape.sharding for name, shape in shapes.items()}
    global_shapes = {name: shape.shape for name, shape in shapes.items()}

    def gather(first: int) -> list[dict[str, np.ndarray]]:
        steps = range(first, min(first + together, len(order)))
        return _taken(reader, [order[step].of(rows) for step in steps])

    elements = grain.MapDataset.range(start, len(order), together).map(gather)
    ahead = how.read_ahead_batches if together == 1 else 1
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    for several in elements.to_iter_dataset(reading):
        for local in several:
            if LOST in local:
                lost = local.pop(LOST)[is_counted]
                if skipped is not None:
                    skipped.add(source, lost)
            yield jax.make_array_from_process_local_data(shardings, local, global_shapes)


def _reader(source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct], how: InputConfig) -> Source:
    """`source`, or what leaves out of it what cannot be read."""
    if how.unreadable == "refuse":
        return source
    rows = {name: shape for name, shape in shapes.items() if name not in ("weights", "mask")}
    return ReadableExamples(
        source, {name: np.zeros(shape.shape[1:], shape.dtype) for name, shape in rows.items()}
    )


def _taken(source: Source, batches: Sequence[Rows]) -> list[dict[str, np.ndarray]]:
    """The batches of `source`, those of one epoch taken at once."""
    filled = []
    for epoch, of_epoch in groupby(batches, key=lambda batch: batch.epoch):
        several = list(of_epoch)
        taken = source.take(np.concatenate([batch.indices for batch in several]), epoch)
        begin = 0
        for batch in several:
            part = slice(begin, begin := begin + len(batch.indices))
            rows = {name: values[part] for name, values in taken.items()} | batch.beside
            filled.append(settled(rows, batch) if READABLE in taken else rows)
    return filled


def _global_batch(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return shapes["inputs"].shape[0]


def _local_rows(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """The rows of a global batch that devices of this process hold, in order, each once."""
    indices = shape.sharding.addressable_devices_indices_map(shape.shape)
    held = {index[0].indices(shape.shape[0]) for index in indices.values() if index}
    return np.concatenate([np.arange(*bounds) for bounds in sorted(held)])


def _are_counted_here(shape: jax.ShapeDtypeStruct, rows: np.ndarray) -> np.ndarray:
    """Which of `rows` no process before this one holds as well, bool."""
    of_others = [
        np.arange(*index[0].indices(shape.shape[0]))
        for device, index in shape.sharding.devices_indices_map(shape.shape).items()
        if device.process_index < jax.process_index()
    ]
    return ~np.isin(rows, np.concatenate(of_others)) if of_others else np.ones(len(rows), bool)
