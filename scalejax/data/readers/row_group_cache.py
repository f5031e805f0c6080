"""Caches of row groups in memory and on a local disk, evicting the least recently used.

The disk cache maps files into memory; any number of processes share a folder. A file is written
atomically: under another name, flushed, and renamed. Knows nothing of the contents of tables.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import pyarrow as pa

from scalejax.config.data import ReadingConfig
from scalejax.core.bounded_memory import BoundedMemory
from scalejax.core.errors import ConfigError
from scalejax.core.filesystem import absolute_location, is_url
from scalejax.data.formats.parquet import RowGroup, read_columns, read_together

_FETCHED_AHEAD = 8
"""Parts of row groups that are fetched from a store concurrently."""
_TOGETHER_BYTES, _MOST_TOGETHER = 2**22, 1024
"""Decompressed bytes of row groups that are read together, and their largest number: opening a file
for each of a thousand takes longer than reading them."""
_KEY = b"scalejax key"
"""Name under which a file holds its key."""


class DiskCache:
    """Tables in `folder`, of at most `limit_bytes`; a larger table is not cached."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        field: str = "data.reading.cache_folder",
        remedy: str = "make room, lower data.reading.cache_bytes, or leave the folder out",
    ) -> None:
        """Open the cache, and evict files beyond the limit.

        Args:
            folder: its folder, created if missing.
            limit_bytes: largest total size of the files.
            field: field of the config that requests the cache.
            remedy: advice if the folder cannot be written.

        Raises:
            ConfigError: if the folder cannot be written.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._field = field
        self._remedy = remedy
        self._host = socket.gethostname()
        with self._naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._remove_drafts()
                self._make_room(0)

    def of(self, key: str, load: Callable[[], pa.Table]) -> pa.Table:
        """The table of `key`, from the cache or else from `load`.

        Raises:
            ConfigError: if the disk is full, or the folder cannot be written.
        """
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.arrow"
        table = _mapped(path, key, self._field)
        if table is None:
            table = load().replace_schema_metadata({_KEY: key.encode()})
            with self._naming(path):
                self._keep(path, table)
        return table

    def _keep(self, path: Path, table: pa.Table) -> None:
        if table.nbytes > self._limit_bytes:  # its file would be even larger
            return
        draft = path.with_name(
            f".{path.stem}.{self._host}.{os.getpid()}.{secrets.token_hex(8)}.draft"
        )
        try:
            with draft.open("xb") as file:  # a new file, not a link that someone has put there
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
                file.flush()
                os.fsync(file.fileno())  # a name that survives a power cut then has its content
            size_bytes = draft.stat().st_size
            if size_bytes <= self._limit_bytes:
                with self._locked():
                    self._make_room(size_bytes)
                    draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _make_room(self, wanted_bytes: int) -> None:
        """Remove the least recently used files, until `wanted_bytes` more are within the limit."""
        files = []
        for path in self._folder.glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        held_bytes = sum(size for _, size, _ in files)
        for _, size_bytes, path in sorted(files):
            if held_bytes + wanted_bytes <= self._limit_bytes:
                return
            path.unlink(missing_ok=True)  # existing mappings stay valid
            held_bytes -= size_bytes

    def _remove_drafts(self) -> None:
        """Remove unfinished files of killed processes on this machine."""
        for draft in self._folder.glob(f".*.{self._host}.*.draft"):
            process = int(draft.name.split(".")[-3])
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                draft.unlink(missing_ok=True)
            except PermissionError:  # the process is alive, and belongs to another user
                continue

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Context that locks the folder; the system releases the locks of killed processes."""
        with (self._folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self._field}: {path} cannot be written ({error}); {self._remedy}."
            ) from error


def _mapped(path: Path, key: str, field: str) -> pa.Table | None:
    """The memory-mapped table of a file; None if it is missing or has another key."""
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        with contextlib.suppress(PermissionError):  # another user's file: only evicted sooner
            os.utime(path)  # used now; the access time of a file is not reliable
    except (FileNotFoundError, pa.ArrowException):
        return None
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error}).") from error
    return table if (table.schema.metadata or {}).get(_KEY) == key.encode() else None


# Row groups as tables, from memory, from the disk cache, or from their files.


