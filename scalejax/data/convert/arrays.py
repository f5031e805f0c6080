"""Rows of NumPy files (.npz, .npy) and of IDX files, the format of MNIST and Fashion-MNIST.

Files are read as a stream, compressed or not: only a few rows are in memory at a time.
"""

import gzip
import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import pyarrow as pa
from PIL import Image

from scalejax.core.errors import ConfigError, refusal, shortened, unknown_name
from scalejax.data.convert.rows import CHUNK_BYTES, IMAGE, fingerprint, hugging_face
from scalejax.data.formats.npy_headers import BAD_ZIP, read_header
from scalejax.data.formats.numpy import PAIRS

_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""NumPy's names for the types of IDX (yann.lecun.com/exdb/mnist, "the IDX file format")."""
MOST_NUMBERS = 4096
"""Largest number of columns that a row of numbers may become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array in a file."""

    path: Path
    """The file."""
    member: str | None
    """Name of the array in an .npz; None for other files."""
    shape: tuple[int, ...]
    """Its shape, rows first."""
    dtype: np.dtype
    """Its type."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    def chunks(self, begin: int, end: int, rows: int) -> Iterator[np.ndarray]:
        """Rows `begin` to `end` - 1, `rows` at a time."""
        row_bytes = self.dtype.itemsize * math.prod(self.row_shape)
        with _naming(self.path), _opened(self.path, self.member) as file:
            _header(file, self.path)
            skipped = begin * row_bytes
            while skipped:
                skipped -= len(_exactly(file, min(skipped, CHUNK_BYTES)))
            for first in range(begin, end, rows):
                count = min(rows, end - first)
                content = _exactly(file, count * row_bytes)
                yield np.frombuffer(content, self.dtype).reshape(count, *self.row_shape)


def is_array(path: Path) -> bool:
    """Whether the name is that of a file of arrays."""
    name = path.name.removesuffix(".gz")
    return path.suffix in (".npz", ".npy") or name.endswith(("-ubyte", ".idx"))


class ArrayRows:
    """Images, encoded as PNG, or rows of numbers; and their classes.

    For an .npz, `names` are those of the two arrays and `stored_names` those of all.
    """

    def __init__(self, path: Path, *, images: str | None, labels: str | None) -> None:
        self.location, self.kind = str(path), "NumPy" if path.suffix[:3] == ".np" else "IDX"
        self.names: tuple[str, str] | None = None
        self.stored_names: tuple[str, ...] = ()
        if path.suffix == ".npz":
            arrays = _arrays_of(path)
            self.names, self.stored_names = _pair_of(path, arrays, images, labels), tuple(arrays)
            self._values, self._labels = (arrays[name] for name in self.names)
            self.kind = "NumPy, {} and {}".format(*self.names)
        else:
            if images is not None:
                accepted = f"{path} holds one array; only those of an .npz have names"
                raise ConfigError(refusal("images", images, accepted))
            self._values, self._labels = stored(path), _labels_beside(path, labels)
        count = self._values.shape[:1]
        if self._labels.shape not in (count, (*count, 1)):  # the latter in some of keras.datasets
            accepted = (
                f"{self._labels.path} holds {self._labels.shape} of them, and "
                f"{self._values.path} rows of {self._values.shape}"
            )
            raise ConfigError(refusal("labels", labels, accepted))
        if self._labels.dtype.kind not in "iub":
            accepted = f"classes are integers, and these are {self._labels.dtype}"
            raise ConfigError(refusal("labels", labels, accepted))
        paths = dict.fromkeys((self._values.path, self._labels.path))
        self.files, self.fingerprint = len(paths), fingerprint(paths)
        self.size_bytes = sum(each.stat().st_size for each in paths)
        self.schema = hugging_face(self._schema())

    def _schema(self) -> pa.Schema:
        shape, dtype = self._values.row_shape, self._values.dtype
        label = pa.field("label", pa.int64())
        if 0 in shape:
            accepted = f"rows must not be empty, but this array is of {list(self._values.shape)}"
            raise ConfigError(refusal("source", self.location, accepted))
        if len(shape) in (2, 3):
            channels = shape[2] if len(shape) == 3 else 1
            if dtype != np.uint8 or channels not in (1, 3):
                accepted = (
                    f"images are uint8 of [rows, height, width] or [rows, height, width, 1 or 3], "
                    f"and this array is {dtype} of {list(self._values.shape)}"
                )
                raise ConfigError(refusal("source", self.location, accepted))
            return pa.schema([pa.field("image", IMAGE), label])
        count = math.prod(shape)
        if len(shape) > 3 or count > MOST_NUMBERS or dtype.kind not in "iufb":
            accepted = (
                f"rows of up to {MOST_NUMBERS} numbers or images are read, and this array is "
                f"{dtype} of {list(self._values.shape)}"
            )
            raise ConfigError(refusal("source", self.location, accepted))
        type_ = pa.from_numpy_dtype(dtype.newbyteorder("="))
        return pa.schema([*(pa.field(f"feature_{i}", type_) for i in range(count)), label])

    def __len__(self) -> int:
        return self._values.shape[0]

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order, some at a time."""
        row_bytes = self._values.dtype.itemsize * math.prod(self._values.row_shape)
        rows = max(1, CHUNK_BYTES // row_bytes)
        chunks = self._values.chunks(begin, end, rows), self._labels.chunks(begin, end, rows)
        for values, labels in zip(*chunks, strict=True):
            if "image" in self.schema.names:
                encoded = [{"bytes": _png(each), "path": None} for each in values]
                columns = [pa.array(encoded, IMAGE)]
            else:
                native = values.astype(values.dtype.newbyteorder("="))
                columns = [pa.array(column.copy()) for column in native.reshape(len(values), -1).T]
            columns.append(pa.array(labels.reshape(-1).astype(np.int64)))
            yield pa.Table.from_arrays(columns, schema=self.schema)

    def name(self, row: int) -> str:
        """File and row."""
        return f"{self.location}, row {row}"


def _png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[2] == 1 else image).save(
        file, "PNG"
    )
    return file.getvalue()


