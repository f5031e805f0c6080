"""What a data set is to the pipeline: examples that can be taken by index, in any order.

Knows no files, no batches, no order and no devices.
"""

from typing import Literal, Protocol, runtime_checkable

import numpy as np

from scalejax.core.errors import ConfigError

Split = Literal["train", "test"]
"""The part of a data set to train on, and the part to evaluate on."""


class UnreadableExample(ConfigError):
    """An example is damaged, or holds what it must not; says in which file and row, and why."""


class Source(Protocol):
    """Examples by index; the same index gives the same example, in every process."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """Rows "inputs" (uint8 images, int32 tokens or float32 numbers) and "targets" (int32) of
        the examples; of hidden words also "places" (int32).

        What is random in an example is decided by seed, epoch and index alone.

        Args:
            indices: int [rows].
            epoch: in which they are taken to train; None to evaluate.

        Raises:
            UnreadableExample: if one of them cannot be read or decoded.
        """
        ...


@runtime_checkable
class Grouped(Protocol):
    """What a source is besides, if some orders of its examples cost less than others."""

    @property
    def rows_together(self) -> int:
        """Examples of a shuffled order to take at once, so that each group is read once for them;
        0 if it makes no difference."""
        ...

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The indices of all examples, as an epoch is to go through them."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """What a source is besides, if it may have an order of its own."""

    def order_of_epoch(self, epoch: int, steps: int, global_batch: int) -> np.ndarray | None:
        """The indices of the batches of an epoch, one after the other, [steps x global batch];
        None if they may be shuffled."""
        ...


@runtime_checkable
class Shared(Protocol):
    """What a source is besides, if it keeps in memory what it reads."""

    def share_of(self, processes: int) -> Source:
        """The same examples with one of `processes` equal parts of the memory; can be pickled.

        Raises:
            ConfigError: if such a part is too small.
        """
        ...
