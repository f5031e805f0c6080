"""Arrays in NumPy's files, by row."""

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from scalejax.config.data import NumpyConfig
from scalejax.data.formats.npy_headers import ArrayHeader, loaded_array
from scalejax.data.formats.numpy import numpy_facts, part_headers, require_room, targets_of
from scalejax.data.readers.memmap import FlatFile
from scalejax.data.source import (
    Inspected,
    Reader,
    Split,
    UnreadableExample,
    UsedPart,
)
from scalejax.data.stage_clock import timed
from scalejax.data.transforms.augmentation import AS_IS, Augmentation

MOST_SAMPLED_ROWS = 2**16
"""Number of rows from which mean and deviation of features are estimated."""


class NumpyArrays(Reader, names=("numpy",)):
    """Images, uint8 of [height, width, channels], or numbers, float32 of [features]; classes."""

    facts = staticmethod(numpy_facts)

    def __init__(
        self, config: NumpyConfig, split: Split, augmentation: Augmentation = AS_IS
    ) -> None:
        self._config = config
        self._augmentation = augmentation
        self._field = f"data.{split}"
        self._headers = part_headers(config, split)
        self._targets = targets_of(config, split)
        if self._headers.is_table:
            self._moments = _moments("data.train", part_headers(config, "train").inputs)

    @staticmethod
    def files(config: NumpyConfig, part: Split) -> Iterable[UsedPart]:
        """The current files of `part`."""
        headers = part_headers(config, part)
        files = dict.fromkeys((headers.inputs.file, headers.targets.file))  # an .npz is one file
        return ((file, headers.inputs.shape[0], None) for file in files)

    @staticmethod
    def inspected(config: NumpyConfig, part: Split) -> Inspected:
        """The arrays of `part`."""
        from scalejax.data.convert.rows import RowsOptions

        headers = part_headers(config, part)
        inputs, targets = headers.inputs, headers.targets
        options = RowsOptions(images=inputs.member, labels=targets.member)
        if inputs.member is None:
            options = RowsOptions(labels=targets.file.path)
        return Inspected(inputs.file.path, options)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._targets)

    def share_of(self, processes: int) -> "NumpyArrays":
        """The source for one of `processes`, each of which loads the arrays of an .npz itself.

        Raises:
            ConfigError: if their copies together exceed the memory budget.
        """
        require_room(self._config, processes)
        return self

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The inputs and classes at `indices`.

        Raises:
            UnreadableExample: if a row has a number that is not finite, naming it.
            ConfigError: if a file cannot be read.
        """
        with timed("storage"):
            inputs = _rows(self._field, self._headers.inputs)(indices, 1)
        if self._headers.is_table:
            inputs = self._normalized(inputs, indices)
        else:
            inputs = inputs.reshape(-1, *self._headers.input_shape)
        examples = {"inputs": inputs, "targets": self._targets[indices]}
        return self._augmentation.of(indices, epoch).applied(examples)

    def _normalized(self, rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.float64)
        wrong = np.argwhere(~np.isfinite(rows))
        if wrong.size:
            row, column = wrong[0].tolist()
            raise UnreadableExample(
                f"{self._headers.inputs.where}, row {indices[row]}, column {column}: "
                f"{rows[row, column]} is not a finite number."
            )
        mean, deviation = self._moments
        return ((rows - mean) / deviation).astype(np.float32)


def _rows(field: str, header: ArrayHeader) -> Callable[[np.ndarray, int], np.ndarray]:
    """A function (first rows, count) -> elements of `count` rows from each first row, [first rows,
    elements]."""
    width = int(np.prod(header.shape[1:]))
    if header.member is not None:
        flat = loaded_array(field, header).reshape(-1)
        view = np.lib.stride_tricks.sliding_window_view
        return lambda indices, together: view(flat, together * width)[indices * width]
    numbers = FlatFile(
        field=field,
        file=header.file,
        dtype=header.dtype,
        offset=header.offset,
        count=header.shape[0] * width,
    )
    return lambda indices, together: numbers.windows(indices * width, together * width)


@lru_cache(maxsize=8)
def _moments(field: str, header: ArrayHeader) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each feature over rows evenly spread over the training part."""
    count, features = header.shape
    begins, together = np.array([0]), count
    if count > MOST_SAMPLED_ROWS:  # in a few stretches, each one request to a URL
        together = 1024
        begins = np.linspace(0, count - together, MOST_SAMPLED_ROWS // together).astype(np.int64)
    rows = _rows(field, header)(begins, together).reshape(-1, features).astype(np.float64)
    known = np.ma.masked_invalid(rows)
    mean, deviation = known.mean(axis=0).filled(0), known.std(axis=0).filled(0)
    return mean, np.where(deviation > 0, deviation, 1)
