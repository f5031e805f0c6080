"""The interface of data sets for `scalejax data`: rows of columns, read sequentially.

Knows no file format, and nothing of the use of the rows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

CHUNK_BYTES = 4 * 2**20
"""Approximate bytes of rows that are read at a time."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""An encoded image as Hugging Face `datasets` stores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOptions:
    """Options for data sets that do not describe themselves fully."""

    images: str | None = None
    """Array of an .npz that holds the images, or rows of numbers."""
    labels: str | None = None
    """Array of an .npz that holds the classes; for other arrays, the file that holds them."""
    shuffle_seed: int | None = None
    """Seed that shuffles the files of a folder of images; None for the order of their names."""


class Rows(Protocol):
    """Rows of one schema."""

    location: str
    """Location of the files."""
    kind: str
    """File format, in words."""
    schema: pa.Schema
    """Their columns."""
    fingerprint: str
    """Fingerprint of the files; it changes if one is added, removed or rewritten."""
    size_bytes: int
    """Bytes of the files."""
    files: int
    """Number of files."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order, some at a time.

        Raises:
            ConfigError: if a row cannot be read, naming the file.
        """
        ...

    def name(self, row: int) -> str:
        """The file of a row and its number there, as a person would look it up."""
        ...


def fingerprint(paths: Iterable[Path]) -> str:
    """Fingerprint of files; it changes if one is added, removed or rewritten."""
    digest = hashlib.sha256()
    for path in paths:
        about = path.stat()
        digest.update(repr((str(path), about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()


def hugging_face(schema: pa.Schema, names: Sequence[str] | None = None) -> pa.Schema:
    """`schema` with the metadata that Hugging Face `datasets` expects for "image" and "label"."""
    features: dict[str, object] = {}
    if "image" in schema.names:
        features["image"] = {"_type": "Image"}
    if names is not None:
        features["label"] = {"names": list(names), "_type": "ClassLabel"}
    elif "label" in schema.names:
        features["label"] = {"dtype": str(schema.field("label").type), "_type": "Value"}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def encoded_images(column: pa.ChunkedArray) -> Iterator[bytes]:
    """The encoded images of a column, empty if missing."""
    for chunk in column.chunks:
        values = chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk
        for value in values:
            yield value.as_py() or b""
