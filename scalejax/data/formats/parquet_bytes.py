"""Reads the bytes of a Parquet file: its footer once, then column chunks of the same version.

Pages are checked against their checksums, if they were written with any. Knows no rows.
"""

import hashlib
import io
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from scalejax.core.bounded_memory import BoundedMemory
from scalejax.core.errors import ConfigError, Damaged
from scalejax.core.filesystem import (
    DataFile,
    absolute_location,
    is_url,
    part_of,
    require_content,
    require_unchanged,
)
from scalejax.core.filesystem import opened as opened_file
from scalejax.core.remote import read_ranges

_TAIL_BYTES = 2**15
"""Bytes at the end of a file at a URL that are read for its footer, before the rest of it."""
_FOOTER_BYTES = 2**28
"""Bytes that footers may take in memory."""
_PARSED = 11
"""Bytes in memory per byte of a footer in its file (30 to 34 MB for 3.25 MB of 1,000 row groups of
40 columns, by the process's resident pages: `experiments/input_peers/wide.py --footer`).
"""
_SENT_BYTES = 2**24
"""Bytes of footers that are sent to a worker process; it reads the others itself."""
_GAP_BYTES = 2**20
"""Largest gap between wanted bytes of a URL that is fetched rather than skipped."""
_WASTE = 4
"""Fetched gaps are at most the wanted bytes divided by this."""
_READS = 3
"""Reads of the same bytes of a URL before they count as damaged in storage."""
_MAGIC = b"PAR1"
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises for bytes that are not Parquet; the last for names of columns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footer:
    """What a file says about its row groups."""

    metadata: pq.FileMetaData
    """The footer, parsed."""
    schema: pa.Schema
    """Its columns."""
    digest: str
    """SHA-256 of its bytes."""
    place: tuple[int, int] | None
    """Inode and change time of a file on this machine; a copy that keeps its times has others."""


_footers: BoundedMemory[Footer] = BoundedMemory(_FOOTER_BYTES)


def footer_of(field: str, file: DataFile) -> Footer:
    """The footer of a file, read once in a process.

    Raises:
        ConfigError: if it cannot be read, is incomplete, or the file has changed.
        Unavailable: if its store does not answer.
    """

    def load() -> tuple[Footer, int]:
        found = _read_at_url(field, file) if is_url(file.path) else _read_here(field, file)
        return found, found.metadata.serialized_size * _PARSED

    return _footers.of(_key(file), load)


def _key(file: DataFile) -> tuple[str, int, str | None]:
    return absolute_location(file.path), file.size_bytes, file.version


def footers_of(files: Iterable[DataFile]) -> dict[DataFile, Footer]:
    """The footers of `files` that this process has, up to the bytes to send to another one."""
    found, left = {}, _SENT_BYTES
    for file in files:
        footer = _footers.get(_key(file))
        if footer is None or footer.metadata.serialized_size > left:
            continue
        found[file] = footer
        left -= footer.metadata.serialized_size
    return found


def keep_footers(footers: Mapping[DataFile, Footer]) -> None:
    """Keep the footers that another process has read."""
    for file, footer in footers.items():
        _footers.of(_key(file), lambda f=footer: (f, f.metadata.serialized_size * _PARSED))


def _read_here(field: str, file: DataFile) -> Footer:
    try:
        with open(file.path, "rb") as stream:
            about = os.fstat(stream.fileno())
            if (about.st_size, str(about.st_mtime_ns)) != (file.size_bytes, file.version):
                raise ConfigError(f"{field}: {file.path} was rewritten while it was read.")
            end = file.size_bytes
            stream.seek(max(0, end - 8))
            tail = stream.read()
            stream.seek(max(0, end - _length(tail) - 8))
            content = stream.read()
        return _parsed(content, (about.st_ino, about.st_ctime_ns))
    except _UNREADABLE as error:
        _refuse(field, file, error)


