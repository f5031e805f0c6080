"""Config of the data sets that a `run.toml` can name, and their facts: counts and shapes.

Reads only as much of the files as it takes to count the examples; returns no arrays.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.parquet import ParquetConfig
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.data.formats.array_record import ArrayRecordConfig, array_record_facts
from scalejax.data.formats.image_folder import ImageFolderConfig, image_folder_facts
from scalejax.data.formats.numpy import NumpyConfig, numpy_facts
from scalejax.data.formats.tokens import TokensConfig, tokens_facts

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts the full set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FashionMnistConfig:
    """Photographs of clothes, 28 x 28 grey, 10 classes (Xiao et al. 2017, arXiv 1708.07747)."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    """Selects this data set."""
    edition: Literal["auto", "embedded", "full"] = "auto"
    """embedded: 10,000 + 2,000 images that come with scalejax. full: 60,000 + 10,000 of the Debian
    package `dataset-fashion-mnist`. auto: full where it is installed, else embedded."""

    def __post_init__(self) -> None:
        if self.edition == "full" and not FASHION_MNIST_FOLDER.is_dir():
            accepted = (
                f"{FASHION_MNIST_FOLDER} is not there; install it with "
                '"apt-get install dataset-fashion-mnist", or use "embedded"'
            )
            raise ConfigError(refusal("data.edition", self.edition, accepted))

    @property
    def is_full(self) -> bool:
        """Whether the full edition is used: asked for, or with "auto" installed."""
        return self.edition != "embedded" and FASHION_MNIST_FOLDER.is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticImagesConfig:
    """Random images with random classes; the defaults have the shape of ImageNet-1k."""

    name: Literal["synthetic_images"] = "synthetic_images"
    """Selects this data set."""
    image_size: int = 224
    """Height and width in pixels."""
    channels: int = 3
    """Colour channels."""
    classes: int = 1000
    """Number of classes."""
    train_examples: int = 1_281_167
    """Examples to train on (ImageNet-1k: Russakovsky et al. 2015, arXiv 1409.0575)."""
    test_examples: int = 50_000
    """Examples to evaluate on."""

    def __post_init__(self) -> None:
        for name in ("image_size", "channels", "classes", "train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTokensConfig:
    """Random tokens, for next-token prediction."""

    name: Literal["synthetic_tokens"] = "synthetic_tokens"
    """Selects this data set."""
    tokens: int = 1024
    """Tokens in an example (sequence length)."""
    vocabulary: int = 50_304
    """Size of the vocabulary (default: GPT-2's 50,257 rounded up to a multiple of 128)."""
    train_examples: int = 1_000_000
    """Examples to train on."""
    test_examples: int = 1_000
    """Examples to evaluate on."""

    def __post_init__(self) -> None:
        for name in ("tokens", "vocabulary", "train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)


FIRST_TOKEN, SEPARATOR_TOKEN, MASK_TOKEN = 1, 2, 3
"""Tokens that begin an example ([CLS]), end a segment ([SEP]) and mask a word ([MASK]); words are
4 and above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTokensConfig:
    """Random tokens in two segments, some of them masked, as BERT is trained on
    (Devlin et al. 2018, arXiv 1810.04805, section 3.1); the defaults are its first phase."""

    name: Literal["masked_tokens"] = "masked_tokens"
    """Selects this data set."""
    tokens: int = 128
    """Tokens in an example (sequence length), [CLS] and two [SEP] included."""
    masked: int = 20
    """Masked tokens in an example, which are its targets (BERT: 15 %, and at most 20 of 128)."""
    vocabulary: int = 30_522
    """Size of the vocabulary (default: that of the published uncased BERT)."""
    train_examples: int = 1_000_000
    """Examples to train on."""
    test_examples: int = 1_000
    """Examples to evaluate on."""

    def __post_init__(self) -> None:
        for name in ("masked", "train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)
        require_at_least("data.vocabulary", self.vocabulary, MASK_TOKEN + 2)
        require_at_least("data.tokens", self.tokens, 4)
        words = self.tokens - 3
        if self.masked > words:
            accepted = f"an example of {self.tokens} tokens has {words} words"
            raise ConfigError(refusal("data.masked", self.masked, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonDocsConfig:
    """The text of the standard library's `pydoc_data.topics`, by bytes."""

    name: Literal["python_docs"] = "python_docs"
    """Selects this data set."""
    tokens: int = 64
    """Bytes in an example."""

    def __post_init__(self) -> None:
        require_at_least("data.tokens", self.tokens, 1)


DataConfig = Annotated[
    FashionMnistConfig
    | SyntheticImagesConfig
    | SyntheticTokensConfig
    | MaskedTokensConfig
    | PythonDocsConfig
    | ParquetConfig
    | ImageFolderConfig
    | NumpyConfig
    | TokensConfig
    | ArrayRecordConfig,
    Field(discriminator="name"),
]
"""One of the data sets, selected by `name`."""
OfFiles = ParquetConfig | ImageFolderConfig | NumpyConfig | TokensConfig | ArrayRecordConfig
"""Data sets in files that a user names."""

BYTE_VALUES = 256
"""Vocabulary of a text read by bytes."""
TEST_FRACTION = 0.05
"""Share of the text, at its end, that is held out for evaluation."""


def facts(config: DataConfig) -> DatasetFacts:
    """The counts and shapes of the data set named in `config`.

    Raises:
        ConfigError: if a text is too short for one example of the length asked for, or files
            cannot be read or hold something else.
    """
    match config:
        case FashionMnistConfig():
            train, test = (60_000, 10_000) if config.is_full else (10_000, 2_000)
            return DatasetFacts(
                train_examples=train,
                test_examples=test,
                input_shape=(28, 28, 1),
                target_shape=(),
                classes=10,
                # counted over the 60,000 training images of the full edition
                pixel_mean=0.28604,
                pixel_std=0.35302,
            )
        case SyntheticImagesConfig():
            return DatasetFacts(
                train_examples=config.train_examples,
                test_examples=config.test_examples,
                input_shape=(config.image_size, config.image_size, config.channels),
                target_shape=(),
                classes=config.classes,
            )
        case SyntheticTokensConfig():
            return DatasetFacts(
                train_examples=config.train_examples,
                test_examples=config.test_examples,
                input_shape=(config.tokens,),
                target_shape=(config.tokens,),
                classes=config.vocabulary,
            )
        case MaskedTokensConfig():
            return DatasetFacts(
                train_examples=config.train_examples,
                test_examples=config.test_examples,
                input_shape=(config.tokens,),
                target_shape=(config.masked,),
                classes=config.vocabulary,
                is_masked=True,
            )
        case PythonDocsConfig():
            return _text_facts(config)
        case ParquetConfig():
            return _parquet_facts(config)
        case ImageFolderConfig():
            return image_folder_facts(config)
        case NumpyConfig():
            return numpy_facts(config)
        case TokensConfig():
            return tokens_facts(config)
        case ArrayRecordConfig():
            return array_record_facts(config)


def _text_facts(config: PythonDocsConfig) -> DatasetFacts:
    text = python_docs()
    test_bytes = int(len(text) * TEST_FRACTION)
    # An example needs one byte more than it has tokens: the target of its last position.
    train_examples = (len(text) - test_bytes - 1) // config.tokens
    test_examples = (test_bytes - 1) // config.tokens
    if test_examples < 1:
        accepted = f"it must be at most {test_bytes - 1}, the bytes kept for evaluation less one"
        raise ConfigError(refusal("data.tokens", config.tokens, accepted))
    return DatasetFacts(
        train_examples=train_examples,
        test_examples=test_examples,
        input_shape=(config.tokens,),
        target_shape=(config.tokens,),
        classes=BYTE_VALUES,
    )


@cache
def python_docs() -> bytes:
    """The help topics of this Python, in the order of their names, UTF-8."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics)).encode()


def _parquet_facts(config: ParquetConfig) -> DatasetFacts:
    # Imported here because other data sets need no Arrow, and commands start sooner without.
    from scalejax.data.formats.parquet_columns import class_values, parquet_part

    values = class_values(config)
    return DatasetFacts(
        train_examples=parquet_part(config, "train").kept_count,
        test_examples=parquet_part(config, "test").kept_count,
        input_shape=(len(config.feature_columns),)
        if config.feature_columns
        else (config.image_size, config.image_size, config.channels),
        target_shape=(),
        classes=len(values) if isinstance(values, tuple) else values,
        is_table=bool(config.feature_columns),
    )
