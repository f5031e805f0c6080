"""A process that takes examples for as long as it is told to: one of several, side by side.

Reads the data set, pickled, from standard input; says "ready"; reads for how long; says how many
examples it took a second. Imports no JAX, as no worker does.
"""

import os
import pickle
import sys
import time

import numpy as np

from scalejax.data.cores import limit_cores
from scalejax.data.source import open_source

TAKEN = 64
"""Examples that are taken at once."""
_READY = 8


class ReadyBatches:
    """A source whose examples cost nothing: a few batches, more than caches hold, in turn."""

    def __init__(self, example_bytes: int) -> None:
        self._bytes = example_bytes
        self._ready: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._taken = 0

    def __len__(self) -> int:
        """As good as endless."""
        return 2**20

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """A batch of as many as are asked for, each time."""
        self._taken += 1
        which = len(indices), self._taken % _READY
        if which not in self._ready:
            inputs = np.full((len(indices), self._bytes), 7, np.uint8)
            self._ready[which] = {"inputs": inputs, "targets": np.zeros(len(indices), np.int32)}
        return self._ready[which]


def main() -> None:
    """Take examples, as one worker does: on one core."""
    limit_cores(1)
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    source = open_source(pickle.loads(sys.stdin.buffer.read(size)), "train", seed=0)
    generator = np.random.default_rng(os.getpid())
    for _ in range(3):
        source.take(generator.integers(0, len(source), TAKEN))
    print("ready", flush=True)
    seconds = float(sys.stdin.buffer.readline())
    begin = now = time.perf_counter()
    taken = 0
    while now - begin < seconds:
        source.take(generator.integers(0, len(source), TAKEN))
        taken, now = taken + TAKEN, time.perf_counter()
    print(taken / (now - begin), flush=True)


if __name__ == "__main__":
    main()
