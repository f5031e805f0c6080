"""Data files at a path, folder, glob or URL of `fsspec`, with size and version.

Knows names, sizes and modification times, but not the contents of files.
"""

import errno
import glob
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import pyarrow.fs as pafs

from scalejax.core.errors import ConfigError, ScalejaxError, Unavailable, refusal
from scalejax.core.remote import (
    Unranged,
    Wanted,
    copy_whole,
    listing,
    read_ranges,
    store_version,
)

_GLOB = frozenset("*?[")
_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EINTR", "EBUSY", "EREMOTEIO"),
        *("ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN"),
        *("EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENODEV", "ENXIO"),
    )
    if hasattr(errno, name)
)
"""Errors of a disk, a file server or this machine, not of the contents of a file."""
_BUFFER_BYTES = 2**16
"""Least bytes read at once from a file at a URL."""
_COPIED_BYTES = 2**24
"""Bytes read at once for a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One data file, as it was when listed."""

    path: str
    """Path; a URL if it is not on this machine."""
    size_bytes: int
    """Size of the file."""
    version: str | None
    """Changes when the file is rewritten: modification time in nanoseconds since 1970, or the
    generation, ETag or content id in its store, else its time there; None if it has none."""


def listed(
    field: str, location: str, is_data: Callable[[str], bool], wanted: str
) -> list[DataFile]:
    """The data files at `location`, sorted by name.

    Args:
        field: field of the config that names the location.
        location: a file, folder, glob or URL.
        is_data: whether a file of that name in or below a folder is a data file; files and folders
            whose names begin with "_" or "." are skipped.
        wanted: description of a data file, for the refusal.

    Raises:
        ConfigError: if there are no data files, or the location cannot be read.
    """
    if is_url(location):
        files = _files_at_url(field, location, is_data)
    else:
        with naming(field, location):
            files = _files_here(field, location, is_data)
    if not files:
        raise ConfigError(refusal(field, location, f"no {wanted} is there"))
    return files


def _files_at_url(field: str, location: str, is_data: Callable[[str], bool]) -> list[DataFile]:
    root, found = listing(field, location, is_whole=True)
    if root not in found and not _GLOB & set(root):  # a folder
        below = {path: path.removeprefix(root).lstrip("/") for path in found}
        found = {
            path: about
            for path, about in found.items()
            if _is_finished(below[path]) and is_data(_name(path))
        }
    return [
        DataFile(
            path=_url(location, path),
            size_bytes=about["size"],
            version=store_version(about),
        )
        for path, about in sorted(found.items())
    ]


def _files_here(field: str, location: str, is_data: Callable[[str], bool]) -> list[DataFile]:
    filesystem = pafs.LocalFileSystem()
    if _GLOB & set(location):
        infos = filesystem.get_file_info(sorted(glob.glob(location, recursive=True)))
    else:
        info = filesystem.get_file_info(location)
        if info.type == pafs.FileType.NotFound:
            raise ConfigError(refusal(field, location, "there is no such file or folder"))
        infos = [info]
        if info.type == pafs.FileType.Directory:
            infos = [
                each
                for each in filesystem.get_file_info(pafs.FileSelector(location, recursive=True))
                if _is_finished(os.path.relpath(each.path, location)) and is_data(each.base_name)
            ]
            infos.sort(key=lambda each: each.path)
    return [
        DataFile(path=each.path, size_bytes=each.size, version=str(each.mtime_ns))
        for each in infos
        if each.type == pafs.FileType.File
    ]


def is_url(location: str) -> bool:
    """Whether `location` is a URL, which `fsspec` opens."""
    return "://" in location


def absolute_location(location: str) -> str:
    """`location` independent of the working directory."""
    return location if is_url(location) else os.path.abspath(location)


def states_below(
    field: str, location: str, paths: Iterable[str]
) -> Iterator[tuple[str, int, str | None]]:
    """Path, size in bytes and version (as in `DataFile`) of given files below a folder or URL.

    Raises:
        ConfigError: if a file is gone, or the location cannot be read.
    """
    if not is_url(location):
        with naming(field, location):
            for path in paths:
                about = os.stat(os.path.join(location, path))
                yield path, about.st_size, str(about.st_mtime_ns)
        return
    root, found = listing(field, location)
    for path in paths:
        if (about := found.get(f"{root.rstrip('/')}/{path}")) is None:
            raise ConfigError(refusal(field, location, f"{path} is gone"))
        yield path, about["size"] or 0, store_version(about)


