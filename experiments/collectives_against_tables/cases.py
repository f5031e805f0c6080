"""The catalogue's hardware for each measured case of the ledger."""

from dataclasses import replace
from functools import cache

from ledger import Point

from scalejax.hardware import Cluster, load_cluster
from scalejax.simulator.program import Collective, CollectiveName, DeviceGroup

CLUSTERS = {
    "h100_sxm_80gb": "dgx-h100",
    "b200_sxm": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb200-nvl72",
    "vtrain_ar_a100": "vtrain-a100",
    "vtrain_ar_v100": "dgx1-v100",
    "cw_gb200": "coreweave-gb200",
    "aws_p4de": "aws-p4de",
    "aws_p5": "aws-p5",
    "dgxh100": "dgx-h100",
    "issue232": "dgx-h100",
    "a800": "dgx-a100-80gb",
    "nccl_a100_sxm": "dgx-a100-80gb",
    "nccl_h100_sxm": "dgx-h100",
    "nccl_h200_sxm": "dgx-h200",
    "nccl_b200_sxm": "dgx-b200",
    "nccl_b300_sxm": "dgx-b300",
    "nccl_gb200": "gb200-nvl72",
    "nccl_gb300": "gb300-nvl72",
    "elsewhere_p5": "aws-p5",
    "elsewhere_p4de": "aws-p4de",
    "elsewhere_a100": "dgx-a100-80gb",
}
"""Catalogue names by the beginning of the ledger's."""


@cache
def family_of(hardware: str) -> str:
    """The key of CLUSTERS that the ledger's name begins with."""
    return next(family for family in CLUSTERS if hardware.startswith(family))


def adapted(cluster: Cluster, family: str) -> Cluster:
    """The cluster as it was used: parts of nodes, and what its log states of its network."""
    if family == "gb300":
        return replace(cluster, link=replace(cluster.link, measured=_table(cluster, "gb300-nvl72")))
    if family == "dgxh100":  # 2 devices of each node, a 400 Gb/s card each
        return _part(cluster, devices_per_node=2, network_bytes_per_second=100e9)
    if family == "issue232":  # one device of each node, one 400 Gb/s card used, NCCL_ALGO=Tree
        part = _part(cluster, devices_per_node=1, network_bytes_per_second=50e9)
        trees = tuple(each for each in cluster.library.methods if each.algorithm == "tree")
        return replace(part, library=replace(cluster.library, methods=trees))
    if family == "a800":  # 2 devices of each node, links of 200 GB/s; assumed: 200 Gb/s cards
        a800 = replace(cluster, link=replace(cluster.link, bytes_per_second=200e9))
        return _part(a800, devices_per_node=2, network_bytes_per_second=50e9)
    return cluster


def _part(cluster: Cluster, *, devices_per_node: int, network_bytes_per_second: float) -> Cluster:
    """Some devices of each node, with the network cards that are theirs."""
    network = cluster.network
    if network is not None:
        network = replace(network, bytes_per_second=network_bytes_per_second)
    return replace(cluster, devices_per_node=devices_per_node, network=network)


def _table(cluster: Cluster, name: str) -> str | None:
    return name if cluster.link.measured is not None else None


def cluster_of(hardware: str) -> Cluster:
    """The hardware of a measured case, as the catalogue describes it."""
    family = family_of(hardware)
    return adapted(load_cluster(CLUSTERS[family]), family)


def gradient_sync_of(point: Point) -> Collective:
    """The collective that was measured."""
    group = DeviceGroup(extents=((point.devices, 1),), axes=())
    name: CollectiveName = point.operation  # pyright: ignore[reportAssignmentType]
    return Collective(name=name, payload_bytes=point.payload_bytes, group=group, is_async=False)
