"""Numbers that lie one after the other in a file, taken from many places of it at once.

Knows places and types; nothing of what the numbers mean.
"""

import mmap
import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalejax.errors import ConfigError
from scalejax.locations import DataFile, is_url, opened_filesystem


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFile:
    """Numbers of one type in a file: mapped into memory, or, of a URL, read where asked for."""

    field: str
    """Field of the config that names the file."""
    file: DataFile
    """Where they are."""
    dtype: np.dtype
    """Their type."""
    offset: int
    """Bytes of the file before the first."""
    count: int
    """How many there are."""

    def windows(self, begins: np.ndarray, width: int) -> np.ndarray:
        """`width` numbers from each of `begins` on, [begins, width].

        Raises:
            ConfigError: if the file is gone, or another than it was.
        """
        if is_url(self.file.path):
            return self._fetched(begins, width)
        try:
            about = os.stat(self.file.path)
        except OSError as error:
            raise ConfigError(
                f"{self.field}: {self.file.path} cannot be read any more ({error})."
            ) from error
        if (about.st_size, str(about.st_mtime_ns)) != (self.file.size_bytes, self.file.version):
            # what is mapped of a file that was cut short would end this process
            raise ConfigError(f"{self.field}: {self.file.path} was written anew while it was read.")
        return np.lib.stride_tricks.sliding_window_view(_mapped(self), width)[begins]

    def _fetched(self, begins: np.ndarray, width: int) -> np.ndarray:
        filesystem, path = opened_filesystem(self.field, self.file.path)
        size = self.dtype.itemsize
        starts = [self.offset + int(begin) * size for begin in begins]
        ends = [start + width * size for start in starts]
        ranges = filesystem.handler.fs.cat_ranges([path] * len(starts), starts, ends)
        for found in ranges:
            if isinstance(found, Exception) or len(found) != width * size:
                why = found if isinstance(found, Exception) else "it is shorter than it was"
                raise ConfigError(
                    f"{self.field}: {self.file.path} cannot be read any more ({why})."
                )
        return np.frombuffer(b"".join(ranges), self.dtype).reshape(len(starts), width)


@lru_cache(maxsize=256)  # each holds a file descriptor
def _mapped(numbers: FlatFile) -> np.ndarray:
    with open(numbers.file.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, numbers.dtype, numbers.count, numbers.offset)
