"""Images and classes in ArrayRecord files, by record."""

from collections.abc import Iterable

import numpy as np

from scalejax.config.data import ArrayRecordConfig
from scalejax.data.formats.array_record import (
    NoExample,
    array_record_facts,
    image_and_class,
    read_records,
    record_files,
)
from scalejax.data.source import Reader, Split, UnreadableExample, UsedPart
from scalejax.data.transforms.augmentation import AS_IS, Augmentation
from scalejax.data.transforms.images import decoded_all


class ArrayRecords(Reader, names=("array_record",)):
    """Images, uint8 of [height, width, channels], and classes."""

    facts = staticmethod(array_record_facts)

    def __init__(
        self, config: ArrayRecordConfig, split: Split, augmentation: Augmentation = AS_IS
    ) -> None:
        self._augmentation = augmentation
        self._config = config
        self._files = record_files(config, split)
        self._ends = np.cumsum([file.count for file in self._files])

    @staticmethod
    def files(config: ArrayRecordConfig, part: Split) -> Iterable[UsedPart]:
        """The files of `part`, as they are now."""
        return ((each.file, each.count, None) for each in record_files(config, part))

    def __len__(self) -> int:
        """Number of records."""
        return int(self._ends[-1])

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`.

        Raises:
            UnreadableExample: if a record is damaged or not an example, naming file and record.
        """
        config = self._config
        classes = np.empty(len(indices), np.int32)
        images = [b""] * len(indices)
        for row, record in self._records(np.asarray(indices)):
            try:
                image, label = image_and_class(record, config.image_column, config.label_column)
            except NoExample as error:
                raise UnreadableExample(f"{self._named(indices[row])}: {error}.") from error
            if not 0 <= label < config.classes:
                raise UnreadableExample(
                    f"{self._named(indices[row])}, feature {config.label_column!r}: {label} is "
                    f"none of the {config.classes} classes (data.classes)."
                )
            images[row], classes[row] = image, label
        changes = self._augmentation.of(indices, epoch)
        pixels = decoded_all(
            images.__getitem__,
            len(images),
            size=config.image_size,
            channels=config.channels,
            named=lambda row: f"{self._named(indices[row])}, feature {config.image_column!r}",
            changes=changes,
        )
        return {"inputs": pixels, "targets": classes, **changes.beside()}

    def _records(self, indices: np.ndarray) -> list[tuple[int, bytes]]:
        """Row and content of each record, a file at a time."""
        which = np.searchsorted(self._ends, indices, side="right")
        records = []
        for number in np.unique(which).tolist():
            rows = np.flatnonzero(which == number)
            file = self._files[number]
            positions = (indices[rows] - (self._ends[number] - file.count)).tolist()
            try:
                found = read_records(file, positions)
            except RuntimeError:  # one of the requested records is damaged: find it
                found = [self._one(file_row) for file_row in indices[rows]]
            records += zip(rows.tolist(), found, strict=True)
        return records

    def _one(self, index: int) -> bytes:
        number, position = self._place(index)
        try:
            return read_records(self._files[number], [position])[0]
        except RuntimeError as error:
            raise UnreadableExample(f"{self._named(index)} cannot be read ({error}).") from error

    def _place(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, int(index - (self._ends[number] - self._files[number].count))

    def _named(self, index: int) -> str:
        """File and record of an example, as a user would look it up."""
        number, position = self._place(index)
        return f"{self._files[number].file.path}, record {position}"
