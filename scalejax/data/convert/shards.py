"""The plan that splits rows into Parquet files, and the atomic writing of one file.

A file is written under another name, flushed, and renamed, so that an existing file is complete.
Its content depends only on the plan.
"""

import contextlib
import fcntl
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import document
from scalejax.data.convert.rows import Rows, encoded_images
from scalejax.data.transforms.images import NO_IMAGE, UndecodableImage, why_undecodable

# Checking and downscaling of encoded images: bytes in, bytes out.


def prepared(encoded: bytes, shorter_side: int | None, *, jpeg_quality: int) -> bytes:
    """The encoded image unchanged, if it can be decoded; a larger one is turned upright and scaled
    down to a shorter side of `shorter_side`.

    A JPEG becomes a JPEG; others become PNG, which is lossless. Scaling is that of training:
    bilinear, over all pixels that a new one covers.

    Raises:
        UndecodableImage: if it cannot be decoded, saying why.
    """
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip it at 255
                raise UndecodableImage(f"Pillow's mode {image.mode}: more than 8 bits a pixel")
            shortest, kind = min(image.size), image.format
            is_kept = shorter_side is None or shortest <= shorter_side
            # A JPEG that is only checked is decoded at an eighth, which reads all its bytes, too.
            least = 1 if is_kept else 2 * (shorter_side or 1)
            image.draft(None, (least, least))
            image.load()
            if is_kept or shorter_side is None:
                return encoded
            upright = ImageOps.exif_transpose(image)
            kept = upright.convert("L" if upright.mode in ("L", "1") else "RGB")
    except NO_IMAGE as error:
        raise UndecodableImage(why_undecodable(error)) from error
    share = shorter_side / min(kept.size)
    width, height = (max(shorter_side, round(side * share)) for side in kept.size)
    kept = kept.resize((width, height), Image.Resampling.BILINEAR)
    # A file rather than a BytesIO, for which Pillow would not release the lock between threads.
    with os.fdopen(os.memfd_create("image"), "w+b") as file:
        if kind == "JPEG":
            kept.save(file, "JPEG", quality=jpeg_quality)
        else:
            kept.save(file, "PNG")
        file.seek(0)
        return file.read()


Compression = Literal["snappy", "zstd", "gzip", "none"]
"""Compression of columns; it hardly shrinks encoded images."""
Unreadable = Literal["refuse", "skip"]
"""How rows whose image cannot be decoded are handled."""
SKIPPED = "scalejax.skipped_rows"
"""Metadata key of a file for the number of unreadable rows that were left out of it."""
PIECES_AHEAD = 2
"""Pieces of a few rows that are prepared while one is written."""


