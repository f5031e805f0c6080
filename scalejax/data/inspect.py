"""Inspection of a data set: rows, columns, classes, images, and its suitability for training.

Knows rows and the requirements of a run; prints nothing.
"""

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from statistics import median

import numpy as np
import pyarrow as pa
from PIL import Image

from scalejax.config.data import DataConfig, ParquetConfig, ReadingConfig, Split
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue, document, plain
from scalejax.core.tabular import Tabular
from scalejax.core.units import MIB, counted, format_bytes
from scalejax.data.convert.image_folder import ImageFolderRows
from scalejax.data.convert.parquet import ParquetRows
from scalejax.data.convert.rows import Rows, encoded_images
from scalejax.data.datasets import open_source
from scalejax.data.formats.parquet import leaf_columns
from scalejax.data.formats.parquet_bytes import footer_of
from scalejax.data.formats.parquet_columns import hugging_face_names, is_class, is_image
from scalejax.data.source import Source
from scalejax.data.suggest_config import data_table, parts_advice
from scalejax.data.transforms.images import UndecodableImage, decoded, in_threads

# The classes of a data set: their column, rows of each, and their distribution over row groups.

SCANNED_BYTES = 64 * MIB
"""Largest column of classes, decompressed, that is read to count them."""
LABEL_NAMES = ("label", "labels", "target", "class", "fine_label", "y")
"""Usual names of a column of classes; without one, the last suitable column is taken."""

GroupClasses = list[Counter[object]]
"""Rows of each class, for one row group after the other."""


def image_column(schema: pa.Schema) -> str | None:
    """The first column of images; None if there is no such column."""
    return next((each.name for each in schema if is_image(each.type)), None)


def label_column(schema: pa.Schema) -> str | None:
    """The column of classes, if identified."""
    image = image_column(schema)
    fitting = [each.name for each in schema if each.name != image and is_class(each.type)]
    named = [name for name in LABEL_NAMES if name in fitting]
    if named or image is None:  # in a table, any column may be the target
        return named[0] if named else None
    return fitting[-1] if fitting else None


def group_classes(rows: Rows, label: str) -> GroupClasses | None:
    """The classes in each row group, or in all rows if there are no row groups; None if counting
    them would read too much."""
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
    """Advice if rows are sorted by class, so that row groups are not representative."""
    total, alike = _total(groups), sum(len(each) == 1 for each in groups)
    rows = total.total()
    # Small row groups may hold only a frequent class in any order: this is their expected number.
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
    """Advice on the order of classes in Parquet files, if a column of classes is found in them.

    Raises:
        ConfigError: if the files cannot be read.
    """
    rows = ParquetRows(location)
    label = label_column(rows.schema)
    groups = group_classes(rows, label) if label is not None else None
    return order_advice(groups) if groups is not None else None


