"""What a data set is to the pipeline: examples that can be taken by index, in any order.

Knows which file reads which data set. Knows no batches, no order and no devices.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from scalejax.config.data import (
    DataConfig,
    FashionMnistConfig,
    MaskedTokensConfig,
    OfFiles,
    PythonDocsConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from scalejax.config.input import AugmentationConfig
from scalejax.config.parquet import ParquetConfig
from scalejax.core.errors import ConfigError
from scalejax.data.formats.array_record import ArrayRecordConfig
from scalejax.data.formats.image_folder import ImageFolderConfig
from scalejax.data.formats.numpy import NumpyConfig
from scalejax.data.formats.tokens import TokensConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How to open a source again, in any process: one whose examples are made, or come with an
    installation, and are large. Files that a user names are listed once for all processes."""

    config: DataConfig
    """The data set."""
    split: Split
    """Which part of it."""
    seed: int
    """Of the run."""
    augmentation: AugmentationConfig | None
    """How images are changed."""

    def open(self) -> Source:
        """The same examples.

        Raises:
            ConfigError: if a file of the data set is missing or damaged.
        """
        return open_source(self.config, self.split, seed=self.seed, augmentation=self.augmentation)


def for_process(source: Source, processes: int) -> Source | Origin:
    """`source` as one of `processes` that share its memory takes examples of it; can be pickled.

    Raises:
        ConfigError: if the memory is too small for so many.
    """
    if isinstance(source, Shared):
        return source.share_of(processes)
    return getattr(source, "origin", source)


def open_source(
    config: DataConfig,
    split: Split,
    *,
    seed: int,
    augmentation: AugmentationConfig | None = None,
) -> Source:
    """The examples of one part of the data set named in `config`.

    Args:
        config: the data set.
        split: which part of it.
        seed: decides what synthetic examples hold, and what is random of real ones.
        augmentation: how images are changed in an epoch of training; if None, not at all.

    Raises:
        ConfigError: if a file of the data set is missing or damaged.
    """
    source = _opened(config, split, seed, augmentation)
    if isinstance(config, OfFiles):  # another process might find other files
        return source
    origin = Origin(config=config, split=split, seed=seed, augmentation=augmentation)
    vars(source)["origin"] = origin
    return source


def _opened(
    config: DataConfig, split: Split, seed: int, augmentation: AugmentationConfig | None
) -> Source:
    # Imported here because the readers name `Split` from this file.
    from scalejax.data.readers.array_record import ArrayRecords
    from scalejax.data.readers.fashion_mnist import FashionMnist
    from scalejax.data.readers.image_folder import ImageFolder
    from scalejax.data.readers.numpy import NumpyArrays
    from scalejax.data.readers.parquet import ParquetExamples
    from scalejax.data.readers.python_docs import PythonDocs
    from scalejax.data.readers.synthetic import MaskedTokens, SyntheticImages, SyntheticTokens
    from scalejax.data.readers.tokens import TokenExamples
    from scalejax.data.transforms.augmentation import AS_IS, Augmentation

    changes = AS_IS if augmentation is None else Augmentation(config=augmentation, seed=seed)
    match config:
        case FashionMnistConfig():
            return FashionMnist(config, split, changes)
        case SyntheticImagesConfig():
            return SyntheticImages(config, split, seed=seed, augmentation=changes)
        case SyntheticTokensConfig():
            return SyntheticTokens(config, split, seed=seed)
        case MaskedTokensConfig():
            return MaskedTokens(config, split, seed=seed)
        case PythonDocsConfig():
            return PythonDocs(config, split)
        case ParquetConfig():
            return ParquetExamples(config, split, changes)
        case ImageFolderConfig():
            return ImageFolder(config, split, changes)
        case NumpyConfig():
            return NumpyArrays(config, split, changes)
        case TokensConfig():
            return TokenExamples(config, split, seed=seed)
        case ArrayRecordConfig():
            return ArrayRecords(config, split, changes)
