"""Config of a data set in Parquet files; reads none of them."""

from dataclasses import dataclass, field
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_at_least

FilterValue = bool | int | float | str
"""Value that a column is compared with; dates and times are texts, such as "2001-03-01"."""
Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
"""Comparison of a filter; "in" takes a list."""
Filter = tuple[str, Comparison, FilterValue | tuple[FilterValue, ...]]
"""Column, comparison, value: the rows for which it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PetastormConfig:
    """The order of rows of Petastorm 0.13.1, to reproduce a run that was trained with its readers.

    Reproduced: which row groups each process reads (index % shard_count), their order (both
    shuffles, bit by bit), which is the same in every epoch, and the rows of a group as stored. A
    process takes its part of each batch from its own row groups, starting over after the last, as
    with `num_epochs=None` and as many steps per epoch as batches fit into all rows: within an epoch
    rows of large shards are left out and those of small ones are repeated. Such runs did so; leave
    this table out to see each row once per epoch.

    Not reproduced: orders that Petastorm itself does not repeat (no seed, `shuffle_rows`, process
    pools of more than one worker), and shuffling buffers of a loader.
    """

    shard_count: int | None = None
    """Petastorm's `shard_count`: processes among which row groups were divided; if absent, one
    reader read all."""
    seed: int | None = None
    """Petastorm's `seed`."""
    shuffle_row_groups: bool = True
    """Petastorm's `shuffle_row_groups`: whether row groups are shuffled by the seed."""

    def __post_init__(self) -> None:
        if self.shard_count is not None:
            require_at_least("data.reading.petastorm.shard_count", self.shard_count, 1)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            accepted = "it must be from 0 to 4294967295"
            raise ConfigError(refusal("data.reading.petastorm.seed", self.seed, accepted))
        if self.shuffle_row_groups and not self.seed:
            accepted = (
                "Petastorm shuffles anew at every start without one, and with 0; give it, or "
                "shuffle_row_groups = false"
            )
            raise ConfigError(refusal("data.reading.petastorm.seed", self.seed, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingConfig:
    """Reading, caching and shuffling of row groups."""

    memory_bytes: int = 2**30
    """Most memory for cached row groups (a half) and prefetched batches (the rest). In addition the
    sampler takes 8 bytes per row, and a row group twice its size while it is read."""
    shuffle: Literal["rows", "row_groups"] = "rows"
    """rows: a permutation of all rows in every epoch. row_groups: a permutation of row groups, with
    the rows of `window` of them mixed, so that each is read once per epoch."""
    window: int = 8
    """Row groups whose rows are mixed with shuffle "row_groups"."""
    petastorm: PetastormConfig | None = None
    """Petastorm's order in place of `shuffle`; if absent, `shuffle` holds."""
    cache_folder: str | None = None
    """Folder on a local disk for decoded row groups, shared by any number of processes and runs; if
    absent, they are not cached there. Refused for files whose store gives no modification time."""
    cache_bytes: int = 100 * 10**9
    """Most bytes in `cache_folder`; the least recently used row groups are evicted first."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "window", "cache_bytes"):
            require_at_least(f"data.reading.{name}", getattr(self, name), 1)
        if self.petastorm is not None and self.shuffle != "rows":
            accepted = "data.reading.petastorm has an order of its own; leave one of them out"
            raise ConfigError(refusal("data.reading.shuffle", self.shuffle, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetConfig:
    """Images or numbers, and their classes, in Parquet files; images as Hugging Face `datasets`
    writes them.

    `train` and `test` are each a file, a folder (every *.parquet in it and below, except names of
    files and folders that begin with "_" or "."), a glob, or a URL of `fsspec`; files are ordered
    by name. A relative path starts at the working directory.

    Pixels scaled to 0..1 are normalised by mean 0.5 and deviation 0.25 in every channel, about
    those of photographs (or as pretrained weights expect them): those of the data set are not
    measured, which would read every image first.
    """

    name: Literal["parquet"] = "parquet"
    """Selects this data set."""
    train: str
    """Files to train on."""
    test: str
    """Files to evaluate on."""
    image_column: str = "image"
    """Encoded images (JPEG, PNG, ...): binary, or a struct with a binary field "bytes"."""
    image_size: int = 224
    """Height and width of inputs: the shorter side of an image is scaled to it, the longer one
    cropped in the middle."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue."""
    feature_columns: tuple[str, ...] = ()
    """Columns of numbers, dates or times that are the input in place of an image, normalised to
    mean 0 and deviation 1 (over at most 16 row groups, evenly spread over `train`)."""
    label_column: str = "label"
    """Column of classes: integers from 0, booleans, or texts (classes are those of `train`,
    sorted)."""
    label_above: float | None = None
    """Threshold that makes two classes of a column of numbers: 1 above it, else 0."""
    classes: int | None = None
    """Number of classes; if absent, that in the metadata of the files, or the largest label + 1."""
    filters: tuple[Filter, ...] = ()
    """Rows to keep: lists of column, comparison ("==", "<", "in", ...) and value, all to hold."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Reading, caching and shuffling of row groups."""

    def __post_init__(self) -> None:
        require_at_least("data.image_size", self.image_size, 1)
        if self.classes is not None:
            require_at_least("data.classes", self.classes, 1)
            if self.label_above is not None:
                accepted = "data.label_above makes two classes; leave one of them out"
                raise ConfigError(refusal("data.classes", self.classes, accepted))
        for column, comparison, value in self.filters:
            if (comparison == "in") != isinstance(value, tuple):
                accepted = '"in" takes a list of values, every other comparison a single one'
                raise ConfigError(refusal("data.filters", [column, comparison, value], accepted))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read: the inputs, and last the class."""
        return (*(self.feature_columns or (self.image_column,)), self.label_column)
