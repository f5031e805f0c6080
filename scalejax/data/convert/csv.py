"""Rows of a CSV file with names in its first line, read as a stream.

Types are inferred from the whole file, which is read once beforehand: a column of whole numbers
with a single fraction among them is float64.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pv

from scalejax.core.errors import ConfigError
from scalejax.data.convert.rows import CHUNK_BYTES, fingerprint


class CsvRows:
    """The rows of a file, plain or .gz."""

    kind = "CSV"
    files = 1

    def __init__(self, path: Path) -> None:
        self.location, self._path = str(path), path
        self.size_bytes, self.fingerprint = path.stat().st_size, fingerprint([path])
        self.schema, self._rows = self._scanned()

    def __len__(self) -> int:
        return self._rows

    def _scanned(self) -> tuple[pa.Schema, int]:
        """Names and types of the columns, and the number of rows."""
        types: dict[str, pa.DataType] = {}
        while True:
            try:
                with self._opened(types) as reader:
                    schema = reader.schema
                    count = sum(len(batch) for batch in reader)
                schema.names  # noqa: B018  raises if they are not UTF-8
                return schema, count
            except UnicodeDecodeError as error:
                accepted = f"{self._path} is refused: its column names must be UTF-8 ({error})."
                raise ConfigError(accepted) from error
            except pa.ArrowInvalid as error:
                wider = self._wider(types, str(error))
                if wider is None:
                    raise ConfigError(f"{self._path} cannot be read as CSV ({error}).") from error
                types = wider

    def _wider(self, types: dict[str, pa.DataType], message: str) -> dict[str, pa.DataType] | None:
        """`types` with a wider type for the first column that does not convert; None if there is
        no wider type."""
        found = re.search(r"In CSV column #(\d+):.*conversion error to (\w+)", message)
        if not found:
            return None
        with self._opened(types) as reader:
            name = reader.schema.names[int(found[1])]
        wider = {"null": pa.int64(), "int64": pa.float64()}.get(found[2], pa.string())
        return None if types.get(name) == pa.string() else {**types, name: wider}

    def _opened(self, types: dict[str, pa.DataType]) -> pv.CSVStreamingReader:
        return pv.open_csv(
            self._path,
            read_options=pv.ReadOptions(block_size=CHUNK_BYTES, use_threads=False),
            convert_options=pv.ConvertOptions(column_types=types),
        )

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order; the rows before them are read, too."""
        at = 0
        with self._opened(dict(zip(self.schema.names, self.schema.types, strict=True))) as reader:
            for batch in reader:
                first, last = max(begin - at, 0), min(end - at, len(batch))
                if first < last:
                    yield pa.Table.from_batches([batch.slice(first, last - first)])
                at += len(batch)
                if at >= end:
                    return

    def name(self, row: int) -> str:
        """File and row."""
        return f"{self.location}, row {row}"
