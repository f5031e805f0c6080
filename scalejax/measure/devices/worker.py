"""One of several processes that measure this machine together; the first prints a line for each
measurement as it begins, and the results at the end.

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
    """Join the other processes, measure the chip and each payload, print `TAG` and a `Between`."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = mesh_of(jax.devices())

    def report(stage: str) -> None:
        if rank == 0:
            print(STAGE, f"{stage} in {processes} processes", flush=True)

    collectives = []
    for size in probe.sizes:
        report("collectives")
        seconds = all_reduce_seconds(mesh, size, probe.calls)
        collectives.append(
            MeasuredCollective(device_count=processes, size_bytes=size, seconds=seconds)
        )
    chip = measure_chip(mesh, probe.grid, probe.source, report)
    if rank == 0:
        print(
            TAG, json.dumps(plain(Between(chip=chip, collectives=tuple(collectives)))), flush=True
        )
    jax.distributed.shutdown()


if __name__ == "__main__":
    port, processes, rank = (int(argument) for argument in sys.argv[1:4])
    main(port, processes, rank, build(Probe, json.loads(sys.argv[4])))
