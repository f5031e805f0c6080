"""One run at a time in a folder: two would write over each other's record and checkpoints.

Held by the first process, and let go of by the system however that process ends.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from scalejax.errors import ConfigError
from scalejax.processes import first_says, is_first


class RunLock:
    """The right to write into the folder of a run."""

    def __init__(self) -> None:
        self._folder: int | None = None

    def take(self, path: Path) -> None:
        """Hold the folder `path` until the end; every process must ask.

        Where the file system knows no locks, as some network disks, nothing is held.

        Raises:
            ConfigError: if another run holds it.
        """
        if first_says(is_first() and not self._is_taken(path)):
            raise ConfigError(
                f"another run trains in {str(path)!r}: wait until it has ended, or stop it."
            )

    def _is_taken(self, path: Path) -> bool:
        """Whether nobody else holds the folder: it is ours from now on."""
        if self._folder is not None:
            return True
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder = folder
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError:
            self.close()
        return True

    def close(self) -> None:
        """Let go."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.close(self._folder)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
