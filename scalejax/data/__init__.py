"""Examples by index, and the global batches made of them: one file per kind of data set."""

from scalejax.data.pipeline import (
    Batch,
    evaluation_batches,
    evaluation_batches_of_seeds,
    training_batches,
    training_batches_of_seeds,
)
from scalejax.data.readable import Skipped
from scalejax.data.source import Source, Split, open_source

__all__ = [
    "Batch",
    "Skipped",
    "Source",
    "Split",
    "evaluation_batches",
    "evaluation_batches_of_seeds",
    "open_source",
    "training_batches",
    "training_batches_of_seeds",
]
