"""Cost of operations, their overlap, and memory: by hand and by property."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hardware_cases import CHIP, cluster_of
from hypothesis import given
from hypothesis import strategies as st

from scalejax.cost import (
    WhatIf,
    band,
    collective_seconds,
    memory_verdict,
    operation_time,
    residuals,
    timeline,
)
from scalejax.cost.compute import channel_use
from scalejax.errors import ConfigError
from scalejax.hardware import Residuals, load_chip, load_cluster
from scalejax.program import (
    Collective,
    DeviceGroup,
    Loop,
    MemoryUse,
    Operation,
    Program,
)

PAPER = cluster_of()
NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)
ATTAINABLE = CHIP.attainable


def program_of(*operations: Operation | Loop, devices: int = 8) -> Program:
    """A step of `operations` on a data axis."""
    return Program(
        name="a step by hand",
        backend="closed_form",
        target="paper",
        compiler="none",
        mesh_axes=(("data", devices),),
        operations=operations,
        memory=NO_MEMORY,
    )


def matmul(name: str, milliseconds: float) -> Operation:
    """Work for so many milliseconds on the paper chip, 100 TFLOP/s."""
    return Operation(name=name, kind="matmul", dtype="bf16", flop=round(milliseconds * 1e11))


def fusion(name: str, milliseconds: float) -> Operation:
    """Traffic for so many milliseconds on the paper chip, 1 TB/s."""
    return Operation(name=name, kind="fusion", dtype="bf16", read_bytes=round(milliseconds * 1e9))


def gather(name: str, milliseconds: float, *, is_async: bool = True, axis: str = "fsdp"):
    """An all-gather for so many milliseconds on two paper chips: half of it at 100 GB/s."""
    seconds = milliseconds * 1e-3 - 1e-6  # one hop of a microsecond
    exchange = Collective(
        name="all_gather",
        payload_bytes=round(2 * seconds * 100e9),
        group=DeviceGroup(extents=((2, 1),), axes=(axis,)),
        is_async=is_async,
    )
    return Operation(name=name, kind="collective", dtype="bf16", collective=exchange)


def wait(name: str) -> Operation:
    """Wait for the collective of that name."""
    return Operation(name=f"{name}-done", kind="wait", dtype="bf16", waits_for=name)


def milliseconds(*operations: Operation | Loop) -> float:
    """Step time of these operations on paper, rounded to a microsecond."""
    return round(timeline(program_of(*operations), PAPER).step_seconds * 1e3, 3)


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


def test_fused_attention_has_a_rate_of_its_own():
    """Softmax and masks between its two products keep the matrix units waiting."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, attention_fraction=0.5))
    operation = Operation(name="a", kind="attention", dtype="bf16", flop=10**11)

    assert operation_time(operation, chip).busy_seconds == pytest.approx(2e-3)


def test_launch_is_counted_apart_from_the_work():
    """Each operation waits for its launch, also one that does nothing."""
    chip = replace(CHIP, attainable=replace(ATTAINABLE, launch_seconds=2e-6))

    time = operation_time(fusion("f", 1.0), chip)

    assert time.launch_seconds == 2e-6
    assert time.seconds == pytest.approx(1e-3 + 2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "use"),
    [
        ((32, 12544, 3, 64, 49), "bf16", 3 / 8),  # the first layer of ResNet-50
        ((32, 12544, 3, 64, 49), "f32", 3 / 4),
        ((32, 3136, 64, 256, 1), "bf16", 1.0),
        ((32, 3136, 20, 64, 9), "f8e4m3fn", 20 / 32),
        ((), "bf16", 1.0),
    ],
)
def test_few_channels_waste_the_vectors_they_are_padded_to(
    shape: tuple[int, ...], dtype: str, use: float
):
    """Channels come in vectors of 16 bytes, whatever of it they fill."""
    assert channel_use(shape, dtype) == pytest.approx(use)


def test_convolutions_of_few_channels_are_slower():
    """The same FLOP take 8/3 as long with 3 bf16 channels as with 64."""
    few, many = (
        operation_time(
            Operation(
                name="c", kind="convolution", dtype="bf16", flop=10**11, shape=(32, 100, c, 64, 9)
            ),
            CHIP,
        ).seconds
        for c in (3, 64)
    )

    assert few == pytest.approx(many * 8 / 3)


