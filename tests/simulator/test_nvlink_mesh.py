"""Rings on the wires of a node whose devices no switch joins, by hand and against measurements."""

from dataclasses import replace

import pytest
from hardware_cases import cluster_of

from scalejax.core.errors import ConfigError
from scalejax.hardware import Link, load_cluster
from scalejax.hardware.catalogue import load_library
from scalejax.simulator.collectives import mesh_rings
from scalejax.simulator.collectives.nvlink_mesh import fewest_links_by_number
from scalejax.simulator.collectives.placement import collective_seconds, group_route
from scalejax.simulator.program import Collective, DeviceGroup


def test_wires_of_a_square_make_one_ring_each_way():
    """Four devices, four wires: one closed path, both ways; two opposite ones share no wire."""
    square = ((0, 1, 0, 1), (1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 1, 0))

    assert mesh_rings(square, (0, 1, 2, 3)) == (2, 1)
    assert mesh_rings(square, (0, 1, 2)) == (0, 1)
    assert mesh_rings(square, (0, 2)) == (0, 0)


def test_double_wires_make_a_ring_twice():
    """Two wires between each two of three devices carry the same closed path twice, both ways."""
    assert mesh_rings(((0, 2, 2), (2, 0, 2), (2, 2, 0)), (0, 1, 2)) == (4, 2)
    assert mesh_rings(((0, 3), (3, 0)), (0, 1)) == (3, 1)


def test_a_mesh_of_wires_gives_few_members_few_wires():
    """A cube: 2 devices share an edge's wires, 4 a face's, 8 all three dimensions."""
    mesh = cluster_of(link=Link(kind="nvlink_mesh", bytes_per_second=90e9))

    rates = [group_route(((n, 1),), mesh).link_bytes_per_second for n in (2, 4, 8)]

    assert rates == pytest.approx([30e9, 60e9, 90e9])


@pytest.mark.parametrize(
    ("devices", "bytes_per_second"),
    # Rates of all-reduces of 1 GiB that vTrain measured, 2 (n - 1)/n payload / seconds.
    [(2, 22.6e9), (3, 45.1e9), (4, 85.4e9), (5, 37.2e9), (7, 87.0e9), (8, 134.5e9)],
)
def test_rings_on_the_wires_of_a_dgx1_explain_its_rates(devices: int, bytes_per_second: float):
    """1, 2, 4, 0, 4, 6 rings; with 5 devices no ring closes, and a chain is run.

    One share of the wire's rate for all, so that 12 % remain: more rings take more of a GPU.
    """
    group = DeviceGroup(extents=((devices, 1),), axes=("data",))
    collective = Collective(name="all_reduce", payload_bytes=2**30, group=group, is_async=False)

    seconds = collective_seconds(collective, load_cluster("dgx1-v100"))

    rate = 2 * (devices - 1) / devices * 2**30 / seconds
    assert rate == pytest.approx(bytes_per_second, rel=0.12)


def test_members_that_no_wire_joins_go_through_the_host():
    """Devices 0 and 5 of a DGX-1 share no wire: 48 GB/s of 8 devices to the host are 6 each."""
    assert group_route(((2, 5),), load_cluster("dgx1-v100")).link_bytes_per_second == 6e9


def test_fewest_wires_of_a_ring_by_numbers():
    """Of a path of three, joined by two wires and one, the ends have none between them."""
    path = ((0, 2, 0), (2, 0, 1), (0, 1, 0))

    assert fewest_links_by_number(path, (0, 1)) == 2
    assert fewest_links_by_number(path, (2, 1)) == 1
    assert fewest_links_by_number(path, (0, 1, 2)) == 0


def test_nccl_1_runs_one_ring_by_numbers_on_a_dgx1():
    """A wire of 18 GB/s joins 0, 1, 2, 3 and 0; none joins 3 and 4, which take the host's 6."""
    cluster = replace(load_cluster("dgx1-p100"), library=load_library("nccl-1"))

    routes = [group_route(((devices, 1),), cluster) for devices in (2, 4, 8)]

    assert [way.link_bytes_per_second for way in routes] == pytest.approx([18e9, 18e9, 6e9])


def test_damaged_wires_are_refused():
    """A wire has two ends, and a mesh one row per device."""
    with pytest.raises(ConfigError, match=r"link\.wires=.*symmetric"):
        Link(kind="nvlink_mesh", bytes_per_second=1e9, wires=((0, 1), (2, 0)))
    with pytest.raises(ConfigError, match=r"link\.wires=.*devices_per_node=8"):
        cluster_of(link=Link(kind="nvlink_mesh", bytes_per_second=1e9, wires=((0, 1), (1, 0))))
