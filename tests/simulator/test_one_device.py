"""Weights sent out from one device, and gradients back: by hand."""

from dataclasses import replace

import pytest
from hardware_cases import cluster_of
from program_cases import matmul, program_of, wait

from scalejax.simulator.frameworks import FRAMEWORKS
from scalejax.simulator.frameworks.one_device import through_one_device
from scalejax.simulator.frameworks.software import software_by_name
from scalejax.simulator.program import Collective, DeviceGroup, Loop, Operation
from scalejax.simulator.timeline.timeline import timeline

MEGABYTE = 10**6
CLUSTER = cluster_of()


def sums(name: str, megabytes: int, dtype: str = "f32", axis: str = "data") -> Operation:
    """An all-reduce of gradients over the 8 devices of a node."""
    collective = Collective(
        name="all_reduce",
        payload_bytes=megabytes * MEGABYTE,
        group=DeviceGroup(extents=((8, 1),), axes=(axis,)),
        is_async=True,
    )
    return Operation(name=name, kind="collective", dtype=dtype, collective=collective)


STEP = program_of(
    matmul("forward", 5),
    Loop(name="layers", trip_count=3, body=(matmul("backward", 3), sums("s", 50, "bf16"))),
    sums("t", 100),
    wait("s"),
    wait("t"),
    matmul("update", 1),
)
"""15 ms of work, and gradients of 3 x 100 + 100 MB in float32."""


@pytest.mark.parametrize(
    ("is_relayed", "megabytes"), [(True, 400 + 400 + 7 * 2), (False, 7 * (400 + 400 + 2))]
)
def test_all_goes_through_the_link_of_one_device_while_nothing_computes(
    is_relayed: bool, megabytes: int
):
    """At 100 GB/s: once, where others pass it on, or seven times; the parts of the batch always."""
    changed = through_one_device(STEP, is_relayed=is_relayed, input_bytes=2 * MEGABYTE)

    expected = 15e-3 + megabytes * MEGABYTE / 100e9
    assert timeline(changed, CLUSTER).step_seconds == pytest.approx(expected, rel=1e-3)
    names = [item.name for item, _ in changed.walk()]
    assert names == ["weights.out", "forward", "backward", "gradients.back", "update"]


def test_frozen_weights_go_out_and_have_no_gradients():
    """A network of 900 MB of which 400 are trained."""
    changed = through_one_device(STEP, is_relayed=True, weight_bytes=900 * MEGABYTE)

    sent = [each.collective.payload_bytes for each, _ in changed.walk() if each.collective]
    assert sent == [900 * MEGABYTE, 400 * MEGABYTE]


def test_a_step_that_sums_no_gradients_stays_as_it_is():
    """Of one device, or over another axis."""
    other = program_of(sums("s", 1, axis="tensor"), wait("s"))

    assert through_one_device(other, is_relayed=True) is other


def test_a_part_of_a_framework_has_its_rates_and_the_band_of_what_nobody_measured():
    """Those of eager PyTorch, with no rows of their own."""
    known = software_by_name()
    software = FRAMEWORKS["pytorch-dataparallel"].software

    assert software.rates_on("v100") == known["pytorch-eager-2020"].rates_on("v100")
    assert software.residual == known["unknown"].residual
    assert not software.rows
    assert (
        replace(FRAMEWORKS["pytorch-dataparallel"], software_of=None).software == known["unknown"]
    )
