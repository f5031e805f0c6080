"""Seconds of collectives: by hand, by property, and against published measurements."""

import dataclasses

import pytest
from hardware_cases import RING, cluster_of
from hypothesis import given
from hypothesis import strategies as st

from scalejax.core.errors import DoesNotFit
from scalejax.hardware import Cluster, Link, Network, load_cluster
from scalejax.simulator import collectives
from scalejax.simulator.collectives.placement import collective_seconds, contention, group_route
from scalejax.simulator.program import HOST_MEMORY, Collective, CollectiveName, DeviceGroup

PAPER = cluster_of()
TREE = dataclasses.replace(RING, algorithm="tree")
HALVING = dataclasses.replace(RING, algorithm="halving_doubling")
NVLS = dataclasses.replace(RING, algorithm="nvls")
GIGABYTE = 10**9


def _collective(name: CollectiveName, payload_bytes: int, *extents: tuple[int, int]) -> Collective:
    group = DeviceGroup(extents=extents, axes=("data",))
    return Collective(name=name, payload_bytes=payload_bytes, group=group, is_async=False)


def _modelled(name: str) -> Cluster:
    """A cluster of the catalogue, its table of measured times left aside."""
    cluster = load_cluster(name)
    return dataclasses.replace(cluster, link=dataclasses.replace(cluster.link, measured=None))


def test_a_group_in_one_node_uses_links_alone():
    """Eight neighbours fill one node; no network card is involved."""
    way = group_route(((8, 1),), PAPER)

    assert (way.members, way.members_per_node, way.nodes) == (8, 8, 1)
    assert way.network_bytes_per_second is None


def test_groups_that_cross_nodes_share_the_network_cards():
    """Devices 0, 8, 16, 24: one in each of 4 nodes, and 8 such groups share 10 GB/s."""
    way = group_route(((4, 8),), PAPER)

    assert (way.members, way.members_per_node, way.nodes) == (4, 1, 4)
    assert way.network_bytes_per_second == pytest.approx(10e9 / 8)


def test_a_group_over_whole_nodes_has_the_network_to_itself():
    """All 32 devices of 4 nodes are one group: nothing is shared."""
    way = group_route(((32, 1),), PAPER)

    assert (way.members, way.members_per_node, way.nodes) == (32, 8, 4)
    assert way.network_bytes_per_second == 10e9


def test_a_group_of_two_extents_sits_on_strided_devices():
    """{16 i + 2 j : i < 2, j < 4}: four devices in node 0, four in node 2, two such groups."""
    way = group_route(((2, 16), (4, 2)), PAPER)

    assert (way.members, way.members_per_node, way.nodes) == (8, 4, 2)
    assert way.network_bytes_per_second == 5e9


def test_a_group_that_ends_within_a_node_sits_as_in_a_full_one():
    """12 devices: eight in node 0 and four in node 1, which wait for the eight."""
    way = group_route(((12, 1),), PAPER)

    assert (way.members, way.members_per_node, way.nodes) == (12, 8, 2)
    assert way.network_bytes_per_second == 10e9


def test_ring_all_reduce_by_hand():
    """8 devices, 1 GB at 100 GB/s: 2 x 7/8 GB is 17.5 ms, and 14 hops of 1 us."""
    assert collective_seconds(_collective("all_reduce", GIGABYTE, (8, 1)), PAPER) == pytest.approx(
        17.5e-3 + 14e-6
    )


def test_ring_all_reduce_over_nodes_by_hand():
    """16 devices in 2 nodes, 1 GB: the network's 10 GB/s sets the pace, 2 of 30 hops cross it."""
    assert collective_seconds(_collective("all_reduce", GIGABYTE, (16, 1)), PAPER) == pytest.approx(
        2 * 15 / 16 * 0.1 + 28 * 1e-6 + 2 * 10e-6
    )


def test_all_gather_is_half_an_all_reduce():
    """A ring all-reduce is a reduce-scatter and an all-gather, of equal cost."""
    whole = collective_seconds(_collective("all_reduce", GIGABYTE, (8, 1)), PAPER)
    gather = collective_seconds(_collective("all_gather", GIGABYTE, (8, 1)), PAPER)
    scatter = collective_seconds(_collective("reduce_scatter", GIGABYTE, (8, 1)), PAPER)

    assert gather == scatter == pytest.approx(whole / 2)


