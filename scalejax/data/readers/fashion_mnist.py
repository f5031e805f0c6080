"""Fashion-MNIST: the subset that comes with scalejax, or the full set of the Debian package."""

import gzip
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from scalejax.config.data import FashionMnistConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.source import Reader, Split
from scalejax.data.transforms.augmentation import AS_IS, Augmentation

FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts the full set."""
EMBEDDED = Path(__file__).parents[1] / "fashion_10000_2000.npz"
"""A class-balanced subset, 10,000 to train on and 2,000 to test on; MIT, see the notice there."""


class FashionMnist(Reader, names=("fashion_mnist",)):
    """Photographs of clothes, uint8 of 28 x 28 x 1, and their classes."""

    def __init__(
        self, config: FashionMnistConfig, split: Split, augmentation: Augmentation = AS_IS
    ) -> None:
        images, classes = (_full if _edition(config) == "full" else _embedded)(split)
        self._images = images.reshape(-1, 28, 28, 1)
        self._classes = classes.astype(np.int32)
        self._augmentation = augmentation

    @staticmethod
    def facts(config: FashionMnistConfig) -> DatasetFacts:
        """Counts and shapes.

        Raises:
            ConfigError: if the full edition is requested but not installed.
        """
        if config.edition == "full" and not FOLDER.is_dir():
            accepted = (
                f"{FOLDER} is not there; install it with "
                '"apt-get install dataset-fashion-mnist", or use "embedded"'
            )
            raise ConfigError(refusal("data.edition", config.edition, accepted))
        return config.facts_of(_edition(config))

    def __len__(self) -> int:
        """Number of images."""
        return len(self._classes)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`."""
        examples = {"inputs": self._images[indices], "targets": self._classes[indices]}
        return self._augmentation.of(indices, epoch).applied(examples)


def _edition(config: FashionMnistConfig) -> Literal["embedded", "full"]:
    """The edition that is read: with "auto", the full one if it is installed."""
    if config.edition == "auto":
        return "full" if FOLDER.is_dir() else "embedded"
    return config.edition


@cache  # the runs of one process, such as those of `quickstart`, share it
def _embedded(split: Split) -> tuple[np.ndarray, np.ndarray]:
    try:
        with EMBEDDED.open("rb") as file, np.load(file) as arrays:
            return arrays[f"x_{split}"], arrays[f"y_{split}"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{EMBEDDED} is damaged; install scalejax again: {error}") from error


def _full(split: Split) -> tuple[np.ndarray, np.ndarray]:
    prefix = "train" if split == "train" else "t10k"
    images = _idx(FOLDER / f"{prefix}-images-idx3-ubyte.gz", header_bytes=16)
    classes = _idx(FOLDER / f"{prefix}-labels-idx1-ubyte.gz", header_bytes=8)
    return images, classes


def _idx(path: Path, *, header_bytes: int) -> np.ndarray:
    """The bytes of an IDX file (a header of sizes, then uint8 elements)."""
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header_bytes)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); install the package dataset-fashion-mnist again, "
            'or use data.edition="embedded".'
        ) from error
