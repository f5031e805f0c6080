"""Files of data at a path, folder, glob or URL of `fsspec`, and what tells each from another.

Knows names, sizes and times; nothing of what is in a file.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow.fs as pafs

from scalejax.core.errors import ConfigError, refusal

_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of data, as it was when it was found."""

    path: str
    """Where it is; a URL if it is not on this machine."""
    size_bytes: int
    """Its length."""
    version: str | None
    """What is another when it is written anew: the nanoseconds since 1970 when it was written, or
    what its store names its content by; None if the store says neither."""


def listed(
    field: str, location: str, is_data: Callable[[str], bool], wanted: str
) -> list[DataFile]:
    """The files at `location`, in the order of their names.

    Args:
        field: field of the config that names the location.
        location: a file, folder, glob or URL.
        is_data: says of a name whether a file of a folder, or below it, is of data; names of
            files and folders that begin with "_" or "." are not asked of.
        wanted: what such a file is, for the refusal.

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
    """Whether it is for `fsspec` to open."""
    return "://" in location


def absolute_location(location: str) -> str:
    """The same files, wherever the working directory is."""
    return location if is_url(location) else os.path.abspath(location)


def opened_filesystem(field: str, location: str) -> tuple[Any, str]:
    """Arrow's file system of a location, and the path in it; of a URL, `handler.fs` is fsspec's.

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
    """Path, bytes and version (that of `DataFile`) of each of some files below a folder or URL.

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
            yield path, about["size"] or 0, _said_version(about)


@contextmanager
def opened(field: str, file: DataFile) -> Iterator[BinaryIO]:
    """The file, open to be read from any place.

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
    """Refuse a file on this machine that is another than it was when it was found.

    Raises:
        ConfigError: if it is gone, or was written anew.
    """
    try:
        about = os.stat(file.path)
    except OSError as error:
        raise ConfigError(f"{field}: {file.path} cannot be read any more ({error}).") from error
    if (about.st_size, str(about.st_mtime_ns)) != (file.size_bytes, file.version):
        raise ConfigError(f"{field}: {file.path} was written anew while it was read.")


def local_copy(field: str, file: DataFile, folder: str) -> str:
    """Path of a copy in `folder` of a file at a URL; made once, and whole whenever it is there.

    Raises:
        ConfigError: if it cannot be read or written.
    """
    key = repr((file.path, file.size_bytes, file.version)).encode()
    copy = os.path.join(folder, f"{hashlib.sha256(key).hexdigest()[:16]}-{_name(file.path)}")
    if not os.path.exists(copy):
        filesystem, path = opened_filesystem(field, file.path)
        draft = f"{copy}.{os.getpid()}.draft"
        with naming(field, file.path):
            os.makedirs(folder, exist_ok=True)
            try:
                filesystem.handler.fs.get_file(path, draft)
                os.replace(draft, copy)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft)
    return copy


def _name(path: str) -> str:
    return path.rpartition("/")[2]


@contextmanager
def naming(field: str, location: str) -> Iterator[None]:
    """Turn what a file system says of a location into a refusal."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(refusal(field, location, f"it cannot be read ({error})")) from error


def _is_finished(path: str) -> bool:
    """Whether a path below a folder is of data: writers begin what is unfinished, or about the
    data, with "_" or "."."""
    return not any(part[0] in "_." for part in path.split(os.sep))


def _version(filesystem: Any, info: pafs.FileInfo) -> str | None:
    if info.mtime_ns is not None:
        return str(info.mtime_ns)
    return _said_version(filesystem.handler.fs.info(info.path))


def _said_version(about: Mapping[str, Any]) -> str | None:
    """What tells a file from one written anew, of what S3, HTTP, Hugging Face, Google say."""
    names = ("mtime", "ETag", "etag", "blob_id", "LastModified", "last_modified", "updated")
    return next((str(about[name]) for name in names if about.get(name) is not None), None)


def _url(location: str, path: str) -> str:
    """`path` of the file system of `location`, as it can be opened again."""
    protocol, separator, _ = location.partition("://")
    return f"{protocol}{separator}{path}" if separator else path
