"""Global batches on the mesh, in an order that (seed, epoch, position) alone decides.

Grain reads ahead on a thread; one element is one step, so the position in the data is the number
of the step and nothing else need be kept to resume. Every process computes the same global order
and gathers only the rows that its own devices hold, so the order does not depend on how many
processes or devices there are.

Knows no network and no optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import grain
import jax
import numpy as np

from scalejax.data.source import Grouped, Source

Batch = dict[str, jax.Array]
"""The rows of one global batch, laid out over the mesh."""

READ_AHEAD = 4
"""Batches made before they are asked for."""


def training_batches(
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int,
    start_step: int,
    stop_step: int,
    first_epoch: int = 0,
    first_step: int = 0,
) -> Iterator[Batch]:
    """The batches of steps `start_step` to `stop_step` - 1 of a run.

    Every epoch is a new shuffle of all examples, cut into batches; an incomplete last batch is
    dropped, and its examples come back in the next epoch.

    Args:
        source: the examples.
        shapes: shapes and shardings of "inputs" and "targets"; the first dimension is the
            global batch.
        seed: decides the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: the step before which to end.
        first_epoch: the first epoch with this global batch.
        first_step: its first step.
    """
    order = _TrainingOrder(
        source,
        _global_batch(shapes),
        seed=seed,
        steps=stop_step - first_step,
        first_epoch=first_epoch,
    )
    together = 1
    if isinstance(source, Grouped):
        together = max(1, source.rows_together // len(_local_rows(shapes["inputs"])))
    return _batches(order, source, shapes, start_step - first_step, together)


def evaluation_batches(
    source: Source, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[Batch]:
    """Batches that hold every example once, in order, and the last one filled up.

    The "mask" of a batch is 1 for an example and 0 for a filling row.
    """
    order = _EvaluationOrder(len(source), _global_batch(shapes))
    return _batches(order, source, shapes, 0)


def training_batches_of_seeds(
    sources: Sequence[Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seeds: Sequence[int],
    start_step: int,
    stop_step: int,
) -> Iterator[Batch]:
    """For each step the batches that `training_batches` gives for each seed, stacked: one more
    dimension in front, (seeds, global batch, ...). For a single device.

    Args:
        sources: the examples of each seed.
        shapes: as of `training_batches`, of one seed.
        seeds: decide the shuffles.
        start_step: 0, or the step to resume from.
        stop_step: steps of the whole run.
    """
    orders = [
        _TrainingOrder(source, _global_batch(shapes), seed=seed, first_epoch=0, steps=stop_step)
        for source, seed in zip(sources, seeds, strict=True)
    ]
    return _stacked(orders, sources, start_step)


def evaluation_batches_of_seeds(
    sources: Sequence[Source], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[Batch]:
    """The batches that `evaluation_batches` gives for each source, stacked likewise."""
    orders = [_EvaluationOrder(len(source), _global_batch(shapes)) for source in sources]
    return _stacked(orders, sources, 0)


def _stacked(
    orders: Sequence["_TrainingOrder | _EvaluationOrder"], sources: Sequence[Source], start: int
) -> Iterator[Batch]:
    def gather(step: int) -> dict[str, np.ndarray]:
        parts = []
        for order, source in zip(orders, sources, strict=True):
            element = order[step]
            parts.append(source.take(element.pop("index")) | element)
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    elements = grain.MapDataset.range(start, len(orders[0])).map(gather)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    for element in elements.to_iter_dataset(reading):
        yield jax.device_put(element)


class _TrainingOrder:
    """Element k: the indices of the examples of step k after the first of its epochs.

    Whole epochs are shuffled by NumPy, 5 ns an example; Grain's own shuffle is called for each
    example and takes 8 us, at a batch of 8192 longer than a step of a small network.
    """

    def __init__(
        self, source: Source, global_batch: int, *, seed: int, steps: int, first_epoch: int
    ) -> None:
        self._global_batch = global_batch
        self._steps = steps
        self._first_epoch = first_epoch
        self._steps_per_epoch = len(source) // global_batch

        @lru_cache(maxsize=2)  # reading ahead crosses from one epoch into the next
        def permutation(epoch: int) -> np.ndarray:
            generator = np.random.default_rng([seed, epoch])
            if isinstance(source, Grouped):
                return source.shuffled(generator)
            return generator.permutation(len(source))

        self._permutation = permutation

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, position = divmod(int(index), self._steps_per_epoch)
        first = position * self._global_batch
        shuffled = self._permutation(self._first_epoch + epoch)
        return {"index": shuffled[first : first + self._global_batch]}


class _EvaluationOrder:
    """Element k: the indices of the k-th run of examples, and which of them are real."""

    def __init__(self, examples: int, global_batch: int) -> None:
        self._examples = examples
        self._global_batch = global_batch

    def __len__(self) -> int:
        return -(-self._examples // self._global_batch)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        examples = int(index) * self._global_batch + np.arange(self._global_batch)
        is_real = examples < self._examples
        return {"index": np.where(is_real, examples, 0), "mask": is_real.astype(np.float32)}


def _batches(
    order: "_TrainingOrder | _EvaluationOrder",
    source: Source,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    start: int,
    together: int = 1,
) -> Iterator[Batch]:
    """Batches of the elements of `order` from `start` on, the rows of `together` taken at once."""
    rows = _local_rows(shapes["inputs"])
    shardings = {name: shape.sharding for name, shape in shapes.items()}
    global_shapes = {name: shape.shape for name, shape in shapes.items()}

    def gather(first: int) -> list[dict[str, np.ndarray]]:
        steps = range(first, min(first + together, len(order)))
        local = [{name: values[rows] for name, values in order[step].items()} for step in steps]
        taken = source.take(np.concatenate([element.pop("index") for element in local]))
        for place, element in enumerate(local):
            part = slice(place * len(rows), (place + 1) * len(rows))
            element |= {name: values[part] for name, values in taken.items()} | element
        return local

    elements = grain.MapDataset.range(start, len(order), together).map(gather)
    ahead = READ_AHEAD if together == 1 else 1
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    for several in elements.to_iter_dataset(reading):
        for local in several:
            yield jax.make_array_from_process_local_data(shardings, local, global_shapes)


def _global_batch(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return shapes["inputs"].shape[0]


def _local_rows(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """The rows of a global batch that devices of this process hold, in order, each once."""
    indices = shape.sharding.addressable_devices_indices_map(shape.shape)
    held = {index[0].indices(shape.shape[0]) for index in indices.values() if index}
    return np.concatenate([np.arange(*bounds) for bounds in sorted(held)])
