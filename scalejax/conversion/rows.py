"""What a data set is to `scalejax data`: rows of columns, to be read once from front to back.

Knows which file reads which kind of data set; nothing of what is made of the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from scalejax.errors import ConfigError, refusal

CHUNK_BYTES = 4 * 2**20
"""About as many bytes of rows are read at a time."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image as Hugging Face `datasets` keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOptions:
    """What a kind of data set does not say of itself."""

    images: str | None = None
    """Array of an .npz that holds the images, or rows of numbers."""
    labels: str | None = None
    """Array of an .npz that holds the classes; of other arrays, the file that does."""
    shuffle_seed: int | None = None
    """Mixes the files of a folder of images; None for the order of their names."""


class Rows(Protocol):
    """Rows of one schema."""

    location: str
    """Where they are."""
    kind: str
    """What they are in, as a person would say it."""
    schema: pa.Schema
    """Their columns."""
    fingerprint: str
    """Another if a file was added, taken away or written anew."""
    size_bytes: int
    """Of their files."""
    files: int
    """Of which there are so many."""

    def __len__(self) -> int:
        """How many."""
        ...

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order, some at a time.

        Raises:
            ConfigError: if they cannot be read, naming the file.
        """
        ...

    def name(self, row: int) -> str:
        """The file of a row, and which of its rows it is, as a person would look for it."""
        ...


def open_rows(location: str, options: RowsOptions | None = None) -> Rows:
    """The rows at `location`.

    Raises:
        ConfigError: if nothing is there that can be read, or `options` do not go with it.
    """
    from scalejax.conversion.parquet import ParquetRows

    options = options or RowsOptions()
    for name in ("images", "labels", "shuffle_seed"):
        if (value := getattr(options, name)) is not None:
            accepted = f"{location} is read as Parquet, which needs none"
            raise ConfigError(refusal(name, value, accepted))
    if "://" not in location and not any(sign in location for sign in "*?["):
        path = Path(location)
        if not path.exists():
            raise ConfigError(refusal("source", location, "there is no such file or folder"))
    return ParquetRows(location)
