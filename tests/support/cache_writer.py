"""Children that write tables into a cache on disk, each until it is killed.

Every line read begins one, after the one before is dead; its process is printed. Forked, as it
takes seconds to import what they need.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa

from scalejax.data.readers.row_group_cache import DiskCache

ROWS = 20_000
TABLES = 12


def table_of(number: int) -> pa.Table:
    """Numbers of which every one names its table, 320 kB."""
    values = np.arange(ROWS) + number * ROWS
    return pa.table({"values": values, "negative": -values})


def write(folder: Path, limit_bytes: int, seed: int, tables: list[pa.Table]) -> NoReturn:
    """Ask for one table after another, in an order of its own, for ever."""
    cache, generator = DiskCache(folder, limit_bytes), np.random.default_rng(seed)
    while True:
        number = int(generator.integers(TABLES))
        if not cache.of(str(number), lambda n=number: tables[n]).equals(tables[number]):
            print(f"table {number} is wrong", flush=True)


def main() -> None:
    """Take the folder and its limit from the arguments."""
    folder, limit_bytes = Path(sys.argv[1]), int(sys.argv[2])
    # Before the children: pyarrow imports pandas for a first array, if it is there, for 0.2 s.
    tables = [table_of(number) for number in range(TABLES)]
    for seed, _ in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            write(folder, limit_bytes, seed, tables)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
