"""Resumable conversion of rows to Parquet files.

The folder holds the plan by which its files were written. A second call with the same plan, or with
one that now skips unreadable rows, resumes with the missing files; a call with any other plan is
refused.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from scalejax.core import serialization
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import MIB
from scalejax.data.convert.open import open_rows
from scalejax.data.convert.rows import Rows, RowsOptions, encoded_images
from scalejax.data.convert.shards import (
    Compression,
    ConvertCallbacks,
    Plan,
    Unreadable,
    prepared,
    write_shard,
    written,
)
from scalejax.data.formats.parquet_columns import is_image
from scalejax.data.transforms.images import UndecodableImage

PLAN = "_conversion.json"
"""Name of the file that holds the plan; readers of Parquet ignore such names."""
FILE_BYTES, ROW_GROUP_BYTES = 64 * MIB, 4 * MIB
"""Approximate bytes of a file and of a row group, if their rows are not given: a killed conversion
loses at most a file; a batch of rows in any order reads a row group for each of its rows."""
LEAST_ROWS = 16
"""Smallest number of rows of a row group, and of a file."""
SAMPLED_ROWS = 64
"""Rows from which the bytes of a row are estimated."""
NAMED_ROWS = 5
"""Left-out rows that are named; the others are only counted."""

Shown = Callable[[int, int], contextlib.AbstractContextManager[OnProgress]]
"""Makes a progress display from the number of all rows and of those already done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How files are written; None for a default that suits the rows."""

    files: int | None = None
    """Number of files, of equally many rows."""
    row_group_rows: int | None = None
    """Rows of a row group."""
    image_size: int | None = None
    """Shorter side to which larger images are scaled down, once; None to keep them as they are."""
    jpeg_quality: int = 95
    """Quality of re-encoded JPEG: 1 to 95."""
    compression: Compression = "snappy"
    """Compression of columns."""
    unreadable: Unreadable = "refuse"
    """How rows whose image cannot be decoded are handled."""
    overwrite: bool = False
    """Whether files of another conversion are removed first."""

    def __post_init__(self) -> None:
        for name in ("files", "row_group_rows", "image_size"):
            require_at_least(name, getattr(self, name), 1)
        if not 1 <= self.jpeg_quality <= 95:
            raise ConfigError(refusal("jpeg_quality", self.jpeg_quality, "it must be from 1 to 95"))


@document("conversion")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult(Tabular):
    """Result of a conversion."""

    rows: int
    """Rows in all files."""
    skipped_rows: int
    """Rows that were left out because they cannot be read."""
    files: int
    """Number of files."""
    files_before: int
    """Number of files that earlier calls had written."""
    skipped: tuple[str, ...]
    """The first rows that this call left out, and why."""
    size_bytes: int
    """Bytes of all files."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """One row of all figures."""
        return [asdict(self)]


def plan_for(rows: Rows, options: RowsOptions, wanted: ConvertOptions) -> Plan:
    """The plan by which `rows` are split and written, independent of the machine.

    Raises:
        ConfigError: if there are fewer rows than files, or no images to scale down.
    """
    image = next((each.name for each in rows.schema if is_image(each.type)), None)
    if image is None and wanted.image_size is not None:
        raise ConfigError(
            refusal("image_size", wanted.image_size, f"{rows.location} has no images")
        )
    if not len(rows):
        raise ConfigError(refusal("source", rows.location, "it holds no rows"))
    row_bytes = _row_bytes(rows, image, wanted)
    most = -(-len(rows) // LEAST_ROWS)
    files = wanted.files or max(1, min(round(len(rows) * row_bytes / FILE_BYTES), most))
    if files > len(rows):
        raise ConfigError(refusal("files", files, f"{rows.location} has {len(rows)} rows"))
    return Plan(
        source=os.path.abspath(rows.location) if "://" not in rows.location else rows.location,
        fingerprint=rows.fingerprint,
        images=options.images,
        labels=options.labels,
        shuffle_seed=options.shuffle_seed,
        rows=len(rows),
        files=files,
        row_group_rows=wanted.row_group_rows or _even_rows(-(-len(rows) // files), row_bytes),
        image_column=image,
        image_size=wanted.image_size,
        jpeg_quality=wanted.jpeg_quality,
        compression=wanted.compression,
        unreadable=wanted.unreadable,
    )


def _even_rows(file_rows: int, row_bytes: int) -> int:
    """Rows of a row group of about the usual size, such that the row groups of a file are alike."""
    usual = max(LEAST_ROWS, ROW_GROUP_BYTES // row_bytes)
    return -(-file_rows // -(-file_rows // usual))


def _row_bytes(rows: Rows, image: str | None, wanted: ConvertOptions) -> int:
    """Approximate bytes of a written row, estimated from the first ones."""
    count, size = min(SAMPLED_ROWS, len(rows)), 0
    for table in rows.read(0, count):
        size += table.nbytes
        for content in encoded_images(table[image]) if image is not None else ():
            with contextlib.suppress(UndecodableImage):
                small = prepared(content, wanted.image_size, jpeg_quality=wanted.jpeg_quality)
                size += len(small) - len(content)
    return max(1, size // count)


def convert(
    source: str,
    destination: Path,
    *,
    options: RowsOptions | None = None,
    wanted: ConvertOptions | None = None,
    workers: int | None = None,
    shown: Shown = lambda total, done: contextlib.nullcontext(no_display),
) -> ConversionResult:
    """Write the rows of `source` to `destination`: a folder, or a single file, *.parquet.

    Args:
        source: location of the rows.
        destination: where to write them.
        options: what the source does not say about itself.
        wanted: how to write the files.
        workers: threads that prepare images; None for as many as there are cores.
        shown: makes the progress display.

    Raises:
        ConfigError: if a row cannot be read, or a file cannot be written, or the destination holds
            something else.
    """
    options, wanted = options or RowsOptions(), wanted or ConvertOptions()
    require_at_least("workers", workers, 1)
    rows = open_rows(source, options)
    is_file = destination.suffix == ".parquet"
    if is_file:
        if wanted.files not in (None, 1):
            accepted = f"{destination} is one file; name a folder, or leave it out"
            raise ConfigError(refusal("files", wanted.files, accepted))
        wanted = replace(wanted, files=1)
    plan = plan_for(rows, options, wanted)
    paths = _admitted(destination, plan, wanted.overwrite)
    missing = [index for index, path in enumerate(paths) if not path.exists()]
    left = sum(end - begin for begin, end in map(plan.bounds, missing))
    count = workers or machine_cores()
    skipped: list[str] = []

    def on_skipped(about: str) -> None:
        if len(skipped) < NAMED_ROWS:
            skipped.append(about)

    done = plan.rows - left

    with ThreadPoolExecutor(count) as threads, shown(plan.rows, done) as on_progress:

        def on_rows(count: int) -> None:
            nonlocal done
            done += count
            on_progress(Progress(done=done, total=plan.rows))

        told = ConvertCallbacks(rows=on_rows, skipped=on_skipped)
        for index in missing:
            write_shard(plan, rows, index, paths[index], threads=threads, told=told)
    found = [written(path) for path in paths]
    return ConversionResult(
        rows=sum(each for each, _ in found),
        skipped_rows=sum(count for _, count in found),
        files=plan.files,
        files_before=plan.files - len(missing),
        skipped=tuple(skipped),
        size_bytes=sum(path.stat().st_size for path in paths),
    )


def _admitted(destination: Path, plan: Plan, overwrite: bool) -> list[Path]:
    """The files to write, in a folder that holds this plan and no files of another.

    Raises:
        ConfigError: if the folder holds something else, or cannot be written.
    """
    if destination.suffix == ".parquet":
        serialization.require_writable("destination", destination)
        if destination.exists():
            if not overwrite:
                accepted = "it already exists; --overwrite replaces it"
                raise ConfigError(refusal("destination", str(destination), accepted))
            destination.unlink()
        return [destination]
    serialization.require_writable_folder("destination", destination)
    paths = [destination / plan.name(index) for index in range(plan.files)]
    if overwrite:
        _remove_conversion(destination)
    if (destination / PLAN).exists():
        before = serialization.load(Plan, destination / PLAN)
        if (before.unreadable, plan.unreadable) == ("refuse", "skip"):
            before = replace(before, unreadable="skip")  # the complete files left no row out
        _require_same(before, plan, destination)
        serialization.save(plan, destination / PLAN)
    elif found := sorted(destination.glob("**/*.parquet")):
        accepted = (
            f"it holds {found[0].relative_to(destination)}, which no known conversion wrote, and "
            "which would be read with the new files; name another folder"
        )
        raise ConfigError(refusal("destination", str(destination), accepted))
    else:
        serialization.save(plan, destination / PLAN)
    return paths


def _remove_conversion(folder: Path) -> None:
    """Remove what a conversion has written, its plan last."""
    if (folder / PLAN).exists():
        for pattern in ("part-*-of-*.parquet", ".part-*-of-*.parquet.draft", PLAN):
            for path in folder.glob(pattern):
                path.unlink()


def _require_same(before: Plan, plan: Plan, folder: Path) -> None:
    derived = ("rows", "files", "row_group_rows")  # differ if another field does: named last
    for name in sorted((each.name for each in fields(Plan)), key=lambda name: name in derived):
        old, new = getattr(before, name), getattr(plan, name)
        if old != new:
            what = (
                f"the files of {plan.source} have changed since"
                if name == "fingerprint"
                else f"{name}={old!r}, and now it is {new!r}"
            )
            accepted = (
                f"it holds a conversion of another kind ({what}); --overwrite removes that first"
            )
            raise ConfigError(refusal("destination", str(folder), accepted))