def _read_at_url(field: str, file: DataFile) -> Footer:
    end = file.size_bytes
    for left in reversed(range(_READS)):
        (content,) = read_ranges(field, [part_of(file, max(0, end - _TAIL_BYTES), end)])
        missing = min(_length(content[-8:]) + 8, end) - len(content)
        if missing > 0:
            begin = end - len(content) - missing
            (before,) = read_ranges(field, [part_of(file, begin, begin + missing)])
            content = before + content
        try:
            return _parsed(content[-_length(content[-8:]) - 8 :], None)
        except _UNREADABLE as error:
            if not left:
                _refuse(field, file, error)
    raise AssertionError  # the last one returns or raises


def _length(tail: bytes) -> int:
    """Bytes of a footer, as said by the 8 bytes that follow it; 0 if they do not say."""
    return int.from_bytes(tail[:4], "little") if tail[4:] == _MAGIC else 0


def _parsed(content: bytes, place: tuple[int, int] | None) -> Footer:
    with pq.ParquetFile(pa.BufferReader(_MAGIC + content)) as parquet:
        digest = hashlib.sha256(content).hexdigest()
        schema = parquet.schema_arrow
        return Footer(metadata=parquet.metadata, schema=schema, digest=digest, place=place)


def _refuse(field: str, file: DataFile, error: Exception) -> NoReturn:
    require_content(field, file.path, error)
    raise ConfigError(
        f"{field}: {file.path} cannot be read as Parquet ({_reason(error)}); "
        "write or copy it again, or leave it out."
    ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _require_same(field: str, file: DataFile, footer: Footer) -> None:
    """Refuse a file on this machine that is not the one whose footer was read, even if its size
    and time are the same.

    Raises:
        ConfigError: if it is gone, or was rewritten.
    """
    require_unchanged(field, file)
    about = os.stat(file.path)
    if (about.st_ino, about.st_ctime_ns) == footer.place:
        return
    now = _read_here(field, file)  # it may be a copy that keeps the times, or have a new mode
    if now.digest != footer.digest:
        raise ConfigError(f"{field}: {file.path} was rewritten while it was read.")
    _footers.put(_key(file), now, now.metadata.serialized_size * _PARSED)


@contextmanager
def opened(field: str, file: DataFile, *, is_streamed: bool = False) -> Iterator[pq.ParquetFile]:
    """The file, open; if streamed, a row group is read as its rows are requested, not as a whole.

    Raises:
        ConfigError: if it cannot be opened, is incomplete, or has changed.
        Damaged: if what is read is not what was written.
        Unavailable: if its store does not answer.
    """
    footer = footer_of(field, file)
    # Arrow 26 reads whole row groups ahead unless it is told not to.
    streaming = {"pre_buffer": False, "buffer_size": 2**20} if is_streamed else {}
    with opened_file(field, file) as stream, _judged(field, file, footer):
        source = stream if is_url(file.path) else pa.OSFile(file.path)
        with pq.ParquetFile(
            source, metadata=footer.metadata, page_checksum_verification=True, **streaming
        ) as parquet:
            yield parquet


@contextmanager
def _judged(field: str, file: DataFile, footer: Footer) -> Iterator[None]:
    """Distinguish a file that changed while it was read, or a failing disk, from a damaged file."""
    try:
        yield
    except _UNREADABLE as error:
        require_content(field, file.path, error)
        if not is_url(file.path):
            _require_same(field, file, footer)
        raise Damaged(
            f"{field}: {file.path} is damaged ({_reason(error)}); "
            "write or copy it again, or leave it out."
        ) from error
    if not is_url(file.path):
        _require_same(field, file, footer)


def read_row_groups(
    field: str, file: DataFile, indices: Sequence[int], leaves: Sequence[str]
) -> pa.Table:
    """Columns of row groups, by their paths in the schema, one group after the other; from a URL,
    only their bytes are fetched, with gaps of at most a quarter of them.

    Raises:
        ConfigError: if the file is gone, or has changed.
        Damaged: if what is read is not what was written.
        Unavailable: if its store does not answer.
    """
    footer = footer_of(field, file)
    checked = {"metadata": footer.metadata, "page_checksum_verification": True}
    wanted = {"row_groups": list(indices), "columns": list(leaves)}
    if not is_url(file.path):
        with _judged(field, file, footer), pq.ParquetFile(pa.OSFile(file.path), **checked) as found:
            return found.read_row_groups(**wanted)
    spans = coalesced(_chunks(footer.metadata, indices, leaves))
    for left in reversed(range(_READS)):
        contents = read_ranges(field, [part_of(file, begin, end) for begin, end in spans])
        pieces = _Pieces(field, file, spans, contents)
        try:
            with pq.ParquetFile(pa.PythonFile(pieces, "r"), pre_buffer=False, **checked) as found:
                return found.read_row_groups(**wanted)
        except _UNREADABLE as error:  # read again, as they may be damaged in transit
            require_content(field, file.path, error)
            if not left:
                raise Damaged(
                    f"{field}: {file.path} is damaged ({_reason(error)}, in each of {_READS} "
                    "reads); write or copy it again, or leave it out."
                ) from error
    raise AssertionError  # the last one returns or raises


def _chunks(
    metadata: pq.FileMetaData, indices: Sequence[int], leaves: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """First byte of each column chunk of some row groups below one of `leaves`, and the byte after
    its last."""
    numbers = list(_columns_below(metadata, set(leaves)))
    for index in indices:
        group = metadata.row_group(index)
        for number in numbers:
            column = group.column(number)
            begin, dictionary = column.data_page_offset, column.dictionary_page_offset
            if dictionary is not None and 0 < dictionary < begin:
                begin = dictionary
            yield begin, begin + column.total_compressed_size


def _columns_below(metadata: pq.FileMetaData, names: set[str]) -> Iterator[int]:
    for number in range(metadata.num_columns):
        path = metadata.schema.column(number).path
        parts = path.split(".")
        if any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1)):
            yield number


