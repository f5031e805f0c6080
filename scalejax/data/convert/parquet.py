"""Rows of Parquet files, read one piece of a row group at a time."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator

import pyarrow as pa

from scalejax.data.convert.rows import CHUNK_BYTES
from scalejax.data.formats.parquet import find_files, read_columns
from scalejax.data.formats.parquet_bytes import opened


class ParquetRows:
    """The rows of a file, folder, glob or URL."""

    kind = "Parquet"

    def __init__(self, location: str) -> None:
        self.location = location
        self.found = find_files("source", location, ())
        self.schema = self.found.schema
        groups = self.found.groups
        data_files = dict.fromkeys(group.file for group in groups)
        self.files = len(data_files)
        self.size_bytes = sum(file.size_bytes for file in data_files)
        self.fingerprint = hashlib.sha256(repr(list(data_files)).encode()).hexdigest()
        self._ends = [0]
        for group in groups:
            self._ends.append(self._ends[-1] + group.rows)

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order, a piece of a row group at a time."""
        first = bisect_right(self._ends, begin) - 1
        for number in range(first, len(self.found.groups)):
            group, before = self.found.groups[number], self._ends[number]
            if before >= end:
                return
            row_bytes = max(1, group.bytes_of(self.schema.names) // group.rows)
            rows = max(1, CHUNK_BYTES // row_bytes)
            at = before
            with opened("source", group.file, is_streamed=True) as parquet:
                for batch in parquet.iter_batches(rows, row_groups=[group.index]):
                    wanted = slice(max(begin - at, 0), max(min(end - at, len(batch)), 0))
                    at += len(batch)
                    if wanted.start < wanted.stop:
                        part = batch.slice(wanted.start, wanted.stop - wanted.start)
                        yield pa.Table.from_batches([part]).select(self.schema.names)
                    if at >= end:
                        return

    def columns(self, names: list[str]) -> Iterator[pa.Table]:
        """Some columns of all rows, a row group at a time."""
        for group in self.found.groups:
            yield read_columns("source", group, names)

    def name(self, row: int) -> str:
        """File and row."""
        number = bisect_right(self._ends, row) - 1
        group = self.found.groups[number]
        return f"{group.file.path}, row {group.first_row + row - self._ends[number]}"
