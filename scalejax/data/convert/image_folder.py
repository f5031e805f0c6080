"""Rows of a folder that has a folder of images for each class, like torchvision's ImageFolder."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from scalejax.core.errors import ConfigError, refusal
from scalejax.data.convert.rows import CHUNK_BYTES, IMAGE, hugging_face

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
"""Suffixes of image files; other files are ignored."""


def is_image_folder(path: Path) -> bool:
    """Whether `path` is a folder that contains folders and no Parquet files."""
    if not path.is_dir() or next(path.rglob("*.parquet"), None) is not None:
        return False
    return any(each.is_dir() for each in path.iterdir())


class ImageFolderRows:
    """Encoded images as they are stored; classes are numbered in the order of their names."""

    kind = "folder of images"

    def __init__(self, path: Path, *, shuffle_seed: int | None = None) -> None:
        self.location = str(path)
        classes = sorted(
            each.name for each in path.iterdir() if each.is_dir() and each.name[0] not in "._"
        )
        self._paths: list[str] = []
        labels: list[int] = []
        digest = []
        for label, name in enumerate(classes):
            for about, relative in _images(path, name):
                self._paths.append(relative)
                labels.append(label)
                digest.append((relative, about.st_size, about.st_mtime_ns))
        if not self._paths:
            accepted = f"no image ({', '.join(SUFFIXES)}) is in the folders of {path}"
            raise ConfigError(refusal("source", str(path), accepted))
        self._sizes = np.array([size for _, size, _ in digest])
        self.labels = np.array(labels)
        if shuffle_seed is not None:
            order = np.random.default_rng(shuffle_seed).permutation(len(labels))
            self._paths = [self._paths[index] for index in order]
            self.labels, self._sizes = self.labels[order], self._sizes[order]
        self._root = path
        self.files, self.size_bytes = len(labels), int(self._sizes.sum())
        self.fingerprint = hashlib.sha256(repr(digest).encode()).hexdigest()
        schema = pa.schema([("image", IMAGE), ("label", pa.int64())])
        self.schema = hugging_face(schema, classes)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, begin: int, end: int) -> Iterator[pa.Table]:
        """Rows `begin` to `end` - 1 in order, some at a time.

        Raises:
            ConfigError: if a file cannot be read.
        """
        images: list[dict[str, object]] = []
        held = 0
        for row in range(begin, end):
            path = self._root / self._paths[row]
            try:
                images.append({"bytes": path.read_bytes(), "path": self._paths[row]})
            except OSError as error:
                raise ConfigError(f"{path} cannot be read ({error}).") from error
            held += int(self._sizes[row])
            if held >= CHUNK_BYTES or row == end - 1:
                labels = self.labels[row + 1 - len(images) : row + 1]
                columns = [pa.array(images, IMAGE), pa.array(labels, pa.int64())]
                yield pa.Table.from_arrays(columns, schema=self.schema)
                images, held = [], 0

    def name(self, row: int) -> str:
        """The file."""
        return str(self._root / self._paths[row])


def _images(root: Path, name: str) -> Iterator[tuple[os.stat_result, str]]:
    """Every image in and below a folder, by name, with its file status."""
    for folder, folders, files in os.walk(root / name, followlinks=True):
        folders.sort()
        for file in sorted(files):
            if file.lower().endswith(SUFFIXES) and file[0] != ".":
                path = Path(folder) / file
                yield path.stat(), str(path.relative_to(root))