SAMPLED_IMAGES = 64
"""Images whose format and size are looked at, evenly spread."""
PLACES = 8
"""Number of places in the data set that are sampled."""
NAMED_ROWS = 10
"""Unreadable rows that are named; the rest are counted."""
SMALL_GROUP_BYTES, MANY_GROUPS = 64 * 2**10, 1000
"""Opening a row group takes about as long as reading so many bytes; so many small ones are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFacts:
    """One column."""

    name: str
    """Its name."""
    type: str
    """Its type, in Arrow's words."""
    decompressed_bytes: int | None = None
    """Its bytes in memory; None if the files do not say."""
    stored_bytes: int | None = None
    """Its bytes in the files; None if they do not say."""
    compression: str | None = None
    """How it is compressed; None if it is not, or the files do not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The row groups of Parquet files."""

    count: int
    """Number of row groups."""
    fewest_rows: int
    """Rows of the smallest."""
    most_rows: int
    """Rows of the largest."""
    largest_bytes: int
    """Decompressed bytes of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Facts about a sample of images, evenly spread over the rows."""

    column: str
    """Column that holds them."""
    sampled: int
    """Number of images sampled."""
    formats: tuple[str, ...]
    """Formats such as JPEG, the most frequent first."""
    smallest: tuple[int, int]
    """Width and height of the smallest image, by pixels."""
    median: tuple[int, int]
    """Width and height of the median image, by pixels."""
    largest: tuple[int, int]
    """Width and height of the largest image, by pixels."""
    mean_bytes: float
    """Mean bytes of an encoded image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A row that cannot be read."""

    where: str
    """File and row."""
    why: str
    """Error of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of inspecting a data set."""

    location: str
    """Location of the data set."""
    kind: str
    """File format, in words."""
    files: int
    """Number of files."""
    size_bytes: int
    """Bytes of all files."""
    rows: int
    """Examples."""
    columns: tuple[ColumnFacts, ...]
    """Columns, in their order."""
    groups: GroupFacts | None
    """Row groups; None if the format is not Parquet."""
    label_column: str | None
    """The column of classes, if identified."""
    classes: tuple[tuple[str, int], ...] | None
    """Rows of each class, the most frequent first; None if counting them would read too much."""
    images: ImageFacts | None
    """Sampled images; None if there are no images."""
    advice: tuple[str, ...]
    """Advice on changes before training."""
    table: str | None
    """The [data] table of a run.toml, to be completed; None if `convert` must run first."""
    verified_rows: int | None = None
    """Rows that were read and decoded; None without verification."""
    unreadable_rows: int = 0
    """Number of unreadable rows."""
    unreadable: tuple[Unreadable, ...] = ()
    """The first unreadable rows."""


