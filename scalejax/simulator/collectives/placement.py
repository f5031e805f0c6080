"""Seconds of a program's collective on a cluster: places its group on nodes, then costs it.

Maps mesh positions to nodes; the formulas are in the modules of the algorithms.
"""

from functools import cache

from scalejax.core.errors import UnknownHardware
from scalejax.hardware import Cluster
from scalejax.simulator import collectives
from scalejax.simulator.collectives import MODELS, Route
from scalejax.simulator.collectives.expert_dispatch import dispatch_seconds
from scalejax.simulator.collectives.torus import Extents, TorusGroup, torus_group, torus_seconds
from scalejax.simulator.program import HOST_MEMORY, Collective

_COPIES = ("copy_to_host", "copy_from_host")
"""Copies between a device and its host. The two directions share no link: PCIe and NVLink-C2C are
full duplex."""
LINK_COUNT = 2 + len(_COPIES)
"""Sets of links that do not slow each other down; see `links`."""


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Time of one collective per step, averaged over all steps, while all groups like it are busy.

    The cluster is otherwise idle. If the library runs buffers one by one, each pays the latency.

    Raises:
        DoesNotFit: if the group spans nodes that no network joins.
        UnknownHardware: if the cluster names a table of measured times that does not exist, or
            does not describe host memory to which the collective copies.
    """
    seconds = _seconds(collective, collective.payload_bytes, cluster)
    if collective.buffer_count > 1 and cluster.library.runs_buffers_one_by_one:
        seconds += (collective.buffer_count - 1) * _seconds(collective, 0, cluster)
    if collective.tokens is not None and collective.name == "all_to_all":
        seconds /= cluster.chip.attainable.token_exchange_scale
    if collective.group != HOST_MEMORY and collective.group.size > 1:
        seconds += cluster.chip.attainable.collective_seconds
    return seconds * collective.share


def links(collective: Collective, cluster: Cluster) -> int:
    """Index of the links that a collective uses: 0 within nodes, 1 across the network, 2 to host
    memory and 3 from host memory."""
    if collective.group == HOST_MEMORY:
        return 2 + _COPIES.index(collective.name)
    _, _, nodes = _seats(collective.group.extents, cluster.devices_per_node)
    return int(nodes > 1)


def contention(collective: Collective, cluster: Cluster) -> float:
    """Fraction of its speed that compute loses while a collective runs.

    While a group within a node communicates, compute loses the chip's whole fraction; for a group
    over nodes it loses that times the share of a node's positions that the group has: an eighth for
    one device of eight. This rule is empirical, not derived: a library takes processors to copy and
    memory to read and write, but the rule considers neither how fast the group sends nor over what.
    A group of whole nodes counts like one on NVLink, even for an all-to-all, most of which goes
    over the network. Checked against steps of NeMo and torchtitan, with families of theirs left out
    of the fit in turn, one of them with Megatron-FSDP (experiments/left_out).
    """
    fraction = cluster.chip.attainable.contention_fraction
    if not fraction or collective.group == HOST_MEMORY:
        return 0.0
    _, places, nodes = _seats(collective.group.extents, cluster.devices_per_node)
    return fraction * (len(places) / cluster.devices_per_node if nodes > 1 else 1.0)


def _seconds(collective: Collective, payload: int, cluster: Cluster) -> float:
    """Time of a collective of one buffer of `payload` bytes.

    Within a node, measured times are used if the cluster's link has a table of them, modelled ones
    otherwise. Across nodes the modelled time is used, but at least the time of that collective
    within one node, except for an all-to-all, which sends less within the node. Expert tokens use
    the cluster's library for them, if it has one. TPUs are on a torus.
    """
    if collective.group == HOST_MEMORY:
        return payload / _host_rate(cluster)
    route = group_route(collective.group.extents, cluster)
    name = collective.name
    tokens = collective.tokens
    if cluster.dispatch is not None and tokens is not None and name == "all_to_all" and payload:
        return dispatch_seconds(payload, tokens, route, cluster.dispatch, chip=cluster.chip.name)
    tpu, multiple = cluster.chip.tpu, cluster.link.ring_multiple
    if tpu is not None and multiple is not None:
        extents = _within(collective.group.extents, cluster.devices_per_node)
        return _torus_seconds(name, payload, torus_group(extents, tpu, multiple), route, cluster)
    inside = None
    if route.members > 1 and (route.nodes == 1 or name != "all_to_all"):
        inside = collectives.measured_seconds(name, payload, route, cluster)
    if route.nodes == 1 and inside is not None:
        return inside
    seconds = MODELS[name](payload, route, cluster.library.methods)
    measured = collectives.seconds_over_nodes(name, payload, seconds, route.nodes, cluster)
    if measured is not None:  # includes all that happens within nodes
        return measured
    return max(inside or 0.0, seconds)


def _torus_seconds(
    name: str, payload: int, group: TorusGroup, route: Route, cluster: Cluster
) -> float:
    """Time on a torus of chips; over several slices, the time within one slice plus what the
    network sends: for sums only a device's share, which all devices of a slice send at once."""
    methods = cluster.library.methods
    inside = min(torus_seconds(name, payload, group, cluster.link, method) for method in methods)
    if route.nodes == 1 or route.network_bytes_per_second is None:
        return inside
    if name in ("all_to_all", "collective_permute"):
        return max(inside, MODELS[name](payload, route, methods))
    passes, k = (2 if name == "all_reduce" else 1), route.nodes
    hop = methods[0].network_hop_seconds + route.network_message_seconds
    sent = (k - 1) / k * payload / route.network_bytes_per_second
    return inside + passes * (sent + (k - 1) * hop)


def _within(extents: Extents, devices: int) -> Extents:
    """The part of a group with these extents that is on the first `devices`."""
    return tuple((min(size, max(1, devices // stride)), stride) for size, stride in extents)


def _host_rate(cluster: Cluster) -> float:
    """Bytes per second between one device and its host's memory, either way, while all devices of
    its node copy too. Left out: the start of a copy, microseconds."""
    if cluster.host is not None:
        return cluster.host.bytes_per_second
    if cluster.link.host_bytes_per_second is not None:
        return cluster.link.host_bytes_per_second / cluster.devices_per_node
    raise UnknownHardware(
        f"{cluster.name} does not say how fast devices copy to the memory of their host, to which "
        "the step offloads arrays; give host.bytes_per_second in a file of the cluster."
    )


def group_route(extents: tuple[tuple[int, int], ...], cluster: Cluster) -> Route:
    """Route of a group of (size, stride) extents on the cluster; devices fill node by node.

    All groups are assumed to be placed like that of device 0; if strides and nodes do not divide
    each other, some would span one more node.
    """
    members, positions, nodes = _seats(extents, cluster.devices_per_node)
    return collectives.find_route(
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
    """(members, positions in the node with the most members, nodes) of the group of device 0."""
    devices = [0]
    for size, stride in extents:
        devices = [device + stride * i for device in devices for i in range(size)]
    per_node: dict[int, list[int]] = {}
    for device in devices:
        per_node.setdefault(device // devices_per_node, []).append(device % devices_per_node)
    places = max(per_node.values(), key=len)
    return len(devices), tuple(sorted(places)), len(per_node)
