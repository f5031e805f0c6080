"""Seconds of an all-reduce: by each algorithm, and by the fastest that a library has.

Depends on the route of a group and the methods of a library, not on programs or placement.
"""

import math
from collections.abc import Callable

from scalejax.hardware import CollectiveMethod
from scalejax.simulator.collectives.alpha_beta import (
    latency_seconds,
    pipelined_seconds,
    protocol_seconds,
    ring_seconds,
    usable,
)
from scalejax.simulator.collectives.route import Route


def all_reduce_seconds(
    payload_bytes: int, route: Route, methods: tuple[CollectiveMethod, ...]
) -> float:
    """Time until every member holds the sum of all payloads, by the fastest available method.

    Args:
        payload_bytes: bytes of the sum.
        route: links between the members. A single member sends only to a parameter server.
        methods: algorithms of the cluster's library.
    """
    if route.members == 1:
        methods = tuple(each for each in methods if each.algorithm == "parameter_server")
        if not methods:
            return 0.0
    # A switch has nothing to add up for a group with only one member in the node.
    is_possible = {
        "nvls": route.in_switch_fraction is not None and route.members_per_node > 1,
        "sharp": route.sums_in_network,
    }
    # Filter before protocols are left out, or the last method that reduces might be dropped.
    reducing = [
        method
        for method in methods
        if method.algorithm in _ALGORITHMS and is_possible.get(method.algorithm, True)
    ]
    return min(
        _ALGORITHMS[method.algorithm](payload_bytes, route, method)
        for method in usable(reducing, route)
    )


def ring_all_reduce_seconds(payload_bytes: int, route: Route, method: CollectiveMethod) -> float:
    """Time of a ring all-reduce: reduce-scatter, then all-gather.

    seconds = base + hops of 2 (n - 1) messages + 2 (n - 1)/n payload / bandwidth, where
    2 (nodes - 1) of the messages cross the network and the slowest link is the bottleneck.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69(2); messages between nodes counted as NCCL's tuner does.
    """
    return ring_seconds(payload_bytes, route, method, passes=2)


def tree_all_reduce_seconds(payload_bytes: int, route: Route, method: CollectiveMethod) -> float:
    """Time of a double binary tree over the nodes, a chain within each: up, then down.

    seconds = base + 2 ((g - 1) link hops + ceil(log2 nodes) network hops) + 2 payload / bandwidth.
    Of two nodes, each sends the other one payload, half of it as a part and half as a sum: a tree
    then moves more than a ring could.

    Source: Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", Parallel Computing 35(12); hops counted as NCCL's tuner does.
    """
    transfer = _tree_between_seconds(payload_bytes, route)
    if route.members_per_node > 1:
        transfer = max(transfer, 2 * payload_bytes / route.tree_link_bytes_per_second)
    start = latency_seconds(
        method,
        route,
        link_hops=2 * (route.members_per_node - 1),
        network_hops=2 * math.ceil(math.log2(route.nodes)),
    )
    sent = protocol_seconds(transfer, payload_bytes, route, method)
    return start + pipelined_seconds(sent, route.ramp_seconds)


def hierarchical_all_reduce_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod
) -> float:
    """Time of a hierarchical all-reduce: rings in each node, and rings between nodes.

    With g members in each of k nodes: reduce-scatter in the node, all-reduce of payload / g over
    the k nodes by g rings side by side, all-gather in the node:
    seconds = base + 2 (g - 1) link hops + 2 (g - 1)/g payload / link
            + 2 (k - 1) network hops + 2 (k - 1)/k payload / network.
    """
    k = route.nodes
    return _two_level_seconds(payload_bytes, route, method, 2 * (k - 1), 2 * (k - 1) / k)


def halving_doubling_all_reduce_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod
) -> float:
    """Time of a hierarchical all-reduce: a ring in each node, halving-doubling between nodes.

    As `hierarchical_all_reduce_seconds`, with 2 log2 k network hops if k is a power of two.
    Otherwise the nodes form binary blocks: k = 44 is 32 + 8 + 4. Each block halves on its own, then
    hands its part to the next larger one, which waits for it; doubling runs in reverse.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
    operations in MPICH", IJHPCA 19(1); binary blocks as in Goyal et al. 2017, section 4.2.
    """
    blocks = [1 << bit for bit in range(route.nodes.bit_length()) if route.nodes >> bit & 1]
    payloads, hops, smaller = 0.0, 0, None
    for block in blocks:  # from the smallest
        payloads, hops = max(payloads, (block - 1) / block), max(hops, block.bit_length() - 1)
        if smaller is not None:
            payloads, hops = payloads + 1 / smaller, hops + 1
        smaller = block
    return _two_level_seconds(payload_bytes, route, method, 2 * hops, 2 * payloads)


