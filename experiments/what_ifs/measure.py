"""How long 10,000 what-ifs take: clusters that differ, one program, one core.

Prints a line for each kind of change, then one for all of them mixed, as processor time and as
time on the wall. The program is ResNet-50 on 256 devices, 1,504 operations and 34 all-reduces,
compiled for H100. Every cluster is another object with other numbers; nothing is timed twice.
"""

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scalejax.core.serialization import build
from scalejax.hardware import Cluster, load_cluster
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.timeline import what_if

PROGRAM = (
    Path(__file__).parents[2] / "tests/golden/programs/resnet50_bf16_256_data256_sm_90.json.gz"
)


def network(cluster: Cluster, factor: float) -> Cluster:
    """Other network cards."""
    if cluster.network is None:
        return cluster
    rate = cluster.network.bytes_per_second * factor
    return replace(cluster, network=replace(cluster.network, bytes_per_second=rate))


def link(cluster: Cluster, factor: float) -> Cluster:
    """Other wires within a node."""
    rate = cluster.link.bytes_per_second * factor
    return replace(cluster, link=replace(cluster.link, bytes_per_second=rate))


def latency(cluster: Cluster, factor: float) -> Cluster:
    """Messages that cost another time between nodes."""
    methods = tuple(
        replace(method, network_hop_seconds=method.network_hop_seconds * factor)
        for method in cluster.library.methods
    )
    return replace(cluster, library=replace(cluster.library, methods=methods))


def chip(cluster: Cluster, factor: float) -> Cluster:
    """Another chip: both of its rates."""
    rates = {name: rate * factor for name, rate in cluster.chip.peak_flop_per_second.items()}
    other = replace(
        cluster.chip,
        peak_flop_per_second=rates,
        memory_bytes_per_second=cluster.chip.memory_bytes_per_second * factor,
    )
    return replace(cluster, chip=other)


CHANGES = (network, link, latency, chip)


def timed(name: str, work: Callable[[Cluster], object], clusters: Sequence[Cluster]) -> None:
    """Print how long `work` takes on all clusters."""
    wall, processor = time.perf_counter(), time.process_time()
    for cluster in clusters:
        work(cluster)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{name:<34}{len(clusters):>7,}{processor:>11.2f} s{wall:>9.2f} s")


def main(count: int) -> None:
    """Draw the clusters, then time each kind of change."""
    program = build(Program, json.loads(gzip.decompress(PROGRAM.read_bytes())))
    base, draw = load_cluster("dgx-h100"), random.Random(0)
    print(f"{'what changes':<34}{'what-ifs':>7}{'processor':>12}{'wall':>11}")
    for change in CHANGES:
        clusters = [change(base, draw.uniform(0.25, 4)) for _ in range(count // len(CHANGES))]
        timed(change.__name__, what_if(program).timeline, clusters)
    mixed = []
    for _ in range(count):
        cluster = base
        for change in draw.sample(CHANGES, draw.randint(1, len(CHANGES))):
            cluster = change(cluster, draw.uniform(0.25, 4))
        mixed.append(cluster)
    timed("one to four of them", what_if(program).timeline, mixed)
    timed("the same, whole predictions", lambda cluster: predict(program, cluster), mixed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="what-ifs in a mixture")
    main(parser.parse_args().count)
