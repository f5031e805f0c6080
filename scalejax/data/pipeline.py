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
) -> Iterator[Batch]:
    """The batches of steps `start_step` to `stop_step` - 1 of a run.

    Args:
        source: the examples.
        shapes: shapes and shardings of "inputs" and "targets"; the first dimension is the
            global batch.
        seed: decides the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: the step before which to end.
        first_epoch: the first epoch with this global batch.
        first_step: its first step.
        how: they are made.
    """
    order = TrainingOrder(
        source,
        _global_batch(shapes),
        seed=seed,
        steps=stop_step - first_step,
        first_epoch=first_epoch,
    )
    together = 1
    if isinstance(source, Grouped):
        together = max(1, source.rows_together // len(_local_rows(shapes["inputs"])))
    return _batches(order, source, shapes, start_step - first_step, how, together)


def evaluation_batches(
    source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct], how: InputConfig = AS_USUAL
) -> Iterator[Batch]:
    """Batches that hold every example once, in order, and the last one filled up.

    The "mask" of a batch is 1 for an example and 0 for a filling row.
    """
    order = EvaluationOrder(len(source), _global_batch(shapes))
    return _batches(order, source, shapes, 0, how)


def training_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seeds: Sequence[int],
    start_step: int,
    stop_step: int,
    how: InputConfig = AS_USUAL,
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
    """
    orders = [
        TrainingOrder(source, _global_batch(shapes), seed=seed, first_epoch=0, steps=stop_step)
        for source, seed in zip(sources, seeds, strict=True)
    ]
    return _stacked(orders, sources, start_step, how)


def evaluation_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    how: InputConfig = AS_USUAL,
) -> Iterator[Batch]:
    """The batches that `evaluation_batches` gives for each source, stacked likewise."""
    orders = [EvaluationOrder(len(source), _global_batch(shapes)) for source in sources]
    return _stacked(orders, sources, 0, how)


def _stacked(
    orders: Sequence[TrainingOrder | EvaluationOrder],
    sources: Sequence[Source],
    start: int,
    how: InputConfig,
) -> Iterator[Batch]:
    def gather(step: int) -> dict[str, np.ndarray]:
        parts = [
            _taken(source, [order[step]])[0] for order, source in zip(orders, sources, strict=True)
        ]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    elements = grain.MapDataset.range(start, len(orders[0])).map(gather)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=how.read_ahead_batches)
    for element in elements.to_iter_dataset(ahead):
        yield jax.device_put(element)


def _batches(
    order: TrainingOrder | EvaluationOrder,
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    how: InputConfig,
    together: int = 1,
) -> Iterator[Batch]:
    """Batches of the elements of `order` from `start` on, the rows of `together` taken at once."""
    rows = _local_rows(shapes["inputs"])
    shardings = {name: shape.sharding for name, shape in shapes.items()}
    global_shapes = {name: shape.shape for name, shape in shapes.items()}

    def gather(first: int) -> list[dict[str, np.ndarray]]:
        steps = range(first, min(first + together, len(order)))
        return _taken(source, [order[step].of(rows) for step in steps])

    elements = grain.MapDataset.range(start, len(order), together).map(gather)
    ahead = how.read_ahead_batches if together == 1 else 1
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    for several in elements.to_iter_dataset(reading):
        for local in several:
            yield jax.make_array_from_process_local_data(shardings, local, global_shapes)


def _taken(source: Source, batches: Sequence[Rows]) -> list[dict[str, np.ndarray]]:
    """The batches of `source`, those of one epoch taken at once."""
    filled = []
    for epoch, of_epoch in groupby(batches, key=lambda batch: batch.epoch):
        several = list(of_epoch)
        taken = source.take(np.concatenate([batch.indices for batch in several]), epoch)
        begin = 0
        for batch in several:
            part = slice(begin, begin := begin + len(batch.indices))
            filled.append({name: values[part] for name, values in taken.items()} | batch.beside)
    return filled


def _global_batch(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return shapes["inputs"].shape[0]


def _local_rows(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """The rows of a global batch that devices of this process hold, in order, each once."""
    indices = shape.sharding.addressable_devices_indices_map(shape.shape)
    held = {index[0].indices(shape.shape[0]) for index in indices.values() if index}
    return np.concatenate([np.arange(*bounds) for bounds in sorted(held)])