@contextmanager
def opened(field: str, file: DataFile) -> Iterator[BinaryIO]:
    """The file, open for random access.

    Raises:
        ConfigError: if it cannot be opened or read, or is at a URL and has changed.
        Unavailable: if its store does not answer.
    """
    if is_url(file.path):
        with io.BufferedReader(_AtUrl(field, file), _BUFFER_BYTES) as stream:
            yield cast(BinaryIO, stream)
        return
    with naming(field, file.path), open(file.path, "rb") as stream:
        yield stream


class _AtUrl(io.RawIOBase):
    """A file at a URL; reads are range requests."""

    def __init__(self, field: str, file: DataFile) -> None:
        self._field, self._file, self._at = field, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size_bytes}
        self._at = max(0, begins[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._file.size_bytes)
        if self._at >= end:
            return 0
        (content,) = read_ranges(self._field, [part_of(self._file, self._at, end)])
        buffer[: len(content)] = content
        self._at = end
        return len(content)


def part_of(file: DataFile, begin: int, end: int) -> Wanted:
    """Bytes `begin` to `end` - 1 of the listed version of a file at a URL."""
    return Wanted(
        url=file.path,
        begin=begin,
        end=end,
        size_bytes=file.size_bytes,
        version=file.version,
    )


def require_unchanged(field: str, file: DataFile) -> None:
    """Refuse a file on this machine that has changed since it was listed.

    Raises:
        ConfigError: if it is gone, or was rewritten.
        Unavailable: if its disk, or this machine, fails.
    """
    try:
        about = os.stat(file.path)
    except OSError as error:
        require_content(field, file.path, error)
        raise ConfigError(f"{field}: {file.path} cannot be read any more ({error}).") from error
    if (about.st_size, str(about.st_mtime_ns)) != (file.size_bytes, file.version):
        raise ConfigError(f"{field}: {file.path} was rewritten while it was read.")


def require_content(field: str, path: str, error: Exception) -> None:
    """Distinguish a failing disk, file server or machine from an invalid file.

    Raises:
        Unavailable: if `error` is not due to the content of the file.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number in _PASSING:
        name = errno.errorcode[number]
        raise Unavailable(
            f"{field}: {path} cannot be read now ({name}: {os.strerror(number)}); try again "
            "when its disk or file server, and this machine, are well."
        ) from error


def local_copy(field: str, file: DataFile, folder: str) -> str:
    """Path of a local copy in `folder` of a file at a URL; made once, never partial.

    Raises:
        ConfigError: if it cannot be read or written.
    """
    key = repr((file.path, file.size_bytes, file.version)).encode()
    copy = os.path.join(folder, f"{hashlib.sha256(key).hexdigest()[:16]}-{_name(file.path)}")
    if not os.path.exists(copy):
        with naming(field, file.path):
            os.makedirs(folder, exist_ok=True)
            # A folder of this user, so that nobody else has put a link into it.
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
                draft = os.path.join(own, "draft")
                with open(draft, "xb") as written:
                    _copy(field, file, written)
                    written.flush()
                    os.fsync(written.fileno())  # a name that survives a power cut has its content
                os.replace(draft, copy)
    return copy


def _copy(field: str, file: DataFile, written: BinaryIO) -> None:
    """Write a file at a URL to `written`: in ranges, each retried separately, or whole if its
    server ignores ranges."""
    try:
        for begin in range(0, file.size_bytes, _COPIED_BYTES):
            end = min(begin + _COPIED_BYTES, file.size_bytes)
            written.writelines(read_ranges(field, [part_of(file, begin, end)]))
    except Unranged:
        whole = replace(part_of(file, 0, file.size_bytes), end=None)
        copy_whole(field, whole, written)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


@contextmanager
def naming(field: str, location: str) -> Iterator[None]:
    """Turn errors of a file system about a location into refusals that name `field`.

    Raises:
        ConfigError: instead of these errors.
        Unavailable: instead of errors that may pass.
    """
    try:
        yield
    except ScalejaxError:
        raise
    except (OSError, ValueError, ImportError) as error:
        require_content(field, location, error)
        raise ConfigError(refusal(field, location, f"it cannot be read ({error})")) from error


def _is_finished(path: str) -> bool:
    """Whether a path below a folder may be a data file: writers prefix unfinished files and
    metadata with "_" or "."."""
    return not any(part[0] in "_." for part in path.split(os.sep))


def _url(location: str, path: str) -> str:
    """The URL of `path` in the file system of `location`; the path if `location` is not a URL."""
    if is_url(path):  # HTTP file systems give whole URLs
        return path
    protocol, separator, _ = location.partition("://")
    return f"{protocol}{separator}{path}" if separator else path
