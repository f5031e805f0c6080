"""Which examples each step takes: an order that (seed, epoch, position) alone decides.

Knows indices and epochs; nothing of processes, devices, files or what an example holds.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scalejax.core.metrics import steps_per_epoch
from scalejax.data.source import Grouped, Ordered, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a global batch."""

    indices: np.ndarray
    """Of their examples, int [rows]."""
    epoch: int | None
    """The epoch in which the examples are taken; None in evaluation."""
    beside: dict[str, np.ndarray] = field(default_factory=dict)
    """What a batch holds of each row beside its example, [rows]."""

    def of(self, places: np.ndarray) -> "Rows":
        """The rows at `places` of these."""
        return Rows(
            indices=self.indices[places],
            epoch=self.epoch,
            beside={name: values[places] for name, values in self.beside.items()},
        )


class TrainingOrder:
    """Element k: the rows of step k after the first of its epochs.

    Every epoch is a new shuffle of all examples, cut into batches. An incomplete last batch is
    dropped, and its examples come back in the next epoch; or it is filled up with the first of the
    epoch once more, of weight 0. A source may have an order of its own.

    Whole epochs are shuffled by NumPy, 5 ns an example; Grain's own shuffle is called for each
    example and takes 8 us, at a batch of 8192 longer than a step of a small network.
    """

    def __init__(
        self,
        source: Source,
        global_batch: int,
        *,
        seed: int,
        steps: int,
        first_epoch: int,
        is_filled: bool = False,
        is_weighted: bool = False,
    ) -> None:
        """The order of an epoch and the next.

        Args:
            source: the examples.
            global_batch: rows of a step.
            seed: decides the shuffles.
            steps: until the end.
            first_epoch: in which step 0 is.
            is_filled: whether an incomplete last batch is filled up.
            is_weighted: whether rows have "weights".
        """
        self._global_batch = global_batch
        self._steps = steps
        self._first_epoch = first_epoch
        self._is_weighted = is_weighted
        self._steps_per_epoch = steps_per_epoch(len(source), global_batch, is_filled=is_filled)

        @lru_cache(maxsize=2)  # reading ahead crosses from one epoch into the next
        def permutation(epoch: int) -> np.ndarray:
            if isinstance(source, Ordered):
                given = source.order_of_epoch(epoch, self._steps_per_epoch, global_batch)
                if given is not None:
                    return given
            generator = np.random.default_rng([seed, epoch])
            if isinstance(source, Grouped):
                return source.shuffled(generator)
            return generator.permutation(len(source))

        self._permutation = permutation

    def __len__(self) -> int:
        """Steps."""
        return self._steps

    def __getitem__(self, index: int) -> Rows:
        past, position = divmod(int(index), self._steps_per_epoch)
        epoch, first = self._first_epoch + past, position * self._global_batch
        shuffled, end = self._permutation(epoch), first + self._global_batch
        indices = shuffled[first:end]
        if end > len(shuffled):
            indices = np.concatenate([indices, shuffled[: end - len(shuffled)]])
        if not self._is_weighted:
            return Rows(indices=indices, epoch=epoch)
        weights = np.arange(first, end) < len(shuffled)
        return Rows(indices=indices, epoch=epoch, beside={"weights": weights.astype(np.float32)})


class EvaluationOrder:
    """Element k: the k-th run of examples, and as "mask" which of them are real."""

    def __init__(self, examples: int, global_batch: int) -> None:
        self._examples = examples
        self._global_batch = global_batch

    def __len__(self) -> int:
        """Batches."""
        return -(-self._examples // self._global_batch)

    def __getitem__(self, index: int) -> Rows:
        examples = int(index) * self._global_batch + np.arange(self._global_batch)
        is_real = examples < self._examples
        return Rows(
            indices=np.where(is_real, examples, 0),
            epoch=None,
            beside={"mask": is_real.astype(np.float32)},
        )