@document("inspection")
@dataclass(frozen=True, slots=True, kw_only=True)
class Inspections(Tabular):
    """Results of inspecting the parts of a data set."""

    inspections: tuple[Inspection, ...]
    """One for each location."""
    shared: tuple["SharedExamples", ...] = ()
    """Validation and test examples that are trained on too, if all rows of a run were read."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """Rows, one for each location."""
        rows = [plain(each) for each in self.inspections]
        return [row for row in rows if isinstance(row, dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExamples:
    """Examples of a part whose input equals that of a training example in every number: what is
    measured on them says nothing about unseen data."""

    part: Split
    """The part, validation or test."""
    examples: int
    """Number of its examples."""
    trained: int
    """Number whose input is also that of a training example."""

    def __str__(self) -> str:
        """A warning in words."""
        return (
            f"{self.trained:,} of {self.examples:,} {self.part} examples are training examples "
            "too, with the same input: leave them out of one of the two"
        )


def shared_examples(
    config: DataConfig, on_progress: OnProgress = no_display
) -> tuple[SharedExamples, ...]:
    """Validation and test examples whose input is that of a training example, by part. Every
    example is read, and each training example takes 100 bytes of memory.

    Raises:
        ConfigError: if a file or an example cannot be read.
    """
    parts: tuple[Split, ...] = ("train", "validation", "test")
    sources: dict[Split, Source] = {
        part: open_source(config, part, seed=0)
        for part in parts
        if part != "validation" or config.has_validation
    }
    total, done = sum(map(len, sources.values())), 0
    trained: set[bytes] = set()
    found = []
    for part, source in sources.items():
        shared = 0
        for first in range(0, len(source), _READ_TOGETHER):
            indices = np.arange(first, min(first + _READ_TOGETHER, len(source)))
            rows = source.take(indices)["inputs"]
            digests = [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
            if part == "train":
                trained.update(digests)
            shared += sum(each in trained for each in digests)
            done += len(indices)
            on_progress(Progress(done=done, total=total))
        if part != "train":
            found.append(SharedExamples(part=part, examples=len(source), trained=shared))
    return tuple(each for each in found if each.trained)


_READ_TOGETHER = 1024
"""Examples that are read at once to compare them."""


def inspect(
    rows: Rows,
    *,
    run: ParquetConfig | None = None,
    verify: bool = False,
    on_progress: OnProgress = no_display,
) -> Inspection:
    """Inspect `rows`.

    Args:
        rows: the rows of the data set.
        run: requirements of a run, if the rows are those of one.
        verify: whether every row is read and decoded.
        on_progress: called with the number of verified rows.

    Raises:
        ConfigError: if files cannot be read at all.
    """
    schema = rows.schema
    image, label = image_column(schema), label_column(schema)
    if run is not None:
        image, label = None if run.feature_columns else run.image_column, run.label_column
    groups = _groups(rows) if isinstance(rows, ParquetRows) else None
    images = _images(rows, image) if image is not None else None
    classes = group_classes(rows, label) if label is not None else None
    # Filters leave rows out of a run, and only the run knows which.
    never_null = label if run is None or not run.filters else None
    broken = list(_unreadable(rows, image, never_null, on_progress)) if verify else []
    advice = list(_advice(rows, groups, images, run.reading if run else ReadingConfig()))
    is_mixed = run is not None and run.reading.shuffle == "rows" and run.reading.petastorm is None
    if about := parts_advice(rows.location):
        advice.append(about)
    if classes is not None and not is_mixed and (about := order_advice(classes)):
        advice.append(about)
    return Inspection(
        location=rows.location,
        kind=rows.kind,
        files=rows.files,
        size_bytes=rows.size_bytes,
        rows=len(rows),
        columns=_columns(rows),
        groups=groups,
        label_column=label,
        classes=named_classes(schema, label, classes) if label and classes else None,
        images=images,
        advice=tuple(advice),
        table=data_table(rows, image, label, min([224, *(images.median if images else ())])),
        verified_rows=len(rows) if verify else None,
        unreadable_rows=len(broken),
        unreadable=tuple(broken[:NAMED_ROWS]),
    )


def _columns(rows: Rows) -> tuple[ColumnFacts, ...]:
    if not isinstance(rows, ParquetRows):
        return tuple(ColumnFacts(name=each.name, type=str(each.type)) for each in rows.schema)
    stored: Counter[str] = Counter()
    compressions: dict[str, set[str]] = {}
    for file in dict.fromkeys(group.file for group in rows.found.groups):
        footer = footer_of("source", file)
        names = leaf_columns(footer.schema)
        for index in range(footer.metadata.num_row_groups):
            group = footer.metadata.row_group(index)
            for place, name in enumerate(names):
                column = group.column(place)
                stored[name] += column.total_compressed_size
                compressions.setdefault(name, set()).add(column.compression.lower())
    return tuple(
        ColumnFacts(
            name=each.name,
            type=str(each.type),
            decompressed_bytes=sum(group.bytes_of([each.name]) for group in rows.found.groups),
            stored_bytes=stored[each.name],
            compression="/".join(sorted(compressions.get(each.name, set()) - {"uncompressed"}))
            or None,
        )
        for each in rows.schema
    )


def _groups(rows: ParquetRows) -> GroupFacts:
    groups = rows.found.groups
    return GroupFacts(
        count=len(groups),
        fewest_rows=min(group.rows for group in groups),
        most_rows=max(group.rows for group in groups),
        largest_bytes=max(group.bytes_of(rows.schema.names) for group in groups),
    )


def _images(rows: Rows, column: str) -> ImageFacts | None:
    formats: Counter[str] = Counter()
    sizes, lengths = [], []
    bounds = [len(rows) * place // PLACES for place in range(PLACES + 1)]
    for begin, next_begin in pairwise(bounds):
        each = min(SAMPLED_IMAGES // PLACES, next_begin - begin)
        for table in rows.read(begin, begin + each):
            for content in encoded_images(table[column]):
                lengths.append(len(content))
                try:
                    with Image.open(io.BytesIO(content)) as image:
                        formats[image.format or "?"] += 1
                        sizes.append(image.size)
                except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                    formats["unreadable"] += 1
    if not sizes:
        return None
    sizes.sort(key=lambda size: size[0] * size[1])
    return ImageFacts(
        column=column,
        sampled=len(lengths),
        formats=tuple(name for name, _ in formats.most_common()),
        smallest=sizes[0],
        median=sizes[len(sizes) // 2],
        largest=sizes[-1],
        mean_bytes=float(np.mean(lengths)),
    )


def _unreadable(
    rows: Rows, image: str | None, label: str | None, on_progress: OnProgress
) -> Iterator[Unreadable]:
    """Every row without an image that can be decoded, or without a class."""
    at = 0
    for table in rows.read(0, len(rows)):
        reasons = [None] * len(table) if image is None else _undecodable(table[image])
        if label is not None and table[label].null_count:
            nulls = table[label].is_null().to_pylist()
            about = f"its class (column {label!r}) is null"
            reasons = [
                reason or (about if is_null else None)
                for reason, is_null in zip(reasons, nulls, strict=True)
            ]
        for row, reason in enumerate(reasons):
            if reason is not None:
                yield Unreadable(where=rows.name(at + row), why=reason)
        at += len(table)
        on_progress(Progress(done=at, total=len(rows)))


def _undecodable(column: pa.ChunkedArray) -> list[str | None]:
    """Why each image cannot be decoded; None for one that can."""
    content = list(encoded_images(column))
    reasons: list[str | None] = [None] * len(content)

    def decode(part: slice) -> None:
        for row in range(len(content))[part]:
            try:
                decoded(content[row], 1, 3)
            except UndecodableImage as error:
                reasons[row] = str(error)

    in_threads(decode, len(content))
    return reasons


def _advice(
    rows: Rows, groups: GroupFacts | None, images: ImageFacts | None, reading: ReadingConfig
) -> Iterator[str]:
    if groups is None:
        mixed = " --shuffle-seed 0" if isinstance(rows, ImageFolderRows) else ""
        yield (
            f"scalejax data convert SOURCE DESTINATION{mixed} writes this as Parquet, of which "
            "training reads many rows at once, mixed or in order."
        )
    elif isinstance(rows, ParquetRows):
        yield from _group_advice(rows, groups, reading)
    if images is not None and min(images.median) > 2 * 224:
        yield (
            f"the median image is {images.median[0]} x {images.median[1]}: decoding takes most of "
            "the input's time. scalejax data convert --image-size 256 makes them small once."
        )


def _group_advice(rows: ParquetRows, groups: GroupFacts, reading: ReadingConfig) -> Iterator[str]:
    total = sum(group.bytes_of(rows.schema.names) for group in rows.found.groups)
    kept = reading.memory_bytes // 2
    fewer = max(1, groups.most_rows * reading.memory_bytes // 64 // max(groups.largest_bytes, 1))
    if 2 * groups.largest_bytes > reading.memory_bytes:
        yield (
            f"a row group of {format_bytes(groups.largest_bytes)} is too large for "
            f"data.reading.memory_bytes ({format_bytes(reading.memory_bytes)}): "
            f"scalejax data convert --row-group-rows {fewer} makes them smaller."
        )
    elif total > kept and groups.largest_bytes > kept // 16:
        yield (
            f"row groups of {format_bytes(groups.largest_bytes)} are large: the "
            f"{format_bytes(total)} do not stay in memory, and a random row reads all of its "
            f'group. shuffle = "row_groups", or scalejax data convert --row-group-rows {fewer}.'
        )
    if groups.count < reading.window and len(rows) > 10 * reading.window:
        yield (
            f"{counted(groups.count, 'row group')}: fewer than the window of "
            f'{reading.window} that shuffle = "row_groups" mixes, and no more processes '
            "than that can each read their own; scalejax data convert --row-group-rows "
            f"{max(1, len(rows) // (8 * reading.window))} makes more."
        )
    middle = median(group.bytes_of(rows.schema.names) for group in rows.found.groups)
    if groups.count > MANY_GROUPS and middle < SMALL_GROUP_BYTES:
        rows_wanted = int(groups.most_rows * 16 * SMALL_GROUP_BYTES / max(middle, 1))
        yield (
            f"{groups.count} row groups of {format_bytes(middle)}: opening them takes longer than "
            f"reading them; scalejax data convert --row-group-rows {rows_wanted} makes fewer."
        )
