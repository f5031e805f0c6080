"""Images and classes in Parquet files, by index: a row group is read when one of its rows is.

Knows columns and what they mean; where row groups are kept is `row_groups`' business.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalejax.data.images import UndecodableImage, decoded, in_threads
from scalejax.data.row_groups import shared_memory
from scalejax.data.source import Split
from scalejax.errors import ConfigError
from scalejax.parquet_columns import class_values, parquet_part
from scalejax.parquet_config import ParquetConfig
from scalejax.parquet_files import RowGroup, read_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoded:
    """The rows of a row group that the filters keep."""

    images: pa.LargeBinaryArray
    """Encoded images."""
    classes: np.ndarray
    """int32."""

    @property
    def held_bytes(self) -> int:
        return self.images.nbytes + self.classes.nbytes


class ParquetImages:
    """Images, uint8 of [height, width, channels], and their classes."""

    def __init__(self, config: ParquetConfig, split: Split) -> None:
        self._config = config
        self._files = parquet_part(config, split)
        counts = self._files.kept_counts
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        self._memory = shared_memory(config.memory_bytes)
        self._values = class_values(config)

    def __len__(self) -> int:
        """Number of rows that the filters keep."""
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The images and classes at `indices`.

        Raises:
            ConfigError: if a row cannot be read, naming file and row.
        """
        size, channels = self._config.image_size, self._config.channels
        images = np.empty((len(indices), size, size, channels), np.uint8)
        classes = np.empty(len(indices), np.int32)
        group_of = np.searchsorted(self._ends, indices, side="right")
        work = []
        for number in np.unique(group_of):  # a group is read once, whatever the order of rows
            places = np.flatnonzero(group_of == number)
            rows = indices[places] - self._firsts[number]
            group = self._decoded(number)
            classes[places] = group.classes[rows]
            offsets = np.frombuffer(group.images.buffers()[1], np.int64)[group.images.offset :]
            content = memoryview(group.images.buffers()[2] or b"")
            begins, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
            for place, row, begin, end in zip(places, rows, begins, ends, strict=True):
                work.append((place, number, row, content[begin:end]))
        for _ in in_threads(partial(self._decode_into, images), work):
            pass
        return {"inputs": images, "targets": classes}

    def _decode_into(self, images: np.ndarray, item: tuple[int, int, int, memoryview]) -> None:
        place, number, row, encoded = item
        config = self._config
        try:
            images[place] = decoded(encoded, config.image_size, config.channels)
        except UndecodableImage as error:
            where = self._named(number, row)
            raise ConfigError(
                f"{where}, column {config.image_column!r}: no image that can be read ({error})."
            ) from error

    def _named(self, number: int, row: int) -> str:
        """File and row, as a user would look for it."""
        group, kept = self._files.groups[number], self._files.kept
        in_group = row if kept is None else kept[number][row]
        return f"{group.file.path}, row {group.first_row + in_group}"

    def _decoded(self, number: int) -> _Decoded:
        group, config = self._files.groups[number], self._config
        columns = (config.image_column, config.label_column)
        key = (group, columns, config.filters, self._values)
        return self._memory.of(key, partial(self._load, number, group))

    def _load(self, number: int, group: RowGroup) -> tuple[_Decoded, int]:
        config = self._config
        type_ = self._files.schema.field(config.image_column).type
        is_struct = pa.types.is_struct(type_)
        wanted = f"{config.image_column}.bytes" if is_struct else config.image_column
        table = read_columns(self._files.field, group, [wanted, config.label_column])
        if self._files.kept is not None:
            table = table.take(pa.array(self._files.kept[number]))
        column = table[config.image_column].combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # more than 2 GiB
            column = pa.concat_arrays([_bytes_of(chunk, is_struct) for chunk in column.chunks])
        else:
            column = _bytes_of(column, is_struct)
        classes = self._classes(number, table[config.label_column])
        group_rows = _Decoded(images=column, classes=classes)
        return group_rows, group_rows.held_bytes

    def _classes(self, number: int, column: pa.ChunkedArray) -> np.ndarray:
        """The class of each row, checked."""
        if isinstance(self._values, tuple):
            values = pa.array(self._values, pa.large_string())
            texts = column.cast(pa.large_string()).combine_chunks()
            classes = pc.call_function("index_in", [texts], pc.SetLookupOptions(values))
            count = len(self._values)
        else:
            classes, count = column.cast(pa.int64()).combine_chunks(), self._values
        numbers = classes.fill_null(-1).to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
        if wrong.size:
            row = int(wrong[0])
            raise ConfigError(
                f"{self._named(number, row)}, column {self._config.label_column!r}: "
                f"{column[row].as_py()!r} is none of the {count} classes (data.classes)."
            )
        return numbers.astype(np.int32)


def _bytes_of(column: pa.Array, is_struct: bool) -> pa.LargeBinaryArray:
    if is_struct:
        column = column.field("bytes")
    return column.cast(pa.large_binary())
