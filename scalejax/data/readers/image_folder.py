"""Images in a folder for each class; a file is opened when its example is taken."""

import hashlib
import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from scalejax.config.data import ImageFolderConfig
from scalejax.core.filesystem import (
    DataFile,
    absolute_location,
    is_url,
    states_below,
)
from scalejax.core.remote import read_whole
from scalejax.data.formats.image_folder import image_files, image_folder_facts
from scalejax.data.source import Inspected, Reader, Split, UnreadableExample, UsedPart
from scalejax.data.transforms.augmentation import AS_IS, Augmentation, Changes
from scalejax.data.transforms.images import decoded_all

_READS_AT_URL = 3
"""Reads of images from a store, whose sizes are unknown, before one counts as unreadable."""


class ImageFolder(Reader, names=("image_folder",)):
    """Images, uint8 of [height, width, channels], and the places of their folders among the
    classes."""

    facts = staticmethod(image_folder_facts)

    def __init__(
        self, config: ImageFolderConfig, split: Split, augmentation: Augmentation = AS_IS
    ) -> None:
        self._augmentation = augmentation
        self._config = config
        self._field = f"data.{split}"
        self._files = image_files(config, split)
        classes = image_files(config, "train").classes
        numbers = [classes.index(name) for name in self._files.classes]
        self._classes = np.repeat(np.array(numbers, np.int32), self._files.counts)

    @staticmethod
    def files(config: ImageFolderConfig, part: Split) -> Iterable[UsedPart]:
        """The current folder of each class, in place of its files."""
        files = image_files(config, part)
        location = absolute_location(files.location)
        paths = map(files.path, range(len(files)))
        states = states_below(f"data.{part}", location, paths)
        for name, count in zip(files.classes, files.counts, strict=True):
            listing, contents, size_bytes, is_known = hashlib.sha256(), hashlib.sha256(), 0, True
            for path, length, version in islice(states, count):
                listing.update(repr((path, length)).encode())
                contents.update(repr((path, length, version)).encode())
                size_bytes += length
                is_known = is_known and version is not None
            version = contents.hexdigest() if is_known else None
            file = DataFile(path=f"{location}/{name}", size_bytes=size_bytes, version=version)
            yield file, count, listing.hexdigest()

    @staticmethod
    def inspected(config: ImageFolderConfig, part: Split) -> Inspected:
        """The folder of `part`."""
        return Inspected(getattr(config, part))

    def __len__(self) -> int:
        """Number of images."""
        return len(self._files)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`.

        Raises:
            UnreadableExample: if a file is gone or holds no image, naming it.
            ConfigError: if one cannot be read.
        """
        location = self._files.location
        paths = [os.path.join(location, self._files.path(int(index))) for index in indices]
        changes = self._augmentation.of(indices, epoch)
        images = self._images(paths, changes, _READS_AT_URL if is_url(location) else 1)
        return {"inputs": images, "targets": self._classes[indices], **changes.beside()}

    def _images(self, paths: list[str], changes: Changes, reads: int) -> np.ndarray:
        """The images at `paths`, read again if one is not an image: a store may have sent the page
        of a proxy, or half an image."""
        try:
            return decoded_all(
                _contents(self._field, self._files.location, paths),
                len(paths),
                size=self._config.image_size,
                channels=self._config.channels,
                named=paths.__getitem__,
                changes=changes,
            )
        except UnreadableExample:
            if reads == 1:
                raise
        return self._images(paths, changes, reads - 1)


def _contents(field: str, location: str, paths: list[str]) -> Callable[[int], bytes]:
    """A function that returns the content of one of `paths`; from a URL, all are read at once."""
    if not is_url(location):
        return lambda number: Path(paths[number]).read_bytes()
    found = read_whole(field, paths)

    def content(number: int) -> bytes:
        if (value := found[number]) is None:
            raise FileNotFoundError(f"{paths[number]} is gone")
        return value

    return content