def test_halving_doubling_over_nodes_by_hand():
    """4 nodes of 8, 1 GB: 17.5 ms inside, 2 x 3/4 GB at 10 GB/s between, 14 + 2 x 2 hops."""
    way = group_route(((32, 1),), PAPER)

    seconds = collectives.halving_doubling_all_reduce_seconds(GIGABYTE, way, HALVING)

    assert seconds == pytest.approx(17.5e-3 + 150e-3 + 14e-6 + 4 * 10e-6)


def test_tree_all_reduce_by_hand():
    """4 nodes of 8, 1 GB: 2 GB at 10 GB/s, 2 x 7 hops in the node and 2 x 2 between nodes."""
    way = group_route(((32, 1),), PAPER)

    seconds = collectives.tree_all_reduce_seconds(GIGABYTE, way, TREE)

    assert seconds == pytest.approx(200e-3 + 14e-6 + 40e-6)


def test_a_tree_over_three_nodes_is_as_deep_as_over_four():
    """Up to four nodes 2 x 2 hops between them, whether a chain or the switch adds up inside."""
    for devices in (24, 32):
        way = group_route(((devices, 1),), PAPER)

        tree = collectives.tree_all_reduce_seconds(GIGABYTE, way, TREE)
        in_switch = collectives.in_switch_all_reduce_seconds(GIGABYTE, way, NVLS)

        assert tree == pytest.approx(200e-3 + 14e-6 + 40e-6)
        assert in_switch == pytest.approx(200e-3 + 1e-6 + 40e-6)


def test_in_switch_all_reduce_by_hand():
    """8 devices, 1 GB: 9/8 GB at half of 100 GB/s, and one hop."""
    switch = cluster_of(
        RING,
        NVLS,
        link=Link(kind="nvswitch", bytes_per_second=100e9, in_switch_fraction=0.5),
    )
    way = group_route(((8, 1),), switch)

    seconds = collectives.in_switch_all_reduce_seconds(GIGABYTE, way, NVLS)

    assert seconds == pytest.approx(22.5e-3 + 1e-6)


def test_switches_of_a_network_sum_however_many_nodes_there_are():
    """Eos's add up what nodes send: 32 KiB over 8 or 448 nodes take equally long, 0.658 of 47 us
    inside and 18 us between, and their pipelines; without them a tree has a hop for each doubling.
    """
    eos = _modelled("eos")
    assert eos.network is not None
    network = dataclasses.replace(eos.network, sums_in_switches=False)
    plain = dataclasses.replace(eos, network=network)

    few, many = (
        collective_seconds(_collective("all_reduce", 2**15, (8 * n, 1)), eos) for n in (8, 448)
    )

    wire = 1.125 * 2**15 / (0.729 * 0.829 * 450e9)
    ramp = 1.79e-6 + 4.4e-8
    assert many == pytest.approx(0.658 * 47e-6 + 18e-6 + wire + 2 * (wire * ramp) ** 0.5)
    assert few <= many
    assert many < 0.6 * collective_seconds(_collective("all_reduce", 2**15, (3584, 1)), plain)


def test_in_switch_reduction_needs_a_switch_that_adds():
    """The library may know NVLS; without the switch for it, the ring it is."""
    able = Link(kind="nvswitch", bytes_per_second=100e9, in_switch_fraction=1.0)
    collective = _collective("all_reduce", GIGABYTE, (8, 1))

    with_ring = collective_seconds(collective, cluster_of(RING, NVLS))
    in_switch = collective_seconds(collective, cluster_of(RING, NVLS, link=able))

    assert with_ring == pytest.approx(17.514e-3)
    assert in_switch == pytest.approx(11.251e-3)


def test_messages_of_low_latency_need_a_network_that_keeps_their_order():
    """EFA's first generation delivers out of order, so NCCL sends by Simple between nodes: a small
    sum over 2 nodes takes its latency, within one node nothing changes, nor do large payloads."""
    ordered = _modelled("dgx-h100")
    network = ordered.network
    assert network is not None
    unordered = dataclasses.replace(
        ordered, network=dataclasses.replace(network, keeps_order=False)
    )

    def ratio(payload: int, devices: int) -> float:
        one = _collective("all_reduce", payload, (devices, 1))
        return collective_seconds(one, unordered) / collective_seconds(one, ordered)

    assert ratio(4096, 16) > 1.5
    assert ratio(4096, 8) == ratio(10 * GIGABYTE, 16) == 1


