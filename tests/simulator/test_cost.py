"""Cost of operations, and memory: by hand and by property."""

from dataclasses import replace
from typing import Any

import pytest
from hardware_cases import CHIP, cluster_of
from hypothesis import given
from hypothesis import strategies as st
from program_cases import NO_MEMORY, PAPER, fusion, program_of

from scalejax.core.errors import ConfigError, UnknownHardware
from scalejax.hardware import (
    Chip,
    MeasuredRates,
    attention_rates_names,
    load_attention_rates,
    load_chip,
    load_cluster,
)
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.device_state import under_load
from scalejax.simulator.frameworks import Software
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Collective, DeviceGroup, Operation

ATTAINABLE = CHIP.attainable


# --- one operation -------------------------------------------------------------------------


def test_operation_takes_the_larger_of_arithmetic_and_traffic():
    """100 GFLOP at 100 TFLOP/s are 1 ms; 3 GB at 1 TB/s are 3 ms; together 3, bound by memory."""
    operation = Operation(
        name="x", kind="matmul", dtype="bf16", flop=10**11, read_bytes=2 * 10**9, write_bytes=10**9
    )

    time = operation_time(operation, CHIP)

    assert time.seconds == pytest.approx(3e-3)
    assert time.bound == "memory"
    assert operation_time(replace(operation, flop=4 * 10**11), CHIP).bound == "compute"


def test_small_products_are_slower_per_flop_than_large_ones():
    """A ramp of 1 us halves the rate of a product that would take 1 us without it."""
    chip = replace(CHIP, attainable=replace(ATTAINABLE, matmul_ramp_seconds=1e-6))

    small = operation_time(Operation(name="s", kind="matmul", dtype="bf16", flop=10**8), chip)
    large = operation_time(Operation(name="l", kind="matmul", dtype="bf16", flop=10**12), chip)

    assert small.seconds == pytest.approx(2e-6)
    assert large.seconds == pytest.approx(10e-3, rel=1e-3)


def test_half_precision_that_matrix_units_cannot_load_runs_without_them():
    """200 GFLOP of heads 225 wide: at half of 10 TFLOP/s in f32 40 ms, and not 2 at 100."""
    attainable = replace(CHIP.attainable, unaligned_fraction=0.5)
    chip = replace(CHIP, attainable=attainable)
    heads = Operation(name="qk", kind="matmul", dtype="bf16", flop=2 * 10**11)

    def milliseconds(width: int, on: Chip) -> float:
        return operation_time(replace(heads, shape=(8, 64, 64, width)), on).busy_seconds * 1e3

    assert milliseconds(225, chip) == pytest.approx(40)
    assert milliseconds(232, chip) == pytest.approx(2)
    assert milliseconds(225, CHIP) == pytest.approx(2)


