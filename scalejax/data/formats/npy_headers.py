"""Headers of the arrays in NumPy's files (.npy, .npz); nothing in the files is ever unpickled.

Knows types, shapes and offsets; nothing of the meaning of the arrays.
"""

import math
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, TYPE_CHECKING

import numpy as np

from scalejax.core.errors import ConfigError, refusal, shortened

if TYPE_CHECKING:  # other data sets need no Arrow, and commands start sooner without it
    from scalejax.core.filesystem import DataFile

BAD_ZIP = (zipfile.BadZipFile, zlib.error, RuntimeError)
"""What `zipfile` raises for an archive that is damaged, encrypted or compressed in another way."""


_MOST_DEFLATED = 1032
"""Bytes that one deflated byte can stand for: 258 for 2 bits (RFC 1951, section 3.2.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """Header of an array in a file."""

    file: "DataFile"
    """The .npy or .npz."""
    member: str | None
    """Name of the array in an .npz."""
    shape: tuple[int, ...]
    """Elements in each dimension."""
    dtype: np.dtype
    """Type of an element."""
    offset: int
    """Bytes before the first element, in an .npy."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def where(self) -> str:
        """The file and the array in it, for messages."""
        return self.file.path if self.member is None else f"{self.file.path}[{self.member!r}]"


def loaded_array(field: str, header: ArrayHeader) -> np.ndarray:
    """The array, loaded into memory; one from an .npz is cached.

    Raises:
        ConfigError: if it cannot be read, is damaged, or has changed.
    """
    return _read_array(field, header) if header.member is None else _kept_array(field, header)


@lru_cache(maxsize=8)
def _kept_array(field: str, header: ArrayHeader) -> np.ndarray:
    return _read_array(field, header)


def _read_array(field: str, header: ArrayHeader) -> np.ndarray:
    from scalejax.core.filesystem import is_url, opened, require_unchanged

    if not is_url(header.file.path):
        require_unchanged(field, header.file)
    with opened(field, header.file) as file:
        try:
            if header.member is None:
                return np.lib.format.read_array(file, allow_pickle=False)
            with zipfile.ZipFile(file) as archive, archive.open(f"{header.member}.npy") as member:
                return np.lib.format.read_array(member, allow_pickle=False)
        except (ValueError, EOFError, KeyError, *BAD_ZIP) as error:
            reason = shortened(str(error))
            raise ConfigError(f"{field}: {header.where} cannot be read ({reason}).") from error


def headers_at(field: str, location: str) -> dict[str, ArrayHeader]:
    """The arrays at a location, an .npz or .npy files, by name.

    Raises:
        ConfigError: if there are no arrays, or a header cannot be read; if a file is incomplete,
            or its rows are not contiguous.
    """
    from scalejax.core.filesystem import listed

    files = listed(field, location, lambda name: name.endswith(".npy"), "array (*.npy)")
    if len(files) == 1 and files[0].path.endswith(".npz"):
        return dict(_headers_of_archive(field, files[0]))
    headers = [header_of_file(field, file) for file in files]
    names = [file.path.rpartition("/")[2].removesuffix(".npy") for file in files]
    return dict(zip(names, headers, strict=True))


@lru_cache(maxsize=256)
def header_of_file(field: str, file: "DataFile") -> ArrayHeader:
    """The array of an .npy.

    Raises:
        ConfigError: if it is not an .npy, is incomplete, or its rows are not contiguous.
    """
    from scalejax.core.filesystem import opened

    if not file.path.endswith(".npy"):
        accepted = "it must be an .npz, or a folder of .npy files"
        raise ConfigError(refusal(field, file.path, accepted))
    with opened(field, file) as stream:
        shape, is_fortran, dtype = _header(field, file.path, stream)
        offset = stream.tell()
    header = ArrayHeader(file=file, member=None, shape=shape, dtype=dtype, offset=offset)
    if file.size_bytes < offset + header.size_bytes and not dtype.hasobject:
        raise ConfigError(
            f"{field}: {file.path} is incomplete: it has {file.size_bytes} of "
            f"{offset + header.size_bytes} bytes; write or copy it again."
        )
    if is_fortran and len(shape) > 1:
        raise ConfigError(
            f"{field}: {file.path} is stored column by column, so rows cannot be read from "
            "it; save numpy.ascontiguousarray of it."
        )
    return header


@lru_cache(maxsize=64)
def _headers_of_archive(field: str, file: "DataFile") -> tuple[tuple[str, ArrayHeader], ...]:
    from scalejax.core.filesystem import opened

    headers = []
    with opened(field, file) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                for name in archive.namelist():
                    if not name.endswith(".npy"):
                        continue
                    with archive.open(name) as member:
                        shape, _, dtype = _header(field, f"{file.path}[{name[:-4]!r}]", member)
                        begin = member.tell()
                    header = ArrayHeader(
                        file=file, member=name[:-4], shape=shape, dtype=dtype, offset=0
                    )
                    _require_room(field, header, archive.getinfo(name), begin)
                    headers.append((name[:-4], header))
        except (EOFError, *BAD_ZIP) as error:
            reason = shortened(str(error))
            raise ConfigError(
                f"{field}: {file.path} cannot be read as .npz ({reason}); write or copy it again."
            ) from error
    return tuple(headers)


def _require_room(field: str, header: ArrayHeader, said: zipfile.ZipInfo, begin: int) -> None:
    """Refuse an array that is larger than its archive member can be: memory for it would be
    allocated before it is read."""
    most = min(said.file_size, said.compress_size * _MOST_DEFLATED + _MOST_DEFLATED)
    if begin + header.size_bytes > most and not header.dtype.hasobject:
        raise ConfigError(
            f"{field}: {header.where} is incomplete: its header says {header.size_bytes} bytes, "
            f"but at most {most} can be there; write or copy it again."
        )


def _header(field: str, where: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and type; leaves the stream at the first element."""
    try:
        return read_header(stream)
    except ValueError as error:
        reason = shortened(str(error))
        raise ConfigError(f"{field}: {where} cannot be read as .npy ({reason}).") from error


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and type of an .npy; leaves the stream at the first
    element.

    Raises:
        ValueError: if it is not an .npy, or is damaged.
    """
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"version {version} of the format")
    try:
        return read[version](stream)
    except (tokenize.TokenError, SyntaxError) as error:  # from NumPy's reading of old headers
        raise ValueError(f"its header is damaged: {error}") from error
