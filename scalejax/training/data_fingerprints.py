"""Fingerprints of the data files of a run, by which a resumed run checks that they are unchanged.

Knows no rows and no loop. Synthetic data sets, and those shipped with scalejax, have no files to
check.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalejax.config.data import DataConfig
from scalejax.core.errors import ConfigError
from scalejax.core.filesystem import DataFile, absolute_location
from scalejax.core.serialization import document, load
from scalejax.data.datasets import reader_of
from scalejax.data.source import Split
from scalejax.training.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """One file of a data set, or the folder of a class of images."""

    file: DataFile
    """Path, size and version of the file; for a folder, the total bytes of its images and the
    SHA-256 of their versions."""
    rows: int
    """Rows, images, records or tokens it holds, before filters."""
    listing: str | None = None
    """For a folder, the SHA-256 of the names and lengths of its images; for a Parquet file, that of
    its footer; None for others, and for Parquet in runs of earlier versions."""


@document("data_files")
@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFiles:
    """The files of a data set that hold rows, by part, in their order."""

    train: tuple[UsedFile, ...]
    """Training files."""
    test: tuple[UsedFile, ...]
    """Test files."""
    validation: tuple[UsedFile, ...] = ()
    """Validation files; empty if validation examples are held out of the training files."""


def refuse_other_files(folder: RunFolder, data: DataConfig) -> None:
    """Refuse to resume a run whose data files have changed since it began.

    Raises:
        ConfigError: naming the first file that is new, gone or changed.
    """
    if not folder.data_files.exists() or (now := used_files(data)) is None:
        return
    used = load(UsedFiles, folder.data_files)
    for part in data.parts:
        field, files_before, files_after = f"data.{part}", getattr(used, part), getattr(now, part)
        before = {each.file.path: each for each in files_before}
        after = {each.file.path: each for each in files_after}
        for path in sorted(before | after):
            if not _is_same(before.get(path), after.get(path)):
                what = "is new" if path not in before else "is gone" if path not in after else ""
                raise ConfigError(
                    f"{str(folder.path)!r} holds a run on other data: {path} of {field} "
                    f"{what or 'has changed'} since it began. Bring the files back as they were, "
                    "or begin a new run in another folder."
                )


def fingerprints_to_keep(folder: RunFolder, data: DataConfig) -> UsedFiles | None:
    """Fingerprints of the files of `data`, for the folder of its run; None if it has no files.
    What an earlier version of scalejax left out of those in the folder stays out, as the manifests
    of its checkpoints have their hash.

    Raises:
        ConfigError: if the fingerprints in the folder are damaged.
    """
    if (now := used_files(data)) is None or not folder.data_files.exists():
        return now
    before = load(UsedFiles, folder.data_files)

    def kept(olds: tuple[UsedFile, ...], news: tuple[UsedFile, ...]) -> tuple[UsedFile, ...]:
        known = {each.file.path: each for each in olds}
        pairs = [(known.get(each.file.path), each) for each in news]
        return tuple(old if old and _is_same(old, new) else new for old, new in pairs)

    return UsedFiles(
        train=kept(before.train, now.train),
        test=kept(before.test, now.test),
        validation=kept(before.validation, now.validation),
    )


def _is_same(before: UsedFile | None, after: UsedFile | None) -> bool:
    if before is not None and after is not None and before.listing is None:
        after = replace(after, listing=None)
    return before == after


def used_files(data: DataConfig) -> UsedFiles | None:
    """Fingerprints of the files of `data` as they are now; None if it has no files."""
    if not data.is_of_files:
        return None
    return UsedFiles(
        train=tuple(_of_part(data, "train")),
        test=tuple(_of_part(data, "test")),
        validation=tuple(_of_part(data, "validation")) if "validation" in data.parts else (),
    )


def _of_part(data: DataConfig, part: Split) -> Iterator[UsedFile]:
    """The fingerprints of one part, independent of the working directory."""
    for file, rows, listing in reader_of(data).files(data, part):
        file = replace(file, path=absolute_location(file.path))
        yield UsedFile(file=file, rows=rows, listing=listing)
