"""Opens the data set that a config names as examples by index, in this or another process.

Knows which reader reads which data set. Knows no batches, no sampler and no devices.
"""

from dataclasses import dataclass

from scalejax.config.data import (
    ArrayRecordConfig,
    DataConfig,
    FashionMnistConfig,
    ImageFolderConfig,
    MaskedTokensConfig,
    NumpyConfig,
    OfFiles,
    PythonDocsConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TokensConfig,
)
from scalejax.config.input import AugmentationConfig
from scalejax.config.parquet import ParquetConfig
from scalejax.data.source import Shared, Source, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Arguments to open a source again in another process, for synthetic or installed data sets,
    which are large to pickle. Files that a user names are listed once for all processes."""

    config: DataConfig
    """The data set."""
    split: Split
    """Part of the data set."""
    seed: int
    """Seed of the run."""
    augmentation: AugmentationConfig | None
    """How images are changed."""

    def open(self) -> Source:
        """Open the source.

        Raises:
            ConfigError: if a file of the data set is missing or damaged.
        """
        return open_source(self.config, self.split, seed=self.seed, augmentation=self.augmentation)


def for_process(source: Source, processes: int) -> Source | Origin:
    """`source` for one of `processes` that share its memory; can be pickled.

    Raises:
        ConfigError: if the memory is too small for that many.
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
        seed: seed of synthetic examples and of augmentation.
        augmentation: augmentation of training images; if None, none.

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
    # Imported here: a process needs the reader of its own data set alone.
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
