"""Seconds of an all-reduce, by each algorithm and by the fastest that a library has."""

import math
from collections.abc import Callable

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.alpha_beta import (
    latency_seconds,
    pipelined_seconds,
    ring_seconds,
)
from scalejax.simulator.collectives.route import Route


def all_reduce_seconds(
    payload_bytes: int, way: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member holds the sum of all payloads, by the fastest method there is.

    Args:
        payload_bytes: bytes of the sum.
        way: where the members sit. One alone sends nothing, but to a parameter server.
        methods: what the cluster's library can do.
    """
    if way.members == 1:
        methods = tuple(each for each in methods if each.algorithm == "parameter_server")
        if not methods:
            return 0.0
    # A switch has nothing to add up for a group with one member in the node.
    has_switch = way.in_switch_fraction is not None and way.members_per_node > 1
    return min(
        _ALGORITHMS[method.algorithm](payload_bytes, way, method)
        for method in methods
        if method.algorithm in _ALGORITHMS and (method.algorithm != "nvls" or has_switch)
    )


def ring_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time of a ring all-reduce: reduce-scatter, then all-gather.

    seconds = base + hops of 2 (n - 1) messages + 2 (n - 1)/n payload / bandwidth, where
    2 (nodes - 1) of the messages cross the network and the slowest wire sets the pace.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2); messages between nodes counted as NCCL's tuner does.
    """
    return ring_seconds(payload_bytes, way, method, passes=2)


def tree_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time of a double binary tree over the nodes, a chain within each: up, then down.

    seconds = base + 2 ((g - 1) link hops + ceil(log2 nodes) network hops) + 2 payload / bandwidth.
    Between two nodes each sends the other one payload, half of it as a part and half as a sum:
    there a tree moves more than a ring could.

    Source: Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", Parallel Computing 35(12); hops counted as NCCL's tuner does.
    """
    wire = _tree_between_seconds(payload_bytes, way)
    if way.members_per_node > 1:
        wire = max(wire, 2 * payload_bytes / way.tree_link_bytes_per_second)
    start = latency_seconds(
        method,
        way,
        link_hops=2 * (way.members_per_node - 1),
        network_hops=2 * math.ceil(math.log2(way.nodes)),
    )
    return start + pipelined_seconds(wire / method.bandwidth_fraction, way.ramp_seconds)


def hierarchical_all_reduce_seconds(
    payload_bytes: int, way: Route, method: CollectiveMethod
) -> float:
    """Time of rings in each node and a ring of nodes for each of their parts.

    With g members in each of k nodes: reduce-scatter in the node, all-reduce of payload / g over
    the k nodes by g rings side by side, all-gather in the node:
    seconds = base + 2 (g - 1) link hops + 2 (g - 1)/g payload / link
            + 2 (k - 1) network hops + 2 (k - 1)/k payload / network.
    """
    k = way.nodes
    return _two_level_seconds(payload_bytes, way, method, 2 * (k - 1), 2 * (k - 1) / k)


def halving_doubling_all_reduce_seconds(
    payload_bytes: int, way: Route, method: CollectiveMethod
) -> float:
    """Time of a hierarchical all-reduce: a ring in each node, halving-doubling between nodes.

    As `hierarchical_all_reduce_seconds`, with 2 log2 k network hops for k a power of two. Else
    the nodes form binary blocks: k = 44 is 32 + 8 + 4. Each block halves on its own, then hands
    its part to the next larger one, which waits for it; doubling runs the same way back.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
    operations in MPICH", IJHPCA 19(1); binary blocks as in Goyal et al. 2017, section 4.2.
    """
    blocks = [1 << bit for bit in range(way.nodes.bit_length()) if way.nodes >> bit & 1]
    payloads, hops, smaller = 0.0, 0, None
    for block in blocks:  # from the smallest
        payloads, hops = max(payloads, (block - 1) / block), max(hops, block.bit_length() - 1)
        if smaller is not None:
            payloads, hops = payloads + 1 / smaller, hops + 1
        smaller = block
    return _two_level_seconds(payload_bytes, way, method, 2 * hops, 2 * payloads)


def in_switch_all_reduce_seconds(payload_bytes: int, way: Route, method: CollectiveMethod) -> float:
    """Time when the switch of each node adds up (NVLS), with a tree between nodes.

    Each member lets the switch read its payload and 1/g of the sum passes back and out again:
    (1 + 1/g) payload each way at the in-switch rate, while the tree crosses the network.
    """
    fraction = way.in_switch_fraction or 1.0
    inside = (1 + 1 / way.members_per_node) * payload_bytes
    inside /= way.link_bytes_per_second * fraction
    wire = max(inside, _tree_between_seconds(payload_bytes, way)) / method.bandwidth_fraction
    network_hops = 2 * math.ceil(math.log2(way.nodes))
    start = latency_seconds(method, way, link_hops=1, network_hops=network_hops)
    ramp = way.in_switch_ramp_seconds if way.nodes == 1 else way.ramp_seconds
    return start + pipelined_seconds(wire, max(ramp, way.in_switch_ramp_seconds))


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
    network_hops = 2 if way.nodes > 1 else 0
    start = latency_seconds(method, way, link_hops=2, network_hops=network_hops)
    return start + (inside + between) / method.bandwidth_fraction


_ALGORITHMS: dict[str, Callable[[int, Route, CollectiveMethod], float]] = {
    "ring": ring_all_reduce_seconds,
    "tree": tree_all_reduce_seconds,
    "hierarchical": hierarchical_all_reduce_seconds,
    "halving_doubling": halving_doubling_all_reduce_seconds,
    "nvls": in_switch_all_reduce_seconds,
    "parameter_server": parameter_server_all_reduce_seconds,
}


def _two_level_seconds(
    payload_bytes: int,
    way: Route,
    method: CollectiveMethod,
    network_hops: int,
    network_payloads: float,
) -> float:
    """Reduce-scatter in the node, `network_payloads` payloads between nodes, all-gather."""
    g = way.members_per_node
    wire = 2 * (g - 1) / g * payload_bytes / way.link_bytes_per_second
    if way.network_bytes_per_second is not None:
        wire += network_payloads * payload_bytes / way.network_bytes_per_second
    start = latency_seconds(method, way, link_hops=2 * (g - 1), network_hops=network_hops)
    return start + pipelined_seconds(wire / method.bandwidth_fraction, way.ramp_seconds)


def _tree_between_seconds(payload_bytes: int, way: Route) -> float:
    """Time on the network of a double binary tree: an inner node passes two payloads each way."""
    if way.network_bytes_per_second is None:
        return 0.0
    payloads = 1 if way.nodes == 2 else 2
    return payloads * payload_bytes / way.network_bytes_per_second
