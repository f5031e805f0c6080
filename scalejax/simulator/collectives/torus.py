"""Seconds of collectives on a torus of chips (TPUs): axes, rings where they close, both directions.

Depends on the sides of a slice and the places of a group on it, not on programs. Devices are
numbered with the last axis fastest, as their mesh is laid out.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from scalejax.hardware import CollectiveMethod, Link
from scalejax.hardware.chip import TpuArchitecture

Extents = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension of a group, major to minor."""
_LINE_SHARE = 0.5
"""Share of a ring's rate: without the closing wire, a device at an end sends only one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorusAxis:
    """The places of a group along one axis of the torus."""

    members: int
    """Chips of the group along the axis."""
    stride: int
    """Chips from one member to the next; that many groups share the axis's wires."""
    is_ring: bool
    """Whether the members form a ring: they span an axis that does."""

    @property
    def hops(self) -> int:
        """Wires that a message passes at most: half a ring, as both directions are used."""
        most = self.members // 2 if self.is_ring else self.members - 1
        return most * self.stride

    @property
    def rate_share(self) -> float:
        """Share of a ring's rate that each of the groups on the axis has."""
        return (1.0 if self.is_ring else _LINE_SHARE) / self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class TorusGroup:
    """A group of devices of one slice."""

    members: int
    """Devices in the group."""
    devices_on_chip: int
    """Devices of the group on each of its chips."""
    axes: tuple[TorusAxis, ...]
    """Axes along which the group has more than one chip."""


def torus_seconds(
    operation: str, payload_bytes: int, group: TorusGroup, link: Link, method: CollectiveMethod
) -> float:
    """Time of a collective in one slice while all groups like it are busy.

    With W bytes per second over both wires of an axis, half of that on a line, all axes at once:
    gather, scatter: seconds = base + hops + (n - 1)/n payload / (sum of W); all-reduce: twice the
    hops and transfer; all-to-all: payload members / (4 W) of the slowest axis; permutation: payload
    over one wire, for each wire that it passes.

    The source gives maxima of hops and transfer, of which the larger is close to their sum. An
    all-gather of 34 MB over a line of 4 v5e is profiled there at 680 us; here it takes 625.

    Args:
        operation: "all_reduce".
        payload_bytes: bytes as in the other models of that operation.
        group: the group on the torus.
        link: the wires; its rate is that of a device over both wires of an axis.
        method: latencies.
    Source: Google DeepMind 2025, "How to Scale Your Model", parts 2 and 3 (TPUs, sharding).
    """
    if group.members == 1:
        return 0.0
    rate = link.bytes_per_second * link.attainable_fraction * method.bandwidth_fraction
    hops = sum(axis.hops for axis in group.axes) or 1
    start = method.base_seconds + hops * method.link_hop_seconds
    if operation == "all_to_all":
        # A quarter of every device's bytes pass a wire of a ring, and twice as many the middle of
        # a line.
        slowest = max(
            (axis.members * axis.stride / (1.0 if axis.is_ring else _LINE_SHARE)
             for axis in group.axes), default=1.0,
        )  # fmt: skip
        return start + payload_bytes * slowest / (4 * rate)
    if operation == "collective_permute":
        passed = group.axes[-1].stride if group.axes else 1
        seconds = method.base_seconds + passed * method.link_hop_seconds
        return seconds + payload_bytes * passed / (rate / 2)
    axes_rate = rate * group.devices_on_chip * (sum(a.rate_share for a in group.axes) or 1.0)
    transfer = (group.members - 1) / group.members * payload_bytes / axes_rate
    passes = 2 if operation == "all_reduce" else 1
    return method.base_seconds + passes * (hops * method.link_hop_seconds + transfer)


@cache
def torus_group(extents: Extents, tpu: TpuArchitecture, ring_multiple: int) -> TorusGroup:
    """Places of a group on the smallest slice that holds it.

    For the outermost axis of a mesh that is the slice of the run. Inner axes are placed on a block
    of their own size, as a mesh is laid out along whole sides where possible; a block of a larger
    slice may lack wires that this slice has.

    Args:
        extents: the group of device 0.
        tpu: the torus.
        ring_multiple: an axis closes to a ring if its length is a multiple of this; on a torus of
            three dimensions, which is wired by cubes, if all lengths are.
    """
    devices = [0]
    for size, stride in extents:
        devices = [device + stride * i for device in devices for i in range(size)]
    per_chip = tpu.devices_per_chip
    chips = sorted({device // per_chip for device in devices})
    span = max(size * stride for size, stride in extents)
    sides = slice_sides(-(-span // per_chip), tpu.torus_dimensions)
    closes = [side % ring_multiple == 0 for side in sides]
    if tpu.torus_dimensions == 3:
        closes = [all(closes)] * 3
    axes, below = [], 1
    for side, is_closed in zip(reversed(sides), reversed(closes), strict=True):
        places = sorted({chip // below % side for chip in chips})
        below *= side
        if len(places) > 1:
            stride = math.gcd(*(place - places[0] for place in places[1:]))
            is_ring = is_closed and len(places) * stride == side
            axes.append(TorusAxis(members=len(places), stride=stride, is_ring=is_ring))
    return TorusGroup(
        members=len(devices),
        devices_on_chip=len(devices) // len(chips),
        axes=tuple(reversed(axes)),
    )


@cache
def slice_sides(chips: int, dimensions: int) -> tuple[int, ...]:
    """Chips along each side of the smallest slice with at least `chips`, shortest first; as cubic
    as possible."""
    whole = chips if chips in (1, 2) else -(-chips // 4) * 4
    return min(slices(whole, dimensions), key=lambda sides: (max(sides), sum(sides)))


def slices(chips: int, dimensions: int) -> Iterator[tuple[int, ...]]:
    """Yield the sides of every slice of that many chips that hosts of 2 x 2 fill."""
    if chips in (1, 2):
        yield (1,) * (dimensions - 1) + (chips,)
        return
    divisors = [size for size in range(1, chips + 1) if chips % size == 0]
    for sides in itertools.product(divisors, repeat=dimensions):
        is_filled = sides[0] % 2 == 0 and sides[1] % 2 == 0
        if math.prod(sides) == chips and is_filled:
            yield sides