operations = st.builds(
    Operation,
    name=st.just("any"),
    kind=st.sampled_from(["matmul", "convolution", "attention", "fusion", "copy", "custom"]),
    dtype=st.sampled_from(["bf16", "f16", "f32", "f8e4m3fn", "s32", "pred"]),
    flop=st.integers(0, 10**13),
    read_bytes=st.integers(0, 10**10),
    write_bytes=st.integers(0, 10**10),
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


GEMM_LEDGER = Path(__file__).parents[2] / "shared" / "ledger" / "gemm_rates.csv"


@pytest.mark.skipif(not GEMM_LEDGER.exists(), reason="the ledger of measurements is not here")
@pytest.mark.parametrize(("hardware", "chip"), [("h100_sxm_80gb", "h100"), ("b200_sxm", "b200")])
def test_matrix_products_agree_with_measurements(hardware: str, chip: str):
    """The fitted form leaves 7 % over 375 measured bf16 products (cost_model.md, section 1)."""
    errors = []
    with GEMM_LEDGER.open() as file:
        for row in csv.DictReader(file):
            if (row["hardware"], row["types"]) != (hardware, "bf16xbf16->bf16"):
                continue
            b, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
            flop = 2 * b * m * n * k
            operation = Operation(
                name="gemm",
                kind="matmul",
                dtype="bf16",
                flop=flop,
                read_bytes=2 * b * (m * k + k * n),
                write_bytes=2 * b * m * n,
            )
            measured = flop / float(row["flop_per_second"])
            errors.append(operation_time(operation, load_chip(chip)).seconds / measured - 1)

    assert len(errors) == 375
    assert sum(map(abs, errors)) / len(errors) < 0.08


# --- two streams ---------------------------------------------------------------------------


def test_a_hidden_collective_costs_nothing():
    """3 ms of gathering behind 5 ms of work: 5 ms."""
    assert milliseconds(gather("g", 3), matmul("m", 5), wait("g")) == 5


def test_only_the_rest_of_a_collective_is_waited_for():
    """7 ms of gathering behind 5 ms of work: 2 ms are exposed, on the axis of the collective."""
    program = program_of(gather("g", 7), matmul("m", 5), wait("g"), fusion("f", 1))

    times = timeline(program, PAPER)

    assert times.compute_seconds == pytest.approx(5e-3)
    assert times.memory_seconds == pytest.approx(1e-3)
    assert dict(times.exposed) == {("fsdp",): pytest.approx(2e-3)}
    assert times.communication_seconds == pytest.approx(7e-3)
    assert times.step_seconds == pytest.approx(8e-3)


def test_a_synchronous_collective_holds_up_compute():
    """No overlap: times add up."""
    assert milliseconds(gather("g", 3, is_async=False), matmul("m", 5)) == 8


def test_collectives_queue_on_one_stream():
    """Two of 3 ms started together behind 4 ms of work: the second ends at 6 ms."""
    assert milliseconds(gather("a", 3), gather("b", 3), matmul("m", 4), wait("a"), wait("b")) == 6


def test_a_synchronous_collective_queues_behind_an_asynchronous_one():
    """It starts when the stream is free: 3 + 2 ms, then 1 ms of work."""
    assert milliseconds(gather("a", 3), gather("b", 2, is_async=False), matmul("m", 1)) == 6


def test_what_is_under_way_at_the_end_is_waited_for():
    """A step is over when its last collective is, though nothing names it."""
    assert milliseconds(matmul("m", 1), gather("g", 3)) == 4


def test_exposed_time_is_that_of_the_axis_waited_for():
    """Each axis pays for its own wait, in the order of the waits."""
    program = program_of(
        gather("a", 2, axis="tensor"), gather("b", 3, axis="data"), wait("a"), wait("b")
    )

    exposed = dict(timeline(program, PAPER).exposed)

    assert exposed == {("tensor",): pytest.approx(2e-3), ("data",): pytest.approx(3e-3)}


def test_a_loop_repeats_its_body():
    """Ten iterations of 2 ms work and 1 ms exposed communication."""
    body = (gather("g", 3), matmul("m", 2), wait("g"))

    assert milliseconds(Loop(name="layers", trip_count=10, body=body)) == 30


def test_loops_nest_and_may_be_empty():
    """3 x (1 + 4 x 1) ms; a loop of no iterations costs nothing."""
    inner = Loop(name="inner", trip_count=4, body=(matmul("m", 1),))
    outer = Loop(name="outer", trip_count=3, body=(fusion("f", 1), inner))
    never = Loop(name="never", trip_count=0, body=(fusion("n", 1),))

    assert milliseconds(outer, never) == 15


def test_a_collective_runs_on_into_the_next_iteration():
    """Started at the end of an iteration, waited for in the middle of the next: 4 ms a turn.

    Each turn: 3 ms of work, wait for the gather of the turn before (4 ms, so 1 ms is left),
    start the next. The first turn waits for nothing; the last gather ends after the loop.
    """
    body = (matmul("m", 3), wait("g"), gather("g", 4))

    assert milliseconds(Loop(name="layers", trip_count=5, body=body)) == 3 + 4 * 4 + 4


def test_a_collective_may_be_started_before_a_loop_and_awaited_in_it():
    """10 ms of gathering, awaited after 2 ms in the first of three iterations of 2 ms."""
    body = (matmul("m", 2), wait("g"))

    assert milliseconds(gather("g", 10), Loop(name="layers", trip_count=3, body=body)) == 14


def test_a_backlog_grows_until_it_is_drained():
    """Gathers of 3 ms every 1 ms, none awaited: the stream decides, 3 ms x 50."""
    body = (gather("g", 3), matmul("m", 1))

    assert milliseconds(Loop(name="layers", trip_count=50, body=body)) == 150


def test_a_wait_for_nothing_is_refused():
    """A program that waits for what it never starts was read wrongly."""
    with pytest.raises(ConfigError, match=r"waits for 'ghost'"):
        timeline(program_of(matmul("m", 1), wait("ghost")), PAPER)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Operation | Loop, ...]:
    """Any order of work, starts and waits, partly inside a loop."""
    items: list[Operation] = []
    for index in range(draw(st.integers(1, 8))):
        what = draw(st.sampled_from(["matmul", "fusion", "async", "sync"]))
        size = draw(st.floats(0.01, 10.0))
        if what == "matmul":
            items.append(matmul(f"m{index}", size))
        elif what == "fusion":
            items.append(fusion(f"f{index}", size))
        else:
            axis = draw(st.sampled_from(["data", "fsdp"]))
            items.append(gather(f"g{index}", size, is_async=what == "async", axis=axis))
            if what == "async" and draw(st.booleans()):
                items.insert(draw(st.integers(0, len(items))), wait(f"g{index}"))
    cut = draw(st.integers(0, len(items)))
    loop = Loop(name="loop", trip_count=draw(st.integers(0, 7)), body=tuple(items[cut:]))
    return (*items[:cut], loop)


