"""Seconds of a program's collective: finds where its devices sit, then asks `collectives`."""

from functools import cache

from scalejax import collectives
from scalejax.collectives import Route
from scalejax.hardware import Cluster
from scalejax.program import Collective

_SECONDS = {
    "all_reduce": collectives.all_reduce_seconds,
    "all_gather": collectives.gather_seconds,
    "reduce_scatter": collectives.gather_seconds,
    "all_to_all": collectives.all_to_all_seconds,
    "collective_permute": collectives.permute_seconds,
}


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Time of one exchange on an otherwise idle cluster, all groups like it busy at once.

    Raises:
        DoesNotFit: if the group spans nodes that no network joins.
    """
    way = group_route(collective.group.extents, cluster)
    return _SECONDS[collective.name](collective.payload_bytes, way, cluster.library.methods)


def group_route(extents: tuple[tuple[int, int], ...], cluster: Cluster) -> Route:
    """Where a group of (size, stride) extents sits on the cluster: devices fill node by node.

    All groups are taken to sit as the one of device 0 does; where strides and nodes do not
    divide each other, some would straddle a node more.
    """
    members, members_per_node, nodes = _seats(extents, cluster.devices_per_node)
    return collectives.route(
        cluster, members=members, members_per_node=members_per_node, nodes=nodes
    )


@cache
def _seats(extents: tuple[tuple[int, int], ...], devices_per_node: int) -> tuple[int, int, int]:
    """(members, most members in one node, nodes) of the group that device 0 is in."""
    devices = [0]
    for size, stride in extents:
        devices = [device + stride * i for device in devices for i in range(size)]
    per_node: dict[int, int] = {}
    for device in devices:
        node = device // devices_per_node
        per_node[node] = per_node.get(node, 0) + 1
    return len(devices), max(per_node.values()), len(per_node)
