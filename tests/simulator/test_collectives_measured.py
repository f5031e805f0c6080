"""Measured times of collectives: read, interpolated, scaled, and held against what they lack."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hardware_cases import cluster_of
from hypothesis import given
from hypothesis import strategies as st

from scalejax.core.errors import UnknownHardware
from scalejax.core.units import MIB
from scalejax.hardware import Cluster, Link, MeasuredTimes, load_cluster, load_measured_times
from scalejax.simulator.collectives.measured import (
    curve_of,
    factor_over_nodes,
    measured_deviation,
)
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.program import Collective, CollectiveName, DeviceGroup

TABLES = (
    "a100-nvswitch",
    "b200-nvswitch",
    "b300-nvswitch",
    "gb200-nvl72",
    "gb300-nvl72",
    "h100-nvswitch",
    "h200-nvswitch",
    "vtrain-a100",
)
NCCL_TIMES = Path(__file__).parents[3] / "shared" / "ledger" / "2026" / "nccl_times.csv"
COMPARE = Path(__file__).parents[2] / "experiments" / "collectives_against_tables" / "compare.py"


def _seconds(name: CollectiveName, payload_bytes: int, devices: int, cluster: Cluster) -> float:
    group = DeviceGroup(extents=((devices, 1),), axes=("data",))
    collective = Collective(name=name, payload_bytes=payload_bytes, group=group, is_async=False)
    return collective_seconds(collective, cluster)


def _linked(cluster: Cluster, **fields: object) -> Cluster:
    return dataclasses.replace(cluster, link=dataclasses.replace(cluster.link, **fields))


def _times(**sizes: tuple[tuple[int, float], ...]) -> MeasuredTimes:
    """A table of all-reduces: n2=((bytes, seconds), ...)."""
    curves = {int(name.removeprefix("n")): points for name, points in sizes.items()}
    return MeasuredTimes(name="paper", cluster="", source="", curves={"all_reduce": curves})


def _linear(operation: str, devices: int, payload_bytes: float) -> float:
    """A model: a microsecond per device, and a second per GB."""
    return devices * 1e-6 + payload_bytes / 1e9


@pytest.mark.parametrize("name", TABLES)
def test_every_table_names_its_source_and_a_cluster_of_the_catalogue(name: str):
    """Numbers without a source are not shipped."""
    times = load_measured_times(name)

    assert len(times.source) > 10
    assert load_cluster(times.cluster).link.kind == "nvswitch"
    assert all(len(points) >= 11 for sizes in times.curves.values() for points in sizes.values())


def test_a_measured_payload_takes_its_measured_time():
    """NCCL's log: what 64 MiB over 8 H100 took."""
    measured = dict(load_measured_times("h100-nvswitch").curves["all_reduce"][8])[64 * MIB]

    assert _seconds("all_reduce", 64 * MIB, 8, load_cluster("dgx-h100")) == pytest.approx(measured)


def test_between_payloads_logarithms_run_straight():
    """From 3 us at 1 kB and 102 us at 100 kB, the root of 3 times 102 at 10 kB."""
    curve = curve_of(_times(n2=((1000, 3e-6), (100_000, 1.02e-4))), _linear, "all_reduce", 2)

    assert curve is not None
    seconds = [curve.at(payload) for payload in (1000, 10_000, 100_000)]
    assert seconds == pytest.approx([3e-6, (3 * 102) ** 0.5 * 1e-6, 1.02e-4])


def test_beyond_a_table_the_model_goes_on_where_it_ends():
    """Twice the model at both ends of the table, so twice the model's 2 us + 1 s per GB beyond."""
    curve = curve_of(_times(n2=((1024, 6.048e-6), (2**20, 2.101152e-3))), _linear, "all_reduce", 2)

    assert curve is not None
    for payload in (1, 16, 256, 1024, 2**20, 2**24, 2**30):
        assert curve.at(payload) == pytest.approx(2 * _linear("all_reduce", 2, payload))
    # Above what is modelled, in proportion.
    assert curve.at(2**40) == pytest.approx(4 * curve.at(2**38))


