"""Roles of the columns of a Parquet data set: images or numbers, and classes.

Reads only footers and, if these do not suffice, columns of classes and filters.
"""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from scalejax.config.data import ParquetConfig, Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.formats.parquet import (
    Filter,
    ParquetFiles,
    RowGroup,
    filtered,
    find_files,
    kept_rows,
    read_columns,
)
from scalejax.data.formats.petastorm import require_full_shards


def parquet_facts(config: ParquetConfig) -> DatasetFacts:
    """Counts of rows and classes.

    Raises:
        ConfigError: as for `parquet_part` and `class_values`.
    """
    values = class_values(config)
    return DatasetFacts(
        train_examples=parquet_part(config, "train").kept_count,
        test_examples=parquet_part(config, "test").kept_count,
        validation_examples=parquet_part(config, "validation").kept_count
        if "validation" in config.parts
        else 0,
        input_shape=(len(config.feature_columns),)
        if config.feature_columns
        else (config.image_size, config.image_size, config.channels),
        target_shape=(),
        classes=len(values) if isinstance(values, tuple) else values,
        is_table=bool(config.feature_columns),
    )


def parquet_part(config: ParquetConfig, split: Split) -> ParquetFiles:
    """The files of one part of the data set, with the rows that the filters keep.

    Raises:
        ConfigError: if they cannot be read, or do not hold what the config says.
    """
    columns = [*config.columns, *(name for name, _, _ in config.filters)]
    files = find_files(f"data.{split}", getattr(config, split), columns)
    for column in config.feature_columns:
        _require_type(files, "feature_columns", column, is_number, "features are numbers or times")
    if not config.feature_columns:
        accepted = 'images are binary, or a struct with a binary field "bytes"'
        _require_type(files, "image_column", config.image_column, is_image, accepted)
    if config.label_above is not None:
        accepted = "data.label_above needs numbers"
        _require_type(files, "label_column", config.label_column, is_number, accepted)
    else:
        accepted = "classes are integers, booleans or texts"
        _require_type(files, "label_column", config.label_column, is_class, accepted)
    require_room(files, config)
    _require_versions(files, config)
    kept = filtered(files, config.filters)
    if split == "train" and config.reading.petastorm is not None:
        require_full_shards(kept, config.reading.petastorm)
    return kept


def rows_together(config: ParquetConfig, files: ParquetFiles) -> int:
    """Rows of a shuffled order to read at once, so that a row group is decoded once for them; 0 if
    row groups stay cached in memory or on a local disk, and it makes no difference."""
    in_memory = _bytes_of(config, files) <= config.reading.memory_bytes // 2
    return 0 if in_memory or stays_on_disk(config, files) else rows_within(config, files)


def stays_on_disk(config: ParquetConfig, files: ParquetFiles) -> bool:
    """Whether all row groups stay in the cache on a local disk."""
    reading = config.reading
    return reading.cache_folder is not None and _bytes_of(config, files) <= reading.cache_bytes


def _bytes_of(config: ParquetConfig, files: ParquetFiles) -> int:
    return sum(group.bytes_of(config.columns) for group in files.groups)


