"""The interface of data sets: examples that can be read by index, in any order, and other facts
about the data set. Readers register by `data.name`.

Knows no files, no batches, no sampler and no devices.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from scalejax.config.data import ParquetConfig, Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError

if TYPE_CHECKING:  # these import Arrow and Pillow
    from scalejax.core.filesystem import DataFile
    from scalejax.data.convert.rows import RowsOptions

UsedPart = tuple["DataFile", int, str | None]
"""A file, its rows before filters, and the SHA-256 of its footer or None; or, for the folder of a
class, the total bytes of its images with the SHA-256 of their versions, their number, and the
SHA-256 of their names and lengths."""


class UnreadableExample(ConfigError):
    """An example is damaged or invalid; the message names file, row and reason."""


class Source(Protocol):
    """Examples by index; the same index gives the same example, in every process."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """Rows "inputs" (uint8 images, int32 tokens or float32 numbers) and "targets" (int32) of
        the examples; for masked language modelling also "places" (int32), for packed documents
        "segment_ids" and "positions" (int32).

        Randomness in an example depends on seed, epoch and index alone.

        Args:
            indices: int [rows].
            epoch: training epoch in which they are read; None for evaluation.

        Raises:
            UnreadableExample: if an example cannot be read or decoded.
        """
        ...


@runtime_checkable
class Grouped(Protocol):
    """A source whose examples are read in groups, so that some orders cost less than others."""

    @property
    def rows_together(self) -> int:
        """Number of examples of a shuffled order to read at once, so that each group is read only
        once for them; 0 if it makes no difference."""
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


@runtime_checkable
class Recut(Protocol):
    """A source that may cut its examples differently in every epoch, so that what one index gives
    in evaluation belongs to other indices in training."""

    def without(self, held_out: np.ndarray) -> Source | None:
        """The source without what the examples at `held_out`, consecutive indices, give in
        evaluation; None if its examples are the same in every epoch."""
        ...


class Inspected(NamedTuple):
    """Files to inspect."""

    location: str
    """Their path, folder, glob or URL."""
    options: "RowsOptions | None" = None
    """Which arrays or files hold images and labels, if the format does not say."""
    run: ParquetConfig | None = None
    """The data table of the run that reads them."""


READERS: dict[str, type["Reader"]] = {}
"""The reader of each `data.name`; see `scalejax.data.datasets.reader_of`."""


class Reader(Source):
    """A data set: the source of its examples, and what its files say.

    A class declared as `class Numbers(Reader, names=("numbers",))` reads the data sets whose
    `data.name` is one of `names`.
    """

    def __init_subclass__(cls, names: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        READERS.update(dict.fromkeys(names, cls))

    def __init__(self, config: Any, split: Split, augmentation: Any) -> None:
        """Open a part; `augmentation` is an `Augmentation`, with the seed of all randomness."""

    @staticmethod
    def facts(config: Any) -> DatasetFacts:
        """Counts and shapes, if they do not follow from `config` alone."""
        raise NotImplementedError(f"{config.name} says no facts")

    @staticmethod
    def files(config: Any, part: Split) -> Iterable[UsedPart]:
        """The current files of a data set in files, or its folders of classes."""
        raise NotImplementedError(f"{config.name} has no files")

    @staticmethod
    def inspected(config: Any, part: Split) -> Inspected | None:
        """What `scalejax data inspect` opens for a run; None if it cannot."""
        del config, part
        return None
