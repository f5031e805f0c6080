"""Device groups of collectives, parsed from XLA's notations of replica groups.

Knows device numbers along the mesh, major to minor, and the names of its axes; no collectives.
"""

import itertools
import math
import re
from collections.abc import Sequence
from functools import cache

from scalejax.core.errors import ProfileError
from scalejax.simulator.program import DeviceGroup

MeshAxes = tuple[tuple[str, int], ...]
"""(name, size) of each mesh axis, major to minor."""

Extents = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension of a grid of devices, major to minor."""


@cache
def replica_group(text: str, mesh_axes: MeshAxes) -> DeviceGroup:
    """The group in a `replica_groups` attribute; the first, if there are several of one shape.

    Reads `mesh['a'=4,'b'=8] {'a'}` (axes, or parts of them, of a mesh of XLA's own making),
    `[8,4]<=[4,8]T(1,0)` (a transposed count of all devices, cut into rows), `{{0,1},{2,3}}`
    (lists), and `{}` (all devices).

    Raises:
        ProfileError: if the notation is none of these.
    """
    device_count = math.prod(size for _, size in mesh_axes)
    if text.startswith("mesh["):
        devices = _devices_of_axes(text)
    elif "<=" in text:
        devices = _devices_of_count(text)
    elif lists := re.match(r"\{\{([\d,]+)\}", text):
        devices = [int(device) for device in lists[1].split(",")]
    elif text in ("", "{}"):
        devices = list(range(device_count))
    else:
        raise ProfileError(f"replica groups in an unknown notation: {text[:200]!r}.")
    return device_group(devices, mesh_axes)


@cache
def permute_group(text: str, mesh_axes: MeshAxes) -> DeviceGroup:
    """The group in a `source_target_pairs` attribute: the devices that the data of the first pair
    of two devices could reach, hop by hop; these may be some of those along its axes."""
    neighbours: dict[int, list[int]] = {}
    found = re.findall(r"\{(\d+),(\d+)\}", text)
    pairs = [(int(source), int(target)) for source, target in found if source != target]
    for source, target in pairs:
        neighbours.setdefault(source, []).append(target)
        neighbours.setdefault(target, []).append(source)
    waiting = [pairs[0][0]] if pairs else [0]
    reached = set(waiting)
    while waiting:
        for neighbour in neighbours.get(waiting.pop(), ()):
            if neighbour not in reached:
                reached.add(neighbour)
                waiting.append(neighbour)
    group = device_group(sorted(reached), mesh_axes)
    if group.axes:
        return group
    axes, stride = [], 1
    for name, size in reversed(mesh_axes):
        if len({device // stride % size for device in reached}) > 1:
            axes.insert(0, name)
        stride *= size
    return DeviceGroup(extents=group.extents, axes=tuple(axes))


def device_group(devices: Sequence[int], mesh_axes: MeshAxes) -> DeviceGroup:
    """The group of `devices`, as a grid of strides and the mesh axes that it spans."""
    extents = _grid(sorted(devices))
    sizes = [size for _, size in mesh_axes]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    used = [
        (name, size, stride)
        for (name, size), stride in zip(mesh_axes, strides, strict=True)
        if size > 1
    ]
    for count in range(len(used) + 1):
        for chosen in itertools.combinations(used, count):
            if _merged([(size, stride) for _, size, stride in chosen]) == extents:
                return DeviceGroup(extents=extents, axes=tuple(name for name, _, _ in chosen))
    return DeviceGroup(extents=extents, axes=())


def _grid(devices: list[int]) -> Extents:
    """The strides of a sorted list of devices; one mean stride if they form no grid."""
    count = len(devices)
    base = [device - devices[0] for device in devices]
    extents: list[tuple[int, int]] = []
    block = 1  # devices in the grid of the minor dimensions found so far
    while block < count:
        stride = base[block]
        size = 1
        while size * block < count and base[size * block] == size * stride:
            size += 1
        extents.insert(0, (size, stride))
        block *= size
        if count % block:
            break
    if base == [sum(position) for position in _positions(extents)]:
        return tuple(extents)
    return ((count, max(1, base[-1] // (count - 1))),)


def _positions(extents: Sequence[tuple[int, int]]) -> itertools.product:
    return itertools.product(*(range(0, size * stride, stride) for size, stride in extents))


def _merged(extents: Sequence[tuple[int, int]]) -> Extents:
    """The grid in as few dimensions as possible."""
    merged: list[tuple[int, int]] = []
    for size, stride in extents:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _devices_of_axes(text: str) -> list[int]:
    """The first group of `mesh['a'=4,'b'=8] {'a','b':(2)4}`.

    `'b':(2)4` is the part of axis b of size 4 that follows a part of size 2.
    """
    mesh_text = text.partition("]")[0]
    order = re.search(r"device_ids=\(?(\[[\d,]+\](?:<=\[[\d,]+\])?(?:T\([\d,]+\))?)", text)
    if "{" not in text or (order is None and "device_ids" in text):
        raise ProfileError(f"replica groups in an unknown notation: {text[:200]!r}.")
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_text)]
    sizes = [size for _, size in axes]
    strides = {name: math.prod(sizes[i + 1 :]) for i, (name, _) in enumerate(axes)}
    chosen = []
    for name, before, part in re.findall(
        r"'([^']+)'(?::\((\d+)\)(\d+))?", text[text.rindex("{") :]
    ):
        size = dict(axes)[name]
        if part:
            chosen.append((int(part), strides[name] * size // (int(before) * int(part))))
        else:
            chosen.append((size, strides[name]))
    positions = [sum(position) for position in _positions(chosen)]
    return positions if order is None else [_counted(order[1], p) for p in positions]


def _devices_of_count(text: str) -> list[int]:
    """The first row of `[rows,columns]<=[dims]T(order)`."""
    shape, _, source = text.partition("<=")
    row = int(re.findall(r"\d+", shape)[-1])
    return [_counted(source, position) for position in range(row)]


def _counted(text: str, position: int) -> int:
    """The device at `position` of `[dims]T(order)`: devices counted over dims, then transposed."""
    dims_text, _, order_text = text.partition("T")
    dims = [int(size) for size in re.findall(r"\d+", dims_text.rpartition("<=")[2])]
    order = [int(axis) for axis in re.findall(r"\d+", order_text)] or list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    device = 0
    for axis in reversed(order):
        position, index = divmod(position, dims[axis])
        device += index * strides[axis]
    return device
