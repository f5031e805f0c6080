"""One of several processes that measure this machine together; the first prints what they found.

Usage: python -m scalejax.calibrate.worker PORT PROCESSES RANK PROBE_JSON
"""

import json
import sys

import jax

from scalejax.calibrate.exchange import Exchange
from scalejax.calibrate.machine import measure_chip, mesh_of
from scalejax.calibrate.probes import all_reduce_seconds
from scalejax.calibrate.processes import TAG, Between, Probe
from scalejax.documents import build, plain


def main(port: int, processes: int, rank: int, probe: Probe) -> None:
    """Join the others, measure the chip and each size, print `TAG` and a `Between`."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = mesh_of(jax.devices())
    exchanges = [
        Exchange(
            device_count=processes,
            size_bytes=size,
            seconds=all_reduce_seconds(mesh, size, probe.calls),
        )
        for size in probe.sizes
    ]
    chip = measure_chip(mesh, probe.grid, probe.source)
    if rank == 0:
        print(TAG, json.dumps(plain(Between(chip=chip, exchanges=tuple(exchanges)))), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    port, processes, rank = (int(argument) for argument in sys.argv[1:4])
    main(port, processes, rank, build(Probe, json.loads(sys.argv[4])))
