"""A cache of values in memory that evicts the least recently used.

Does not know what it holds.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedMemory(Generic[Value]):
    """LRU cache of values by key, of at most `limit_bytes`.

    A value larger than the limit is returned but not cached. Thread-safe; several threads may load
    the same value.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        """The value of `key`, if it is cached."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def of(self, key: Hashable, load: Callable[[], tuple[Value, int]]) -> Value:
        """The value of `key`, from the cache or else from `load`, which also returns its bytes."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size_bytes = load()
        with self._lock:
            if key not in self._values:
                self._add(key, value, size_bytes)
        return value

    def put(self, key: Hashable, value: Value, size_bytes: int) -> None:
        """Cache `value`, replacing the value of `key`."""
        with self._lock:
            if key in self._values:
                self.held_bytes -= self._values.pop(key)[1]
            self._add(key, value, size_bytes)

    def _add(self, key: Hashable, value: Value, size_bytes: int) -> None:
        if size_bytes > self.limit_bytes:
            return
        self._values[key] = value, size_bytes
        self.held_bytes += size_bytes
        while self.held_bytes > self.limit_bytes:
            _, (_, gone_bytes) = self._values.popitem(last=False)
            self.held_bytes -= gone_bytes
