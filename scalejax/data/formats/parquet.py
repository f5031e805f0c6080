"""Parquet files and their row groups, read from the footers.

Knows files, columns and rows; nothing of the meaning of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalejax.core.errors import ConfigError, Damaged, refusal, unknown_name
from scalejax.core.filesystem import DataFile, listed
from scalejax.data.formats.parquet_bytes import footer_of, read_row_groups

Filter = tuple[str, str, object]
"""Column, comparison and value: the rows for which it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows that are read together."""

    file: DataFile
    """File that holds them."""
    index: int
    """Index of the row group in the file."""
    first_row: int
    """Rows of the file before them."""
    rows: int
    """Number of rows."""
    column_bytes: tuple[tuple[str, int], ...]
    """Bytes of each column when it is decompressed."""
    column_bounds: tuple[tuple[str, int, int], ...]
    """Lowest and highest value of each column of integers whose bounds the footer has."""

    def __hash__(self) -> int:
        """Hash of its place only: hashing all columns of a wide file takes longer than reading."""
        return hash((self.file, self.index))

    def bytes_of(self, columns: Sequence[str]) -> int:
        """Bytes of `columns` in memory; a lower bound if they were written as a dictionary."""
        return sum(size for name, size in self.column_bytes if name in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFiles:
    """The row groups of some files of one schema, in order."""

    field: str
    """Field of the config that names the files."""
    location: str
    """Value of the field."""
    schema: pa.Schema
    """Columns of every file (the requested ones are the same in all)."""
    groups: tuple[RowGroup, ...]
    """Row groups, by file name and in file order."""
    kept: tuple[np.ndarray, ...] | None = None
    """For each row group the rows that filters keep, int32, in order; None for all."""
    filters: tuple[Filter, ...] = ()
    """Filters that select the rows."""

    @property
    def kept_counts(self) -> np.ndarray:
        """Rows of each group that filters keep."""
        if self.kept is None:
            return np.array([group.rows for group in self.groups])
        return np.array([len(rows) for rows in self.kept])

    @property
    def kept_count(self) -> int:
        """Rows of all groups that filters keep."""
        return int(self.kept_counts.sum())


def find_files(field: str, location: str, columns: Sequence[str]) -> ParquetFiles:
    """The row groups of the files at `location`, a file, folder, glob or URL.

    Footers are read once in a process for as long as their files stay the same.

    Args:
        field: field of the config that names the location.
        location: the location.
        columns: columns that every file must have, of the same type.

    Raises:
        ConfigError: if there are no files or rows, or a file cannot be read, is incomplete, or
            lacks a column.
    """
    wanted = "Parquet file (*.parquet)"
    footers = [_footer(field, file) for file in listed(field, location, _is_parquet, wanted)]
    first = footers[0]
    for file, schema, _ in footers:
        for column in columns:
            if column not in schema.names:
                unknown = unknown_name("column", column, schema.names)
                raise ConfigError(f"{file.path} has no such column: {unknown}")
            if schema.field(column).type != (type_ := first[1].field(column).type):
                raise ConfigError(
                    f"{file.path} holds {column!r} as {schema.field(column).type}, and "
                    f"{first[0].path} as {type_}: {field} must name files of one schema."
                )
    groups = tuple(group for _, _, groups in footers for group in groups if group.rows)
    if not groups:
        raise ConfigError(refusal(field, location, "its files hold no rows"))
    return ParquetFiles(field=field, location=location, schema=first[1], groups=groups)


def _is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


@lru_cache(maxsize=65536)
def _footer(field: str, file: DataFile) -> tuple[DataFile, pa.Schema, tuple[RowGroup, ...]]:
    footer = footer_of(field, file)
    metadata, schema = footer.metadata, footer.schema
    about = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    firsts = np.cumsum([0, *(each.num_rows for each in about)])
    leaves = _Leaves.of(metadata, schema)
    of_numbers = cache(leaves.column_bytes_of)
    groups = tuple(
        RowGroup(
            file=file,
            index=index,
            first_row=int(firsts[index]),
            rows=each.num_rows,
            column_bytes=leaves.column_bytes(each) if leaves.sized else of_numbers(each.num_rows),
            column_bounds=leaves.column_bounds(each),
        )
        for index, each in enumerate(about)
    )
    return file, schema, groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """Places of columns in a footer, found once for all of its row groups."""

    bits: dict[str, int]
    """Bits of a value of each column; 0 for columns whose bytes the footer gives."""
    sized: tuple[tuple[int, str], ...]
    """Place and column of each leaf of those columns."""
    integers: tuple[tuple[int, str], ...]
    """Place and name of each column of integers."""

    @classmethod
    def of(cls, metadata: pq.FileMetaData, schema: pa.Schema) -> "_Leaves":
        """The leaves of a file."""
        # repeated numbers are stored in fewer bytes than they take in memory
        is_number = {field.name: pa.types.is_primitive(field.type) for field in schema}
        paths = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
        columns = leaf_columns(schema)
        integers = {field.name for field in schema if pa.types.is_integer(field.type)}
        return cls(
            bits={
                field.name: field.type.bit_width if is_number[field.name] else 0 for field in schema
            },
            sized=tuple(pair for pair in enumerate(columns) if not is_number.get(pair[1])),
            integers=tuple(pair for pair in enumerate(paths) if pair[1] in integers),
        )

    def column_bytes_of(self, rows: int) -> tuple[tuple[str, int], ...]:
        """Bytes of each column of numbers, 0 for others."""
        return tuple((name, rows * bits // 8) for name, bits in self.bits.items())

    def column_bytes(self, about: pq.RowGroupMetaData) -> tuple[tuple[str, int], ...]:
        """Bytes of each column when it is decompressed."""
        sizes = dict(self.column_bytes_of(about.num_rows))
        for place, name in self.sized:
            sizes[name] += about.column(place).total_uncompressed_size
        return tuple(sizes.items())

    def column_bounds(self, about: pq.RowGroupMetaData) -> tuple[tuple[str, int, int], ...]:
        """Lowest and highest value of each column of integers that has them."""
        known = ((name, about.column(place).statistics) for place, name in self.integers)
        return tuple(
            (name, found.min, found.max)
            for name, found in known
            if found is not None and found.has_min_max
        )


def leaf_columns(schema: pa.Schema) -> list[str]:
    """The column to which each leaf of a file belongs, in order. The path of a leaf does not tell,
    as names may contain dots."""
    return [field.name for field in schema for _ in range(_leaf_count(field.type))]


def _leaf_count(type_: pa.DataType) -> int:
    if isinstance(type_, pa.BaseExtensionType):
        return _leaf_count(type_.storage_type)
    if pa.types.is_nested(type_):
        return sum(_leaf_count(type_.field(place).type) for place in range(type_.num_fields))
    return 1


def read_columns(field: str, group: RowGroup, columns: Sequence[str]) -> pa.Table:
    """Columns of a row group, each in one piece; a struct is replaced by its field "bytes".

    Raises:
        ConfigError: if the file cannot be read, or has changed.
        Damaged: if it is damaged.
        Unavailable: if its store does not answer.
    """
    (table,) = read_together(field, [group], columns)
    return table


def read_together(field: str, groups: Sequence[RowGroup], columns: Sequence[str]) -> list[pa.Table]:
    """`read_columns` of several row groups of one file, which are read at once."""
    file = groups[0].file
    schema = footer_of(field, file).schema
    types = {name: schema.field(name).type for name in columns}  # each once
    structs = {name for name, type_ in types.items() if pa.types.is_struct(type_)}
    leaves = [f"{name}.bytes" if name in structs else name for name in types]
    read = read_row_groups(field, file, [group.index for group in groups], leaves)
    ends = np.cumsum([group.rows for group in groups]).tolist()
    if len(read) != ends[-1]:
        raise Damaged(f"{field}: {file.path} has {len(read)} rows instead of {ends[-1]}.")
    tables = []
    for group, end in zip(groups, ends, strict=True):
        rows = read if len(groups) == 1 else read.slice(end - group.rows, group.rows)
        pieces = {name: _in_one_piece(rows[name], name in structs) for name in types}
        if len(groups) > 1:  # copied: a cached table must not keep the memory of the others
            pieces = {
                name: pa.concat_arrays([piece, piece.slice(0, 0)]) for name, piece in pieces.items()
            }
        tables.append(pa.table(pieces))
    return tables


def _in_one_piece(column: pa.ChunkedArray, is_struct: bool) -> pa.Array:
    chunks = [chunk.field("bytes") if is_struct else chunk for chunk in column.chunks]
    if pa.types.is_dictionary(column.type):
        chunks = [chunk.dictionary_decode() for chunk in chunks]
    type_ = chunks[0].type
    if pa.types.is_binary(type_):  # one piece of it would be limited to 2 GiB
        chunks, type_ = [chunk.cast(pa.large_binary()) for chunk in chunks], pa.large_binary()
    if pa.types.is_string(type_):
        chunks, type_ = [chunk.cast(pa.large_string()) for chunk in chunks], pa.large_string()
    return pa.concat_arrays(chunks) if len(chunks) != 1 else chunks[0]


# Filters on rows of Parquet files; only the compared columns are read.


def filtered(files: ParquetFiles, filters: tuple[Filter, ...]) -> ParquetFiles:
    """`files` with the rows that `filters` keep.

    Raises:
        ConfigError: if a value does not compare with its column, or no row is kept.
    """
    if not filters:
        return files
    kept = kept_rows(files.field, files.groups, filters)
    if not any(rows.size for rows in kept):
        raise ConfigError(refusal("data.filters", filters, f"they keep no row of {files.location}"))
    return replace(files, kept=kept, filters=filters)


@lru_cache(maxsize=8)
def kept_rows(
    field: str, groups: tuple[RowGroup, ...], filters: tuple[Filter, ...]
) -> tuple[np.ndarray, ...]:
    """For each row group the rows that `filters` keep, int32.

    Raises:
        ConfigError: if a value does not compare with its column.
    """
    columns = sorted({column for column, _, _ in filters})
    kept = []
    for group in groups:
        table = read_columns(field, group, columns)
        mask = np.ones(group.rows, bool)
        for each in filters:
            mask &= _matches(table[each[0]], each)
        kept.append(np.flatnonzero(mask).astype(np.int32))
    return tuple(kept)


_COMPARISONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
"""Arrow's function for each comparison."""


def _matches(values: pa.ChunkedArray, each: Filter) -> np.ndarray:
    """Which `values` satisfy the comparison; missing ones never do."""
    _, comparison, wanted = each
    try:
        if isinstance(wanted, tuple):
            options = pc.SetLookupOptions(pa.array(wanted).cast(values.type))
            mask = pc.call_function("is_in", [values], options)
        else:
            is_fraction = isinstance(wanted, float) and not wanted.is_integer()
            if is_fraction and pa.types.is_integer(values.type):
                # integers that are rounded here are further from 0 than any bound with a fraction
                values = values.cast(pa.float64(), safe=False)
            bound = pa.scalar(wanted).cast(values.type)
            mask = pc.call_function(_COMPARISONS[comparison], [values, bound])
    except (pa.ArrowException, OverflowError) as error:
        accepted = f"the column is {values.type}, which cannot be compared so ({error})"
        raise ConfigError(refusal("data.filters", list(each), accepted)) from error
    return mask.fill_null(False).to_numpy()