def _unrolled(items: tuple[Operation | Loop, ...]) -> list[Operation]:
    flat: list[Operation] = []
    for item in items:
        if isinstance(item, Loop):
            flat += _unrolled(item.body) * item.trip_count
        else:
            flat.append(item)
    return flat


@given(schedules(), st.sampled_from([0.0, 0.1, 0.7]))
def test_a_loop_costs_what_its_unrolled_iterations_do(
    items: tuple[Operation | Loop, ...], contention: float
):
    """Stopping at the steady state loses nothing, with contention or without."""
    cluster = contended(contention)
    flat = _unrolled(items)
    names = {item.name for item in flat if item.collective is not None}
    flat = [item for item in flat if item.waits_for is None or item.waits_for in names]

    assert timeline(program_of(*items), cluster).step_seconds == pytest.approx(
        timeline(program_of(*flat), cluster).step_seconds, rel=1e-9
    )


@given(schedules(), st.floats(1.0, 10.0))
def test_a_step_is_between_perfect_overlap_and_none(
    items: tuple[Operation | Loop, ...], factor: float
):
    """max(device, communication) <= step <= their sum; faster parts never make it slower."""
    program = program_of(*items)
    faster = cluster_of(
        link=replace(PAPER.link, bytes_per_second=PAPER.link.bytes_per_second * factor),
        chip=replace(CHIP, memory_bytes_per_second=CHIP.memory_bytes_per_second * factor),
    )

    times = timeline(program, PAPER)

    longest = max(times.device_seconds, times.communication_seconds)
    total = times.device_seconds + times.communication_seconds
    assert longest * (1 - 1e-9) <= times.step_seconds <= total * (1 + 1e-9)
    assert timeline(program, faster).step_seconds <= times.step_seconds * (1 + 1e-9)


# --- contention and overhead ---------------------------------------------------------------


def contended(fraction: float):
    """Paper, where compute loses so much of its speed beside a collective."""
    chip = replace(CHIP, attainable=replace(ATTAINABLE, contention_fraction=fraction))
    return cluster_of(chip=chip)


def test_compute_is_slower_while_a_collective_is_under_way():
    """8 ms beside 5 ms of gathering at 4/5 speed: 4 ms of it by then, 4 ms after; 9 in all."""
    program = program_of(gather("g", 5), matmul("m", 8), wait("g"))

    times = timeline(program, contended(0.2))

    assert times.step_seconds == pytest.approx(9e-3)
    assert times.compute_seconds == pytest.approx(8e-3)
    assert times.contention_seconds == pytest.approx(1e-3)


