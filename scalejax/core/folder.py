"""Output folders: the files in a folder, and the lock of its writer.

Knows names, but not what the files hold.
"""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalejax.core.errors import ConfigError


class FileIn:
    """Attribute of a folder class with a `path`: the path of the file of this name in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type) -> Path:
        return folder.path / self._name

    @staticmethod
    def names(kind: type) -> frozenset[str]:
        """Names of the files that a folder class has."""
        return frozenset(e._name for e in vars(kind).values() if isinstance(e, FileIn))


@contextlib.contextmanager
def locked(path: Path, refused: str, *, seconds: float = 0.0) -> Iterator[int]:
    """Hold the lock of the file `path`; processes that inherit its descriptor hold it too.

    Args:
        path: the lock file; created, with its folder, if it does not exist.
        refused: message if another process holds the lock.
        seconds: how long to wait for it.

    Raises:
        ConfigError: if another process still holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(refused) from error
                time.sleep(0.1)
        yield file.fileno()
