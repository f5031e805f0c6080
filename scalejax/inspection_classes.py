"""The classes in a data set: which column they are, how many rows each has, and how they lie.

Reads a column of classes where that is cheap; prints nothing.
"""

from collections import Counter

import pyarrow as pa

from scalejax.conversion.image_folder import ImageFolderRows
from scalejax.conversion.parquet import ParquetRows
from scalejax.conversion.rows import Rows
from scalejax.parquet_columns import hugging_face_names, is_class, is_image
from scalejax.units import MIB

SCANNED_BYTES = 64 * MIB
"""Largest column of classes, decompressed, that is read to count them."""
LABEL_NAMES = ("label", "labels", "target", "class", "fine_label", "y")
"""What a column of classes is called; else it is the last that could be one."""

GroupClasses = list[Counter[object]]
"""Rows of each class, of one row group after the other."""


def image_column(schema: pa.Schema) -> str | None:
    """The first column of images; None if there is none."""
    return next((each.name for each in schema if is_image(each.type)), None)


def label_column(schema: pa.Schema) -> str | None:
    """The column of classes, as far as can be told."""
    image = image_column(schema)
    fitting = [each.name for each in schema if each.name != image and is_class(each.type)]
    named = [name for name in LABEL_NAMES if name in fitting]
    if named or image is None:  # of a table, any column may be what is to be learned
        return named[0] if named else None
    return fitting[-1] if fitting else None


def group_classes(rows: Rows, label: str) -> GroupClasses | None:
    """The classes in each row group, or in all rows where there are none; None if counting them
    would read too much."""
    if isinstance(rows, ParquetRows):
        if sum(group.bytes_of([label]) for group in rows.found.groups) > SCANNED_BYTES:
            return None
        return [_counts(table[label]) for table in rows.columns([label])]
    if isinstance(rows, ImageFolderRows):
        return [_counts(pa.chunked_array([rows.labels]))]
    return None


def _counts(column: pa.ChunkedArray) -> Counter[object]:
    found = column.value_counts()
    return Counter({each["values"].as_py(): each["counts"].as_py() for each in found})


def named_classes(
    schema: pa.Schema, label: str, groups: GroupClasses
) -> tuple[tuple[str, int], ...]:
    """Rows of each class by its name, the most frequent first."""
    names = hugging_face_names(schema, label)
    total = _total(groups)
    return tuple((_class_name(value, names), count) for value, count in total.most_common())


def _class_name(value: object, names: tuple[str, ...]) -> str:
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return str(value)


def _total(groups: GroupClasses) -> Counter[object]:
    total: Counter[object] = Counter()
    for each in groups:
        total.update(each)
    return total


def order_advice(groups: GroupClasses) -> str | None:
    """What to do if classes lie one after the other, so that row groups are no sample of them."""
    total, alike = _total(groups), sum(len(each) == 1 for each in groups)
    rows = total.total()
    # Small row groups of a frequent class are of one class in any order: so many, on average.
    by_chance = sum((count / rows) ** each.total() for each in groups for count in total.values())
    if len(total) < 2 or 2 * alike <= len(groups) or 2 * by_chance >= alike:
        return None
    return (
        f"classes lie one after the other: {alike:,} of {len(groups):,} row groups hold a single "
        f'class of {len(total):,}. data.reading.shuffle = "row_groups" would train badly; "rows", '
        "the default, mixes them, and scalejax data convert --shuffle-seed N writes a folder of "
        "images in mixed order."
    )


def written_order_advice(location: str) -> str | None:
    """The same of Parquet files, if a column of classes is found in them.

    Raises:
        ConfigError: if they cannot be read.
    """
    rows = ParquetRows(location)
    label = label_column(rows.schema)
    groups = group_classes(rows, label) if label is not None else None
    return order_advice(groups) if groups is not None else None