class RowGroups:
    """Columns of row groups, cached as `reading` configures."""

    def __init__(self, reading: ReadingConfig) -> None:
        self._memory = _shared_memory(reading.memory_bytes // 2)
        self._disk = None
        if reading.cache_folder is not None:
            self._disk = DiskCache(Path(reading.cache_folder), reading.cache_bytes)

    def table(self, field: str, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """The columns of `group`, in one piece each.

        Raises:
            ConfigError: if they cannot be read, have changed, or cannot be cached on the disk.
            Damaged: if they are not what was written.
            Unavailable: if their store does not answer.
        """
        key = (group, tuple(columns))
        return self._memory.of(key, partial(self._read, field, group, columns))

    def tables(
        self, field: str, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """`table` of each of `groups`: small ones are read together, and those at a URL are read
        ahead, within a quarter of the memory for row groups.

        Raises:
            ConfigError: as for `table`.
            Damaged: as for `table`.
            Unavailable: as for `table`.
        """
        parts = self._parts(groups, columns)
        if len(groups) < 2 or not is_url(groups[0].file.path):
            for part in parts:
                yield from self._together(field, part, columns)
            return
        asked: deque[tuple[Future[list[pa.Table]], int]] = deque()
        ahead_bytes, waiting = 0, deque(parts)
        with ThreadPoolExecutor(_FETCHED_AHEAD, "row groups") as threads:
            try:
                while asked or waiting:
                    while waiting and len(asked) < _FETCHED_AHEAD:
                        size_bytes = sum(group.bytes_of(columns) for group in waiting[0])
                        if asked and ahead_bytes + size_bytes > self._memory.limit_bytes // 4:
                            break
                        future = threads.submit(self._together, field, waiting.popleft(), columns)
                        asked.append((future, size_bytes))
                        ahead_bytes += size_bytes
                    future, size_bytes = asked.popleft()
                    yield from future.result()
                    ahead_bytes -= size_bytes
            finally:
                for future, _ in asked:
                    future.cancel()

    def _parts(
        self, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[list[RowGroup]]:
        """`groups` in order, in parts of one file that are small enough to be read at once; one by
        one if they are cached on the disk."""
        most_bytes = 0 if self._disk else min(_TOGETHER_BYTES, self._memory.limit_bytes // 8)
        part: list[RowGroup] = []
        part_bytes = 0
        for group in groups:
            size_bytes = group.bytes_of(columns)
            is_full = part_bytes + size_bytes > most_bytes or len(part) == _MOST_TOGETHER
            if part and (is_full or part[0].file != group.file):
                yield part
                part, part_bytes = [], 0
            part.append(group)
            part_bytes += size_bytes
        if part:
            yield part

    def _together(
        self, field: str, groups: list[RowGroup], columns: Sequence[str]
    ) -> list[pa.Table]:
        keys = [(group, tuple(columns)) for group in groups]
        found = [self._memory.get(key) for key in keys]
        missing = [number for number, table in enumerate(found) if table is None]
        if len(missing) < 2:
            return [self.table(field, group, columns) for group in groups]
        read = read_together(field, [groups[number] for number in missing], columns)
        for number, table in zip(missing, read, strict=True):
            found[number] = table
            self._memory.put(keys[number], table, table.nbytes)
        return [table for table in found if table is not None]

    def _read(self, field: str, group: RowGroup, columns: Sequence[str]) -> tuple[pa.Table, int]:
        read = partial(read_columns, field, group, columns)
        if self._disk is None:
            table = read()
        else:
            file = group.file
            path = absolute_location(file.path)  # processes in other folders share the cache
            parts = (path, file.size_bytes, file.version, group.index, *columns)
            table = self._disk.of(repr(parts), read)
        return table, table.nbytes


def _shared_memory(limit_bytes: int) -> BoundedMemory[pa.Table]:
    """The memory cache of this process, shared by the parts of a data set and concurrent runs."""
    memory = _memories.get(limit_bytes)
    if memory is None:
        memory = _memories[limit_bytes] = BoundedMemory(limit_bytes)
    return memory


_memories: WeakValueDictionary[int, BoundedMemory[pa.Table]] = WeakValueDictionary()
"""Memory caches of this process, by limit, while they are in use."""
