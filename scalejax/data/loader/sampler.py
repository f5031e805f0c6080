"""Samplers: the examples of each step, in an order that depends only on (seed, epoch, position).

Knows indices and epochs; nothing of processes, devices, files or the contents of examples.
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
    """Indices of their examples, int [rows]."""
    epoch: int | None
    """The epoch in which the examples are read; None in evaluation."""
    beside: dict[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the batch other than the example, such as weights, [rows]."""

    def of(self, places: np.ndarray) -> "Rows":
        """The rows at `places` among these."""
        return Rows(
            indices=self.indices[places],
            epoch=self.epoch,
            beside={name: values[places] for name, values in self.beside.items()},
        )


class TrainingSampler:
    """Training sampler: element k holds the rows of step k.

    Every epoch is a new shuffle of all examples, cut into batches. An incomplete last batch is
    dropped, or padded with the first examples of the epoch at weight 0. A source may prescribe its
    own order.

    NumPy shuffles whole epochs at 5 ns per example; Grain's own shuffle is called for each example
    and takes 8 us, which at a batch of 8192 is longer than a step of a small network.
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
        """Create the sampler.

        Args:
            source: the examples.
            global_batch: rows per step.
            seed: seed of the shuffles.
            steps: number of steps.
            first_epoch: epoch of step 0.
            is_filled: whether an incomplete last batch is padded.
            is_weighted: whether rows have "weights".
        """
        self._global_batch = global_batch
        self._steps = steps
        self._first_epoch = first_epoch
        self._is_weighted = is_weighted
        self._steps_per_epoch = steps_per_epoch(len(source), global_batch, is_filled=is_filled)

        @lru_cache(maxsize=2)  # prefetching crosses from one epoch into the next
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
        """Number of steps."""
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


class EvaluationSampler:
    """Evaluation sampler: element k holds the k-th batch in order, with a "mask" for padding."""

    def __init__(self, examples: int, global_batch: int) -> None:
        self._examples = examples
        self._global_batch = global_batch

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self._examples // self._global_batch)

    def __getitem__(self, index: int) -> Rows:
        examples = int(index) * self._global_batch + np.arange(self._global_batch)
        is_real = examples < self._examples
        return Rows(
            indices=np.where(is_real, examples, 0),
            epoch=None,
            beside={"mask": is_real.astype(np.float32)},
        )
