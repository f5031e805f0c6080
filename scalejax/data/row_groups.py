"""Row groups as tables, from memory, from a local disk, or from their files.

Knows where row groups are kept; nothing of what their columns mean.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa

from scalejax.data.disk_cache import DiskCache
from scalejax.locations import absolute_location
from scalejax.parquet_config import ReadingConfig
from scalejax.parquet_files import RowGroup, read_columns

Value = TypeVar("Value")


class BoundedMemory(Generic[Value]):
    """Values by key, of `limit_bytes` at most, the least recently used leaving first.

    A value larger than the limit is handed out and not kept. Safe with several threads, which may
    load the same value twice.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def of(self, key: Hashable, load: Callable[[], tuple[Value, int]]) -> Value:
        """The value of `key`; `load` gives it, and its bytes, if it is not here."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size_bytes = load()
        with self._lock:
            if key not in self._values and size_bytes <= self.limit_bytes:
                self._values[key] = value, size_bytes
                self.held_bytes += size_bytes
            while self.held_bytes > self.limit_bytes:
                _, (_, gone_bytes) = self._values.popitem(last=False)
                self.held_bytes -= gone_bytes
        return value


class RowGroups:
    """Columns of row groups, as `reading` says where to keep them."""

    def __init__(self, reading: ReadingConfig) -> None:
        self._memory = _shared_memory(reading.memory_bytes // 2)
        self._disk = None
        if reading.cache_folder is not None:
            self._disk = DiskCache(Path(reading.cache_folder), reading.cache_bytes)

    def table(self, field: str, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """The columns of `group`, in one piece each.

        Raises:
            ConfigError: if they cannot be read, or not be kept on the disk.
        """
        key = (group, tuple(columns))
        return self._memory.of(key, partial(self._read, field, group, columns))

    def _read(self, field: str, group: RowGroup, columns: Sequence[str]) -> tuple[pa.Table, int]:
        read = partial(read_columns, field, group, columns)
        if self._disk is None:
            table = read()
        else:
            file = group.file
            path = absolute_location(file.path)  # others share the cache, from other folders
            parts = (path, file.size_bytes, file.version, group.index, *columns)
            table = self._disk.of(repr(parts), read)
        return table, table.nbytes


def _shared_memory(limit_bytes: int) -> BoundedMemory[pa.Table]:
    """Of this process: the parts of a data set, and runs side by side, share it."""
    memory = _memories.get(limit_bytes)
    if memory is None:
        memory = _memories[limit_bytes] = BoundedMemory(limit_bytes)
    return memory


_memories: WeakValueDictionary[int, BoundedMemory[pa.Table]] = WeakValueDictionary()
"""By their limit, for as long as someone reads with them."""
