"""Examples in Parquet files, by index: a row group is read when one of its rows is.

Knows the meaning of columns; `row_group_cache` caches row groups.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalejax.config.data import ParquetConfig
from scalejax.core.filesystem import DataFile
from scalejax.data.formats.parquet import RowGroup, find_files
from scalejax.data.formats.parquet_bytes import footer_of, footers_of, keep_footers
from scalejax.data.formats.parquet_columns import (
    class_values,
    parquet_facts,
    parquet_part,
    require_room,
    rows_together,
)
from scalejax.data.formats.petastorm import epoch_rows
from scalejax.data.readers.row_group_cache import RowGroups
from scalejax.data.source import (
    Inspected,
    Reader,
    Split,
    UnreadableExample,
    UsedPart,
)
from scalejax.data.stage_clock import timed_items
from scalejax.data.transforms.augmentation import AS_IS, Augmentation, Changes
from scalejax.data.transforms.images import decoded_all

MOST_SAMPLED_GROUPS = 16
"""Number of row groups from which mean and deviation of features are estimated."""


class ParquetExamples(Reader, names=("parquet",)):
    """Images, uint8 of [height, width, channels], or numbers, float32 of [features]; classes."""

    facts = staticmethod(parquet_facts)

    def __init__(
        self, config: ParquetConfig, split: Split, augmentation: Augmentation = AS_IS
    ) -> None:
        self._config = config
        self._augmentation = augmentation
        self._files = parquet_part(config, split)
        self._counts = self._files.kept_counts
        self._ends = np.cumsum(self._counts)
        self._groups = RowGroups(config.reading)
        self._classes = class_values(config)
        if config.feature_columns:
            self._moments = _moments(config, parquet_part(config, "train").groups)

    @staticmethod
    def files(config: ParquetConfig, part: Split) -> Iterable[UsedPart]:
        """The current files of `part`."""
        rows: dict[DataFile, int] = {}
        field = f"data.{part}"
        for group in find_files(field, getattr(config, part), ()).groups:
            rows[group.file] = rows.get(group.file, 0) + group.rows
        return ((file, count, footer_of(field, file).digest) for file, count in rows.items())

    @staticmethod
    def inspected(config: ParquetConfig, part: Split) -> Inspected:
        """The files, and how the run reads them: only training data are shuffled."""
        if part != "train":
            reading = replace(config.reading, shuffle="rows", petastorm=None)
            config = replace(config, reading=reading)
        return Inspected(getattr(config, part), run=config)

    def __len__(self) -> int:
        """Number of rows that the filters keep."""
        return int(self._ends[-1])

    def share_of(self, processes: int) -> "ParquetExamples":
        """The source with one of `processes` equal shares of the memory.

        Raises:
            ConfigError: if the share does not hold two row groups.
        """
        reading = self._config.reading
        memory_bytes = reading.memory_bytes // processes
        share = copy(self)
        share._config = replace(self._config, reading=replace(reading, memory_bytes=memory_bytes))
        require_room(self._files, share._config, processes)
        share._groups = RowGroups(share._config.reading)
        return share

    def __getstate__(self) -> dict[str, Any]:
        """State without cached contents of files; facts about the files and footers are kept."""
        state = {name: value for name, value in vars(self).items() if name != "_groups"}
        files = dict.fromkeys(group.file for group in self._files.groups)
        return state | {"footers": footers_of(files)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        keep_footers(state.pop("footers"))
        vars(self).update(state)
        self._groups = RowGroups(self._config.reading)

    @property
    def rows_together(self) -> int:
        """As many as an eighth of the memory holds, if row groups are decoded more than once an
        epoch: up to three such sets exist, in progress, ready and in use."""
        return rows_together(self._config, self._files)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The indices of all examples: in any order, or the rows of some row groups mixed."""
        dtype = np.int32 if len(self) < 2**31 else np.int64
        if self._config.reading.shuffle == "rows":
            indices = np.arange(len(self), dtype=dtype)
            generator.shuffle(indices)
            return indices
        groups, window = generator.permutation(len(self._ends)), self._config.reading.window
        bounds = np.stack([self._ends - self._counts, self._ends], axis=1)[groups].tolist()
        mixed = []
        for first in range(0, len(bounds), window):
            chosen = bounds[first : first + window]
            rows = [np.arange(begin, end, dtype=dtype) for begin, end in chosen]
            mixed.append(np.concatenate(rows))
            generator.shuffle(mixed[-1])
        return np.concatenate(mixed)

    def order_of_epoch(self, epoch: int, steps: int, global_batch: int) -> np.ndarray | None:
        """The order of Petastorm, if configured; otherwise None."""
        order = self._config.reading.petastorm
        if order is None:
            return None
        return epoch_rows(self._counts, order, epoch=epoch, steps=steps, global_batch=global_batch)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The inputs and classes at `indices`.

        Raises:
            UnreadableExample: if a row is invalid, naming file and row.
            ConfigError: if a file cannot be read.
        """
        config = self._config
        # Sorted, so that a row group is requested once, and its rows are consecutive.
        order = np.argsort(indices, kind="stable")
        ascending = np.asarray(indices)[order]
        classes = np.empty(len(indices), np.int32)
        inputs = np.empty((len(indices), len(config.feature_columns)), np.float32)
        encoded = []
        for part, table in self._pieces(ascending):
            classes[order[part]] = self._classes_of(table[config.label_column], ascending[part])
            if config.feature_columns:
                inputs[order[part]] = self._features(table, ascending[part])
            else:
                encoded += table[config.image_column].chunks
        changes = self._augmentation.of(indices, epoch)
        if encoded:  # images of all row groups at once, so that no thread waits for another
            inputs = self._images(pa.chunked_array(encoded), order, ascending, changes)
        return {"inputs": inputs, "targets": classes, **changes.beside()}

    def _pieces(self, ascending: np.ndarray) -> Iterator[tuple[slice, pa.Table]]:
        """The rows at `ascending` indices, a row group at a time, as the files hold them."""
        ends = np.searchsorted(ascending, self._ends)
        numbers = np.flatnonzero(np.diff(ends, prepend=0)).tolist()
        groups = [self._files.groups[number] for number in numbers]
        tables = self._groups.tables(self._files.field, groups, self._config.columns)
        for number, table in zip(numbers, timed_items("storage", tables), strict=True):
            part = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
            rows = ascending[part] - (self._ends[number] - self._counts[number])
            if self._files.kept is not None:
                rows = self._files.kept[number][rows]
            yield part, table.take(pa.array(rows))

    def _images(
        self,
        column: pa.ChunkedArray,
        order: np.ndarray,
        ascending: np.ndarray,
        changes: Changes,
    ) -> np.ndarray:
        config, places = self._config, np.argsort(order)  # place of each row in the column

        def named(row: int) -> str:
            return f"{self._named(int(ascending[places[row]]))}, column {config.image_column!r}"

        return decoded_all(
            lambda row: memoryview(column[places[row]].as_buffer() or b""),
            len(order),
            size=config.image_size,
            channels=config.channels,
            named=named,
            changes=changes,
        )

    def _features(self, table: pa.Table, ascending: np.ndarray) -> np.ndarray:
        values = np.stack([_numbers(table[name]) for name in self._config.feature_columns], axis=1)
        wrong = np.argwhere(~np.isfinite(values))
        if wrong.size:
            row, column = wrong[0].tolist()
            name = self._config.feature_columns[column]
            raise UnreadableExample(
                f"{self._named(int(ascending[row]))}, column {name!r}: "
                f"{values[row, column]} is not a finite number; data.filters can leave the row out."
            )
        mean, deviation = self._moments
        return (values - mean) / deviation

    def _classes_of(self, column: pa.ChunkedArray, ascending: np.ndarray) -> np.ndarray:
        """The class of each row, checked."""
        if self._config.label_above is not None:
            above = _numbers(column)
            classes, count = np.where(np.isnan(above), -1, above > self._config.label_above), 2
        elif isinstance(self._classes, tuple):
            values = pa.array(self._classes, pa.large_string())
            found = pc.call_function(
                "index_in", [column.cast(pa.large_string())], pc.SetLookupOptions(values)
            )
            classes, count = found.fill_null(-1).to_numpy(), len(self._classes)
        else:
            # safe=False: an unsigned number beyond 2^63 becomes negative, and is no class
            numbers = column.cast(pa.int64(), safe=False)
            classes, count = numbers.fill_null(-1).to_numpy(), self._classes
        wrong = np.flatnonzero((classes < 0) | (classes >= count))
        if wrong.size:
            row = int(wrong[0])
            raise UnreadableExample(
                f"{self._named(ascending[row])}, column {self._config.label_column!r}: "
                f"{column[row].as_py()!r} is none of the {count} classes (data.classes)."
            )
        return classes.astype(np.int32)

    def _named(self, index: int) -> str:
        """File and row of an example, as a user would look it up."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (self._ends[number] - self._counts[number])
        if self._files.kept is not None:
            row = self._files.kept[number][row]
        group = self._files.groups[number]
        return f"{group.file.path}, row {group.first_row + row}"


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers as float64; times in the unit of their type, NaN for missing values."""
    if pa.types.is_temporal(column.type):
        is_short = column.type.bit_width == 32
        column = column.cast(pa.int32() if is_short else pa.int64())
    # safe=False: an integer beyond 2^53 may lose its last digits
    return column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()


@lru_cache(maxsize=8)
def _moments(config: ParquetConfig, groups: tuple[RowGroup, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each feature over row groups evenly spread over the training part."""
    files, reader = parquet_part(config, "train"), RowGroups(config.reading)
    every = -(-len(groups) // MOST_SAMPLED_GROUPS)
    moments = [(0, 0.0, 0.0)] * len(config.feature_columns)
    for number in range(0, len(groups), every):
        table = reader.table(files.field, groups[number], config.columns)
        if files.kept is not None:
            table = table.take(pa.array(files.kept[number]))
        columns = [_numbers(table[name]) for name in config.feature_columns]
        moments = [
            _with(each, values[np.isfinite(values)])
            for each, values in zip(moments, columns, strict=True)
        ]
    mean = np.array([mean for _, mean, _ in moments])
    deviation = np.sqrt([squares / max(count, 1) for count, _, squares in moments])
    return mean, np.where(deviation > 0, deviation, 1)


def _with(moments: tuple[int, float, float], values: np.ndarray) -> tuple[int, float, float]:
    """Count, mean and sum of squared deviations after more values are included.

    Source: Chan, Golub & LeVeque 1983, The American Statistician 37(3), equation 2.1.
    """
    if not values.size:
        return moments
    count, mean, squares = moments
    more, of_more = values.size, float(values.mean())
    total, apart = count + more, of_more - mean
    squares += float(((values - of_more) ** 2).sum()) + apart**2 * count * more / total
    return total, mean + apart * more / total, squares
