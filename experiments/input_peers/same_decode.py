"""This project's Parquet source with the very transform of the others, also in worker processes."""

from typing import Any

import numpy as np
from decoding import TRANSFORMS

from scalejax.config.data import ParquetConfig
from scalejax.data.readers import parquet
from scalejax.data.transforms import images


class SameDecode(parquet.ParquetExamples):
    """Decodes with a transform of `decoding`; pickled by its name, so that a worker imports it."""

    transform = "resized"

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The examples at `indices`."""
        decode = TRANSFORMS[self.transform]
        images.decoded = lambda content, *_: decode(content)  # type: ignore
        return super().take(indices, epoch)


def examples(config: ParquetConfig, transform: str) -> Any:
    """The examples to train on."""
    source = SameDecode(config, "train")
    source.transform = transform
    return source