def test_a_library_of_messages_in_order_alone_still_sends():
    """A library without Simple has no other way, whatever the network does."""
    flagged = dataclasses.replace(RING, protocol="ll")
    network = dataclasses.replace(PAPER.network, keeps_order=False)  # pyright: ignore[reportArgumentType]
    library = dataclasses.replace(PAPER.library, methods=(flagged,))
    cluster = dataclasses.replace(PAPER, network=network, library=library)

    assert collective_seconds(_collective("all_reduce", 1000, (32, 1)), cluster) > 0


def test_a_method_that_a_group_cannot_use_does_not_take_the_place_of_those_in_order():
    """Rings and trees of LL and LL128 alone, beside Simple for messages in pairs and in a switch:
    over a network out of order groups with one member a node, which no switch sums, still send."""
    flagged = tuple(
        dataclasses.replace(RING, algorithm=algorithm, protocol=protocol)
        for algorithm in ("ring", "tree")
        for protocol in ("ll", "ll128")
    )
    pairwise = dataclasses.replace(RING, algorithm="pairwise")
    network = dataclasses.replace(PAPER.network, keeps_order=False)  # pyright: ignore[reportArgumentType]
    library = dataclasses.replace(PAPER.library, methods=(*flagged, NVLS, pairwise))
    unordered = dataclasses.replace(PAPER, network=network, library=library)
    ordered = dataclasses.replace(unordered, network=PAPER.network)

    for name in ("all_reduce", "all_gather", "all_to_all"):
        one = _collective(name, 1000, (4, 8))
        assert collective_seconds(one, unordered) == collective_seconds(one, ordered) > 0


def test_flagged_messages_pass_each_hop_whole():
    """1 MB up and down one network hop at 1 GB/s is 2 ms, and along 7 links of 100 GB/s 0.14 ms,
    over any cards; within a node the messages flow."""
    posted = dataclasses.replace(RING, network_payload_bytes_per_second=1e9)
    cluster = dataclasses.replace(
        PAPER, library=dataclasses.replace(PAPER.library, methods=(posted,))
    )
    free = dataclasses.replace(PAPER, library=dataclasses.replace(PAPER.library, methods=(RING,)))

    one, none = (_collective("all_reduce", size, (32, 1)) for size in (10**6, 0))
    added = collective_seconds(one, cluster) - collective_seconds(none, cluster)
    assert added == pytest.approx(2e-3 + 0.14e-3)
    within = _collective("all_reduce", 10**6, (8, 1))
    assert collective_seconds(within, cluster) == collective_seconds(within, free)


def test_a_network_adds_its_start_and_slower_flags_within_nodes():
    """A tree over 4 nodes of 8: 14 link hops of 3 us for 1, 4 network hops of 10 and 50 us once;
    over 8 devices of a node neither is there."""
    slow = dataclasses.replace(TREE, link_hop_multiple_over_nodes=3.0, network_base_seconds=50e-6)
    cluster = dataclasses.replace(
        PAPER, library=dataclasses.replace(PAPER.library, methods=(slow,))
    )

    assert collective_seconds(_collective("all_reduce", 0, (32, 1)), cluster) == pytest.approx(
        14 * 3e-6 + 4 * 10e-6 + 50e-6
    )
    assert collective_seconds(_collective("all_reduce", 0, (8, 1)), cluster) == pytest.approx(14e-6)


def test_all_to_all_by_hand():
    """2 nodes of 8, 160 MB each: 80 MB leave per device, 640 MB per node, at 10 GB/s."""
    seconds = collective_seconds(_collective("all_to_all", 160_000_000, (16, 1)), PAPER)

    assert seconds == pytest.approx(64e-3 + 7 * 1e-6 + 8 * 10e-6)


def test_permute_by_hand():
    """100 MB to the neighbour: 1 ms in the node; 10 ms where it crosses to the next."""
    inside = collective_seconds(_collective("collective_permute", 10**8, (8, 1)), PAPER)
    across = collective_seconds(_collective("collective_permute", 10**8, (16, 1)), PAPER)

    assert inside == pytest.approx(1e-3 + 1e-6)
    assert across == pytest.approx(10e-3 + 10e-6)


