"""Batches as arrays in this process's memory: the rows that its devices hold, taken of a source.

The same in whichever process they are made. Needs no JAX, and knows no devices.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from scalejax.data.loader.sampler import Rows
from scalejax.data.loader.skip_unreadable import READABLE, settled
from scalejax.data.source import Source

LocalBatch = dict[str, np.ndarray]
"""Of each part of a batch the rows that devices of this process hold."""


def unchanged(source: Source) -> Source:
    """`source`, with nothing put around it."""
    return source


def take_batches(source: Source, batches: Sequence[Rows]) -> list[LocalBatch]:
    """The batches of `source`, those of one epoch taken at once.

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
            filled.append(settled(rows, batch) if READABLE in taken else rows)
    return filled
