"""Sampler of an emulated run: the examples of each minibatch.

An asynchronous worker has its own part of the examples, in the order of every epoch's shuffle;
synchronous workers share the global batches that `train` would use. A single worker gets the
batches of `train` in both cases. Knows indices and epochs.
"""

from functools import lru_cache

import numpy as np

from scalejax.config.run import ResolvedRun
from scalejax.data.loader.sampler import TrainingSampler
from scalejax.data.source import Source
from scalejax.emulation.checks import require_enough
from scalejax.emulation.instructions import Rows


class Samples:
    """The training examples of a run, by minibatch."""

    def __init__(self, run: ResolvedRun, source: Source) -> None:
        self._source, self._global_batch = source, run.split.global_batch
        self._whole = TrainingSampler(
            source,
            self._global_batch,
            seed=run.config.seed,
            steps=run.total_steps,
            first_epoch=0,
        )
        self._epochs = TrainingSampler(
            source, len(source), seed=run.config.seed, steps=run.config.train.epochs, first_epoch=0
        )
        self._assignt = lru_cache(maxsize=8)(self._assign)

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        """The examples of a minibatch, "inputs" and "targets", in the format of the step.

        Raises:
            ConfigError: if a worker's part of the examples is less than a minibatch.
        """
        if rows.way == "part":
            global_rows = self._whole[rows.index]
            size = self._global_batch // rows.workers
            part = slice(rows.worker * size, (rows.worker + 1) * size)
            return self._source.take(global_rows.indices[part], global_rows.epoch)
        size = self._global_batch // rows.sharing
        require_enough(rows.workers, size, len(self._source))
        own = len(range(rows.worker, len(self._source), rows.workers))
        epoch, place = divmod(rows.index, own // size)
        mine = self._assignt(epoch, rows.workers)[rows.worker]
        return self._source.take(mine[place * size : (place + 1) * size], epoch)

    def _assign(self, epoch: int, workers: int) -> list[np.ndarray]:
        """Examples of each worker in the order of the epoch: those whose index modulo the number of
        workers is its own number, so that it has the same ones in every epoch."""
        shuffled = self._epochs[epoch].indices
        owners = shuffled % workers
        ordered = shuffled[np.argsort(owners, kind="stable")]
        return np.split(ordered, np.cumsum(np.bincount(owners, minlength=workers))[:-1])
