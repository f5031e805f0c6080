"""Fingerprints of the data files of a run, by which a resumed run checks that they are unchanged.

Knows no rows and no loop. Synthetic data sets, and those shipped with scalejax, have no files to
check.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from scalejax.config.data import (
    ArrayRecordConfig,
    DataConfig,
    ImageFolderConfig,
    NumpyConfig,
    OfFiles,
    TokensConfig,
)
from scalejax.config.parquet import ParquetConfig
from scalejax.core.errors import ConfigError
from scalejax.core.filesystem import DataFile, absolute_location, states_below
from scalejax.core.serialization import document, load, save
from scalejax.data.formats.array_record import record_files
from scalejax.data.formats.image_folder import image_files
from scalejax.data.formats.numpy import part_headers
from scalejax.data.formats.parquet import find_files
from scalejax.data.formats.tokens import token_files
from scalejax.training.record import RunFolder

Part = Literal["train", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """One file of a data set, or the folder of a class of images."""

    file: DataFile
    """Path, size and version of the file; of a folder, the total bytes of its images and the
    SHA-256 of their versions."""
    rows: int
    """Rows, images, records or tokens it holds, before filters."""
    listing: str | None = None
    """For a folder, the SHA-256 of the names and lengths of its images."""


@document("data_files")
@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFiles:
    """The files of a data set that hold rows, by part, in their order."""

    train: tuple[UsedFile, ...]
    """Training files."""
    test: tuple[UsedFile, ...]
    """Test files."""


def save_used_files(folder: RunFolder, data: DataConfig) -> None:
    """Save to `folder` the fingerprints of the files of `data`, if it has files."""
    if (used := used_files(data)) is not None:
        save(used, folder.data_files)


def refuse_other_files(folder: RunFolder, data: DataConfig) -> None:
    """Refuse to resume a run whose data files have changed since it began.

    Raises:
        ConfigError: naming the first file that is new, gone or changed.
    """
    if not folder.data_files.exists() or (now := used_files(data)) is None:
        return
    used = load(UsedFiles, folder.data_files)
    parts = (("data.train", used.train, now.train), ("data.test", used.test, now.test))
    for field, files_before, files_after in parts:
        before = {each.file.path: each for each in files_before}
        after = {each.file.path: each for each in files_after}
        for path in sorted(before | after):
            if before.get(path) != after.get(path):
                what = "is new" if path not in before else "is gone" if path not in after else ""
                raise ConfigError(
                    f"{str(folder.path)!r} holds a run on other data: {path} of {field} "
                    f"{what or 'has changed'} since it began. Bring the files back as they were, "
                    "or begin a new run in another folder."
                )


def used_files(data: DataConfig) -> UsedFiles | None:
    """Fingerprints of the files of `data` as they are now; None if it has no files."""
    if not isinstance(data, OfFiles):
        return None
    return UsedFiles(train=tuple(_of_part(data, "train")), test=tuple(_of_part(data, "test")))


def _of_part(data: OfFiles, part: Part) -> Iterable[UsedFile]:
    match data:
        case ParquetConfig():
            return _of_parquet(data, part)
        case ImageFolderConfig():
            return _of_folders(data, part)
        case NumpyConfig():
            return _of_arrays(data, part)
        case TokensConfig():
            return (_used(each.file, each.count) for each in token_files(data, part))
        case ArrayRecordConfig():
            return (_used(each.file, each.count) for each in record_files(data, part))


def _of_parquet(data: ParquetConfig, part: Part) -> Iterable[UsedFile]:
    rows: dict[DataFile, int] = {}
    location = absolute_location(getattr(data, part))
    for group in find_files(f"data.{part}", location, ()).groups:
        rows[group.file] = rows.get(group.file, 0) + group.rows
    return (UsedFile(file=file, rows=count) for file, count in rows.items())


def _of_folders(data: ImageFolderConfig, part: Part) -> Iterable[UsedFile]:
    """One fingerprint for the folder of each class, in place of its files."""
    files = image_files(data, part)
    location = absolute_location(files.location)
    paths = map(files.path, range(len(files)))
    states = states_below(f"data.{part}", location, paths)
    for name, count in zip(files.classes, files.counts, strict=True):
        listing, contents, size_bytes, is_known = hashlib.sha256(), hashlib.sha256(), 0, True
        for path, length, version in islice(states, count):
            listing.update(repr((path, length)).encode())
            contents.update(repr((path, length, version)).encode())
            size_bytes += length
            is_known = is_known and version is not None
        version = contents.hexdigest() if is_known else None
        file = DataFile(path=f"{location}/{name}", size_bytes=size_bytes, version=version)
        yield UsedFile(file=file, rows=count, listing=listing.hexdigest())


def _of_arrays(data: NumpyConfig, part: Part) -> Iterable[UsedFile]:
    headers = part_headers(data, part)
    files = dict.fromkeys((headers.inputs.file, headers.targets.file))  # one, of an .npz
    return (_used(file, headers.inputs.shape[0]) for file in files)


def _used(file: DataFile, rows: int) -> UsedFile:
    """The fingerprint of `file` with an absolute path, independent of the working directory."""
    return UsedFile(file=replace(file, path=absolute_location(file.path)), rows=rows)
