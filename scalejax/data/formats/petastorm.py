"""The order in which Petastorm 0.13.1 returns rows to the processes of a run.

Knows counts of row groups and rows, and no files.
"""

import random

import numpy as np

from scalejax.config.data import PetastormConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.formats.parquet import ParquetFiles


def shard_groups(groups: int, order: PetastormConfig) -> list[list[int]]:
    """The row groups that each process reads, in its order, which every epoch repeats.

    Source: petastorm 0.13.1, reader.py `_partition_row_groups` (Python's generator shuffles all
    groups, and a process keeps those of its number) and workers_pool/ventilator.py `_ventilate`
    (NumPy's permutes those, once). Threads pass them on in this order.

    Raises:
        ConfigError: if there are fewer row groups than shards, like Petastorm's
            NoDataAvailableError.
    """
    numbers = list(range(groups))
    shards = [numbers]
    if order.shard_count is not None:
        if groups < order.shard_count:
            accepted = f"data.train has {groups} row groups, and each process needs one of its own"
            raise ConfigError(
                refusal("data.reading.petastorm.shard_count", order.shard_count, accepted)
            )
        if order.seed is not None:
            random.Random(order.seed).shuffle(numbers)
        count = order.shard_count
        shards = [[n for n in numbers if n % count == shard] for shard in range(count)]
    if order.shuffle_row_groups:
        shards = [np.random.default_rng(order.seed).permutation(shard).tolist() for shard in shards]
    return shards


def epoch_rows(
    counts: np.ndarray, order: PetastormConfig, *, epoch: int, steps: int, global_batch: int
) -> np.ndarray:
    """The rows of the batches of an epoch, int64 [steps x global batch], one after the other.

    A batch holds the next rows of each process, in the order of the processes.

    Args:
        counts: rows of each row group.
        order: what is known about the readers.
        epoch: counted from 0; all epochs before it had as many steps.
        steps: number of steps in an epoch.
        global_batch: rows of a step, a multiple of the processes.
    """
    begins = np.cumsum(counts) - counts
    shards = shard_groups(len(counts), order)
    taken = steps * (global_batch // len(shards))
    places = epoch * taken + np.arange(taken)
    of_shards = []
    for shard in shards:
        rows = np.concatenate([np.arange(begins[n], begins[n] + counts[n]) for n in shard])
        of_shards.append(rows[places % len(rows)].reshape(steps, -1))
    return np.concatenate(of_shards, axis=1).reshape(-1)


def require_full_shards(files: ParquetFiles, order: PetastormConfig) -> None:
    """Refuse processes that would have nothing to read.

    Raises:
        ConfigError: as for `shard_groups`, or if filters keep no row of a process.
    """
    counts = files.kept_counts
    for shard, groups in enumerate(shard_groups(len(counts), order)):
        if not counts[groups].sum():
            accepted = f"they keep no row of the row groups of process {shard}"
            raise ConfigError(refusal("data.filters", files.filters, accepted))
