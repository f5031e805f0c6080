"""Holds validation examples out of the training part of a data set: chooses them, and gives sources
of them and of the rest.

The choice depends only on the number of examples, `data.validation_fraction` and
`data.validation_seed`, so that all processes, layouts, runs and resumed runs hold out the same
examples. Knows indices; nothing of the contents of examples.
"""

import numpy as np

from scalejax.config.data import DataConfig, Split
from scalejax.data.source import Grouped, Recut, Shared, Source


def held_out_indices(examples: int, held_out: int, *, seed: int, is_stream: bool) -> np.ndarray:
    """The indices of the examples that are held out, ascending.

    Args:
        examples: number of training examples, including held-out ones.
        held_out: number to hold out.
        seed: seed of the choice.
        is_stream: whether examples continue their neighbours: then those held out are consecutive,
            with no training example between two of them.
    """
    generator = np.random.default_rng(seed)
    if is_stream:
        first = int(generator.integers(0, examples - held_out + 1))
        return np.arange(first, first + held_out)
    return np.sort(generator.permutation(examples)[:held_out])


def divided(source: Source, config: DataConfig, split: Split) -> Source:
    """The part `split` of `source`, the training examples of `config`: those held out for
    validation, or the rest.

    Raises:
        ConfigError: if no example would be held out, or none would be left to train on.
    """
    count = len(source)
    held_out = held_out_indices(
        count,
        config.held_out_of(count),
        seed=config.validation_seed,
        is_stream=config.is_stream,
    )
    if split == "validation":
        return part_of(source, held_out)
    if isinstance(source, Recut) and (rest := source.without(held_out)) is not None:
        return rest
    return part_of(source, np.setdiff1d(np.arange(count), held_out, assume_unique=True))


def part_of(whole: Source, indices: np.ndarray) -> "Part":
    """The examples of `whole` at `indices`, ascending, as a source."""
    kind = GroupedPart if isinstance(whole, Grouped) else Part
    kind = kind if not isinstance(whole, Shared) else _SHARED[kind]
    return kind(whole, indices)


class Part:
    """Some examples of a source, unchanged: their randomness depends on their index in the whole
    source."""

    def __init__(self, whole: Source, indices: np.ndarray) -> None:
        self._whole = whole
        self._indices = indices

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._indices)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The rows of `Source.take`."""
        return self._whole.take(self._indices[indices], epoch)


class GroupedPart(Part):
    """Some examples of a source that reads and shuffles them in groups."""

    @property
    def rows_together(self) -> int:
        """Examples of a shuffled order to read at once."""
        assert isinstance(self._whole, Grouped)  # noqa: S101  ensured by `part_of`
        return self._whole.rows_together

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The indices of all examples, in the order of the whole source, without its others."""
        assert isinstance(self._whole, Grouped)  # noqa: S101  ensured by `part_of`
        order = self._whole.shuffled(generator)
        places = np.full(len(self._whole), -1, order.dtype)
        places[self._indices] = np.arange(len(self._indices))
        found = places[order]
        return found[found >= 0]


class _SharedPart(Part):
    """Some examples of a source that caches in memory what it reads."""

    def share_of(self, processes: int) -> "Part":
        """The part of a source with one of `processes` equal shares of its memory.

        Raises:
            ConfigError: if the share is too small.
        """
        assert isinstance(self._whole, Shared)  # noqa: S101  ensured by `part_of`
        return part_of(self._whole.share_of(processes), self._indices)


class _SharedGroupedPart(GroupedPart, _SharedPart):
    """A part of a source that does both."""


_SHARED: dict[type[Part], type[Part]] = {Part: _SharedPart, GroupedPart: _SharedGroupedPart}
