"""Seconds of a program's collective: finds where its devices sit, then asks `collectives`."""

from functools import cache

from scalejax.hardware import Cluster
from scalejax.simulator import collectives
from scalejax.simulator.collectives import MODELS, Route
from scalejax.simulator.program import Collective


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Time of one exchange on an otherwise idle cluster, all groups like it busy at once, in the
    mean of all steps.

    Where the library runs its buffers one by one, each has the latency of one.

    Raises:
        DoesNotFit: if the group spans nodes that no network joins.
        UnknownHardware: if the cluster names a table of measured times that does not exist.
    """
    seconds = _seconds(collective, collective.payload_bytes, cluster)
    if collective.buffer_count > 1 and cluster.library.runs_buffers_one_by_one:
        seconds += (collective.buffer_count - 1) * _seconds(collective, 0, cluster)
    return seconds * collective.share


def links(collective: Collective, cluster: Cluster) -> int:
    """0 where an exchange stays within nodes, on their links; 1 where it crosses the network."""
    return int(group_route(collective.group.extents, cluster).nodes > 1)


def _seconds(collective: Collective, payload: int, cluster: Cluster) -> float:
    """Time of an exchange of one buffer of `payload` bytes.

    Within a node measured times are taken where the cluster's link has a table of them, modelled
    ones elsewhere. Over nodes it takes what the model says, and no less than the same exchange
    between the members of one node; an all-to-all sends less within the node, and may.
    """
    way = group_route(collective.group.extents, cluster)
    name = collective.name
    inside = None
    if way.members > 1 and (way.nodes == 1 or name != "all_to_all"):
        inside = collectives.measured_seconds(name, payload, way, cluster)
    if way.nodes == 1 and inside is not None:
        return inside
    return max(inside or 0.0, MODELS[name](payload, way, cluster.library.methods))


def group_route(extents: tuple[tuple[int, int], ...], cluster: Cluster) -> Route:
    """Where a group of (size, stride) extents sits on the cluster: devices fill node by node.

    All groups are taken to sit as the one of device 0 does; where strides and nodes do not
    divide each other, some would straddle a node more.
    """
    members, positions, nodes = _seats(extents, cluster.devices_per_node)
    return collectives.route(
        cluster,
        members=members,
        members_per_node=len(positions),
        nodes=nodes,
        positions=positions,
    )


@cache
def _seats(
    extents: tuple[tuple[int, int], ...], devices_per_node: int
) -> tuple[int, tuple[int, ...], int]:
    """(members, places in the node with most of them, nodes) of the group that device 0 is in."""
    devices = [0]
    for size, stride in extents:
        devices = [device + stride * i for device in devices for i in range(size)]
    per_node: dict[int, list[int]] = {}
    for device in devices:
        per_node.setdefault(device // devices_per_node, []).append(device % devices_per_node)
    places = max(per_node.values(), key=len)
    return len(devices), tuple(sorted(places)), len(per_node)
