"""One of several processes that measure this machine together; the first prints what they measure
as it begins, a line each, and at the end what they found.

Usage: python -m scalejax.measure.devices.worker PORT PROCESSES RANK PROBE_JSON
"""

import json
import sys

import jax

from scalejax.core.serialization import build, plain
from scalejax.measure.devices.collectives import MeasuredCollective
from scalejax.measure.devices.machine import measure_chip, mesh_of
from scalejax.measure.devices.probes import all_reduce_seconds
from scalejax.measure.devices.processes import STAGE, TAG, Between, Probe


def main(port: int, processes: int, rank: int, probe: Probe) -> None:
    """Join the others, measure the chip and each size, print `TAG` and a `Between`."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = mesh_of(jax.devices())

    def say(what: str) -> None:
        if rank == 0:
            print(STAGE, f"{what} in {processes} processes", flush=True)

    collectives = []
    for size in probe.sizes:
        say("collectives")
        seconds = all_reduce_seconds(mesh, size, probe.calls)
        collectives.append(
            MeasuredCollective(device_count=processes, size_bytes=size, seconds=seconds)
        )
    chip = measure_chip(mesh, probe.grid, probe.source, say)
    if rank == 0:
        print(
            TAG, json.dumps(plain(Between(chip=chip, collectives=tuple(collectives)))), flush=True
        )
    jax.distributed.shutdown()


if __name__ == "__main__":
    port, processes, rank = (int(argument) for argument in sys.argv[1:4])
    main(port, processes, rank, build(Probe, json.loads(sys.argv[4])))
