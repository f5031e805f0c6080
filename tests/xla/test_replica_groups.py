"""Replica groups in every notation become strides and mesh axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.core.errors import ProfileError
from scalejax.xla.replica_groups import device_group, permute_group, replica_group

MESH = (("data", 32), ("fsdp", 1), ("tensor", 8))


@pytest.mark.parametrize(
    ("text", "extents", "axes"),
    [
        ("mesh['axis_0'=32,'axis_1'=8] {'axis_0'}", ((32, 8),), ("data",)),
        ("mesh['axis_0'=32,'axis_1'=8] {'axis_1'}", ((8, 1),), ("tensor",)),
        ("mesh['axis_0'=32,'axis_1'=8] {'axis_0','axis_1'}", ((256, 1),), ("data", "tensor")),
        ("mesh['a'=256] {'a':(1)32}", ((32, 8),), ("data",)),
        ("mesh['a'=256] {'a':(32)8}", ((8, 1),), ("tensor",)),
        ("mesh['a'=8,'b'=32], device_ids=([8,32]<=[32,8]T(1,0)) {'a'}", ((8, 1),), ("tensor",)),
        (
            "mesh['a'=8,'b'=1,'c'=32],device_ids=([32,8]T(1,0)) {'a'}",
            ((8, 1),),
            ("tensor",),
        ),
        ("[32,8]<=[256]", ((8, 1),), ("tensor",)),
        ("[8,32]<=[32,8]T(1,0)", ((32, 8),), ("data",)),
        ("[1,256]<=[256]", ((256, 1),), ("data", "tensor")),
        ("{}", ((256, 1),), ("data", "tensor")),
        ("{{0,8,16,24},{1,9,17,25}}", ((4, 8),), ()),
        ("{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", ((8, 1),), ("tensor",)),
        ("{{0},{1}}", (), ()),
    ],
)
def test_every_notation_names_the_same_devices(text, extents, axes):
    """A group is strides over device numbers, and the axes it spans if it spans whole ones."""
    group = replica_group(text, MESH)

    assert (group.extents, group.axes) == (extents, axes)


def test_a_group_over_outer_and_inner_axis_keeps_two_strides():
    """Data x tensor of data=2, fsdp=4, tensor=2 are devices 0, 1, 8, 9."""
    mesh = (("data", 2), ("fsdp", 4), ("tensor", 2))

    for text in (
        "{{0,1,8,9},{2,3,10,11},{4,5,12,13},{6,7,14,15}}",
        "mesh['data'=2,'fsdp'=4,'tensor'=2] {'data','tensor'}",
        "[4,4]<=[2,4,2]T(1,0,2)",
    ):
        group = replica_group(text, mesh)
        assert group.extents == ((2, 8), (2, 1))
        assert group.axes == ("data", "tensor")


def test_devices_of_a_permutation_are_those_its_data_can_reach():
    """A ring over the tensor axis reaches 4 neighbours, whichever way round."""
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"

    group = permute_group(pairs, (("data", 2), ("tensor", 4)))

    assert (group.extents, group.axes) == (((4, 1),), ("tensor",))


def test_a_permutation_is_more_than_what_its_first_device_keeps():
    """Of four stages the first keeps its data; the others pass theirs on, and are no whole axis."""
    mesh = (("pipeline", 4), ("tensor", 2))
    pairs = "{{0,0},{2,4},{4,6},{6,2},{1,1},{3,5},{5,7},{7,3}}"

    group = permute_group(pairs, mesh)

    assert (group.extents, group.axes) == (((3, 2),), ("pipeline",))


def test_an_unknown_notation_is_refused():
    """A wrong group would be a wrong prediction."""
    with pytest.raises(ProfileError, match="unknown notation"):
        replica_group("something['new']", MESH)


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_any_product_of_mesh_axes_is_recognised(sizes, data):
    """Extents describe exactly the devices of the group, and the axes are found again."""
    mesh = tuple((f"axis{index}", size) for index, size in enumerate(sizes))
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    positions = itertools.product(*(range(n) if i in chosen else (0,) for i, n in enumerate(sizes)))
    devices = []
    for position in positions:
        number = 0
        for index, size in zip(position, sizes, strict=True):
            number = number * size + index
        devices.append(number)

    group = device_group(devices, mesh)

    offsets = (range(0, size * stride, stride) for size, stride in group.extents)
    assert sorted(map(sum, itertools.product(*offsets))) == sorted(devices)
    assert group.axes == tuple(f"axis{index}" for index in sorted(chosen))
