"""The two streams of a step: by hand and by property."""

from dataclasses import replace

import pytest
from hardware_cases import CHIP, cluster_of
from hypothesis import given
from hypothesis import strategies as st
from program_cases import PAPER, contended, fusion, gather, matmul, program_of, schedules, wait

from scalejax.core.errors import ConfigError, UnknownHardware
from scalejax.hardware import NO_SITE, Attainable, HostMemory, with_conditions
from scalejax.hardware.cluster import LaunchMode
from scalejax.simulator.device_state import GRAPH_LAUNCH_SECONDS
from scalejax.simulator.program import (
    HOST_MEMORY,
    Collective,
    CollectiveName,
    DeviceGroup,
    Loop,
    Operation,
)
from scalejax.simulator.timeline.schedule import Start, Work
from scalejax.simulator.timeline.streams import Streams
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.timeline.trace import trace_step


def milliseconds(*operations: Operation | Loop) -> float:
    """Step time of these operations on paper, rounded to a microsecond."""
    return round(timeline(program_of(*operations), PAPER).step_seconds * 1e3, 3)


# --- two streams ---------------------------------------------------------------------------


def test_host_that_waits_for_each_operation_adds_its_work_to_theirs():
    """Two operations of 3 ms, 1 ms each to set off: 8 ms instead of 6."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, dispatch_seconds=1e-3))
    program = program_of(matmul("a", 3), matmul("b", 3))
    ahead = cluster_of(chip=chip)
    blocking = replace(ahead, launch_mode="blocking")

    assert timeline(program, ahead).step_seconds == pytest.approx(6e-3)
    assert timeline(program, blocking).step_seconds == pytest.approx(8e-3)
    assert timeline(program, blocking).device_seconds == pytest.approx(8e-3)
    assert trace_step(program, blocking).step_seconds == pytest.approx(8e-3)


def test_operations_of_a_graph_wait_for_no_host():
    """100 operations of no time, 10 us apart and each 36 us to set off: 3.6 ms one by one, and in
    a graph 100 times the gap that is left. A chip that is quicker than that stays as it is."""
    slow = replace(CHIP.attainable, launch_seconds=10e-6, dispatch_seconds=36e-6)
    quick = replace(CHIP.attainable, launch_seconds=1e-6)
    program = program_of(*(fusion(f"f{index}", 0) for index in range(100)))

    def seconds(attainable: Attainable, mode: LaunchMode = "asynchronous") -> float:
        cluster = cluster_of(chip=replace(CHIP, attainable=attainable), launch_mode=mode)
        assert trace_step(program, cluster).step_seconds == pytest.approx(
            timeline(program, cluster).step_seconds
        )
        return timeline(program, cluster).step_seconds

    assert seconds(slow) == pytest.approx(3.6e-3)
    assert seconds(slow, "graph") == pytest.approx(100 * GRAPH_LAUNCH_SECONDS)
    assert seconds(quick, "graph") == pytest.approx(100e-6) == seconds(quick)


def test_a_graph_is_not_set_off_one_by_one():
    """Both at once say nothing."""
    with pytest.raises(ConfigError, match=r"conditions\.launches_in_graph=True is refused"):
        with_conditions(cluster_of(), NO_SITE, {"launches_in_graph": True, "launches_block": True})


def test_a_hidden_collective_costs_nothing():
    """3 ms of gathering behind 5 ms of work: 5 ms."""
    assert milliseconds(gather("g", 3), matmul("m", 5), wait("g")) == 5


def test_copies_to_the_host_and_back_go_beside_work_and_each_other():
    """4 ms out and 4 ms in behind 5 ms of work, which they do not slow down, cost nothing; a second
    copy out waits for the first, 8 ms. Without a rate of the host nothing is said."""

    def copy(name: str, way: CollectiveName) -> Operation:
        made = Collective(name=way, payload_bytes=4 * 10**6, group=HOST_MEMORY, is_async=True)
        return Operation(name=name, kind="collective", dtype="f32", collective=made)

    cluster = replace(contended(0.5), host=HostMemory(bytes_per_second=1e9))
    out, back = copy("out", "copy_to_host"), copy("back", "copy_from_host")
    both = program_of(out, back, matmul("m", 5), wait("out"), wait("back"))
    again = program_of(out, copy("more", "copy_to_host"), matmul("m", 5), wait("more"))

    assert timeline(both, cluster).step_seconds == pytest.approx(5e-3)
    assert timeline(again, cluster).step_seconds == pytest.approx(8e-3)
    assert timeline(again, cluster).exposed == ((("host memory",), pytest.approx(3e-3)),)
    with pytest.raises(UnknownHardware, match=r"host\.bytes_per_second"):
        timeline(both, PAPER)


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


def test_collectives_on_the_same_wires_queue():
    """Two of 3 ms started together behind 4 ms of work: the second ends at 6 ms."""
    assert milliseconds(gather("a", 3), gather("b", 3), matmul("m", 4), wait("a"), wait("b")) == 6


def send(size: float) -> Operation:
    """As many bytes as a gather of `size` ms."""
    made = gather("send", size)
    assert made.collective is not None
    return replace(made, collective=replace(made.collective, name="collective_permute"))


def test_a_send_goes_beside_collectives_on_the_same_wires():
    """A send started behind a gather of 6 ms has half of the wires: it takes twice as long, and the
    gather longer by what the send takes alone; of a longer send the gather takes twice as long.
    Alone it has all, and a gather waits for it. The trace has the same ends."""

    for size in (1, 12):
        alone, gathering = milliseconds(send(size), wait("send")), 6
        shared = min(alone, gathering)
        program = program_of(gather("g", 6), send(size), wait("send"), wait("g"), matmul("m", 1))
        waits = dict(timeline(program, PAPER).exposed_by_name)
        assert waits["send"] == pytest.approx((alone + shared) / 1e3)
        assert milliseconds(*program.operations) == pytest.approx(alone + gathering + 1)
        ends = {each.name: each.end_seconds for each in trace_step(program, PAPER).events}
        assert ends["g"] == pytest.approx((gathering + shared) / 1e3)
        assert ends["send"] == pytest.approx((alone + shared) / 1e3)
        after = (send(size), gather("g", 6), wait("g"), wait("send"))
        assert milliseconds(*after) == pytest.approx(alone + gathering)


@pytest.mark.parametrize("size", [1, 5, 12])
def test_a_send_delays_each_collective_by_what_it_sends_until_then(size):
    """Two gathers of 6 ms, one after the other on the half of the wires that a send leaves: the
    first ends by 12 ms however long the send is, and the second begins then."""
    alone = milliseconds(send(size), wait("send"))
    first, second = 6 + min(alone, 6), 12 + min(alone, 12)
    program = program_of(
        gather("a", 6), gather("b", 6), send(size), wait("a"), matmul("m", 0.1), wait("b")
    )

    traced = {each.name: each for each in trace_step(program, PAPER).events}
    waits = dict(timeline(program, PAPER).exposed_by_name)

    assert traced["a"].end_seconds == pytest.approx(first / 1e3)
    assert traced["b"].start_seconds == pytest.approx(first / 1e3)
    assert traced["b"].end_seconds == pytest.approx(second / 1e3)
    assert traced["send"].end_seconds == pytest.approx((alone + min(alone, 12)) / 1e3)
    assert waits["a"] == pytest.approx(first / 1e3)


def test_collectives_between_nodes_overlap_with_those_within_them():
    """Other wires: 3 ms on the links are over long before as many bytes have crossed."""
    within, between = gather("links", 3), gather("network", 3)
    assert between.collective is not None
    far = DeviceGroup(extents=((2, PAPER.devices_per_node),), axes=("data",))
    between = replace(between, collective=replace(between.collective, group=far))
    alone = milliseconds(between, wait("network"))

    assert alone > 3
    together = (between, within, wait("links"), matmul("m", 1), wait("network"))
    assert milliseconds(*together) == alone
    waits = dict(timeline(program_of(*together), PAPER).exposed_by_name)
    assert waits["links"] == pytest.approx(3e-3)


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


def test_a_backlog_that_grows_by_little_is_counted():
    """Gathers that take 0.6 ps longer than the 441 us of work beside them: after 1,000 iterations
    the step still ends with the last of them."""
    body = (gather("g", 0.441424885), replace(matmul("m", 1), flop=44_142_488_437))

    times = timeline(program_of(Loop(name="layers", trip_count=1000, body=body)), PAPER)

    assert times.step_seconds == pytest.approx(times.communication_seconds, rel=1e-12)


def test_a_backlog_grows_until_it_is_drained():
    """Gathers of 3 ms every 1 ms, none awaited: the stream decides, 3 ms x 50."""
    body = (gather("g", 3), matmul("m", 1))

    assert milliseconds(Loop(name="layers", trip_count=50, body=body)) == 150


def test_a_wait_for_nothing_is_refused():
    """A program that waits for what it never starts was read wrongly."""
    with pytest.raises(ConfigError, match=r"ghost-done\.waits_for='ghost' is refused"):
        timeline(program_of(matmul("m", 1), wait("ghost")), PAPER)


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


def test_compute_loses_what_the_slowest_of_those_under_way_takes():
    """8 ms beside 2 ms at half speed and 5 ms at 4/5: 1 ms by the end of the one, 2.4 more by that
    of the other, and 4.6 alone."""
    streams = Streams([8e-3], [5e-3, 2e-3], [0, 1], [False, False], [0.2, 0.5])

    streams.run([Start("g", 0, True), Start("h", 1, True), Work(0)])

    assert streams.now == pytest.approx(9.6e-3)
    assert streams.contention_seconds == pytest.approx(1.6e-3)


@pytest.mark.parametrize(
    ("contention", "compute", "elapsed"),
    [
        ([0.0, 0.5], 2e-3, 2e-3),  # ends before the second begins
        ([0.0, 0.5], 6e-3, 7e-3),  # 5 ms beside the first, then 1 ms at half speed
        ([0.5, 0.0], 6e-3, 8.5e-3),  # 5 ms for half as much, then at full speed
        ([0.2, 0.5], 8e-3, 11.5e-3),  # 4 and 2.5 ms of it beside them, then 1.5
    ],
)
def test_a_collective_slows_compute_from_when_it_begins(
    contention: list[float], compute: float, elapsed: float
):
    """Two of 5 ms on the same links, both started at 0: the second waits for the first."""
    streams = Streams([compute], [5e-3, 5e-3], [1, 1], [False, False], contention)

    streams.run([Start("g", 0, True), Start("h", 1, True), Work(0)])

    assert streams.now == pytest.approx(elapsed)
    assert streams.contention_seconds == pytest.approx(elapsed - compute)


def test_a_send_lets_what_is_queued_slow_compute_later():
    """A send of 2 ms takes half of the links: the first of 5 ms ends at 7, the second is from 7 to
    12 and takes half of the speed then: 7 ms alone and 1 ms for 2."""
    streams = Streams([8e-3], [5e-3, 5e-3, 2e-3], [1, 1, 1], [False, False, True], [0.0, 0.5, 0.0])

    streams.run([Start("g", 0, True), Start("h", 1, True), Start("s", 2, True), Work(0)])

    assert streams.now == pytest.approx(9e-3)


def test_overhead_of_the_step_is_added_once():
    """It is the host's, whatever the operations."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, step_overhead_seconds=2e-3))
    program = program_of(matmul("m", 1), matmul("n", 1))

    times = timeline(program, cluster_of(chip=chip))

    assert times.overhead_seconds == 2e-3
    assert times.step_seconds == pytest.approx(4e-3)


