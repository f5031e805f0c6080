"""Hardware with round numbers, for tests that a reader checks on paper."""

from dataclasses import replace

from scalejax.hardware import (
    Attainable,
    Chip,
    Cluster,
    CollectiveMethod,
    CommunicationLibrary,
    Link,
    Network,
)

CHIP = Chip(
    name="paper",
    title="A chip with round numbers",
    peak_flop_per_second={"bf16": 100e12, "f32": 10e12},
    memory_bytes=10_000_000_000,
    memory_bytes_per_second=1e12,
    attainable=Attainable(
        matmul_fraction=1.0,
        matmul_ramp_seconds=0.0,
        convolution_fraction=1.0,
        memory_fraction=1.0,
        launch_seconds=0.0,
    ),
    runtime_reserve_bytes=1_000_000_000,
)

RING = CollectiveMethod(
    algorithm="ring",
    protocol="simple",
    bandwidth_fraction=1.0,
    base_seconds=0.0,
    link_hop_seconds=1e-6,
    network_hop_seconds=10e-6,
)


def cluster_of(*methods: CollectiveMethod, **fields: object) -> Cluster:
    """Nodes of 8 paper chips: 100 GB/s to the node's others, 10 GB/s per node to other nodes."""
    cluster = Cluster(
        name="paper-cluster",
        title="A cluster with round numbers",
        chip=CHIP,
        devices_per_node=8,
        link=Link(kind="nvswitch", bytes_per_second=100e9),
        network=Network(bytes_per_second=10e9),
        library=CommunicationLibrary(name="paper", title="Rings", methods=methods or (RING,)),
    )
    return replace(cluster, **fields)