def test_compute_that_is_hidden_within_a_collective_is_slow_throughout():
    """4 ms at 4/5 speed are 5 ms; the gather of 7 ms leaves 2 ms to wait for."""
    program = program_of(gather("g", 7), matmul("m", 4), wait("g"))

    times = timeline(program, contended(0.2))

    assert times.contention_seconds == pytest.approx(1e-3)
    assert times.exposed_seconds == pytest.approx(2e-3)
    assert times.step_seconds == pytest.approx(7e-3)


def test_overhead_of_the_step_is_added_once():
    """It is the host's, whatever the operations."""
    chip = replace(CHIP, attainable=replace(ATTAINABLE, step_overhead_seconds=2e-3))
    program = program_of(matmul("m", 1), matmul("n", 1))

    times = timeline(program, cluster_of(chip=chip))

    assert times.overhead_seconds == 2e-3
    assert times.step_seconds == pytest.approx(4e-3)


# --- uncertainty ---------------------------------------------------------------------------


def test_a_step_of_one_class_is_as_uncertain_as_that_class():
    """A tenth in the logarithm: 1.2816 tenths to either side; the other classes are not in it."""
    what_if = WhatIf(program_of(matmul("m", 10)))

    spread = band(
        lambda scales: what_if.timeline(PAPER, scales).step_seconds,
        {"compute": 0.1, "memory": 0.5, "launch": 0.5, "communication": 0.5},
    )

    assert spread.p90_seconds == pytest.approx(10e-3 * math.exp(0.12816), rel=1e-4)
    assert spread.p10_seconds == pytest.approx(10e-3 * math.exp(-0.12816), rel=1e-4)


def test_independent_classes_add_in_quadrature():
    """Half compute and half memory, each off by z tenths: half of sqrt(2) of that, about."""
    what_if = WhatIf(program_of(matmul("m", 5), fusion("f", 5)))

    spread = band(
        lambda scales: what_if.timeline(PAPER, scales).step_seconds,
        {"compute": 0.01, "memory": 0.01},
        step_deviation=0.01,
    )

    expected = 0.012816 * math.sqrt(0.5**2 + 0.5**2 + 1)
    assert math.log(spread.p90_seconds / 10e-3) == pytest.approx(expected, rel=0.01)


def test_what_is_hidden_today_may_be_exposed_tomorrow():
    """9 ms of gathering behind 10 of work: slower links count above the median, not below."""
    what_if = WhatIf(program_of(gather("g", 9), matmul("m", 10), wait("g")))

    spread = band(
        lambda scales: what_if.timeline(PAPER, scales).step_seconds, {"communication": 0.2}
    )

    assert spread.p10_seconds == pytest.approx(10e-3)
    assert spread.p90_seconds == pytest.approx(9e-3 * math.exp(0.2 * 1.2816), rel=1e-3)


def test_residuals_are_unknown_where_nothing_was_fitted():
    """Of the library only where something is exchanged."""
    fitted = replace(CHIP, residuals=Residuals(compute=0.1, memory=0.2, launch=0.3))

    assert residuals(PAPER, communicates=False) is None
    assert residuals(cluster_of(chip=fitted), communicates=True) is None
    assert residuals(cluster_of(chip=fitted), communicates=False) == {
        "compute": 0.1,
        "memory": 0.2,
        "launch": 0.3,
        "communication": 0.0,
    }


# --- memory, and a whole step by hand ------------------------------------------------------


def test_memory_counts_the_runtime_s_own_share():
    """9 GB of program and 1 GB of runtime fill a chip of 10 GB; one byte more does not fit."""
    use = replace(NO_MEMORY, argument_bytes=6 * 10**9, temporary_bytes=3 * 10**9)

    assert memory_verdict(use, CHIP).fits
    assert memory_verdict(use, CHIP).peak_bytes == 10**10
    assert not memory_verdict(replace(use, output_bytes=1), CHIP).fits


def test_gradients_of_resnet50_cost_a_tenth_of_a_step_on_ethernet():
    """Goyal et al. 2017, section 4: 100 MB of gradients over 32 servers of 8 on 50 Gb/s.

    Halving-doubling moves 2 x 31/32 x 102 MB through 5.6 GB/s: 35 ms; two passes over NVLink
    at 72 GB/s add 2.5 ms. Little beside 120 ms of backpropagation, when overlapped with it.
    """
    group = DeviceGroup(extents=((256, 1),), axes=("data",))
    exchange = Collective(name="all_reduce", payload_bytes=102_228_128, group=group, is_async=True)

    seconds = collective_seconds(exchange, load_cluster("big-basin-goyal2017"))

    assert seconds == pytest.approx(38e-3, rel=0.05)
