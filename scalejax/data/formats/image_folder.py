"""Images in a folder for each class, as torchvision's ImageFolder reads them; opens no image."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalejax.config.data import ImageFolderConfig, Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp"),
    *(".pgm", ".tif", ".tiff", ".webp"),
)
"""Suffixes of image files, in lower or upper case (those of torchvision)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """The images of a folder, class by class; names take as many bytes in memory as on disk."""

    location: str
    """The folder."""
    classes: tuple[str, ...]
    """Names of its folders that hold images, sorted."""
    counts: tuple[int, ...]
    """Number of images of each class."""
    names: bytes
    """Paths below the folder, separated by zero bytes."""
    ends: np.ndarray
    """End offset of each path in `names`, int64."""

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> str:
        """Path below the folder."""
        begin = self.ends[index - 1] + 1 if index else 0
        return os.fsdecode(self.names[begin : self.ends[index]])


def image_folder_facts(config: ImageFolderConfig) -> DatasetFacts:
    """Counts of images and classes.

    Raises:
        ConfigError: as for `image_files`.
    """
    train = image_files(config, "train")
    return DatasetFacts(
        train_examples=len(train),
        test_examples=len(image_files(config, "test")),
        validation_examples=len(image_files(config, "validation"))
        if "validation" in config.parts
        else 0,
        input_shape=(config.image_size, config.image_size, config.channels),
        target_shape=(),
        classes=len(train.classes),
    )


def image_files(config: ImageFolderConfig, split: Split) -> ImageFiles:
    """The images of one part. Folders are listed again once one of them changed, URLs only once.

    Raises:
        ConfigError: if there is no such folder, it has no class, a class has no image, or another
            part has a class that the training part lacks.
    """
    files = _files(f"data.{split}", getattr(config, split))
    if split != "train":
        known = image_files(config, "train").classes
        unknown = sorted(set(files.classes) - set(known))
        if unknown:
            accepted = (
                f"it holds the class {unknown[0]!r}, and data.train={config.train!r} does not"
            )
            raise ConfigError(refusal(f"data.{split}", getattr(config, split), accepted))
    return files


_listings: dict[str, tuple[tuple[tuple[str, int], ...], ImageFiles]] = {}
"""Listings by location, with the modification time of each folder."""
_MOST_LISTINGS = 8


def _files(field: str, location: str) -> ImageFiles:
    # Imported here because other data sets need no Arrow, and commands start sooner without it.
    from scalejax.core.filesystem import is_url, naming

    with naming(field, location):
        key = location if is_url(location) else os.path.abspath(location)
        if key in _listings:
            written, files = _listings[key]
            if all(_written(folder) == when for folder, when in written):
                return files
        if is_url(location):
            written, below = (), _below_url(field, location)
        else:
            if not os.path.isdir(location):
                accepted = f"there is no such folder; it must hold one for each class of {field}"
                raise ConfigError(refusal(field, location, accepted))
            when, below = [], {}
            for path, names in _folders(location):
                when.append((os.path.join(location, path), _written(os.path.join(location, path))))
                below[path] = names
            written = tuple(when)
        files = _ordered(field, location, below)
    _listings.pop(key, None)
    while len(_listings) >= _MOST_LISTINGS:
        del _listings[next(iter(_listings))]
    _listings[key] = written, files
    return files


def _written(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return -1


def _folders(root: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder below `root`, and `root` as "", with the names of the files in it.

    Lists only names and types: a system call for each file would dominate the time.
    """
    waiting = [""]
    while waiting:
        path = waiting.pop()
        names = []
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    waiting.append(os.path.join(path, entry.name))
                else:
                    names.append(entry.name)
        yield path, names


def _below_url(field: str, location: str) -> dict[str, list[str]]:
    """Every folder below a URL with the names of its files, like `_folders`."""
    from scalejax.core.remote import listing

    below: dict[str, list[str]] = {}
    root, found = listing(field, location)
    start = len(root.rstrip("/")) + 1
    for path in found:
        parts = path[start:].split("/")
        if not any(part.startswith(".") for part in parts):
            below.setdefault("/".join(parts[:-1]), []).append(parts[-1])
    if not below:
        accepted = f"there is no such folder; it must hold one for each class of {field}"
        raise ConfigError(refusal(field, location, accepted))
    return below


def _ordered(field: str, location: str, below: dict[str, list[str]]) -> ImageFiles:
    """The images among the files of each folder, as torchvision orders them."""
    counts: dict[str, int] = {}
    paths: list[str] = []
    for folder in sorted(below, key=lambda folder: (folder.split("/")[0], folder)):
        if not folder:  # these files are outside the folders of the classes
            continue
        names = sorted(n for n in below[folder] if n.lower().endswith(IMAGE_SUFFIXES))
        paths += [f"{folder}/{name}" for name in names]
        of_class = folder.split("/")[0]
        counts[of_class] = counts.get(of_class, 0) + len(names)
    if not counts:
        accepted = "it holds no folders; each class has one, with its images in it"
        raise ConfigError(refusal(field, location, accepted))
    empty = [name for name, count in counts.items() if not count]
    if empty:
        accepted = (
            f"its folder {empty[0]!r} is a class without an image "
            f"({', '.join(IMAGE_SUFFIXES)}); remove it, or fill it"
        )
        raise ConfigError(refusal(field, location, accepted))
    joined = os.fsencode("\0".join(paths))
    zeros = np.flatnonzero(np.frombuffer(joined, np.uint8) == 0)
    return ImageFiles(
        location=location,
        classes=tuple(counts),
        counts=tuple(counts.values()),
        names=joined,
        ends=np.append(zeros, len(joined)).astype(np.int64),
    )
