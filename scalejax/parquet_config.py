"""What a `run.toml` says of a data set in Parquet files; reads none of them."""

from dataclasses import dataclass
from typing import Literal

from scalejax.errors import ConfigError, refusal, require_at_least

FilterValue = bool | int | float | str
"""What a column is compared with; dates and times are texts, such as "2001-03-01"."""
Comparison = Literal["==", "!=", "<", "<=", ">", ">=", "in"]
"""How; "in" takes a list."""
Filter = tuple[str, Comparison, FilterValue | tuple[FilterValue, ...]]
"""Column, comparison, value: the rows for which it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetConfig:
    """Images and their classes in Parquet files, as Hugging Face `datasets` writes them.

    `train` and `test` are each a file, a folder (every *.parquet in it and below), a glob, or a
    URL of `fsspec`; files count in the order of their names. A relative path begins at the working
    directory.
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
    label_column: str = "label"
    """Classes: integers from 0, booleans, or texts (then classes are those of `train`, sorted)."""
    classes: int | None = None
    """Values of the target; if absent, what the files say of it, or one more than the largest."""
    filters: tuple[Filter, ...] = ()
    """Rows to keep: [[column, comparison, value], ...], all of which must hold."""
    memory_bytes: int = 2**30
    """Most that row groups kept in memory take, training and test part together."""

    def __post_init__(self) -> None:
        for name in ("image_size", "memory_bytes"):
            require_at_least(f"data.{name}", getattr(self, name), 1)
        if self.classes is not None:
            require_at_least("data.classes", self.classes, 1)
        for column, comparison, value in self.filters:
            if (comparison == "in") != isinstance(value, tuple):
                accepted = '"in" takes a list of values, every other comparison a single one'
                raise ConfigError(refusal("data.filters", [column, comparison, value], accepted))