def coalesced(chunks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that cover all of `chunks`, and gaps between them, smallest first, until the gaps come
    to a quarter of the chunks."""
    ordered = sorted(chunks)
    left = sum(end - begin for begin, end in ordered) // _WASTE
    gaps = sorted(
        (after[0] - before[1], at) for at, (before, after) in enumerate(pairwise(ordered))
    )
    joined = set()
    for gap, at in gaps:
        if gap > min(left, _GAP_BYTES):
            break
        left -= max(0, gap)
        joined.add(at)
    spans: list[tuple[int, int]] = []
    for at, (begin, end) in enumerate(ordered):
        if at - 1 in joined:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


class _Pieces(io.RawIOBase):
    """A file at a URL with some ranges in memory; others are fetched, as Arrow reads beyond the
    chunks of files from old writers."""

    def __init__(
        self,
        field: str,
        file: DataFile,
        spans: Sequence[tuple[int, int]],
        contents: Sequence[bytes],
    ) -> None:
        self._field, self._file, self._at = field, file, 0
        self._begins, self._contents = [begin for begin, _ in spans], contents

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size_bytes}
        self._at = begins[whence] + offset
        return self._at

    def read(self, size: int = -1) -> Any:
        end = self._file.size_bytes if size < 0 else min(self._at + size, self._file.size_bytes)
        content = self._part(self._at, end)
        self._at += len(content)
        return content

    def _part(self, begin: int, end: int) -> bytes | memoryview:
        if begin >= end:
            return b""
        number = bisect_right(self._begins, begin) - 1
        if number >= 0:
            first, content = self._begins[number], self._contents[number]
            if end - first <= len(content):
                return memoryview(content)[begin - first : end - first]
        (content,) = read_ranges(self._field, [part_of(self._file, begin, end)])
        return content