def test_noise_is_pooled_until_time_never_falls():
    """4 us, then 1 us: both are 2 us, their geometric mean."""
    noisy = _times(n2=((1, 4e-6), (2, 1e-6), (4, 3e-6)))
    curve = curve_of(noisy, _linear, "all_reduce", 2)

    assert curve is not None
    assert [curve.at(payload) for payload in (1, 2, 4)] == pytest.approx([2e-6, 2e-6, 3e-6])


def test_other_group_sizes_keep_the_ratio_to_the_model():
    """Measured twice the model at 2, as it is at 8: at 4, sqrt 2 of it; at 16, as at 8."""
    times = _times(
        n2=tuple((s, 2 * _linear("", 2, s)) for s in (10**3, 10**6)),
        n8=tuple((s, _linear("", 8, s)) for s in (10**3, 10**6)),
    )

    between, beyond = (curve_of(times, _linear, "all_reduce", n) for n in (4, 16))

    assert between is not None
    assert beyond is not None
    assert between.at(10**6) == pytest.approx(math.sqrt(2) * _linear("", 4, 10**6))
    assert beyond.at(10**6) == pytest.approx(_linear("", 16, 10**6))


def test_faster_links_leave_latency_as_it_is():
    """At twice the rate, half of what exceeds the smallest message's time."""
    cluster = load_cluster("dgx-h100")
    twice = _linked(cluster, bytes_per_second=2 * cluster.link.bytes_per_second)
    least, large = (_seconds("all_gather", payload, 8, cluster) for payload in (1, 2**31))

    assert _seconds("all_gather", 1, 8, twice) == least
    assert _seconds("all_gather", 2**31, 8, twice) == pytest.approx(least + (large - least) / 2)


def test_tables_speak_of_what_was_measured_alone():
    """One node, and the library that was measured; the model answers for all else."""
    cluster = load_cluster("dgx-h100")
    modelled = _linked(cluster, measured=None)
    own = dataclasses.replace(cluster.library, name="own")
    both = [dataclasses.replace(c, library=own) for c in (cluster, modelled)]

    assert _seconds("all_reduce", MIB, 8, cluster) != _seconds("all_reduce", MIB, 8, modelled)
    assert _seconds("all_reduce", MIB, 16, cluster) == _seconds("all_reduce", MIB, 16, modelled)
    assert _seconds("all_reduce", MIB, 8, both[0]) == _seconds("all_reduce", MIB, 8, both[1])


def test_a_group_over_nodes_takes_no_less_than_its_members_of_one():
    """16 MiB gathered over PCIe by 8 RTX PRO 6000 take long; over two nodes no less."""
    cluster = load_cluster("rtx-pro-6000")
    inside, across = (_seconds("all_gather", 16 * MIB, n, cluster) for n in (8, 16))

    assert across == inside > _seconds("all_gather", 16 * MIB, 16, _linked(cluster, measured=None))


def test_a_message_between_racks_takes_no_less_than_within_one():
    """16 MiB to the next of 72 GB200, and to the next rack's: XLA's table of permutations, in which
    the first takes 14 times as long as NCCL's, is not used."""
    cluster = load_cluster("gb200-nvl72")
    inside, across = (_seconds("collective_permute", 16 * MIB, n, cluster) for n in (72, 144))

    assert 30e-6 < inside <= across < 100e-6


def test_an_operation_that_was_not_measured_is_modelled():
    """vTrain measured all-reduces alone."""
    cluster = load_cluster("vtrain-a100")
    modelled = _linked(cluster, measured=None)

    assert _seconds("all_gather", MIB, 8, cluster) == _seconds("all_gather", MIB, 8, modelled)


def test_an_unknown_table_is_refused_with_the_nearest():
    """A typo in a user's file costs one line."""
    link = Link(kind="nvswitch", bytes_per_second=450e9, measured="h100-nvswich")

    with pytest.raises(UnknownHardware, match="did you mean 'h100-nvswitch'"):
        _seconds("all_reduce", MIB, 8, cluster_of(link=link))


BUS_BANDWIDTHS = (
    ("all_reduce", 16, 361.749),
    ("all_reduce", 512, 32.938),
    ("all_gather", 64, 68.998),
)
"""GB/s of 256 MiB over so many H100 of the Ultra-Scale Playbook, as it prints them."""


