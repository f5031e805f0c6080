"""Opens files of any kind that can be converted, as rows of columns.

Knows which module reads which kind of file; nothing of the use of the rows.
"""

from pathlib import Path

from scalejax.core.errors import ConfigError, refusal
from scalejax.data.convert.rows import Rows, RowsOptions

KINDS = (
    "rows are read from Parquet (*.parquet, also a folder, glob or URL), a folder with a folder of "
    "images for each class, .npz and .npy, IDX (*-ubyte, *.idx, also .gz), and .csv"
)
"""Accepted kinds of files, for refusals."""


def open_rows(location: str, options: RowsOptions | None = None) -> Rows:
    """The rows at `location`: Parquet (also a folder, glob or URL), a folder with a folder of
    images for each class, NumPy's .npz and .npy, IDX (the format of MNIST), CSV.

    Raises:
        ConfigError: if there is nothing readable, or `options` do not apply to it.
    """
    # Imported here, so that one kind of file does not wait for the libraries of another.
    from scalejax.data.convert.arrays import ArrayRows, is_array
    from scalejax.data.convert.csv import CsvRows
    from scalejax.data.convert.image_folder import ImageFolderRows, is_image_folder
    from scalejax.data.convert.parquet import ParquetRows

    options, on_disk = options or RowsOptions(), location.removeprefix("file://")
    path = Path(on_disk)
    if "://" not in on_disk and not any(sign in on_disk for sign in "*?["):
        if not path.exists():
            raise ConfigError(refusal("source", location, "there is no such file or folder"))
        if is_array(path):
            _refuse(options, path, ("shuffle_seed",))
            return ArrayRows(path, images=options.images, labels=options.labels)
        if is_image_folder(path):
            _refuse(options, path, ("images", "labels"))
            return ImageFolderRows(path, shuffle_seed=options.shuffle_seed)
        _refuse(options, path, ("images", "labels", "shuffle_seed"))
        if path.suffix == ".csv" or path.name.endswith(".csv.gz"):
            return CsvRows(path)
        if path.is_file() and path.suffix != ".parquet" and not _begins_as_parquet(path):
            raise ConfigError(refusal("source", location, KINDS))
    return ParquetRows(location)


def _begins_as_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _refuse(options: RowsOptions, path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None:
            accepted = f"it does not apply to files such as {path}"
            raise ConfigError(refusal(name, value, accepted))