def test_a_group_of_one_sends_nothing():
    """One member has what it needs."""
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(_collective(name, GIGABYTE, (1, 1)), PAPER) == 0


def test_small_payloads_take_the_method_of_least_latency():
    """NCCL's tuner changes protocol and algorithm with size, and so do we.

    On 8 H100 a kilobyte takes a ring of LL or LL128, 0.658 (7.04 us + 14 x 1.26 us), and a gigabyte
    the switch: 0.658 (22 us + 25 us) + W + 2 sqrt(1.54 us W), W = 9/8 GB at 0.729 x 0.829 x 450
    GB/s.
    """
    small, large = (
        collective_seconds(_collective("all_reduce", payload, (8, 1)), _modelled("dgx-h100"))
        for payload in (1000, GIGABYTE)
    )
    wire = 1.125 / (0.729 * 0.829 * 450)

    # A kilobyte's own time, and the ramp's share of it, are 0.3 us.
    assert small == pytest.approx(0.658 * (7.04e-6 + 14 * 1.26e-6), rel=0.03)
    assert large == pytest.approx(0.658 * 47e-6 + wire + 2 * (1.54e-6 * wire) ** 0.5)


@given(st.integers(1, 10**10), st.sampled_from([2, 4, 8, 16, 64]))
def test_the_fastest_of_the_protocols_is_taken(payload: int, devices: int):
    """Each method alone is no faster than the library that may choose."""
    cluster = _modelled("dgx-h100")
    way = group_route(((devices, 1),), cluster)
    methods = cluster.library.methods

    chosen = collectives.all_reduce_seconds(payload, way, methods)
    alone = [
        collectives.all_reduce_seconds(payload, way, (method,))
        for method in methods
        if method.algorithm not in ("pairwise", "sharp")
    ]

    assert chosen == min(alone)


def test_nodes_without_a_network_are_refused():
    """A group across nodes that nothing joins cannot run."""
    with pytest.raises(DoesNotFit, match="no network"):
        collective_seconds(_collective("all_reduce", 8, (16, 1)), cluster_of(network=None))


names = st.sampled_from(
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"]
)
clusters = st.sampled_from(
    ["dgx-h100", "dgx-a100", "dgx-b200", "big-basin-goyal2017", "dgx1-v100", "aws-p4d"]
)
groups = st.sampled_from(
    [((2, 1),), ((8, 1),), ((64, 1),), ((12, 8),), ((4, 16), (2, 1)), ((3, 1),), ((256, 1),)]
)


def test_a_switch_adds_nothing_for_one_device_per_node():
    """Data groups under tensor=8 have one member in each node of eight: the network's work."""
    cluster = _modelled("dgx-h100")
    without = tuple(method for method in cluster.library.methods if method.algorithm != "nvls")
    plain = dataclasses.replace(
        cluster, library=dataclasses.replace(cluster.library, methods=without)
    )
    one_per_node = _collective("all_reduce", 10**8, (32, 8))
    one_node = _collective("all_reduce", 10**8, (8, 1))

    assert collective_seconds(one_per_node, cluster) == collective_seconds(one_per_node, plain)
    assert collective_seconds(one_node, cluster) < collective_seconds(one_node, plain)


@given(names, st.integers(1, 10**10), st.floats(1.0, 100.0), clusters, groups)
def test_faster_wires_never_slow_a_collective(
    name: CollectiveName, payload: int, factor: float, cluster_name: str, extents: tuple
):
    """Monotone in bandwidth, in latency and in payload."""
    cluster = load_cluster(cluster_name)
    collective = _collective(name, payload, *extents)
    assert cluster.network is not None
    faster = dataclasses.replace(
        cluster,
        link=dataclasses.replace(
            cluster.link, bytes_per_second=cluster.link.bytes_per_second * factor
        ),
        network=dataclasses.replace(
            cluster.network, bytes_per_second=cluster.network.bytes_per_second * factor
        ),
    )
    methods = tuple(
        dataclasses.replace(
            method,
            link_hop_seconds=method.link_hop_seconds * factor,
            network_hop_seconds=method.network_hop_seconds * factor,
        )
        for method in cluster.library.methods
    )
    laggard = dataclasses.replace(
        cluster, library=dataclasses.replace(cluster.library, methods=methods)
    )
    larger = _collective(name, payload + 1, *extents)

    seconds = collective_seconds(collective, cluster)

    assert collective_seconds(collective, faster) <= seconds
    assert collective_seconds(collective, laggard) >= seconds
    assert collective_seconds(larger, cluster) >= seconds