@pytest.mark.parametrize(("name", "devices", "bus_bandwidth"), BUS_BANDWIDTHS)
def test_a_cluster_sends_at_its_measured_bus_bandwidth(
    name: CollectiveName, devices: int, bus_bandwidth: float
):
    """Its network gives 362 GB/s to two nodes, and 33 to 64, where its cards have 400."""
    sent = (2 if name == "all_reduce" else 1) * (devices - 1) / devices * 256 * MIB

    seconds = _seconds(name, 256 * MIB, devices, load_cluster("hf-ultrascale"))

    assert sent / seconds / 1e9 == pytest.approx(bus_bandwidth, rel=0.005)  # four digits are kept


def test_what_one_payload_took_longer_is_latency_below_it_and_a_rate_above():
    """So a MiB takes as much longer than modelled as 256 MiB, a GiB four times, and a kilobyte next
    to nothing."""
    cluster = load_cluster("hf-ultrascale")
    assert cluster.network is not None
    network = dataclasses.replace(cluster.network, measured=None)
    modelled = dataclasses.replace(cluster, network=network)

    beyond = [
        _seconds("all_gather", payload, 512, cluster)
        - _seconds("all_gather", payload, 512, modelled)
        for payload in (1024, MIB, 256 * MIB, 1024 * MIB)
    ]

    assert beyond[1] == pytest.approx(beyond[2])
    assert beyond[3] == pytest.approx(4 * beyond[2])
    assert beyond[0] == pytest.approx(beyond[2] / 1024)
    assert 0.01 < beyond[2] < 0.0243  # of the 24.3 ms that were measured


def test_between_node_counts_logarithms_run_straight():
    """Factors of 2 over 2 nodes and 8 over 8 are 4 over 4; both hold beyond."""
    factors = {2: ((0.0, math.log(2)),), 8: ((0.0, math.log(8)),)}

    found = [factor_over_nodes(factors, MIB, nodes) for nodes in (2, 4, 8, 64)]

    assert found == pytest.approx([2, 4, 8, 8])


def test_payloads_over_nodes_take_their_measured_time():
    """AWS's log of two p5: 1 GiB takes 4.6076 ms, and between 1 and 4 GiB nothing falls."""
    cluster = load_cluster("aws-p5")

    seconds = [_seconds("all_reduce", size * MIB, 16, cluster) for size in (1024, 2048, 3000, 4096)]

    assert seconds[0] == pytest.approx(4.6076e-3, rel=1e-3)  # four digits are kept
    assert seconds == sorted(seconds)


def test_steps_over_more_nodes_of_that_cluster_are_less_certain():
    """From one choice of two nodes to another 10 to 20 %, of 64 more than 50."""
    cluster = load_cluster("hf-ultrascale")

    deviations = [measured_deviation(nodes, cluster) for nodes in (1, 2, 64)]

    assert deviations[0] == 0
    assert 0.1 < deviations[1] < 0.2
    assert deviations[2] > 0.5
    assert measured_deviation(64, load_cluster("dgx-h100")) == 0


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.sampled_from(["dgx-h100", "dgx-b200", "gb200-nvl72"]),
    st.integers(2, 8),
    st.integers(1, 10**11),
    st.integers(0, 10**9),
)
def test_measured_times_never_fall_with_payload(
    name: CollectiveName, cluster_name: str, devices: int, payload: int, more: int
):
    """Noise in a table makes no larger payload faster, for measured and other group sizes."""
    cluster = load_cluster(cluster_name)

    assert _seconds(name, payload + more, devices, cluster) >= _seconds(
        name, payload, devices, cluster
    )


def test_sizes_and_device_counts_held_out_are_predicted_within_10_percent():
    """The median error over each file of measurements, nothing predicted from itself."""
    printed = subprocess.run(
        [sys.executable, str(COMPARE)], capture_output=True, text=True, check=True
    ).stdout

    medians = re.findall(r"(\w+\.csv), (\w+) held out: (\d+) rows, median error ([\d.]+)%", printed)
    assert {(file, kind) for file, kind, _, _ in medians} == {
        (file, kind)
        for file in ("nvlink_collective_rates.csv", "all_reduce_times.csv")
        for kind in ("sizes", "devices")
    } | {("nccl_times.csv", kind) for kind in ("sizes", "devices") if NCCL_TIMES.exists()}
    assert all(int(rows) > 200 for _, _, rows, _ in medians)
    assert all(float(error) <= 10 for _, _, _, error in medians)
