"""Flat files of numbers, read at many offsets at once.

Knows offsets and types; nothing of the meaning of the numbers.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalejax.core.errors import ConfigError
from scalejax.core.filesystem import DataFile, is_url, opened_filesystem, require_unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFile:
    """A file of numbers of one type: memory-mapped, or at a URL read in ranges."""

    field: str
    """Field of the config that names the file."""
    file: DataFile
    """File that holds them."""
    dtype: np.dtype
    """Data type of the numbers."""
    offset: int
    """Bytes of the file before the first."""
    count: int
    """Number of numbers."""

    def windows(self, begins: np.ndarray, width: int) -> np.ndarray:
        """`width` numbers from each of `begins` on, [begins, width].

        Raises:
            ConfigError: if the file is missing or has changed.
        """
        if is_url(self.file.path):
            zeros = np.zeros(len(begins), np.int64)
            return gathered([self], zeros, begins, begins + width).reshape(-1, width)
        return np.lib.stride_tricks.sliding_window_view(self._mapped(), width)[begins]

    def _mapped(self) -> np.ndarray:
        """All numbers, memory-mapped, if the file is unchanged."""
        # reading the mapping of a truncated file would kill this process
        require_unchanged(self.field, self.file)
        return _mapped(self)


def gathered(
    files: Sequence[FlatFile], which: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Concatenated ranges of numbers of `files`.

    Args:
        files: all on this machine, or all of one remote storage.
        which: file of each range.
        begins: its first number.
        ends: the number after its last.

    Raises:
        ConfigError: if a file is missing or has changed.
    """
    ranges = zip(which.tolist(), begins.tolist(), ends.tolist(), strict=True)
    if not is_url(files[0].file.path):
        mapped = {number: files[number]._mapped() for number in set(which.tolist())}
        return np.concatenate([mapped[number][begin:end] for number, begin, end in ranges])
    paths, starts, stops = [], [], []
    for number, begin, end in ranges:
        each = files[number]
        paths.append(opened_filesystem(each.field, each.file.path)[1])
        starts.append(each.offset + begin * each.dtype.itemsize)
        stops.append(each.offset + end * each.dtype.itemsize)
    filesystem, _ = opened_filesystem(files[0].field, files[0].file.path)
    parts = []
    found = filesystem.handler.fs.cat_ranges(paths, starts, stops, on_error="return")
    for number, start, stop, content in zip(which.tolist(), starts, stops, found, strict=True):
        if isinstance(content, Exception) or len(content) != stop - start:
            why = content if isinstance(content, Exception) else "it is shorter than it was"
            each = files[number]
            raise ConfigError(f"{each.field}: {each.file.path} cannot be read any more ({why}).")
        parts.append(np.frombuffer(content, files[number].dtype))
    return np.concatenate(parts)


@lru_cache(maxsize=256)  # each holds a file descriptor
def _mapped(numbers: FlatFile) -> np.ndarray:
    with open(numbers.file.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, numbers.dtype, numbers.count, numbers.offset)
