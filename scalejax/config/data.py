"""Config of the data sets that a `run.toml` can name, and the counts and shapes it determines.

Opens no files: `scalejax.data.facts` reads what they hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.optimizer import OptionValue
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_at_least,
    require_import_path,
    require_size,
)
from scalejax.core.serialization import BY_NAME, Family

FilterValue = bool | int | float | str
"""Value that a column is compared with; dates and times are strings, such as "2001-03-01"."""
Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
"""Comparison of a filter; "in" takes a list."""
Split = Literal["train", "validation", "test"]
"""The parts of a data set: for training, for selection, and for the final test."""
Filter = tuple[str, Comparison, FilterValue | tuple[FilterValue, ...]]
"""Column, comparison, value: selects the rows for which the comparison holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PetastormConfig:
    """The row order of Petastorm 0.13.1, to reproduce a run that was trained with its readers.

    Reproduced: which row groups each process reads (index % shard_count); their order (both
    shuffles, bit for bit), which is the same in every epoch; and the rows of a group as stored. A
    process takes its part of each batch from its own row groups, starting over after the last, as
    with `num_epochs=None` and as many steps per epoch as full batches of all rows: within an epoch,
    rows of large shards are left out and rows of small ones are repeated. Such runs did the same;
    leave this table out to see each row once per epoch.

    Not reproduced: orders that Petastorm itself does not repeat (no seed, `shuffle_rows`, process
    pools of more than one worker), and shuffling buffers of a loader.
    """

    shard_count: int | None = None
    """Petastorm's `shard_count`: processes among which row groups were divided; if absent, one
    reader read all row groups."""
    seed: int | None = None
    """Petastorm's `seed`."""
    shuffle_row_groups: bool = True
    """Petastorm's `shuffle_row_groups`: whether row groups are shuffled by the seed."""

    def __post_init__(self) -> None:
        require_at_least("data.reading.petastorm.shard_count", self.shard_count, 1)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            accepted = "it must be from 0 to 4294967295"
            raise ConfigError(refusal("data.reading.petastorm.seed", self.seed, accepted))
        if self.shuffle_row_groups and not self.seed:
            accepted = (
                "without one, or with 0, Petastorm shuffles differently at every start; give one, "
                "or shuffle_row_groups = false"
            )
            raise ConfigError(refusal("data.reading.petastorm.seed", self.seed, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingConfig:
    """Reading, caching and shuffling of row groups."""

    memory_bytes: int = 2**30
    """Most memory for cached row groups (half of it) and prefetched batches (the rest). In
    addition, the sampler takes 8 bytes per row, and a row group twice its size while it is read."""
    shuffle: Literal["rows", "row_groups"] = "rows"
    """rows: a permutation of all rows in every epoch. row_groups: a permutation of row groups, with
    the rows of `window` of them mixed, so that each is read once per epoch."""
    window: int = 8
    """Row groups whose rows are mixed with shuffle "row_groups"."""
    petastorm: PetastormConfig | None = None
    """Petastorm's order instead of `shuffle`; if absent, `shuffle` applies."""
    cache_folder: str | None = None
    """Folder on a local disk that caches decoded row groups, shared by any number of processes and
    runs; if absent, none does. Refused for files whose store gives no modification time."""
    cache_bytes: int = 100 * 10**9
    """Most bytes in `cache_folder`; the least recently used row groups are evicted first."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "window", "cache_bytes"):
            require_at_least(f"data.reading.{name}", getattr(self, name), 1)
        if self.petastorm is not None and self.shuffle != "rows":
            accepted = "data.reading.petastorm has an order of its own; leave one of them out"
            raise ConfigError(refusal("data.reading.shuffle", self.shuffle, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Family):
    """One of the data sets, selected by `name`, and what follows from its config alone."""

    name: str
    validation_fraction: float | None = None
    """Share of the training examples that is held out, to choose by: early stopping, the best
    checkpoint and searches use it, and nothing uses test data before the end. If absent, none is
    held out. From a stream of text it is one stretch, otherwise examples from everywhere."""
    validation_seed: int = 0
    """Seed that decides which examples are held out; separate from `seed`, so that runs with
    another `seed` hold out the same ones."""

    is_of_files: ClassVar[bool] = False
    """Whether it is in files that a user names as `train` and `test`."""
    is_stream: ClassVar[bool] = False
    """Whether neighbouring examples continue each other, like pieces of one text."""
    decodes_images: ClassVar[bool] = False
    """Whether its images are encoded, and have any size until they are read."""
    divides_itself: ClassVar[bool] = False
    """Whether its reader and its facts already hold examples out."""
    has_any_vocabulary: ClassVar[bool] = False
    """Whether its `vocabulary` may be any number, which its examples then follow."""

    @property
    def may_be_missing(self) -> bool:
        """Whether it may name something that is not installed, which only its reader finds out."""
        return False

    @property
    def known_facts(self) -> DatasetFacts | None:
        """Its counts and shapes if they follow from its config; None if they are in files, which
        `scalejax.data.facts.read_facts` reads."""
        return None

    def found_in(self, facts: DatasetFacts) -> dict[str, str]:
        """Fields that depend on what is installed, and their values if the data has `facts`."""
        return {}

    @property
    def parts(self) -> tuple[Split, ...]:
        """The parts that it has itself; validation may be held out of them."""
        has_own = getattr(self, "validation", None) is not None
        return ("train", "validation", "test") if has_own else ("train", "test")

    @property
    def locations(self) -> tuple[str, ...]:
        """Locations of its files, as a user names them."""
        named = (getattr(self, part, None) for part in ("train", "validation", "test"))
        return tuple(each for each in named if each is not None) if self.is_of_files else ()

    @property
    def has_validation(self) -> bool:
        """Whether it has validation examples, which are neither trained nor tested on."""
        return self.validation_fraction is not None or "validation" in self.parts

    def divided(self, whole: DatasetFacts) -> DatasetFacts:
        """The facts of the data set; `whole` counts examples that are held out as training
        examples.

        Raises:
            ConfigError: if no example would be held out, or none would remain.
        """
        if not (held_out := self.held_out_of(whole.train_examples)):
            return whole
        return replace(
            whole,
            train_examples=whole.train_examples - held_out,
            validation_examples=held_out,
        )

    def held_out_of(self, examples: int) -> int:
        """How many of `examples` training examples are held out.

        Raises:
            ConfigError: as `divided`.
        """
        if self.validation_fraction is None:
            return 0
        held_out = round(self.validation_fraction * examples)
        if not 0 < held_out < examples:
            accepted = (
                f"of {examples} training examples it holds out {held_out}; it must hold out at "
                "least one and leave one"
            )
            raise ConfigError(
                refusal("data.validation_fraction", self.validation_fraction, accepted)
            )
        return held_out

    @property
    def petastorm(self) -> PetastormConfig | None:
        """Petastorm's row order, if rows are read in it."""
        return None

    @property
    def note(self) -> str | None:
        """A warning about settings that are valid but often a mistake."""
        return None


_BYTES = 256
"""Values of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FashionMnistConfig(DataConfig):
    """Photographs of clothes, 28 x 28 grey, 10 classes (Xiao et al. 2017, arXiv 1708.07747)."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    """Selects this data set."""
    edition: Literal["auto", "embedded", "full"] = "auto"
    """embedded: 10,000 + 2,000 images that come with scalejax. full: 60,000 + 10,000 from the
    Debian package `dataset-fashion-mnist`. auto: full if it is installed, else embedded."""

    @property
    def may_be_missing(self) -> bool:
        """The full edition may be missing; "auto" uses it only if it is installed."""
        return self.edition == "full"

    @property
    def known_facts(self) -> DatasetFacts | None:
        """Its counts and shapes; None with "auto", where they depend on what is installed."""
        return None if self.edition == "auto" else self.facts_of(self.edition)

    def found_in(self, facts: DatasetFacts) -> dict[str, str]:
        """The edition that has these facts."""
        found = facts.train_examples + facts.validation_examples
        is_full = found == self.facts_of("full").train_examples
        return {"edition": "full" if is_full else "embedded"}

    @staticmethod
    def facts_of(edition: Literal["embedded", "full"]) -> DatasetFacts:
        """Counts and shapes of an edition."""
        train, test = (60_000, 10_000) if edition == "full" else (10_000, 2_000)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticImagesConfig(DataConfig):
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
        for name in ("image_size", "channels", "classes"):
            require_size(f"data.{name}", getattr(self, name))
        for name in ("train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)

    @property
    def known_facts(self) -> DatasetFacts:
        """Its counts and shapes."""
        return DatasetFacts(
            train_examples=self.train_examples,
            test_examples=self.test_examples,
            input_shape=(self.image_size, self.image_size, self.channels),
            target_shape=(),
            classes=self.classes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTokensConfig(DataConfig):
    """Random tokens, for next-token prediction."""

    has_any_vocabulary = True

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
    document_tokens: int | None = None
    """Mean tokens of a document, if several are packed into an example, where each sees only
    itself; their lengths are random (geometric). If absent, an example is one document."""

    def __post_init__(self) -> None:
        for name in ("tokens", "vocabulary"):
            require_size(f"data.{name}", getattr(self, name))
        for name in ("train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)
        if self.document_tokens is not None:
            require_at_least("data.document_tokens", self.document_tokens, 1)

    @property
    def known_facts(self) -> DatasetFacts:
        """Its counts and shapes."""
        return DatasetFacts(
            train_examples=self.train_examples,
            test_examples=self.test_examples,
            input_shape=(self.tokens,),
            target_shape=(self.tokens,),
            classes=self.vocabulary,
            is_packed=self.document_tokens is not None,
        )


FIRST_TOKEN, SEPARATOR_TOKEN, MASK_TOKEN = 1, 2, 3
"""Tokens that begin an example ([CLS]), end a segment ([SEP]) and mask a word ([MASK]); words have
tokens from 4 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTokensConfig(DataConfig):
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
        require_size("data.masked", self.masked)
        for name in ("train_examples", "test_examples"):
            require_at_least(f"data.{name}", getattr(self, name), 1)
        require_size("data.vocabulary", self.vocabulary, MASK_TOKEN + 2)
        require_size("data.tokens", self.tokens, 4)
        words = self.tokens - 3
        if self.masked > words:
            accepted = f"an example of {self.tokens} tokens has {words} words"
            raise ConfigError(refusal("data.masked", self.masked, accepted))

    @property
    def known_facts(self) -> DatasetFacts:
        """Its counts and shapes."""
        return DatasetFacts(
            train_examples=self.train_examples,
            test_examples=self.test_examples,
            input_shape=(self.tokens,),
            target_shape=(self.masked,),
            classes=self.vocabulary,
            is_masked=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonDocsConfig(DataConfig):
    """The text of the standard library's `pydoc_data.topics`, as bytes."""

    is_stream = True

    name: Literal["python_docs"] = "python_docs"
    """Selects this data set."""
    tokens: int = 64
    """Bytes in an example."""
    document_mask: bool = False
    """Whether a topic sees only itself; see `document_mask` of tokens."""

    def __post_init__(self) -> None:
        require_size("data.tokens", self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetConfig(DataConfig):
    """Images or numbers, and their classes, in Parquet files; images as Hugging Face `datasets`
    writes them.

    `train` and `test` are each a file, a folder (every *.parquet in it and below, except names of
    files and folders that begin with "_" or "."), a glob, or a URL of `fsspec`; files are ordered
    by name. A relative path starts at the working directory.

    Pixels scaled to 0..1 are normalised by mean 0.5 and deviation 0.25 in every channel, about
    those of photographs (or as pretrained weights expect). Those of the data set are not measured,
    because every image would have to be read first.
    """

    is_of_files = True
    decodes_images = True

    name: Literal["parquet"] = "parquet"
    """Selects this data set."""
    train: str
    """Files to train on."""
    test: str
    """Files to evaluate on."""
    validation: str | None = None
    """Validation files, instead of `validation_fraction`; if absent, none."""
    image_column: str = "image"
    """Encoded images (JPEG, PNG, ...): binary, or a struct with a binary field "bytes"."""
    image_size: int = 224
    """Height and width of inputs: the shorter side of an image is scaled to it, and the middle of
    the longer one is kept."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue."""
    feature_columns: tuple[str, ...] = ()
    """Columns of numbers, dates or times that are the input instead of an image, normalised to mean
    0 and deviation 1 (over at most 16 row groups, evenly spread over `train`)."""
    label_column: str = "label"
    """Column of classes: integers from 0, booleans, or strings (classes are those of `train`,
    sorted)."""
    label_above: float | None = None
    """Threshold that turns a column of numbers into two classes: 1 above it, else 0."""
    classes: int | None = None
    """Number of classes; if absent, that in the metadata of the files, or the largest label + 1."""
    filters: tuple[Filter, ...] = ()
    """Rows to keep: lists of column, comparison ("==", "<", "in", ...) and value; all must hold."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Reading, caching and shuffling of row groups."""

    def __post_init__(self) -> None:
        require_size("data.image_size", self.image_size)
        if self.classes is not None:
            require_size("data.classes", self.classes)
            if self.label_above is not None:
                accepted = "data.label_above makes two classes; leave one of them out"
                raise ConfigError(refusal("data.classes", self.classes, accepted))
        for column, comparison, value in self.filters:
            if (comparison == "in") != isinstance(value, tuple):
                accepted = '"in" takes a list of values, every other comparison a single one'
                raise ConfigError(refusal("data.filters", [column, comparison, value], accepted))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read: the inputs, then the class."""
        return (*(self.feature_columns or (self.image_column,)), self.label_column)

    @property
    def petastorm(self) -> PetastormConfig | None:
        """Petastorm's row order, if rows are read in it."""
        return self.reading.petastorm


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolderConfig(DataConfig):
    """Images in a folder for each class: root/class/**/name.jpg, with the same indices as
    torchvision's ImageFolder.

    `train` and `test` are each a folder or a URL of `fsspec`. Classes are the folders in `train`,
    sorted by name; an image is in one, or in any folder below it, also through links. Files without
    an image's extension, and files and folders whose names begin with ".", are left out.
    """

    is_of_files = True
    decodes_images = True

    name: Literal["image_folder"] = "image_folder"
    """Selects this data set."""
    train: str
    """Folder to train on."""
    test: str
    """Folder to evaluate on; its classes are among those of `train`."""
    validation: str | None = None
    """Validation folder, instead of `validation_fraction`; if absent, none."""
    image_size: int = 224
    """Height and width of inputs: the shorter side of an image is scaled to it, and the middle of
    the longer one is kept."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue."""

    def __post_init__(self) -> None:
        require_size("data.image_size", self.image_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyConfig(DataConfig):
    """Images or numbers, and their classes, in NumPy's files.

    `train` and `test` are each an .npz, or a folder or URL of .npy files named as its arrays would
    be (an unzipped .npz). Arrays in .npy files are mapped into memory, or, at a URL, read in the
    ranges that a batch needs; arrays in an .npz are loaded whole, in every process that makes
    batches. Inputs are uint8 images [n, height, width] or [n, height, width, 1 or 3], or numbers
    [n, features], brought to mean 0 and deviation 1 (over at most 65,536 rows, evenly spread over
    `train`); targets are integers from 0, [n] or [n, 1]. Pickled objects are refused.
    """

    is_of_files = True

    name: Literal["numpy"] = "numpy"
    """Selects this data set."""
    train: str
    """Arrays to train on."""
    test: str
    """Arrays to evaluate on; may be the same file, with other arrays in it."""
    validation: str | None = None
    """Validation arrays, instead of `validation_fraction`; if absent, none."""
    inputs: str | None = None
    """Name of the array of inputs, in which "{part}" stands for train, test or validation (or val);
    if absent, the first of x_{part}, {part}_images, inputs, images and x that exists together with
    its targets."""
    targets: str | None = None
    """Name of the array of classes; if absent, y_{part}, {part}_labels, targets, labels or y."""
    classes: int | None = None
    """Number of classes; if absent, the largest target + 1."""
    memory_bytes: int = 4 * 2**30
    """Most memory that arrays of .npz files take in all `input.workers` processes of a host."""

    def __post_init__(self) -> None:
        require_at_least("data.memory_bytes", self.memory_bytes, 1)
        require_size("data.classes", self.classes)
        if (self.inputs is None) != (self.targets is None):
            given = "inputs" if self.targets is None else "targets"
            accepted = "name data.inputs and data.targets, both or neither"
            raise ConfigError(refusal(f"data.{given}", getattr(self, given), accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig(DataConfig):
    """Text as consecutive tokens in flat files: .bin of unsigned integers, as nanoGPT (no header)
    and llm.c (its header) write them, .npy of integers, or .txt, read as bytes.

    `train` and `test` are each a file, a folder, a glob, or a URL of `fsspec`; the files make one
    stream, in the order of their names. They are mapped into memory, or, at a URL, read in the
    ranges that a batch needs. An example is the next `tokens` of the stream, and its targets are
    the same shifted by one: in an epoch each token is a target once, except the first and those at
    the end that do not fill an example. Examples cross the ends of documents; `document_mask` says
    whether attention does.
    """

    is_of_files = True
    is_stream = True

    name: Literal["tokens"] = "tokens"
    """Selects this data set."""
    train: str
    """Files to train on."""
    test: str | None = None
    """Files to evaluate on; if absent, the end of `train`, which is then excluded from training."""
    validation: str | None = None
    """Validation files, instead of `validation_fraction`; if absent, none."""
    test_fraction: float = 0.05
    """Share of the tokens of `train`, at its end, that replaces an absent `test`."""
    tokens: int = 1024
    """Tokens in an example."""
    vocabulary: int = 50_304
    """Number of different tokens (default: GPT-2's 50,257 rounded up to a multiple of 128)."""
    dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of a token in .bin files without a header; if absent, uint16. Files whose header names
    another type are refused."""
    packing: Literal["concatenate", "documents"] = "concatenate"
    """Concatenate: the stream is cut as it is, and its examples are shuffled. Documents: documents
    are concatenated in another order in every epoch of training, and then cut (as in Megatron-LM's
    GPT data sets): the neighbours of a document in an example change too."""
    end_of_document: int | None = None
    """Token that ends a document; the end of a file does too. Used by `packing = "documents"` and
    `document_mask`: files are read once to find it, and a document takes 40 bytes of memory."""
    document_mask: bool = False
    """Whether a token attends only to its own document, positions restart at each document (and at
    the beginning of an example, within a document), and the last token of a document has no target.
    The loss is the mean over all other targets of a batch. MaxText's `packing`; Megatron-LM's
    --reset-attention-mask, --reset-position-ids and --eod-mask-loss; the document mask of Llama 3
    (arXiv 2407.21783, section 3.2)."""

    def __post_init__(self) -> None:
        require_size("data.tokens", self.tokens)
        require_size("data.vocabulary", self.vocabulary)
        if not 0 < self.test_fraction < 1:
            raise ConfigError(
                refusal("data.test_fraction", self.test_fraction, "it must be between 0 and 1")
            )
        if self.end_of_document is not None and not self.has_documents:
            accepted = 'it is for packing = "documents" and for document_mask; leave it out'
            raise ConfigError(refusal("data.end_of_document", self.end_of_document, accepted))

    @property
    def has_documents(self) -> bool:
        """Whether it matters where documents end."""
        return self.packing == "documents" or self.document_mask

    @property
    def note(self) -> str | None:
        """A warning that each file counts as a document, or that bytes do not fill the
        vocabulary."""
        if not self.has_documents or self.end_of_document is not None:
            if not self.train.endswith(".txt") or self.vocabulary <= _BYTES:
                return None
            return (
                f"text in .txt is read by bytes, {_BYTES} of which are tokens, and data.vocabulary "
                f"is {self.vocabulary:,}: {_BYTES} would do, with smaller embeddings"
            )
        asked = 'packing = "documents"' if self.packing == "documents" else "document_mask"
        return f"data.{asked} without data.end_of_document takes each file for one document"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecordConfig(DataConfig):
    """Images and their classes in ArrayRecord files whose records are `tf.train.Example`, as TFDS
    writes them.

    `train` and `test` are each a file, a folder (every name.array_record and
    name.array_record-00000-of-00010 in it and below), a glob, or a URL of `fsspec`; files are
    ordered by name. TensorFlow is not needed.
    """

    is_of_files = True
    decodes_images = True

    name: Literal["array_record"] = "array_record"
    """Selects this data set."""
    train: str
    """Files to train on."""
    test: str
    """Files to evaluate on."""
    validation: str | None = None
    """Validation files, instead of `validation_fraction`; if absent, none."""
    classes: int
    """Number of classes, which the files do not state."""
    image_column: str = "image"
    """Feature that holds an encoded image (JPEG, PNG, ...)."""
    label_column: str = "label"
    """Feature that holds a class, an integer from 0."""
    image_size: int = 224
    """Height and width of inputs: the shorter side of an image is scaled to it, and the middle of
    the longer one is kept."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue."""
    cache_folder: str | None = None
    """Folder to which files at a URL are copied, whole, before the first is read; they are kept
    there. The format can only be read from local disks. Refused for files whose store does not say
    when they were written."""

    def __post_init__(self) -> None:
        require_size("data.image_size", self.image_size)
        require_size("data.classes", self.classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomDataConfig(DataConfig):
    """Data of your own, by import path: samples by index."""

    name: Literal["custom"]
    """Selects data of your own."""
    path: str
    """Import path "module:function". The function is called with "train" or "test", and returns
    samples by index: a length, `[index]`, and an attribute `classes`, the number of classes or the
    size of the vocabulary. The module is imported, also to cost a run, which runs its code: name
    one that you trust."""
    options: dict[str, OptionValue] = field(default_factory=dict)
    """Keyword arguments of the function."""
    gives_validation: bool = False
    """Whether the function also gives a part "validation", instead of `validation_fraction`."""

    def __post_init__(self) -> None:
        require_import_path("data.path", self.path, "my_data:samples")
        if self.gives_validation and self.validation_fraction is not None:
            accepted = "data.gives_validation has examples of its own; leave one of the two out"
            raise ConfigError(
                refusal("data.validation_fraction", self.validation_fraction, accepted)
            )

    @property
    def parts(self) -> tuple[Split, ...]:
        """The parts that the function gives."""
        return ("train", "validation", "test") if self.gives_validation else ("train", "test")


Text = TokensConfig | PythonDocsConfig | SyntheticTokensConfig | CustomDataConfig
"""Data sets that may hold text for next-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureStage:
    """Weights of the sources of a mixture for an initial part of a run."""

    until_epoch: float
    """Epochs after which the next stage begins, or `data.weights` apply: 0.8 in a run of one epoch
    means its first 80 %."""
    weights: tuple[float, ...]
    """Like `data.weights`, until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(DataConfig):
    """Texts of several sources, mixed by weights that may change during the run.

    The source of the n-th example of a run depends only on n: sources take turns by Webster's
    method of apportionment. Among the first n examples, each of up to three sources has its share
    to within one example (of up to six, two), whatever n and the batch are. Each source is shuffled
    separately, and starts over, shuffled again, when it is used up: small ones may be seen several
    times in an epoch. Test and validation examples are those of all sources.
    """

    is_of_files = True
    divides_itself = True

    name: Literal["mixture"] = "mixture"
    """Selects this data set."""
    sources: tuple[Annotated[Text, BY_NAME], ...]
    """Data sets to mix, with the same number of tokens and the same vocabulary; each is a table,
    [[data.sources]]. The mixture's `validation_fraction` is held out of each."""
    weights: tuple[float, ...]
    """How often each source is drawn from: [0.7, 0.3], or in any other unit, such as tokens. A
    source with 0 is never trained on, but tested on."""
    stages: tuple[MixtureStage, ...] = ()
    """Other weights at the beginning, one stage after the other (a curriculum); after the last
    stage `weights` apply."""
    epoch_examples: int | None = None
    """Examples of an epoch; if absent, as many as all sources have."""

    def __post_init__(self) -> None:
        require_at_least("data.epoch_examples", self.epoch_examples, 1)
        if len(self.sources) < 2:
            accepted = "a mixture has two or more; name the one itself in [data]"
            raise ConfigError(refusal("data.sources", len(self.sources), accepted))
        for index, source in enumerate(self.sources):
            if source.validation_fraction is not None:
                name = f"data.sources.{index}.validation_fraction"
                accepted = "it is given once for all sources, as data.validation_fraction"
                raise ConfigError(refusal(name, source.validation_fraction, accepted))
        own = ["validation" in source.parts for source in self.sources]
        if any(own) and not all(own):
            name = f"data.sources.{own.index(False)}.validation"
            accepted = "another source has validation data of its own: all have them, or none"
            raise ConfigError(refusal(name, None, accepted))
        before = 0.0
        for index, stage in enumerate(self.stages):
            self._require_weights(f"data.stages.{index}.weights", stage.weights)
            if not before < stage.until_epoch < math.inf:
                accepted = f"stages follow one another: it must be more than {before:g}"
                name = f"data.stages.{index}.until_epoch"
                raise ConfigError(refusal(name, stage.until_epoch, accepted))
            before = stage.until_epoch
        self._require_weights("data.weights", self.weights)

    def _require_weights(self, name: str, weights: tuple[float, ...]) -> None:
        if len(weights) != len(self.sources):
            accepted = f"it must have one for each of the {len(self.sources)} data.sources"
            raise ConfigError(refusal(name, list(weights), accepted))
        if not all(0 <= each < math.inf for each in weights) or not sum(weights):
            accepted = "none may be negative or infinite, and one must be above 0"
            raise ConfigError(refusal(name, list(weights), accepted))

    @property
    def parts(self) -> tuple[Split, ...]:
        """The parts that every source has itself."""
        return self.sources[0].parts

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations of its sources."""
        return tuple(each for source in self.sources for each in source.locations)

    @property
    def may_be_missing(self) -> bool:
        """Whether something that a source names may be missing."""
        return any(source.may_be_missing for source in self.sources)

    @property
    def divided_sources(self) -> tuple[DataConfig, ...]:
        """The sources, each with the examples to hold out."""
        fraction, seed = self.validation_fraction, self.validation_seed
        return tuple(
            replace(source, validation_fraction=fraction, validation_seed=seed)
            for source in self.sources
        )

    @property
    def known_facts(self) -> DatasetFacts | None:
        """Its counts and shapes, if those of all sources follow from their config."""
        facts = [
            source.divided(known)
            for source in self.divided_sources
            if (known := source.known_facts) is not None
        ]
        return self.mixed(facts) if len(facts) == len(self.sources) else None

    def divided(self, whole: DatasetFacts) -> DatasetFacts:
        """`whole`, since its sources are divided one by one."""
        return whole

    def mixed(self, facts: Sequence[DatasetFacts]) -> DatasetFacts:
        """The facts of the mixture of sources with these facts.

        Raises:
            ConfigError: if a source holds no text for next-token prediction, or texts of another
                kind than the first.
        """
        first = facts[0]
        for index, each in enumerate(facts):
            if each.kind != "text" or each.target_shape != each.input_shape:
                accepted = f"it holds {each.kind}; a mixture is of texts with their next tokens"
                name = f"data.sources.{index}.name"
                raise ConfigError(refusal(name, self.sources[index].name, accepted))
            for what, has, wanted in (
                ("tokens", each.input_shape[0], first.input_shape[0]),
                ("vocabulary", each.classes, first.classes),
                ("document_mask", each.is_packed, first.is_packed),
            ):
                if has != wanted:
                    accepted = f"sources are alike, and data.sources.0 has {wanted}"
                    raise ConfigError(refusal(f"data.sources.{index}.{what}", has, accepted))
        return replace(
            first,
            train_examples=self.epoch_examples or sum(each.train_examples for each in facts),
            validation_examples=sum(each.validation_examples for each in facts),
            test_examples=sum(each.test_examples for each in facts),
        )

    @property
    def note(self) -> str | None:
        """The first warning about a source."""
        notes = (source.note for source in self.sources)
        return next((note for note in notes if note is not None), None)
