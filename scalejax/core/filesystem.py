"""Data files at a path, folder, glob or URL of `fsspec`, with size and version.

Knows names, sizes and modification times; nothing of the contents of a file.
"""

import glob
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow.fs as pafs

from scalejax.core.errors import ConfigError, refusal

_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One data file, as it was when it was listed."""

    path: str
    """Path; a URL if it is not on this machine."""
    size_bytes: int
    """Size of the file."""
    version: str | None
    """Changes when the file is rewritten: modification time in nanoseconds since 1970, or the ETag
    or content id of its store; None if the store has neither."""


def listed(
    field: str, location: str, is_data: Callable[[str], bool], wanted: str
) -> list[DataFile]:
    """The data files at `location`, sorted by name.

    Args:
        field: field of the config that names the location.
        location: a file, folder, glob or URL.
        is_data: whether a file of that name in a folder, or below it, is a data file; files and
            folders whose names begin with "_" or "." are skipped.
        wanted: description of a data file, for the refusal.

    Raises:
        ConfigError: if there are none, or the location cannot be read.
    """
    filesystem, root = opened_filesystem(field, location)
    with naming(field, location):
        if isinstance(filesystem, pafs.LocalFileSystem) and _GLOB & set(root):
            infos = filesystem.get_file_info(sorted(glob.glob(root, recursive=True)))
        elif _GLOB & set(root):
            infos = filesystem.get_file_info(sorted(filesystem.handler.fs.glob(root)))
        else:
            info = filesystem.get_file_info(root)
            if info.type == pafs.FileType.NotFound:
                raise ConfigError(refusal(field, location, "there is no such file or folder"))
            infos = [info]
            if info.type == pafs.FileType.Directory:
                infos = [
                    each
                    for each in filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
                    if _is_finished(os.path.relpath(each.path, root)) and is_data(each.base_name)
                ]
                infos.sort(key=lambda each: each.path)
    files = [
        DataFile(
            path=_url(location, each.path),
            size_bytes=each.size,
            version=_version(filesystem, each),
        )
        for each in infos
        if each.type == pafs.FileType.File
    ]
    if not files:
        raise ConfigError(refusal(field, location, f"no {wanted} is there"))
    return files


def is_url(location: str) -> bool:
    """Whether `location` is a URL, which `fsspec` opens."""
    return "://" in location


def absolute_location(location: str) -> str:
    """`location` independent of the working directory."""
    return location if is_url(location) else os.path.abspath(location)


def opened_filesystem(field: str, location: str) -> tuple[Any, str]:
    """Arrow's file system of a location, and the path in it; for a URL `handler.fs` is fsspec's.

    Raises:
        ConfigError: if fsspec, or its package for the protocol, is not installed.
    """
    if not is_url(location):
        return pafs.LocalFileSystem(), location
    try:
        import fsspec
    except ImportError as error:
        accepted = 'a URL needs fsspec: "pip install fsspec" and the package of its protocol'
        raise ConfigError(refusal(field, location, accepted)) from error
    with naming(field, location):
        filesystem, path = fsspec.core.url_to_fs(location)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


def states_below(
    field: str, location: str, paths: Iterable[str]
) -> Iterator[tuple[str, int, str | None]]:
    """Path, size in bytes and version (as of `DataFile`) of given files below a folder or URL.

    Raises:
        ConfigError: if one is gone, or the location cannot be read.
    """
    with naming(field, location):
        if not is_url(location):
            for path in paths:
                about = os.stat(os.path.join(location, path))
                yield path, about.st_size, str(about.st_mtime_ns)
            return
        filesystem, root = opened_filesystem(field, location)
        found = filesystem.handler.fs.find(root, detail=True)
        for path in paths:
            if (about := found.get(f"{root.rstrip('/')}/{path}")) is None:
                raise FileNotFoundError(f"{path} is gone")
            yield path, about["size"] or 0, _store_version(about)


@contextmanager
def opened(field: str, file: DataFile) -> Iterator[BinaryIO]:
    """The file, open for random access.

    Raises:
        ConfigError: if it cannot be opened or read.
    """
    with naming(field, file.path):
        if is_url(file.path):
            filesystem, path = opened_filesystem(field, file.path)
            stream = filesystem.handler.fs.open(path, "rb")
        else:
            stream = open(file.path, "rb")  # noqa: SIM115  closed below
        with stream:
            yield stream


def require_unchanged(field: str, file: DataFile) -> None:
    """Refuse a file on this machine that has changed since it was listed.

    Raises:
        ConfigError: if it is gone, or was rewritten.
    """
    try:
        about = os.stat(file.path)
    except OSError as error:
        raise ConfigError(f"{field}: {file.path} cannot be read any more ({error}).") from error
    if (about.st_size, str(about.st_mtime_ns)) != (file.size_bytes, file.version):
        raise ConfigError(f"{field}: {file.path} was written anew while it was read.")


def local_copy(field: str, file: DataFile, folder: str) -> str:
    """Path of a local copy in `folder` of a file at a URL; made once, and never partial.

    Raises:
        ConfigError: if it cannot be read or written.
    """
    key = repr((file.path, file.size_bytes, file.version)).encode()
    copy = os.path.join(folder, f"{hashlib.sha256(key).hexdigest()[:16]}-{_name(file.path)}")
    if not os.path.exists(copy):
        filesystem, path = opened_filesystem(field, file.path)
        with naming(field, file.path):
            os.makedirs(folder, exist_ok=True)
            # A folder of this user's own: nobody else has put a link into it.
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
                draft = os.path.join(own, "draft")
                filesystem.handler.fs.get_file(path, draft)
                os.replace(draft, copy)
    return copy


def _name(path: str) -> str:
    return path.rpartition("/")[2]


@contextmanager
def naming(field: str, location: str) -> Iterator[None]:
    """Turn errors of a file system about a location into refusals that name `field`."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(refusal(field, location, f"it cannot be read ({error})")) from error


def _is_finished(path: str) -> bool:
    """Whether a path below a folder may be a data file: writers prefix unfinished files and
    metadata with "_" or "."."""
    return not any(part[0] in "_." for part in path.split(os.sep))


def _version(filesystem: Any, info: pafs.FileInfo) -> str | None:
    if info.mtime_ns is not None:
        return str(info.mtime_ns)
    return _store_version(filesystem.handler.fs.info(info.path))


def _store_version(about: Mapping[str, Any]) -> str | None:
    """The version of a file in the metadata of S3, HTTP, Hugging Face or Google Cloud Storage."""
    names = ("mtime", "ETag", "etag", "blob_id", "LastModified", "last_modified", "updated")
    return next((str(about[name]) for name in names if about.get(name) is not None), None)


def _url(location: str, path: str) -> str:
    """The URL, or the path if `location` is none, of `path` in the file system of `location`."""
    if is_url(path):  # that of HTTP is a whole URL
        return path
    protocol, separator, _ = location.partition("://")
    return f"{protocol}{separator}{path}" if separator else path
