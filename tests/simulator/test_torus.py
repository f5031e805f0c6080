"""Collectives on a torus of chips: rings, lines, axes, against hand calculations and a profile."""

import pytest

from scalejax.core.units import MIB
from scalejax.hardware import load_cluster
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.collectives.torus import TorusAxis, slice_sides, torus_group
from scalejax.simulator.program import Collective, CollectiveName, DeviceGroup

V5P, V5E = load_cluster("tpu-v5p"), load_cluster("tpu-v5e")
W = 0.9 * 180e9
"""Bytes per second of a v5p over both wires of an axis."""
HOP = 1e-6


def _seconds(name: CollectiveName, payload: int, *extents: tuple[int, int], cluster=V5P) -> float:
    group = DeviceGroup(extents=extents, axes=("data",))
    collective = Collective(name=name, payload_bytes=payload, group=group, is_async=False)
    return collective_seconds(collective, cluster)


def test_an_all_reduce_of_a_large_slice_is_no_flat_ring():
    """4 MiB over 16 x 16 x 16: 2 x 24 hops and twice the payload over three axes, 66 us; a ring of
    4,096 took 8.2 ms."""
    seconds = _seconds("all_reduce", 4 * MIB, (4096, 1))

    assert seconds == pytest.approx(HOP + 2 * (24 * HOP + 4095 / 4096 * 4 * MIB / (3 * W)))
    assert seconds < 70e-6


def test_a_gather_over_a_line_takes_as_long_as_its_profile():
    """34 MB over the 4 of a 4 x 8 of v5e, without a wire that closes them: 3 shards over one wire,
    560 us at its nominal rate; 680 us in the scaling book's profile."""
    payload = 2048 * 8192 * 2

    seconds = _seconds("all_gather", payload, (4, 8), cluster=V5E)

    assert seconds == pytest.approx(4 * HOP + 3 / 4 * payload / (0.9 * 45e9))
    assert seconds == pytest.approx(680e-6, rel=0.1)  # wires at 0.9 of their rate, unverified


@pytest.mark.parametrize(
    ("devices", "sides"), [(8, (2, 2, 2)), (64, (4, 4, 4)), (96, (4, 4, 6)), (8960, (16, 20, 28))]
)
def test_a_slice_is_as_cubic_as_it_can_be(devices: int, sides: tuple[int, ...]):
    """As the published slices of v5p are."""
    assert slice_sides(devices, 3) == sides


def test_axes_of_a_group_follow_the_mesh():
    """Of 64 as 16 x 4: the inner 4 are one axis of 4 x 4 x 4, the outer 16 the other two."""
    assert V5P.chip.tpu is not None

    outer = torus_group(((16, 4),), V5P.chip.tpu, 4)
    strided = torus_group(((2, 32), (2, 2)), V5P.chip.tpu, 4)

    assert outer.axes == (TorusAxis(members=4, stride=1, is_ring=True),) * 2
    assert [(axis.members, axis.stride) for axis in strided.axes] == [(2, 2), (2, 2)]


def test_only_whole_cubes_close_to_rings():
    """2 x 4 x 4 chips have no wires around, 4 x 4 x 4 have; of v5e a side of 16 has, of 8 not."""
    assert V5P.chip.tpu is not None
    assert V5E.chip.tpu is not None

    small, cube = (torus_group(((n, 1),), V5P.chip.tpu, 4) for n in (32, 64))
    flat = torus_group(((128, 1),), V5E.chip.tpu, 16)

    assert [axis.is_ring for axis in small.axes] == [False] * 3
    assert [axis.is_ring for axis in cube.axes] == [True] * 3
    assert [(axis.members, axis.is_ring) for axis in flat.axes] == [(8, False), (16, True)]


def test_an_all_to_all_passes_a_quarter_of_a_ring():
    """Over 16 of v5e, each sends its 1 GB along a quarter of 16: 4 GB over both wires."""
    seconds = _seconds("all_to_all", 10**9, (16, 1), (16, 16), cluster=V5E)

    assert seconds == pytest.approx(16 * 10**9 / (4 * 0.9 * 90e9), rel=1e-3)  # hops are 17 us


def test_two_devices_of_a_chip_share_its_wires():
    """128 v3 devices are 64 chips of 8 x 8: both devices of a chip send half of what it sends."""
    v3 = load_cluster("tpu-v3")
    payload = 10**9

    seconds = _seconds("all_gather", payload, (128, 1), cluster=v3)

    rate = 2 * (2 * 0.5) * 0.9 * 82e9  # two devices, two lines
    assert seconds == pytest.approx(127 / 128 * payload / rate, rel=3e-3)  # hops are 15 us


def test_slices_send_each_other_what_a_slice_sums():
    """Two v6e pods: in the pod as alone, and half of the payload twice over their network."""
    v6e = load_cluster("tpu-v6e")
    payload = 10**9

    one, two = (_seconds("all_reduce", payload, (n, 1), cluster=v6e) for n in (256, 512))

    assert two - one == pytest.approx(2 * (payload / 2 / (0.9 * 3200e9) + 10e-6), rel=0.01)


def test_more_chips_gather_no_faster():
    """A gather of a payload takes at least as long over a longer side of as many axes."""
    seconds = [_seconds("all_gather", 10**9, (n, 1)) for n in (64, 512, 4096)]

    assert seconds == sorted(seconds)