@given(names, st.integers(1, 10**10), st.floats(0.01, 100.0), clusters, groups)
def test_no_collective_beats_its_wires(
    name: CollectiveName, payload: int, factor: float, cluster_name: str, extents: tuple
):
    """A member sends (n - 1)/n of its payload at least, measured or modelled, on any link."""
    named = load_cluster(cluster_name)
    link = dataclasses.replace(named.link, bytes_per_second=named.link.bytes_per_second * factor)
    cluster = dataclasses.replace(named, link=link)
    assert cluster.network is not None
    way = group_route(extents, cluster)
    n, g, k = way.members, way.members_per_node, way.nodes

    seconds = collective_seconds(_collective(name, payload, *extents), cluster)

    # In the node: all but the part that a member keeps. Between nodes: what leaves a node, or in
    # a permutation one member's payload.
    inside = (g - 1) / n * payload / link.bytes_per_second
    between = (k - 1) / k * payload / cluster.network.bytes_per_second
    assert seconds >= max(inside, between if k > 1 else 0.0)


switched = st.sampled_from(["dgx-h100", "dgx-a100", "dgx-b200", "gb200-nvl72", "aws-p4d"])


@given(names, st.integers(1, 10**9), switched)
def test_more_devices_never_lower_total_communication(
    name: CollectiveName, payload: int, cluster_name: str
):
    """With the same payload, the device-seconds of all members together only grow.

    Not on a mesh of wires: there 2 members have one wire between them, and 8 have six rings.
    """
    cluster = load_cluster(cluster_name)
    totals = [
        n * collective_seconds(_collective(name, payload, (n, 1)), cluster)
        for n in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256)
    ]

    assert totals == sorted(totals)


PARAMETER_SERVER = dataclasses.replace(RING, algorithm="parameter_server")
HOSTED = cluster_of(
    PARAMETER_SERVER,
    link=Link(kind="pcie", bytes_per_second=12e9, host_bytes_per_second=40e9),
)


def test_parameter_servers_on_every_node_by_hand():
    """2 nodes of 8, 1 GB: 2 x 8 GB at 40 GB/s to the hosts, 2 x 1/2 GB at 10 GB/s between."""
    seconds = collective_seconds(_collective("all_reduce", GIGABYTE, (16, 1)), HOSTED)

    assert seconds == pytest.approx(0.4 + 0.1 + 2e-6 + 20e-6)


def test_lone_worker_pushes_to_its_server_and_sums_with_no_one():
    """1 GB there and back at its eighth of 40 GB/s, two hops of 1 us; a ring of one is silent."""
    alone = _collective("all_reduce", GIGABYTE, (1, 1))

    assert collective_seconds(alone, HOSTED) == pytest.approx(0.4 + 2e-6)
    assert collective_seconds(alone, cluster_of()) == 0.0


def test_each_link_of_few_servers_carries_all_workers():
    """4 nodes push 1 GB each to 2 servers: 2 GB in, 2 GB out of each at 10 GB/s."""
    two_servers = dataclasses.replace(PARAMETER_SERVER, servers=2)
    way = group_route(((4, 8),), cluster_of(devices_per_node=1))

    seconds = collectives.parameter_server_all_reduce_seconds(GIGABYTE, way, two_servers)

    assert seconds == pytest.approx(2 / 100 + 0.4 + 2e-6 + 20e-6)