@document("conversion")
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the content of the files depends on."""

    source: str
    """Location of the rows."""
    fingerprint: str
    """Fingerprint of their files."""
    images: str | None
    """Array of images of an .npz."""
    labels: str | None
    """Array or file of classes."""
    shuffle_seed: int | None
    """Seed that shuffles a folder of images."""
    rows: int
    """Number of rows."""
    files: int
    """Number of files to split them into."""
    row_group_rows: int
    """Rows of a row group."""
    image_column: str | None
    """Column of images; None if there is no such column."""
    image_size: int | None
    """Shorter side to which larger images are scaled down; None to keep them as they are."""
    jpeg_quality: int
    """Quality of re-encoded JPEG."""
    compression: Compression
    """Compression of columns."""
    unreadable: Unreadable
    """How rows whose image cannot be decoded are handled."""

    def bounds(self, index: int) -> tuple[int, int]:
        """First row of a file, and the row after its last; row counts differ by at most one."""
        return self.rows * index // self.files, self.rows * (index + 1) // self.files

    def name(self, index: int) -> str:
        """Name of a file, as Hugging Face `datasets` names them."""
        return f"part-{index:05d}-of-{self.files:05d}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCallbacks:
    """Callbacks that report the progress of writing."""

    rows: Callable[[int], None]
    """Called with the number of rows that are done."""
    skipped: Callable[[str], None]
    """Called with position and error of each skipped row."""


def write_shard(
    plan: Plan,
    rows: Rows,
    index: int,
    path: Path,
    *,
    threads: Executor,
    told: ConvertCallbacks,
) -> None:
    """Write file `index` of the plan to `path`.

    Raises:
        ConfigError: if a row cannot be read, naming it, or the file cannot be written.
    """
    draft, skipped = path.with_name(f".{path.name}.draft"), 0
    with _naming(path), _locked(draft, path) as file:
        try:
            file.truncate(0)  # drop what a killed process has left
            with pq.ParquetWriter(
                file, rows.schema, compression=plan.compression, write_page_checksum=True
            ) as writer:
                for table, left_out in _groups(plan, rows, index, threads, told):
                    skipped += left_out
                    if len(table):
                        writer.write_table(table, plan.row_group_rows)
                writer.add_key_value_metadata({SKIPPED: str(skipped)})
            file.flush()
            os.fsync(file.fileno())  # a name that survives a power cut then has its content
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _locked(draft: Path, path: Path) -> IO[bytes]:
    """The draft, open and locked, and still of this name: another process may have finished it."""
    while True:
        flags = os.O_APPEND | os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
        file = os.fdopen(os.open(draft, flags, 0o666), "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), draft.stat()):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"{path} is being written by another process.") from error
        file.close()


def _groups(
    plan: Plan, rows: Rows, index: int, threads: Executor, told: ConvertCallbacks
) -> Iterator[tuple[pa.Table, int]]:
    """The rows of a file in whole row groups, the last one smaller; and how many are left out."""
    held, count = rows.schema.empty_table(), 0
    for piece, left_out in _pieces(plan, rows, index, threads, told):
        held, count = pa.concat_tables([held, piece]), count + left_out
        if whole := len(held) - len(held) % plan.row_group_rows:
            yield held.slice(0, whole), count
            held, count = held.slice(whole), 0
        told.rows(len(piece) + left_out)
    yield held, count


def written(path: Path) -> tuple[int, int]:
    """Rows of a file, and rows that were left out of it.

    Raises:
        ConfigError: if `convert` did not write the file.
    """
    try:
        about = pq.read_metadata(path)
        return about.num_rows, int((about.metadata or {})[SKIPPED.encode()])
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} is not as scalejax data convert wrote it ({error}); remove it, and the same "
            "command writes it again."
        ) from error


def _pieces(
    plan: Plan, rows: Rows, index: int, threads: Executor, told: ConvertCallbacks
) -> Iterator[tuple[pa.Table, int]]:
    """The rows of a file as they are to be written, some at a time, and how many of them are left
    out; images are prepared in parallel, some pieces ahead."""
    waiting: deque[tuple[pa.Table, int, list[Future[bytes]]]] = deque()
    begin, end = plan.bounds(index)
    prepare = partial(prepared, shorter_side=plan.image_size, jpeg_quality=plan.jpeg_quality)
    try:
        for table in rows.read(begin, end):
            images = () if plan.image_column is None else encoded_images(table[plan.image_column])
            waiting.append((table, begin, [threads.submit(prepare, image) for image in images]))
            begin += len(table)
            if len(waiting) > PIECES_AHEAD:
                yield _finished(plan, rows, told, *waiting.popleft())
        while waiting:
            yield _finished(plan, rows, told, *waiting.popleft())
    finally:
        for _, _, futures in waiting:
            for future in futures:
                future.cancel()


def _finished(
    plan: Plan,
    rows: Rows,
    told: ConvertCallbacks,
    table: pa.Table,
    begin: int,
    images: list[Future[bytes]],
) -> tuple[pa.Table, int]:
    """The table with its images prepared, without the rows that are left out; and their number."""
    if plan.image_column is None:
        return table, 0
    contents: list[bytes | None] = []
    for row, image in enumerate(images):
        try:
            contents.append(image.result())
        except UndecodableImage as error:
            about = f"{rows.name(begin + row)}: no image that can be read ({error})"
            if plan.unreadable == "refuse":
                raise ConfigError(
                    f"{about}; repair it, or leave such rows out with --unreadable skip."
                ) from error
            told.skipped(about)
            contents.append(None)
    column = table.schema.get_field_index(plan.image_column)
    field = table.schema.field(column)
    values = pa.array(contents, pa.binary())
    if pa.types.is_struct(field.type):
        names = [each.name for each in field.type]
        old = table[plan.image_column].combine_chunks()
        parts = [values if name == "bytes" else old.field(name) for name in names]
        parts = [
            part.cast(field.type.field(name).type) for part, name in zip(parts, names, strict=True)
        ]
        image_values = pa.StructArray.from_arrays(parts, fields=list(field.type))
    else:
        image_values = values.cast(field.type)
    kept = [row for row, content in enumerate(contents) if content is not None]
    table = table.set_column(column, field, image_values)
    return (table.take(kept) if len(kept) < len(table) else table), len(contents) - len(kept)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{path} cannot be written ({error}). Files already written are kept; once there "
            "is room, the same command continues with the rest."
        ) from error