def _arrays_of(path: Path) -> dict[str, StoredArray]:
    """The arrays of an .npz, by name."""
    with _naming(path), zipfile.ZipFile(path) as file:
        names = [name.removesuffix(".npy") for name in file.namelist()]
    return {name: stored(path, f"{name}.npy") for name in names}


def _pair_of(
    path: Path, arrays: dict[str, StoredArray], images: str | None, labels: str | None
) -> tuple[str, str]:
    """Which array holds the images and which the classes: as given, by the names that training
    looks for, or by elimination."""
    for field, name in (("images", images), ("labels", labels)):
        if name is not None and name not in arrays:
            raise ConfigError(unknown_name(field, name, arrays))
    for part in ("train", "test"):
        for pair in PAIRS:
            x, y = (name.replace("{part}", part) for name in pair)
            if {x, y} <= set(arrays) and images in (None, x) and labels in (None, y):
                return x, y
    listed = ", ".join(f"{name} {list(each.shape)}" for name, each in arrays.items())
    found = []
    for field, name, has_rows in (("images", images, True), ("labels", labels, False)):
        fitting = [each for each in arrays if (len(arrays[each].shape) > 1) == has_rows]
        if name is None and len(fitting) != 1:
            example = (fitting or list(arrays) or ["NAME"])[0]
            accepted = f"{path} holds {listed}; name one, such as --{field} {example}"
            raise ConfigError(refusal(field, name, accepted))
        found.append(name or fitting[0])
    return found[0], found[1]


def _labels_beside(path: Path, labels: str | None) -> StoredArray:
    """The classes of the images in an IDX file: in the file `labels`, or that of MNIST's naming."""
    beside = path.name.replace("images", "labels").replace("idx3", "idx1")
    found = Path(labels) if labels is not None else path.with_name(beside)
    if not found.is_file() or found == path:
        accepted = f"name the file of the classes of {path}"
        raise ConfigError(refusal("labels", labels, accepted))
    return stored(found)


def stored(path: Path, member: str | None = None) -> StoredArray:
    """The array in a file, without its elements.

    Raises:
        ConfigError: if the file cannot be read as an array.
    """
    with _naming(path), _opened(path, member) as file:
        shape, dtype = _header(file, path)
    if not shape or dtype.hasobject:
        raise ConfigError(refusal("source", str(path), f"it holds {dtype} of {list(shape)}"))
    return StoredArray(path=path, member=member, shape=shape, dtype=dtype)


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is not None:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file)


def _header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array; leaves the file at its first row."""
    if path.suffix in (".npz", ".npy"):
        shape, is_fortran, dtype = read_header(file)
        if is_fortran and len(shape) > 1:
            raise ValueError("its rows are not contiguous (Fortran order)")
        return shape, dtype
    zero, kind, dimensions = np.frombuffer(
        _exactly(file, 4), [("0", ">u2"), ("k", "u1"), ("d", "u1")]
    )[0]
    if zero or int(kind) not in _IDX_TYPES:
        raise ValueError("it does not begin as an IDX file")
    shape = np.frombuffer(_exactly(file, 4 * int(dimensions)), ">u4")
    return tuple(map(int, shape)), np.dtype(_IDX_TYPES[int(kind)])


def _exactly(file: IO[bytes], count: int) -> bytes:
    pieces, missing = [], count
    while missing:  # in pieces: a damaged header may ask for more than any memory holds
        piece = file.read(min(missing, CHUNK_BYTES))
        if not piece:
            raise EOFError("it ends too early")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, *BAD_ZIP) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read ({shortened(str(error))}).") from error
