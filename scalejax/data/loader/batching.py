"""Batching: the rows of global batches that this process holds, read from a source as arrays.

Batches do not depend on the process that reads them. Needs no JAX, and knows no devices.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from scalejax.data.loader.sampler import Rows
from scalejax.data.loader.skip_unreadable import READABLE, without_unreadable
from scalejax.data.source import Source
from scalejax.data.stage_clock import STAGE_SECONDS, reading

LocalBatch = dict[str, np.ndarray]
"""The rows that devices of this process hold, for each array of a batch."""


def unchanged(source: Source) -> Source:
    """`source` itself: the identity as a wrapper."""
    return source


def take_batches(source: Source, batches: Sequence[Rows]) -> list[LocalBatch]:
    """The examples of `batches`; those of the same epoch are read at once.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """
    filled = []
    for epoch, of_epoch in groupby(batches, key=lambda batch: batch.epoch):
        several = list(of_epoch)
        taken = source.take(np.concatenate([batch.indices for batch in several]), epoch)
        begin = 0
        for batch in several:
            part = slice(begin, begin := begin + len(batch.indices))
            rows = {name: values[part] for name, values in taken.items()} | batch.beside
            filled.append(without_unreadable(rows, batch) if READABLE in taken else rows)
    return filled


def timed_batches(source: Source, batches: Sequence[Rows]) -> list[LocalBatch]:
    """The batches of `take_batches`, each with its `STAGE_SECONDS`."""
    with reading(len(batches)) as seconds:
        taken = take_batches(source, batches)
    return [batch | {STAGE_SECONDS: seconds.copy()} for batch in taken]
