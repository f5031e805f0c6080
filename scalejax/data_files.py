"""The files a run is trained on, as they were when it began: a resumed run asks for the same.

Knows no rows and no loop; of other data sets than Parquet there is nothing to keep.
"""

from dataclasses import dataclass

from scalejax.data_config import DataConfig
from scalejax.documents import load, save
from scalejax.errors import ConfigError
from scalejax.locations import DataFile, absolute_location
from scalejax.parquet_files import find_files
from scalejax.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """One file of a data set."""

    file: DataFile
    """Where it is, and what tells it from another in its place."""
    rows: int
    """Rows it holds, before filters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFiles:
    """The files of a data set that hold rows, by part, in their order."""

    train: tuple[UsedFile, ...]
    """Trained on."""
    test: tuple[UsedFile, ...]
    """Evaluated on."""


def save_used_files(folder: RunFolder, data: DataConfig) -> None:
    """Keep in `folder` which files `data` has now, if it is of files."""
    if data.name == "parquet":
        used = UsedFiles(train=_used("train", data.train), test=_used("test", data.test))
        save(used, folder.data_files)


def refuse_other_files(folder: RunFolder, data: DataConfig) -> None:
    """Refuse to go on with a run whose files are others than they were when it began.

    Raises:
        ConfigError: naming the first file that is new, gone or changed.
    """
    if data.name != "parquet" or not folder.data_files.exists():
        return
    used = load(UsedFiles, folder.data_files)
    parts = (
        ("data.train", used.train, _used("train", data.train)),
        ("data.test", used.test, _used("test", data.test)),
    )
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


def _used(part: str, location: str) -> tuple[UsedFile, ...]:
    rows: dict[DataFile, int] = {}
    for group in find_files(f"data.{part}", absolute_location(location), ()).groups:
        rows[group.file] = rows.get(group.file, 0) + group.rows
    return tuple(UsedFile(file=file, rows=count) for file, count in rows.items())
