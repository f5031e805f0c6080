"""A data set in one file: its config, what follows from it, its examples; and a slow one."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scalejax.config.data import DataConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.data.source import Reader, Split
from scalejax.data.stage_clock import timed


@dataclass(frozen=True, slots=True, kw_only=True)
class StripesConfig(DataConfig):
    """Images with one bright row, which is their class."""

    name: Literal["stripes"] = "stripes"
    """Selects this data set."""
    side: int = 4
    """Height and width in pixels."""

    @property
    def known_facts(self) -> DatasetFacts:
        """16 images to train on, and 8 to test on."""
        return DatasetFacts(
            train_examples=16,
            test_examples=8,
            input_shape=(self.side, self.side, 1),
            target_shape=(),
            classes=self.side,
        )


class Stripes(Reader, names=("stripes",)):
    """Its examples."""

    def __init__(self, config: StripesConfig, split: Split, augmentation: Any) -> None:
        self._side, self._length = config.side, 16 if split == "train" else 8

    def __len__(self) -> int:
        """Number of images."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`."""
        classes = (indices % self._side).astype(np.int32)
        rows = 255 * np.eye(self._side, dtype=np.uint8)[classes]
        images = np.repeat(rows[:, :, None, None], self._side, axis=2)
        return {"inputs": images, "targets": classes}


class Pausing:
    """Examples that take `seconds` a batch to read, and no core."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        """Any number."""
        return 1000

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """Zeros."""
        with timed("storage"):
            time.sleep(self._seconds)
        count = len(indices)
        return {"inputs": np.zeros((count, 2), np.float32), "targets": np.zeros(count, np.int32)}
