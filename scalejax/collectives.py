"""Seconds that a group of devices takes to exchange data, algorithm by algorithm.

Every time is latency plus bytes over bandwidth: hops of small messages, then the payload
through the narrowest wire on its way. Knows hardware and the `Route` of a group on it;
`cost.communication` finds the route of a program's collective.

Left out: the dip in bandwidth between 1 and 64 MiB (6 to 20 % there), time lost to waiting
for the slowest member, and congestion in the network's core.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from scalejax.errors import DoesNotFit, require_at_least
from scalejax.hardware import Cluster, CollectiveMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the members of a group sit, and the wires between them."""

    members: int
    """Devices in the group."""
    members_per_node: int
    """Those that share a node."""
    nodes: int
    """Nodes on which the group has members."""
    link_bytes_per_second: float
    """Attainable rate of each member to the others of its node, one way."""
    network_bytes_per_second: float | None
    """Attainable rate of the group's members of one node together to other nodes, one way;
    None if all are in one node."""
    in_switch_fraction: float | None
    """Share of the link's rate that remains when its switch adds up; None if it cannot."""
    host_bytes_per_second: float
    """Attainable rate of the members of one node together to their host's memory, one way."""

    def __post_init__(self) -> None:
        require_at_least("route.members", self.members, 1)
        require_at_least("route.members_per_node", self.members_per_node, 1)
        require_at_least("route.nodes", self.nodes, 1)

    @property
    def narrowest_bytes_per_second(self) -> float:
        """Rate of the slowest wire that the group's messages pass."""
        if self.network_bytes_per_second is None:
            return self.link_bytes_per_second
        if self.members_per_node == 1:
            return self.network_bytes_per_second
        return min(self.link_bytes_per_second, self.network_bytes_per_second)


def route(cluster: Cluster, *, members: int, members_per_node: int, nodes: int) -> Route:
    """The wires that a group uses when all groups like it are busy at once.

    Every device is in one such group, so devices_per_node / members_per_node groups share the
    network cards of a node. A mesh of direct wires is a cube: each doubling of the members adds
    a dimension and its wires, so g of N have floor(log2 g) / log2 N of them.

    Raises:
        DoesNotFit: if the group spans nodes that no network joins.
    """
    link = cluster.link
    link_rate = link.bytes_per_second * link.attainable_fraction
    if link.kind == "nvlink_mesh" and 1 < members_per_node < cluster.devices_per_node:
        link_rate *= math.floor(math.log2(members_per_node)) / math.log2(cluster.devices_per_node)
    network_rate = None
    if nodes > 1:
        if cluster.network is None:
            raise DoesNotFit(
                f"{cluster.name} has no network between its nodes of "
                f"{cluster.devices_per_node} devices, and a group spans {nodes} nodes."
            )
        sharing = max(1, cluster.devices_per_node // members_per_node)
        network_rate = (
            cluster.network.bytes_per_second * cluster.network.attainable_fraction / sharing
        )
    return Route(
        members=members,
        members_per_node=members_per_node,
        nodes=nodes,
        link_bytes_per_second=link_rate,
        network_bytes_per_second=network_rate,
        in_switch_fraction=link.in_switch_fraction,
        host_bytes_per_second=link.host_bytes_per_second or link_rate * members_per_node,
    )


def all_reduce_seconds(
    payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member holds the sum of all payloads, by the fastest method there is.

    Args:
        payload_bytes: bytes of the sum.
        way: where the members sit.
        methods: what the cluster's library can do.
    """
    if way.members == 1:
        return 0.0
    possible = [
        method
        for method in methods
        # A switch has nothing to add up for a group with one member in the node.
        if method.algorithm != "nvls"
        or (way.in_switch_fraction is not None and way.members_per_node > 1)
    ]
    return min(_ALL_REDUCE[method.algorithm](payload_bytes, way, method) for method in possible)


def gather_seconds(payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]) -> float:
    """Time of an all-gather, or of its mirror image, a reduce-scatter.

    A ring sends n - 1 messages of payload / n bytes each:
    seconds = (n - 1) hop + (n - 1)/n payload / bandwidth.

    Args:
        payload_bytes: bytes of the gathered result, or of one input to be scattered.
        way: where the members sit.
        methods: what the cluster's library can do; only its rings are of use.
    """
    if way.members == 1:
        return 0.0
    return min(_ring_pass(payload_bytes, way, ring, passes=1) for ring in _rings(methods))


def all_to_all_seconds(
    payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member has sent every other its 1/n of `payload_bytes`.

    Messages within the node and between nodes use different wires at the same time:
    seconds = (n - 1) hops + payload max((g - 1)/n / link, g (n - g)/n / network).

    Args:
        payload_bytes: bytes of one member's input.
        way: where the members sit, g of them in a node.
        methods: what the cluster's library can do; messages cost what a ring's do.
    """
    n, g = way.members, way.members_per_node
    if n == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hops = (g - 1) * method.link_hop_seconds + (n - g) * method.network_hop_seconds
        inside = (g - 1) / n * payload_bytes / way.link_bytes_per_second
        between = 0.0
        if way.network_bytes_per_second is not None:
            between = g * (n - g) / n * payload_bytes / way.network_bytes_per_second
        return method.base_seconds + hops + max(inside, between) / method.bandwidth_fraction

    return min(seconds(ring) for ring in _rings(methods))


def permute_seconds(payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]) -> float:
    """Time until every member has passed its payload on to the next: one message each.

    Where the group spans nodes, one member of each node sends through the network.
    """
    if way.members == 1:
        return 0.0

    def seconds(method: CollectiveMethod) -> float:
        hop = method.link_hop_seconds if way.nodes == 1 else method.network_hop_seconds
        rate = way.narrowest_bytes_per_second * method.bandwidth_fraction
        return method.base_seconds + hop + payload_bytes / rate

    return min(seconds(ring) for ring in _rings(methods))


def ring_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time of a ring all-reduce: reduce-scatter, then all-gather.

    seconds = base + hops of 2 (n - 1) messages + 2 (n - 1)/n payload / bandwidth, where
    2 (nodes - 1) of the messages cross the network and the slowest wire sets the pace.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2); messages between nodes counted as NCCL's tuner does.
    """
    return _ring_pass(payload_bytes, way, method, passes=2)


def tree_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time of a double binary tree over the nodes, a chain within each: up, then down.

    seconds = base + 2 ((g - 1) link hops + ceil(log2 nodes) network hops) + 2 payload / bandwidth

    Source: Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", Parallel Computing 35(12); hops counted as NCCL's tuner does.
    """
    link_hops = 2 * (way.members_per_node - 1)
    network_hops = 2 * math.ceil(math.log2(way.nodes))
    rate = way.narrowest_bytes_per_second * method.bandwidth_fraction
    return _latency(method, link_hops, network_hops) + 2 * payload_bytes / rate


