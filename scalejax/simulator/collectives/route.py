"""The route of a group on a cluster: how its members spread over nodes, and their link rates.

Depends on hardware and counts of members, not on programs or algorithms.
"""

import math
from dataclasses import dataclass

from scalejax.core.errors import DoesNotFit, require_at_least
from scalejax.hardware import Cluster
from scalejax.simulator.collectives.nvlink_mesh import fewest_links_by_number, mesh_rings


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Members of a group per node, and the links between them; all rates are attainable."""

    members: int
    """Devices in the group."""
    members_per_node: int
    """Devices of the group that share a node."""
    nodes: int
    """Nodes on which the group has members."""
    link_bytes_per_second: float
    """Rate of each member to the others of its node in a ring, per direction."""
    tree_link_bytes_per_second: float
    """Rate of each member to the others of its node in a tree, which sends in both directions
    over each of its links."""
    network_bytes_per_second: float | None
    """Combined rate of the group's members of one node to other nodes, per direction; None if all
    are in one node."""
    host_bytes_per_second: float
    """Combined rate of the members of one node to their host's memory, per direction."""
    in_switch_fraction: float | None = None
    """Fraction of the link's rate that is reached when the switch sums; None if it cannot sum."""
    in_switch_ramp_seconds: float = 0.0
    """Time constant of the pipeline when the switch sums."""
    sums_in_network: bool = False
    """Whether the switches between the nodes add up what the nodes send."""
    keeps_order: bool = True
    """Whether messages arrive in the order in which they were sent, along the whole route."""
    own_share: float = 0.0
    """Time to copy a member's own part in memory, over the time to send it on a link."""
    latency_fraction: float = 1.0
    """Latency within a node over that of the library's constants."""
    ramp_seconds: float = 0.0
    """Time constant of the pipeline through the links and networks of the route."""
    network_message_seconds: float = 0.0
    """Time that the network adds to each message between nodes."""

    def __post_init__(self) -> None:
        require_at_least("route.members", self.members, 1)
        require_at_least("route.members_per_node", self.members_per_node, 1)
        require_at_least("route.nodes", self.nodes, 1)

    @property
    def narrowest_bytes_per_second(self) -> float:
        """Rate of the slowest link that the messages of a ring pass."""
        if self.network_bytes_per_second is None:
            return self.link_bytes_per_second
        if self.members_per_node == 1:
            return self.network_bytes_per_second
        return min(self.link_bytes_per_second, self.network_bytes_per_second)


def find_route(
    cluster: Cluster,
    *,
    members: int,
    members_per_node: int,
    nodes: int,
    positions: tuple[int, ...] | None = None,
) -> Route:
    """Route of a group when all groups like it are busy at once.

    Every device is in one such group, so devices_per_node / members_per_node groups share the
    network cards of a node, and its link to host memory.

    Args:
        cluster: the hardware.
        members: devices in the group.
        members_per_node: devices of the group that share a node.
        nodes: nodes on which the group has members.
        positions: positions of the members in their node, for a mesh of links; the first ones, if
            omitted.

    Raises:
        DoesNotFit: if the group spans nodes that no network joins.
    """
    link = cluster.link
    places = positions if positions is not None else tuple(range(members_per_node))
    ring_rate, tree_rate = _link_rates(cluster, places)
    host_rate = link.bytes_per_second * link.attainable_fraction * members_per_node
    if link.host_bytes_per_second is not None:
        host_rate = link.host_bytes_per_second * members_per_node / cluster.devices_per_node
    network_rate, message_seconds, ramp_seconds = None, 0.0, link.ramp_seconds
    if nodes > 1:
        network_rate = _network_rate(cluster, members_per_node, nodes)
        if cluster.network is not None:
            message_seconds = cluster.network.message_seconds
            ramp_seconds += cluster.network.ramp_seconds
    return Route(
        members=members,
        members_per_node=members_per_node,
        nodes=nodes,
        link_bytes_per_second=ring_rate,
        tree_link_bytes_per_second=tree_rate,
        network_bytes_per_second=network_rate,
        host_bytes_per_second=host_rate,
        in_switch_fraction=link.in_switch_fraction,
        in_switch_ramp_seconds=link.in_switch_ramp_seconds,
        sums_in_network=nodes > 1
        and cluster.network is not None
        and cluster.network.sums_in_switches,
        keeps_order=nodes == 1 or cluster.network is None or cluster.network.keeps_order,
        own_share=link.own_share,
        latency_fraction=link.latency_fraction,
        ramp_seconds=ramp_seconds,
        network_message_seconds=message_seconds,
    )


def _link_rates(cluster: Cluster, positions: tuple[int, ...]) -> tuple[float, float]:
    """Rates of one member to the others of its node: in a ring, and in a tree.

    On a mesh whose links are known, both follow from the paths that fit on them. Members that no
    path of links joins go through the host; in a ring in device order, so do two neighbours without
    a link, and all others wait for them. On a mesh of unknown links each doubling of the members
    adds a dimension: g of N have floor(log2 g) / log2 N of the links.
    """
    link, devices_per_node = cluster.link, cluster.devices_per_node
    rate = link.bytes_per_second * link.attainable_fraction
    if link.kind != "nvlink_mesh" or not 1 < len(positions) <= devices_per_node:
        return rate, rate
    if link.wires is None:
        if len(positions) < devices_per_node:
            rate *= math.floor(math.log2(len(positions))) / math.log2(devices_per_node)
        return rate, rate
    link_rate = rate / max(map(sum, link.wires))
    host_rate = min(link_rate, (link.host_bytes_per_second or rate) / devices_per_node)
    if cluster.library.rings_by_number:
        rate = fewest_links_by_number(link.wires, positions) * link_rate or host_rate
        return rate, rate
    rings, chains = mesh_rings(link.wires, positions)
    return (rings * link_rate) or host_rate, (2 * chains * link_rate) or host_rate


def _network_rate(cluster: Cluster, members_per_node: int, nodes: int) -> float:
    """Combined rate of a group's members of one node to other nodes."""
    network = cluster.network
    if network is None:
        raise DoesNotFit(
            f"{cluster.name} has no network between its nodes of "
            f"{cluster.devices_per_node} devices, and a group spans {nodes} nodes."
        )
    groups_at_once = max(1, cluster.devices_per_node // members_per_node)
    of_node = network.bytes_per_second
    if 1 < members_per_node < cluster.devices_per_node:
        of_node = min(of_node, network.partial_group_bytes_per_second or of_node)
    rate = of_node * network.attainable_fraction / groups_at_once
    if network.nodes_per_switch is not None and nodes > network.nodes_per_switch:
        rate /= network.oversubscription
    return rate
