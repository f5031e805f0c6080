"""What a `run.toml` says of a data set in Parquet files; reads none of them."""

from dataclasses import dataclass, field
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_at_least

FilterValue = bool | int | float | str
"""What a column is compared with; dates and times are texts, such as "2001-03-01"."""
Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
"""How; "in" takes a list."""
Filter = tuple[str, Comparison, FilterValue | tuple[FilterValue, ...]]
"""Column, comparison, value: the rows for which it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PetastormConfig:
    """The order in which readers of Petastorm 0.13.1 give rows to the processes of a run, so that
    a run that was trained with them can be trained again.

    The same: which row groups each process reads (index % shard_count), in which order (both
    shuffles, bit by bit), that it is the same order in every epoch, and the rows of a group as they
    lie. A process takes its part of each batch from its own row groups, again from the first after
    the last, as with `num_epochs=None` and as many steps an epoch as batches fit into all rows: so
    within an epoch rows of large shards are left out and those of small ones come twice. That is
    what such runs did; leave this out to see each row once an epoch.

    Not the same: orders that Petastorm itself does not repeat (no seed, `shuffle_rows`, process
    pools of more than one worker), and what a loader mixes afterwards (shuffling buffers).
    """

    shard_count: int | None = None
    """Processes among which row groups were shared; if absent, none, and one reader read all."""
    seed: int | None = None
    """Its `seed`."""
    shuffle_row_groups: bool = True
    """Whether row groups come in an order by the seed."""

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
    """How row groups are read, kept and mixed."""

    memory_bytes: int = 2**30
    """Most that row groups kept in memory (a half) and batches made ahead (the rest) take. Besides,
    the order takes 8 bytes a row, and a row group twice its size while it is read."""
    shuffle: Literal["rows", "row_groups"] = "rows"
    """Rows: every epoch in any order. Row groups: in any order too, and the rows of `window` of
    them mixed, so that each is read once an epoch."""
    window: int = 8
    """Row groups whose rows are mixed."""
    petastorm: PetastormConfig | None = None
    """Petastorm's order, in place of `shuffle`; if absent, that."""
    cache_folder: str | None = None
    """Where decoded row groups are kept on a local disk, for any number of processes and runs;
    None for nowhere. Refused for files whose store does not say when they were written."""
    cache_bytes: int = 100 * 10**9
    """Most that they take there; the least recently used leave first."""

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

    `train` and `test` are each a file, a folder (every *.parquet in it and below, but for names of
    files and folders that begin with "_" or "."), a glob, or a URL of `fsspec`; files count in the
    order of their names. A relative path begins at the working directory.

    Pixels of any images, scaled to 0..1, enter a network less 0.5 and over 0.25 in every channel,
    about the mean and deviation of photographs (or as pretrained weights expect them): their own
    are not measured, which would read every image first.
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
    """Height and width to which images are brought: the shorter side is scaled to it, the middle
    of the longer kept."""
    channels: Literal[1, 3] = 3
    """1: grey, 3: red, green, blue."""
    feature_columns: tuple[str, ...] = ()
    """Numbers, dates or times to learn from in place of an image, brought to mean 0 and deviation
    1 (over at most 16 row groups, evenly spread over `train`)."""
    label_column: str = "label"
    """Classes: integers from 0, booleans, or texts (then classes are those of `train`, sorted)."""
    label_above: float | None = None
    """Makes two classes of a column of numbers: 1 where it is above this, else 0."""
    classes: int | None = None
    """Values of the target; if absent, what the files say of it, or one more than the largest."""
    filters: tuple[Filter, ...] = ()
    """Rows to keep: lists of column, comparison ("==", "<", "in", ...) and value, all to hold."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """How they are read."""

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
        """What is read of a row: what to learn from, and last its class."""
        return (*(self.feature_columns or (self.image_column,)), self.label_column)
