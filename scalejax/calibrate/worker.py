"""One of several processes that time all-reduces between them; the first prints the times.

Usage: python -m scalejax.calibrate.worker PORT PROCESSES RANK CALLS SIZE,SIZE,...
"""

import sys

import jax

from scalejax.calibrate.exchange import TAG
from scalejax.calibrate.machine import mesh_of
from scalejax.calibrate.probes import all_reduce_seconds


def main(port: int, processes: int, rank: int, calls: int, sizes: list[int]) -> None:
    """Join the others, time each size, print "all_reduce BYTES SECONDS"."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = mesh_of(jax.devices())
    for size in sizes:
        seconds = all_reduce_seconds(mesh, size, calls)
        if rank == 0:
            print(TAG, size, seconds)
    jax.distributed.shutdown()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:5]]
    main(numbers[0], numbers[1], numbers[2], numbers[3], [int(s) for s in sys.argv[5].split(",")])