def test_a_pipeline_takes_time_to_fill():
    """W = 10 ms on the wire, r = 1 us a chunk: 2 sqrt(W r) = 0.2 ms more."""
    link = Link(kind="nvswitch", bytes_per_second=100e9, ramp_seconds=1e-6)
    seconds = collective_seconds(
        _collective("all_gather", 8 * GIGABYTE // 7, (8, 1)), cluster_of(link=link)
    )

    assert seconds == pytest.approx(7e-6 + 10e-3 + 0.2e-3, rel=1e-6)


def test_a_member_moves_its_own_part_too():
    """2 members, 1 GB: half a GB on the link, and half of that time again in memory."""
    link = Link(kind="nvswitch", bytes_per_second=100e9, own_share=0.5)
    seconds = collective_seconds(_collective("all_gather", GIGABYTE, (2, 1)), cluster_of(link=link))

    assert seconds == pytest.approx(5e-3 + 2.5e-3 + 1e-6)


def test_two_nodes_send_more_through_a_tree_than_rings_would():
    """1 GB over 2 nodes at 10 GB/s: 100 ms by tree, 187.5 ms by ring; over 4, 200 ms by tree."""
    two, four = (group_route(((n, 1),), PAPER) for n in (16, 32))

    tree = collectives.tree_all_reduce_seconds(GIGABYTE, two, TREE)
    ring = collectives.ring_all_reduce_seconds(GIGABYTE, two, RING)

    assert tree == pytest.approx(100e-3 + 14e-6 + 20e-6)
    assert ring == pytest.approx(187.5e-3 + 28e-6 + 20e-6)
    assert collectives.tree_all_reduce_seconds(GIGABYTE, four, TREE) > 2 * tree - 1e-3


def test_hierarchical_rings_by_hand():
    """4 nodes of 8, 1 GB: 17.5 ms inside, 2 x 3/4 GB at 10 GB/s between, 14 + 6 hops."""
    way = group_route(((32, 1),), PAPER)

    seconds = collectives.hierarchical_all_reduce_seconds(GIGABYTE, way, RING)

    assert seconds == pytest.approx(17.5e-3 + 150e-3 + 14e-6 + 6 * 10e-6)


def test_binary_blocks_by_hand():
    """44 nodes are 32 + 8 + 4: 3/4, then max(7/8, 3/4) + 1/4, then max(31/32, 9/8) + 1/8.

    1 GB crosses 2 x 1.25 times at 10 GB/s, in 2 (5 + 1) hops: the block of 4 ends before that
    of 8, and that of 8 before that of 32, whose five steps alone count.
    """
    way = group_route(((44, 8),), cluster_of(devices_per_node=1))

    seconds = collectives.halving_doubling_all_reduce_seconds(GIGABYTE, way, HALVING)

    assert seconds == pytest.approx(2 * 1.25 * 0.1 + 2 * 6 * 10e-6)


def test_groups_in_part_of_a_node_may_use_fewer_cards():
    """2 of 8 devices in each node share one card of four with three such groups; alone or all
    together devices use all cards."""
    network = Network(bytes_per_second=40e9, partial_group_bytes_per_second=10e9)
    cluster = cluster_of(network=network)

    ways = [group_route(((16 // stride, stride),), cluster) for stride in (1, 4, 8)]

    assert [way.network_bytes_per_second for way in ways] == [40e9, 10e9 / 4, 40e9 / 8]


def test_an_oversubscribed_network_slows_large_groups():
    """Up to 4 nodes share a switch; beyond, four nodes share the way up that one could fill."""
    network = Network(bytes_per_second=10e9, nodes_per_switch=4, oversubscription=4.0)
    cluster = cluster_of(network=network)

    rates = [group_route(((n, 1),), cluster).network_bytes_per_second for n in (32, 64)]

    assert rates == [10e9, 2.5e9]


@pytest.mark.parametrize(
    ("group", "share"),
    [
        (DeviceGroup(extents=((2, 4),), axes=("data",)), 1.0),
        (DeviceGroup(extents=((16, 1),), axes=("data",)), 1.0),
        (DeviceGroup(extents=((8, 2),), axes=("data",)), 1 / 2),
        (DeviceGroup(extents=((4, 8),), axes=("data",)), 1 / 8),
        (HOST_MEMORY, 0.0),
    ],
)
def test_compute_loses_by_the_share_of_a_node_that_a_group_has(group: DeviceGroup, share: float):
    """On nodes of eight: all of it within one, and as members of a node over its devices else."""
    cluster = load_cluster("dgx-h100")
    attainable = dataclasses.replace(cluster.chip.attainable, contention_fraction=0.4)
    chip = dataclasses.replace(cluster.chip, attainable=attainable)
    kind = "copy_to_host" if group == HOST_MEMORY else "all_gather"
    one = Collective(name=kind, payload_bytes=8, group=group, is_async=True)

    assert contention(one, dataclasses.replace(cluster, chip=chip)) == pytest.approx(0.4 * share)