def in_switch_all_reduce_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod
) -> float:
    """Time of an all-reduce summed in the switch of each node (NVLS), with a tree between nodes.

    The switch reads each member's payload, and 1/g of the sum passes back and out again:
    (1 + 1/g) payload in each direction at the in-switch rate, while the tree crosses the network.
    """
    fraction = route.in_switch_fraction or 1.0
    inside = (1 + 1 / route.members_per_node) * payload_bytes
    inside /= route.link_bytes_per_second * fraction
    transfer = max(inside, _tree_between_seconds(payload_bytes, route)) / method.bandwidth_fraction
    network_hops = 2 * math.ceil(math.log2(route.nodes))
    start = latency_seconds(method, route, link_hops=1, network_hops=network_hops)
    ramp = route.in_switch_ramp_seconds if route.nodes == 1 else route.ramp_seconds
    return start + pipelined_seconds(transfer, max(ramp, route.in_switch_ramp_seconds))


def in_network_all_reduce_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod
) -> float:
    """Time of an all-reduce summed by the switches between the nodes (SHARP), however many.

    Each node sends the sum of its members once, and receives the total once:
    seconds = base + link hops + 2 network hops + max(inside, payload / network),
    where inside is (1 + 1/g) payload at the in-switch rate if the node's switch sums too, else a
    reduce-scatter and an all-gather. Left out: more levels of switches, under a microsecond each.

    Source: Graham et al. 2016, "Scalable hierarchical aggregation protocol (SHArP)", COMHPC; sizes
    as of NVLS with CollNet in NCCL's tuner.
    """
    g = route.members_per_node
    inside, link_hops = 0.0, 0
    if g > 1 and route.in_switch_fraction is not None:
        inside = (1 + 1 / g) * payload_bytes
        inside /= route.link_bytes_per_second * route.in_switch_fraction
        link_hops = 1
    elif g > 1:
        inside, link_hops = 2 * (g - 1) / g * payload_bytes / route.link_bytes_per_second, 2
    between = payload_bytes / (route.network_bytes_per_second or math.inf)
    transfer = max(inside, between) / method.bandwidth_fraction
    start = latency_seconds(method, route, link_hops=link_hops, network_hops=2)
    return start + pipelined_seconds(
        transfer, max(route.ramp_seconds, route.in_switch_ramp_seconds)
    )


def parameter_server_all_reduce_seconds(
    payload_bytes: int, route: Route, method: CollectiveMethod
) -> float:
    """Time of one synchronous round: every worker pushes its payload and pulls the sum.

    The g workers of a node share its link to host memory, where their payloads are added; nodes
    push the node's sum S and pull the total. With a server on each of k nodes, S/k stays in the
    node; with k separate servers, each receives and sends S/k for every node:
    seconds = base + 2 (link hop + network hop) + 2 g S / host + 2 S max(1, nodes/k) / network.
    Left out: the addition itself, which memory does about 5 times faster than the links.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server",
    OSDI; placement as in TensorFlow's benchmarks of 2017 (distributed_replicated).
    """
    inside = 2 * route.members_per_node * payload_bytes / route.host_bytes_per_second
    between = 0.0
    if route.network_bytes_per_second is not None:
        at_once = (
            (route.nodes - 1) / route.nodes
            if method.servers is None
            else max(1.0, route.nodes / method.servers)
        )
        between = 2 * payload_bytes * at_once / route.network_bytes_per_second
    network_hops = 2 if route.nodes > 1 else 0
    start = latency_seconds(method, route, link_hops=2, network_hops=network_hops)
    return start + (inside + between) / method.bandwidth_fraction


_ALGORITHMS: dict[str, Callable[[int, Route, CollectiveMethod], float]] = {
    "ring": ring_all_reduce_seconds,
    "tree": tree_all_reduce_seconds,
    "hierarchical": hierarchical_all_reduce_seconds,
    "halving_doubling": halving_doubling_all_reduce_seconds,
    "nvls": in_switch_all_reduce_seconds,
    "sharp": in_network_all_reduce_seconds,
    "parameter_server": parameter_server_all_reduce_seconds,
}


def _two_level_seconds(
    payload_bytes: int,
    route: Route,
    method: CollectiveMethod,
    network_hops: int,
    network_payloads: float,
) -> float:
    """Time of reduce-scatter in the node, `network_payloads` payloads between nodes, all-gather."""
    g = route.members_per_node
    transfer = 2 * (g - 1) / g * payload_bytes / route.link_bytes_per_second
    if route.network_bytes_per_second is not None:
        transfer += network_payloads * payload_bytes / route.network_bytes_per_second
    start = latency_seconds(method, route, link_hops=2 * (g - 1), network_hops=network_hops)
    return start + pipelined_seconds(transfer / method.bandwidth_fraction, route.ramp_seconds)


def _tree_between_seconds(payload_bytes: int, route: Route) -> float:
    """Network time of a double binary tree: an inner node sends two payloads in each direction."""
    if route.network_bytes_per_second is None:
        return 0.0
    payloads = 1 if route.nodes == 2 else 2
    return payloads * payload_bytes / route.network_bytes_per_second