def rows_within(config: ParquetConfig, files: ParquetFiles) -> int:
    """Rows to read at once if row groups are not cached: as many as an eighth of the memory holds,
    images both encoded and decoded, as up to three batches of them exist (in progress, ready, in
    use); 0 if only a few row groups are mixed."""
    if config.reading.shuffle == "row_groups" or config.reading.petastorm is not None:
        return 0
    if config.feature_columns:
        row_bytes = 4 * len(config.feature_columns)
    else:
        encoded = sum(group.bytes_of((config.image_column,)) for group in files.groups)
        encoded //= sum(group.rows for group in files.groups)
        row_bytes = encoded + config.image_size**2 * config.channels
    return max(1, config.reading.memory_bytes // 8 // (row_bytes + 4))


def _require_type(
    files: ParquetFiles,
    field: str,
    column: str,
    fits: Callable[[pa.DataType], bool],
    accepted: str,
) -> None:
    type_ = files.schema.field(column).type
    if not fits(type_):
        where = files.groups[0].file.path
        raise ConfigError(refusal(f"data.{field}", column, f"it is {type_} in {where}; {accepted}"))


def require_room(files: ParquetFiles, config: ParquetConfig, processes: int = 1) -> None:
    """Refuse row groups that take more than the half of the memory that is reserved for them.

    Args:
        files: the files that are read.
        config: config with the memory of one process.
        processes: number of processes with that memory.

    Raises:
        ConfigError: if the memory is too small.
    """
    reading = config.reading
    sizes = sorted((group.bytes_of(config.columns) for group in files.groups), reverse=True)
    at_once = reading.window if reading.shuffle == "row_groups" else 1
    if reading.petastorm is not None:  # each process reads one
        at_once = reading.petastorm.shard_count or 1
    needed = 2 * sum(sizes[:at_once])
    if reading.memory_bytes < needed:
        accepted = (
            f"the largest row group of {files.location} takes {sizes[0]} bytes, and {at_once} at "
            f"once need {needed} with the batches made of them"
        )
        if processes > 1:
            memory_bytes = processes * reading.memory_bytes
            accepted += (
                f", in each of {processes} processes that share data.reading.memory_bytes="
                f"{memory_bytes}; at most {max(0, memory_bytes // needed - 1)}"
            )
            raise ConfigError(refusal("input.workers", processes - 1, accepted))
        raise ConfigError(refusal("data.reading.memory_bytes", reading.memory_bytes, accepted))


def _require_versions(files: ParquetFiles, config: ParquetConfig) -> None:
    """Refuse a disk cache of files without a version, whose changes would go unnoticed."""
    folder = config.reading.cache_folder
    unknown = [group.file.path for group in files.groups if group.file.version is None]
    if folder is not None and unknown:
        accepted = (
            f"the store of {unknown[0]} says neither when it was written nor what its content is; "
            "leave the cache out, or copy the files to this machine"
        )
        raise ConfigError(refusal("data.reading.cache_folder", folder, accepted))


def class_values(config: ParquetConfig) -> int | tuple[str, ...]:
    """Number of classes; their names if they are texts.

    Two where `config.label_above` splits a column. Texts are those of the training part, sorted.
    Other columns have `config.classes`, if that is given; else booleans have two, and integers
    count up to what Hugging Face's metadata names, or to the largest of all parts.

    Raises:
        ConfigError: if the column holds an integer below 0 or beyond int32, a number of texts other
            than `config.classes`, or in another part a text that the training part lacks.
    """
    parts = [parquet_part(config, part) for part in config.parts]
    train, column = parts[0], config.label_column
    type_ = train.schema.field(column).type
    if config.label_above is not None:
        return 2
    if is_text(type_):
        texts = _texts_of(train, column)
        if config.classes not in (None, len(texts)):
            accepted = f"column {column!r} of {train.location} holds {len(texts)} different texts"
            raise ConfigError(refusal("data.classes", config.classes, accepted))
        for other in parts[1:]:
            if unknown := sorted(set(_texts_of(other, column)) - set(texts)):
                accepted = (
                    f"{other.location} holds {unknown[0]!r} in it, and {train.location} does not; "
                    "data.filters can leave its rows out"
                )
                raise ConfigError(refusal("data.label_column", column, accepted))
        return texts
    if config.classes is not None:
        return config.classes
    if pa.types.is_boolean(type_):
        return 2
    if named := hugging_face_names(train.schema, column):
        return len(named)
    bounds = [_bounds_of(part, column) for part in parts]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest < 0:
        accepted = f"it holds {lowest}; classes count from 0"
        raise ConfigError(refusal("data.label_column", column, accepted))
    if highest >= 2**31 - 1:
        accepted = f"it holds {highest}; classes count from 0, to 2^31 - 2 at most"
        raise ConfigError(refusal("data.label_column", column, accepted))
    return highest + 1


def is_text(type_: pa.DataType) -> bool:
    """Whether a column holds texts, or indices of texts in a dictionary."""
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def is_image(type_: pa.DataType) -> bool:
    """Whether a column holds bytes, which may be an encoded image."""
    if pa.types.is_struct(type_) and type_.get_field_index("bytes") >= 0:
        type_ = type_.field("bytes").type
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def is_number(type_: pa.DataType) -> bool:
    """Whether a column can be a feature."""
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    times = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_duration)
    return any(check(type_) for check in (*checks, *times))


def is_class(type_: pa.DataType) -> bool:
    """Whether a column can be classes."""
    return is_text(type_) or pa.types.is_boolean(type_) or pa.types.is_integer(type_)


def hugging_face_names(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """The names that Hugging Face's metadata gives to the classes of `column`, if any."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        return tuple(map(str, about["info"]["features"][column]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _texts_of(files: ParquetFiles, column: str) -> tuple[str, ...]:
    """The different values of a column of texts in the kept rows, sorted; nulls left out."""
    return _distinct_texts(files.field, files.groups, files.filters, column)


@lru_cache(maxsize=8)
def _distinct_texts(
    field: str, groups: tuple[RowGroup, ...], filters: tuple[Filter, ...], column: str
) -> tuple[str, ...]:
    found: set[str] = set()
    for values in _kept_values(field, groups, filters, column):
        found |= set(values.cast(pa.large_string()).unique().to_pylist())
    return tuple(sorted(found - {None}))


def _kept_values(
    field: str, groups: tuple[RowGroup, ...], filters: tuple[Filter, ...], column: str
) -> Iterator[pa.ChunkedArray]:
    """A column of each row group, without the rows that `filters` leave out."""
    kept = kept_rows(field, groups, filters) if filters else [None] * len(groups)
    for group, rows in zip(groups, kept, strict=True):
        values = read_columns(field, group, [column])[column]
        yield values if rows is None else values.take(pa.array(rows))


def _bounds_of(files: ParquetFiles, column: str) -> tuple[int, int]:
    """Lowest and highest value of an integer column in the kept rows.

    They are read from the footers, if these have them and no row is left out.

    Raises:
        ConfigError: if the column holds only nulls.
    """
    return _extremes(files.field, files.groups, files.filters, column)


@lru_cache(maxsize=8)
def _extremes(
    field: str, groups: tuple[RowGroup, ...], filters: tuple[Filter, ...], column: str
) -> tuple[int, int]:
    known = [each for group in groups for each in group.column_bounds if each[0] == column]
    bounds = [(low, high) for _, low, high in known]
    if filters or len(bounds) < len(groups):
        bounds = []
        for values in _kept_values(field, groups, filters, column):
            found = pc.call_function("min_max", [values]).as_py()
            bounds.append((found["min"], found["max"]))
    bounds = [pair for pair in bounds if None not in pair]
    if not bounds:
        raise ConfigError(f"{field}: column {column!r} holds nothing but nulls.")
    return min(low for low, _ in bounds), max(high for _, high in bounds)
