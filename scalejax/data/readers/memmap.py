"""Flat files of numbers, read at many offsets at once.

Knows offsets and types; nothing of the meaning of the numbers.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalejax.core.filesystem import DataFile, is_url, part_of, require_unchanged
from scalejax.core.remote import read_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFile:
    """A file of numbers of one type: memory-mapped, or read in ranges from a URL."""

    field: str
    """Field of the config that names the file."""
    file: DataFile
    """File that holds them."""
    dtype: np.dtype
    """Data type of the numbers."""
    offset: int
    """Bytes of the file before the first number."""
    count: int
    """Count of the numbers."""

    def windows(self, begins: np.ndarray, width: int) -> np.ndarray:
        """`width` numbers from each of `begins`, [begins, width].

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
        files: all on this machine, or all in one remote storage.
        which: file of each range.
        begins: its first number.
        ends: the number after its last.

    Raises:
        ConfigError: if a file is missing or has changed.
        Unavailable: if its store does not answer.
    """
    ranges = zip(which.tolist(), begins.tolist(), ends.tolist(), strict=True)
    if not is_url(files[0].file.path):
        mapped = {number: files[number]._mapped() for number in set(which.tolist())}
        return np.concatenate([mapped[number][begin:end] for number, begin, end in ranges])
    wanted, numbers = [], []
    for number, begin, end in ranges:
        each, size = files[number], files[number].dtype.itemsize
        wanted.append(part_of(each.file, each.offset + begin * size, each.offset + end * size))
        numbers.append(number)
    found = read_ranges(files[0].field, wanted)
    parts = zip(numbers, found, strict=True)
    return np.concatenate([np.frombuffer(part, files[number].dtype) for number, part in parts])


@lru_cache(maxsize=256)  # each holds a file descriptor
def _mapped(numbers: FlatFile) -> np.ndarray:
    with open(numbers.file.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, numbers.dtype, numbers.count, numbers.offset)