def test_devices_wait_for_a_host_that_is_slower_than_they_are():
    """A loop of 100 products of 10 us and one of 2 ms: 101 x 30 us is 0.03 ms more than 3 ms."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, dispatch_seconds=30e-6))
    small = Loop(name="l", trip_count=100, body=(matmul("m", 0.01),))
    program = program_of(small, matmul("n", 2))

    times = timeline(program, cluster_of(chip=chip))

    assert times.host_seconds == pytest.approx(0.03e-3)
    assert times.step_seconds == pytest.approx(3.03e-3)


def test_a_host_that_is_ahead_costs_nothing():
    """It sets off the products of 1 ms in 30 us each, while those before run."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, dispatch_seconds=30e-6))

    times = timeline(program_of(matmul("m", 1), matmul("n", 1)), cluster_of(chip=chip))

    assert times.host_seconds == 0
    assert times.step_seconds == pytest.approx(2e-3)


def test_a_host_takes_longer_for_collectives_and_most_beside_sends_over_the_network():
    """Ten of 10 us over 2 devices of a node and a send: 10 x (30 + 400) us and 430 for the send;
    where it goes to another node, 2 x 200 us more for each of the ten. In a graph there is none."""
    attainable = replace(
        CHIP.attainable,
        dispatch_seconds=30e-6,
        collective_dispatch_seconds=400e-6,
        member_dispatch_seconds=200e-6,
    )
    cluster = cluster_of(chip=replace(CHIP, attainable=attainable))

    def sent(stride: int) -> Operation:
        group = DeviceGroup(extents=((2, stride),), axes=("pipeline",))
        made = Collective(name="collective_permute", payload_bytes=8, group=group, is_async=False)
        return Operation(name="send", kind="collective", dtype="bf16", collective=made)

    gathers = tuple(gather(f"g{index}", 0.01, axis="tensor") for index in range(10))
    steps = [program_of(*gathers, sent(stride)) for stride in (1, 8)]
    graph = replace(cluster, launch_mode="graph")

    assert timeline(steps[0], cluster).dispatch_seconds == pytest.approx(11 * 430e-6)
    assert timeline(steps[1], cluster).dispatch_seconds == pytest.approx(11 * 430e-6 + 4e-3)
    assert timeline(steps[1], cluster).step_seconds == pytest.approx(8.73e-3)
    assert timeline(steps[1], graph).dispatch_seconds == 0