def halving_doubling_all_reduce_seconds(
    payload_bytes: int, way: Route, method: CollectiveMethod
) -> float:
    """Time of a hierarchical all-reduce: a ring in each node, halving-doubling between nodes.

    With g members in each of k nodes: reduce-scatter in the node, recursive halving and
    doubling of the node's sum over the nodes, all-gather in the node:
    seconds = base + 2 (g - 1) link hops + 2 (g - 1)/g payload / link
            + 2 ceil(log2 k) network hops + 2 (k - 1)/k payload / network.
    For k no power of two these are binary blocks; their uneven last step is left out.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
    operations in MPICH", IJHPCA 19(1); as used in Goyal et al. 2017, section 4.2.
    """
    g, k = way.members_per_node, way.nodes
    inside = 2 * (g - 1) / g * payload_bytes / way.link_bytes_per_second
    between = 0.0
    if way.network_bytes_per_second is not None:
        between = 2 * (k - 1) / k * payload_bytes / way.network_bytes_per_second
    hops = _latency(method, 2 * (g - 1), 2 * math.ceil(math.log2(k)))
    return hops + (inside + between) / method.bandwidth_fraction


def in_switch_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time when the switch of each node adds up (NVLS), with a tree between nodes.

    Each member lets the switch read its payload and 1/g of the sum passes back and out again:
    (1 + 1/g) payload each way at the in-switch rate, while up to 2 payloads cross the network.
    """
    fraction = way.in_switch_fraction or 1.0
    inside = (1 + 1 / way.members_per_node) * payload_bytes
    inside /= way.link_bytes_per_second * fraction
    between = 0.0
    if way.network_bytes_per_second is not None:
        between = 2 * payload_bytes / way.network_bytes_per_second
    hops = _latency(method, 1, 2 * math.ceil(math.log2(way.nodes)))
    return hops + max(inside, between) / method.bandwidth_fraction


def parameter_server_all_reduce_seconds(
    payload_bytes: int, way: Route, method: CollectiveMethod
) -> float:
    """Time of one synchronous round: every worker pushes its payload and pulls the sum.

    The g workers of a node share its way to host memory, where their payloads are added; nodes
    push the node's sum S and pull the total. With a server on each of k nodes, S/k stays at
    home; with k servers apart, each receives and sends S/k for every node:
    seconds = base + 2 (link hop + network hop) + 2 g S / host + 2 S max(1, nodes/k) / network.
    Left out: the addition itself, which memory does about 5 times faster than the wires.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server",
    OSDI; placement as in TensorFlow's benchmarks of 2017 (distributed_replicated).
    """
    inside = 2 * way.members_per_node * payload_bytes / way.host_bytes_per_second
    between = 0.0
    if way.network_bytes_per_second is not None:
        at_once = (
            (way.nodes - 1) / way.nodes
            if method.servers is None
            else max(1.0, way.nodes / method.servers)
        )
        between = 2 * payload_bytes * at_once / way.network_bytes_per_second
    hops = _latency(method, 2, 2 if way.nodes > 1 else 0)
    return hops + (inside + between) / method.bandwidth_fraction


_ALL_REDUCE: dict[str, Callable[[int, Route, CollectiveMethod], float]] = {
    "ring": ring_all_reduce_seconds,
    "tree": tree_all_reduce_seconds,
    "halving_doubling": halving_doubling_all_reduce_seconds,
    "nvls": in_switch_all_reduce_seconds,
    "parameter_server": parameter_server_all_reduce_seconds,
}


def _rings(methods: tuple[CollectiveMethod, ...]) -> list[CollectiveMethod]:
    """The rings; where there are none, messages cost what a parameter server's do."""
    rings = [method for method in methods if method.algorithm == "ring"]
    return rings or [method for method in methods if method.algorithm == "parameter_server"]


def _ring_pass(payload_bytes: int, way: Route, method: CollectiveMethod, *, passes: int) -> float:
    """Time for `passes` rounds of the ring, each of n - 1 messages of payload / n bytes."""
    n = way.members
    network_hops = passes * (way.nodes - 1)
    rate = way.narrowest_bytes_per_second * method.bandwidth_fraction
    wire = passes * (n - 1) / n * payload_bytes / rate
    return _latency(method, passes * (n - 1) - network_hops, network_hops) + wire


def _latency(method: CollectiveMethod, link_hops: int, network_hops: int) -> float:
    return (
        method.base_seconds
        + link_hops * method.link_hop_seconds
        + network_hops * method.network_hop_seconds
    )
