"""Suggests the [data] table of a run.toml for an inspected data set.

Knows usual names of files and folders; reads no data.
"""

import re
from pathlib import Path

from scalejax.data.convert.arrays import ArrayRows
from scalejax.data.convert.image_folder import ImageFolderRows
from scalejax.data.convert.parquet import ParquetRows
from scalejax.data.convert.rows import Rows
from scalejax.data.formats.numpy import PAIRS
from scalejax.data.formats.parquet_columns import is_number

TRAIN_NAMES = ("train", "training")
"""Name of the training part."""
TEST_NAMES = ("test", "val", "valid", "validation", "eval")
"""Names of the test part, in order of preference."""
UNKNOWN_PART = "..."
"""Placeholder for the user to fill in."""


def parts_within(location: str) -> tuple[str, str] | None:
    """Training and test folders in `location`; None unless both exist."""
    path = Path(location.removeprefix("file://"))
    found = [
        next((str(path / name) for name in names if (path / name).is_dir()), None)
        for names in (TRAIN_NAMES, TEST_NAMES)
    ]
    return (found[0], found[1]) if found[0] and found[1] else None


def parts_advice(location: str) -> str | None:
    """Advice for a folder that contains both parts."""
    parts = parts_within(location)
    if parts is None:
        return None
    return (
        f"{parts[0]} and {parts[1]} are counted together here; scalejax data inspect, and data "
        "convert, take one of them at a time."
    )


def _parts(location: str) -> tuple[str, str]:
    """Locations of the training and test parts, inferred from names of files and folders."""
    if parts := parts_within(location):
        return parts
    path = Path(location)
    word = re.match("[a-z]*", path.name.lower())
    name = word[0] if word else ""

    def beside(names: tuple[str, ...]) -> str:
        others = (path.with_name(other + path.name[len(name) :]) for other in names)
        return next((str(other) for other in others if other.exists()), UNKNOWN_PART)

    if name in TEST_NAMES:
        return beside(TRAIN_NAMES), location
    return location, beside(TEST_NAMES) if name in TRAIN_NAMES else UNKNOWN_PART


def data_table(rows: Rows, image: str | None, label: str | None, image_size: int) -> str | None:
    """The table, to be completed; None if training does not read such files.

    Args:
        rows: the data set.
        image: its column of images, if it has one.
        label: its column of classes, if identified.
        image_size: size that images are scaled to.
    """
    if isinstance(rows, ParquetRows):
        return "\n".join(_parquet_lines(rows, image, label, image_size))
    if isinstance(rows, ImageFolderRows):
        return "\n".join([*_head("image_folder", *_parts(rows.location)), _size(image_size)])
    if isinstance(rows, ArrayRows) and rows.names is not None:
        return "\n".join(_numpy_lines(rows, rows.names))
    return None


def _head(name: str, train: str, test: str) -> list[str]:
    return ["[data]", f'name = "{name}"', f'train = "{train}"', f'test = "{test}"']


def _size(image_size: int) -> str:
    return f"image_size = {image_size}"


def _parquet_lines(
    rows: ParquetRows, image: str | None, label: str | None, image_size: int
) -> list[str]:
    lines = _head("parquet", *_parts(rows.location))
    if image is None:
        names = [each.name for each in rows.schema if is_number(each.type) and each.name != label]
        listed = ", ".join(f'"{name}"' for name in names)
        return [*lines, f"feature_columns = [{listed}]", f'label_column = "{label or "..."}"']
    if image != "image":
        lines.append(f'image_column = "{image}"')
    lines.append(_size(image_size))
    if label != "label":
        lines.append(f'label_column = "{label or "..."}"')
    return lines


def _numpy_lines(rows: ArrayRows, names: tuple[str, str]) -> list[str]:
    """Lines for an .npz, which may hold both parts, by names that `train` finds or that are
    given."""
    as_of_part = [re.sub("train|test", "{part}", name) for name in names]
    other = [name.replace("{part}", "test") for name in as_of_part]
    train, test = _parts(rows.location)
    if as_of_part != list(names) and set(other) <= set(rows.stored_names):
        train = test = rows.location
    lines = _head("numpy", train, test)
    if tuple(as_of_part) not in PAIRS:
        lines += [f'inputs = "{as_of_part[0]}"', f'targets = "{as_of_part[1]}"']
    return lines
