"""The interface of data sources: examples that can be read by index, in any order.

Knows no files, no batches, no sampler and no devices.
"""

from typing import Literal, Protocol, runtime_checkable

import numpy as np

from scalejax.core.errors import ConfigError

Split = Literal["train", "test"]
"""The training part and the test part of a data set."""


class UnreadableExample(ConfigError):
    """An example is damaged or invalid; the message names file, row and reason."""


class Source(Protocol):
    """Examples by index; the same index gives the same example, in every process."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """Rows "inputs" (uint8 images, int32 tokens or float32 numbers) and "targets" (int32) of
        the examples; for masked language modelling also "places" (int32).

        Randomness in an example depends on seed, epoch and index alone.

        Args:
            indices: int [rows].
            epoch: training epoch in which they are read; None for evaluation.

        Raises:
            UnreadableExample: if one of them cannot be read or decoded.
        """
        ...


@runtime_checkable
class Grouped(Protocol):
    """A source whose examples are read in groups, so that some orders cost less than others."""

    @property
    def rows_together(self) -> int:
        """Examples of a shuffled order to read at once, so that each group is read only once for
        them; 0 if it makes no difference."""
        ...

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The indices of all examples in the shuffled order of an epoch."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A source that may prescribe the order of its examples."""

    def order_of_epoch(self, epoch: int, steps: int, global_batch: int) -> np.ndarray | None:
        """The indices of the batches of an epoch, one after the other, [steps x global batch];
        None if they may be shuffled."""
        ...


@runtime_checkable
class Shared(Protocol):
    """A source that caches in memory what it reads."""

    def share_of(self, processes: int) -> Source:
        """The source with one of `processes` equal shares of its memory; can be pickled.

        Raises:
            ConfigError: if the share is too small.
        """
        ...
