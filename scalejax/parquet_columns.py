"""What the columns of a data set in Parquet files are to a network: images, classes, how many.

Reads no more of the files than footers and, where these do not say, columns of classes and filters.
"""

import json
from typing import Literal

import pyarrow as pa

from scalejax.errors import ConfigError, refusal
from scalejax.parquet_config import ParquetConfig
from scalejax.parquet_files import ParquetFiles, distinct_texts, extremes, filtered, find_files


def parquet_part(config: ParquetConfig, split: Literal["train", "test"]) -> ParquetFiles:
    """The files of one part of the data set, with the rows that the filters keep.

    Raises:
        ConfigError: if they cannot be read, or hold something else than the config says.
    """
    columns = [config.image_column, config.label_column, *(name for name, _, _ in config.filters)]
    files = find_files(f"data.{split}", getattr(config, split), columns)
    type_ = files.schema.field(config.image_column).type
    if not _is_binary(bytes_type(type_)):
        accepted = (
            f"it is {type_} in {files.groups[0].file.path}; images are binary, or a struct "
            'with a binary field "bytes"'
        )
        raise ConfigError(refusal("data.image_column", config.image_column, accepted))
    label = files.schema.field(config.label_column).type
    if not (_is_text(label) or pa.types.is_boolean(label) or pa.types.is_integer(label)):
        accepted = f"it is {label}; classes are integers, booleans or texts"
        raise ConfigError(refusal("data.label_column", config.label_column, accepted))
    return filtered(files, config.filters)


def bytes_type(type_: pa.DataType) -> pa.DataType:
    """The type of a column of images, or of the field "bytes" if it is a struct."""
    if pa.types.is_struct(type_) and type_.get_field_index("bytes") >= 0:
        return type_.field("bytes").type
    return type_


def class_values(config: ParquetConfig) -> int | tuple[str, ...]:
    """How many classes there are; where they are texts, which.

    Texts are those of the training part, sorted. Integers count up to what Hugging Face's metadata
    names, else to the largest of both parts.

    Raises:
        ConfigError: if the column holds an integer below 0, or other than `config.classes` texts.
    """
    parts = [parquet_part(config, "train"), parquet_part(config, "test")]
    train, column = parts[0], config.label_column
    type_ = train.schema.field(column).type
    if _is_text(type_):
        texts = distinct_texts(train.field, train.groups, column)
        if config.classes not in (None, len(texts)):
            accepted = f"column {column!r} of {train.location} holds {len(texts)} different texts"
            raise ConfigError(refusal("data.classes", config.classes, accepted))
        return texts
    if config.classes is not None:
        return config.classes
    if pa.types.is_boolean(type_):
        return 2
    if named := _hugging_face_classes(train.schema, column):
        return named
    bounds = [extremes(part.field, part.groups, column) for part in parts]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest < 0:
        accepted = f"it holds {lowest}; classes count from 0"
        raise ConfigError(refusal("data.label_column", column, accepted))
    return highest + 1


def _is_binary(type_: pa.DataType) -> bool:
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _hugging_face_classes(schema: pa.Schema, column: str) -> int | None:
    """How many names Hugging Face's metadata gives to the classes of `column`, if it does."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        return len(about["info"]["features"][column]["names"]) or None
    except (KeyError, TypeError, ValueError):
        return None