def test_fused_attention_has_a_rate_of_its_own():
    """Softmax and masks between its two products keep the matrix units waiting."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, attention_fraction=0.5))
    operation = Operation(name="a", kind="attention", dtype="bf16", flop=10**11)

    assert operation_time(operation, chip).busy_seconds == pytest.approx(2e-3)


def test_fused_attention_has_the_rate_that_was_measured_of_its_size():
    """0.5 of 100 TFLOP/s at 4096 tokens and heads of 128, 0.25 at half of both; between them what
    is between, and where the size is not known that of `attention_fraction`."""
    rates = ((4096, 128, 0.5), (2048, 64, 0.25))
    attainable = replace(CHIP.attainable, attention_fraction=0.1, attention_by_shape=rates)
    chip = replace(CHIP, attainable=attainable)

    def milliseconds(*shape: int) -> float:
        operation = Operation(name="a", kind="attention", dtype="bf16", flop=10**11, shape=shape)
        return operation_time(operation, chip).busy_seconds * 1e3

    assert milliseconds(8, 4096, 4096, 128) == pytest.approx(2)
    assert milliseconds(8, 2048, 2048, 64) == pytest.approx(4)
    assert milliseconds(8, 4096, 4096, 64) == pytest.approx(2 * 2**0.5)
    assert milliseconds() == pytest.approx(10)
    with pytest.raises(ConfigError, match=r"attention_by_shape=1\.5 is refused"):
        replace(attainable, attention_by_shape=((4096, 128, 1.5),))


def test_fused_attention_reaches_more_of_the_peak_in_longer_rows():
    """u / (1 + s / tokens) by hand, between two head sizes what is between them, beyond them that
    of the nearest; without a shape `attention_fraction`."""
    rates = load_attention_rates("b200")
    (small, share, half), (large, other, other_half) = rates.by_head_size[:2]
    attainable = replace(ATTAINABLE, attention_rates="b200", attention_fraction=0.1)
    chip = replace(CHIP, attainable=attainable)

    def share_of(*shape: int) -> float:
        operation = Operation(name="a", kind="attention", dtype="bf16", flop=10**12, shape=shape)
        return 10**12 / operation_time(operation, chip).busy_seconds / chip.peak("bf16")

    both = rates.both_over_forward
    assert share_of(8, 4096, 4096, small) == pytest.approx(both * share / (1 + half / 4096))
    assert share_of(8, 512, 8192, large) == pytest.approx(both * other / (1 + other_half / 8192))
    between = share_of(8, 4096, 4096, 96)
    assert share_of(8, 4096, 4096, small) < between < share_of(8, 4096, 4096, large)
    assert share_of(8, 4096, 4096, 32) == share_of(8, 4096, 4096, small)
    assert share_of(8, 4096, 4096, 512) == share_of(8, 4096, 4096, rates.by_head_size[-1][0])
    assert share_of() == pytest.approx(0.1)
    slower = share_of(8, 4096, 4096, 64)
    chip = replace(chip, attainable=replace(attainable, attention_scale=0.5))
    assert share_of(8, 4096, 4096, 64) == pytest.approx(slower / 2)
    chip = replace(chip, attainable=replace(attainable, attention_scale=9.0))
    assert share_of(8, 4096, 4096, 64) == pytest.approx(1.0)


@pytest.mark.parametrize("name", attention_rates_names())
def test_no_rate_of_attention_is_above_the_peak_or_falls_with_length(name: str):
    """Every file of the catalogue, at lengths and head sizes beyond what was measured."""
    rates = load_attention_rates(name)
    for size in (16, 64, 80, 128, 192, 256, 512):
        shares = [rates.share(tokens, size) for tokens in (1, 128, 1024, 8192, 2**20)]
        assert shares[0] > 0
        assert shares == sorted(shares)
        assert shares[-1] < 0.8


def test_unknown_or_damaged_rates_of_attention_are_refused():
    """The closest name is offered; head sizes must ascend."""
    with pytest.raises(UnknownHardware, match=r"attention_rates='b20' is refused.*'b200'"):
        load_attention_rates("b20")
    with pytest.raises(ConfigError, match=r"by_head_size=\[128, 64\] is refused"):
        replace(load_attention_rates("b200"), by_head_size=((128, 0.5, 1.0), (64, 0.4, 1.0)))


def test_a_step_is_costed_with_what_its_software_makes_of_a_chip(monkeypatch):
    """Launches of 1 us in XLA's command buffers, 10 in PyTorch, applied once; of software that
    nobody knows those of XLA, and those that were measured here as they were."""
    software = {"pytorch-fsdp-2023": Software(gap_seconds=9e-6), "unknown": Software()}
    monkeypatch.setattr(
        "scalejax.simulator.frameworks.framework.software_by_name", lambda: software
    )
    chip = replace(CHIP, attainable=replace(ATTAINABLE, launch_seconds=1e-6))
    bench = MeasuredRates(matmul={"f32": ((1, 1, 1, 1, 1e12),)}, convolution={}, stream=((1, 1e9),))

    def launch(framework: str, **changes: Any) -> float:
        program = replace(program_of(fusion("f", 1.0)), framework=framework)
        loaded = under_load(cluster_of(chip=replace(chip, **changes)), program)
        assert under_load(loaded, program) == loaded
        return loaded.chip.attainable.launch_seconds

    assert launch("xla-2026") == launch("xla") == 1e-6
    assert launch("pytorch-fsdp-2023") == launch("pytorch") == pytest.approx(10e-6)
    assert launch("ours") == launch("mxnet-2020") == 1e-6
    assert launch("pytorch", measured=bench) == 1e-6
    assert launch("xla", rates_of="pytorch-fsdp-2023") == 1e-6
    assert launch("pytorch", rates_of="pytorch-fsdp-2023") == 1e-6


def test_launch_is_counted_apart_from_the_work():
    """Each operation waits for its launch, also one that does nothing."""
    chip = replace(CHIP, attainable=replace(ATTAINABLE, launch_seconds=2e-6))

    time = operation_time(fusion("f", 1.0), chip)

    assert time.launch_seconds == 2e-6
    assert time.seconds == pytest.approx(1e-3 + 2e-6)


operations = st.builds(
    Operation,
    name=st.just("any"),
    kind=st.sampled_from(["matmul", "convolution", "attention", "fusion", "copy", "custom"]),
    dtype=st.sampled_from(["bf16", "f16", "f32", "f8e4m3fn", "s32", "pred"]),
    flop=st.integers(0, 10**13),
    read_bytes=st.integers(0, 10**10),
    write_bytes=st.integers(0, 10**10),
    shape=st.one_of(st.just(()), st.tuples(*[st.integers(1, 4096)] * 5)),
    convolution_pass=st.sampled_from([None, "forward", "input_gradient", "filter_gradient"]),
    convolution_groups=st.sampled_from([1, 4, 64]),
    channels_first=st.booleans(),
)
chips = st.sampled_from(["p100", "v100", "a100-80gb", "h100", "b200", "tpu-v5p"]).map(load_chip)


@given(operations, chips, st.floats(1.0, 10.0))
def test_no_operation_beats_the_chip(operation: Operation, chip, factor: float):
    """Never faster than FLOP over peak nor bytes over bandwidth; a better chip is no slower."""
    moved = operation.read_bytes + operation.write_bytes
    better = replace(
        chip,
        peak_flop_per_second={k: v * factor for k, v in chip.peak_flop_per_second.items()},
        memory_bytes_per_second=chip.memory_bytes_per_second * factor,
    )

    seconds = operation_time(operation, chip).seconds

    assert seconds >= operation.flop / chip.peak(operation.dtype)
    assert seconds >= moved / chip.memory_bytes_per_second
    assert operation_time(operation, better).seconds <= seconds


# --- memory, and a whole step by hand ------------------------------------------------------


def test_memory_counts_the_runtime_s_own_share():
    """9 GB of program and 1 GB of runtime fill a chip of 10 GB; one byte more does not fit, nor
    one more than the host has."""
    use = replace(NO_MEMORY, argument_bytes=6 * 10**9, temporary_bytes=3 * 10**9)

    assert memory_verdict(use, CHIP).fits
    assert memory_verdict(use, CHIP).peak_bytes == 10**10
    assert not memory_verdict(replace(use, output_bytes=1), CHIP).fits
    offloading = replace(use, host_bytes=10**9)
    assert memory_verdict(offloading, CHIP, 10**9).fits
    assert not memory_verdict(offloading, CHIP, 10**9 - 1).fits


def test_a_library_that_runs_buffers_one_by_one_pays_latency_for_each():
    """Rings of 8 have 14 hops of 1 us: 4 buffers cost 3 x 14 us more than one of all bytes."""
    group = DeviceGroup(extents=((8, 1),), axes=("data",))
    whole = Collective(name="all_reduce", payload_bytes=10**8, group=group, is_async=False)
    parts = replace(whole, buffer_count=4)
    library = replace(PAPER.library, runs_buffers_one_by_one=True)
    one_by_one = replace(PAPER, library=library)

    assert collective_seconds(parts, PAPER) == collective_seconds(whole, PAPER)
    assert collective_seconds(parts, one_by_one) == pytest.approx(
        collective_seconds(whole, PAPER) + 3 * 14e-6
    )


def test_gradients_of_resnet50_cost_a_tenth_of_a_step_on_ethernet():
    """Goyal et al. 2017, section 4: 100 MB of gradients over 32 servers of 8 on 50 Gb/s.

    Halving-doubling moves 2 x 31/32 x 102 MB through 5.6 GB/s: 35 ms; two passes over NVLink
    at 72 GB/s add 2.5 ms. Little beside 120 ms of backpropagation, when overlapped with it.
    """
    group = DeviceGroup(extents=((256, 1),), axes=("data",))
    collective = Collective(
        name="all_reduce", payload_bytes=102_228_128, group=group, is_async=True
    )

    seconds = collective_seconds(collective, load_cluster("big-basin-goyal2017"))

    assert seconds == pytest.approx(38e-3, rel=0.05)
