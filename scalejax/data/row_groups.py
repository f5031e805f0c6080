"""Decoded row groups in memory, the least recently used leaving first.

Knows sizes and keys; nothing of what the row groups hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedMemory(Generic[Value]):
    """Values by key, of `limit_bytes` at most.

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


@cache
def shared_memory(limit_bytes: int) -> BoundedMemory:
    """The row groups of this process: the parts of a data set, and runs side by side, share it."""
    return BoundedMemory(limit_bytes)
