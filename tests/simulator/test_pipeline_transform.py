"""Pipelines from one of their stages, by hand: work of all microbatches, and the bubble."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program_cases import PAPER, matmul, program_of

from scalejax.config.pipeline_schedule import PipelineTicks, timetable
from scalejax.core.errors import ConfigError
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Loop, MemoryUse, Operation, Program
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.transforms.dualpipe import with_paired_passes, with_second_stage
from scalejax.simulator.transforms.pipeline import (
    Pipeline,
    pipelined,
    sent_between_stages,
    with_bubble,
    without_bubble,
)

LOGITS = matmul("logits", 2)


def stage() -> Program:
    """Eight microbatches of 3 blocks, 1 ms forward and 2 ms back, and 2 ms of logits; then 1 ms."""
    return _stage(_work(8, 3, (LOGITS,)))


def without_logits() -> Program:
    """The same of a stage before the last."""
    return _stage(_work(8, 3, ()))


def _work(microbatches: int, blocks: int, between: tuple[Operation, ...]) -> Loop:
    forward = Loop(name="forward", trip_count=blocks, body=(matmul("f", 1),))
    backward = Loop(name="backward", trip_count=blocks, body=(matmul("b", 2),))
    return Loop(name="work", trip_count=microbatches, body=(forward, *between, backward))


def _stage(work: Loop) -> Program:
    return replace(program_of(work, matmul("update", 1)), mesh_axes=(("data", 2),))


def pipeline(**changed: Any) -> Pipeline:
    """4 stages, 8 microbatches, nothing to send."""
    return Pipeline(**{"stages": 4, "microbatches": 8, "boundary_bytes": 0, **changed})


def step_milliseconds(program: Program) -> float:
    """Without what is sent: two hops of a microsecond or ten for each microbatch."""
    times = timeline(program, PAPER)
    return (times.step_seconds - times.exposed_seconds) * 1e3


def test_bubble_is_the_time_of_all_other_stages():
    """8 x 11 ms on the last stage, 3 x 9 ms until it is reached and left again, 1 ms after."""
    assert step_milliseconds(pipelined(stage(), pipeline())) == pytest.approx(88 + 27 + 1)


def test_chunks_divide_the_bubble():
    """Of 3 chunks, each stage waits a third as long: 9 ms."""
    assert step_milliseconds(pipelined(stage(), pipeline(chunks=3))) == pytest.approx(88 + 9 + 1)


def test_bubble_of_unequal_stages_is_what_each_of_the_others_takes():
    """8 x 11 ms on the last stage, of 3 blocks; 9 ms for each block of 2 + 3 + 3 others, 1 ms
    after. Where another stage of 3 is slower, 8 x 9 ms there, and 2 ms of logits once."""
    last = pipelined(stage(), pipeline(layers=(2, 3, 3, 3)))
    first = pipelined(without_logits(), pipeline(layers=(3, 3, 3, 2)), last=(LOGITS,))

    assert step_milliseconds(last) == pytest.approx(88 + 3 * 8 + 1)
    assert step_milliseconds(first) == pytest.approx(72 + 3 * 8 + 2 + 1)


@given(
    least=st.integers(1, 5),
    long=st.integers(0, 3),
    short=st.integers(1, 4),
    microbatches=st.integers(1, 12),
    logits=st.sampled_from([0.5, 1.5, 4.0]),
)
def test_step_is_that_of_the_schedule_walked_through(least, long, short, microbatches, logits):
    """One forward, one backward, by an event-driven walk: as long where stages are equal or the
    last is the slowest, and else no longer, by a block of each stage that lacks one at most."""
    counts = (least + 1,) * long + (least,) * short
    assume(len(counts) > 1)
    has_logits = not long or logits > 3
    own = least if has_logits else least + 1
    one = replace(LOGITS, flop=matmul("l", logits).flop)
    work = _work(microbatches, own, (one,) if has_logits else ())
    whole = pipeline(stages=len(counts), layers=counts, microbatches=microbatches)
    program = pipelined(_stage(work), whole, last=() if has_logits else (one,))

    walked = _walked([(count, 2 * count) for count in counts], logits, microbatches)
    own_milliseconds = step_milliseconds(program) - 1
    if has_logits:
        assert own_milliseconds == pytest.approx(walked)
    else:
        assert walked - 1e-6 <= own_milliseconds <= walked + 3 * short + 1e-6


def _walked(blocks: list[tuple[float, float]], logits: float, microbatches: int) -> float:
    """Milliseconds of 1F1B over stages that take so long forward and back; logits are a third
    forward and two back, on the last."""
    times = [*blocks[:-1], (blocks[-1][0] + logits / 3, blocks[-1][1] + 2 * logits / 3)]
    stages, orders = len(times), []
    for index in range(stages):
        first = min(microbatches, stages - index - 1)
        order = [("f", each) for each in range(first)]
        for each in range(microbatches - first):
            order += [("f", first + each), ("b", each)]
        orders.append(order + [("b", each) for each in range(microbatches - first, microbatches)])
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    while any(orders):
        for index, order in enumerate(orders):
            while order:
                way, each = order[0]
                before = (index - 1, "f", each) if way == "f" else (index + 1, "b", each)
                if way == "b" and index == stages - 1:
                    before = (index, "f", each)
                if before[0] >= 0 and before not in done:
                    break
                order.pop(0)
                start = max(free[index], done.get(before, 0.0))
                free[index] = start + times[index][way == "b"]
                done[index, way, each] = free[index]
    return max(free)


def test_what_is_handed_on_is_paid_for_each_microbatch_and_each_chunk():
    """100 MB at 100 GB/s are 1 ms, forward and back, for 8 microbatches and 3 in the bubble."""
    sent = pipelined(stage(), pipeline(boundary_bytes=10**8))
    in_chunks = pipelined(stage(), pipeline(boundary_bytes=10**8, chunks=3))

    once = timeline(sent, PAPER).exposed_seconds
    assert once == pytest.approx(2 * (8 + 3) * 1e-3, rel=0.01)
    assert timeline(in_chunks, PAPER).exposed_seconds == pytest.approx(
        once * (3 * 8 + 3) / (8 + 3), rel=0.01
    )


def test_devices_and_names_are_those_of_the_pipeline():
    """4 stages of 2 devices; every operation has a name of its own."""
    even = pipelined(stage(), pipeline(boundary_bytes=10**6, chunks=3))
    uneven = pipeline(boundary_bytes=10**6, layers=(3, 3, 2, 2))
    for program in (even, pipelined(without_logits(), uneven, last=(LOGITS,))):
        names = [operation.name for operation, _ in program.walk()]

        assert program.device_count == 8
        assert len(names) == len(set(names))


def test_a_stage_holds_activations_of_the_microbatches_under_way():
    """The last of 4 holds none but its own; counted is the first, with 3 more of 3 blocks."""
    program = pipelined(stage(), pipeline(boundary_bytes=10**6))

    assert program.memory.temporary_bytes == 3 * 3 * 10**6


def test_a_step_without_microbatches_is_no_stage():
    """There is nothing for the stages to work on in turn."""
    layers = Loop(name="layers", trip_count=3, body=(matmul("b", 2),))
    for program in (program_of(matmul("m", 1)), program_of(layers)):
        with pytest.raises(ConfigError, match="loop over microbatches, 8 of them"):
            pipelined(program, pipeline())


def test_stages_that_are_not_the_one_given_are_refused():
    """The stage has 3 blocks; and each has a number of its own."""
    with pytest.raises(ConfigError, match="one of them must be the stage given, of 3 blocks"):
        pipelined(stage(), pipeline(layers=(2, 2, 1, 1)))
    with pytest.raises(ConfigError, match="an entry for each of 4 stages"):
        pipeline(layers=(3, 3))


@pytest.mark.parametrize("changed", [{"stages": 1}, {"chunks": 0}, {"microbatches": 0}])
def test_a_pipeline_of_nothing_is_refused(changed):
    """At least two stages, a chunk, a microbatch."""
    with pytest.raises(ConfigError, match=next(iter(changed))):
        pipeline(**changed)


def test_bubble_is_a_term_of_its_own():
    """3 trips of 9 ms; the terms still add up to the step, and stages without one have none."""
    program = pipelined(stage(), pipeline())
    terms = dict(predict(program, PAPER).waterfall)
    working = dict(predict(without_bubble(program), PAPER).waterfall)

    assert terms["bubble"] == pytest.approx(27e-3, rel=1e-3)
    assert {name: terms[name] for name in working} == working
    assert "bubble" not in working


def test_ticks_without_work_are_told_apart():
    """Of 11 ticks of a compiled pipeline, 3 are idle: the same step in other words."""
    ticks = Loop(name="ticks", trip_count=11, body=(matmul("product", 4),))
    whole = program_of(ticks, matmul("update", 1))
    told = with_bubble(whole, PipelineTicks("gpipe", stages=4, microbatches=8))

    times = timeline(told, PAPER).step_seconds
    assert times == pytest.approx(timeline(whole, PAPER).step_seconds)
    assert times - timeline(without_bubble(told), PAPER).step_seconds == pytest.approx(12e-3)
    assert without_bubble(whole) is whole


@pytest.mark.parametrize(("chunks", "bubble"), [(1, 3 * 3 + 0.25), (2, 3 * 3 + 0.25)])
def test_slots_of_a_timetable_are_those_of_the_last_stage(chunks, bubble):
    """8 microbatches through each chunk of the last of 4 stages, 1 ms forward and 2 ms back; 0.5 ms
    of its loss for each, with the last chunk; and while it waits, what one stage takes for a chunk
    of a microbatch, three times, and the embedding once."""
    ticks = PipelineTicks("1f1b", stages=4, microbatches=8, chunks=chunks)
    first, last = (
        Loop(name=f"{name}_part", trip_count=1, body=(matmul(name, each),))
        for name, each in (("first", 0.25), ("last", 0.5))
    )
    forward = Loop(name="forward_pass", trip_count=1, body=(first, matmul("f", 1), last))
    backward = Loop(name="backward_pass", trip_count=1, body=(matmul("b", 2),))
    body = (forward, backward, matmul("between", 0))
    slots = Loop(name="slots", trip_count=len(timetable(ticks).slots), body=body)
    compiled = replace(
        program_of(slots, matmul("update", 1)), mesh_axes=(("pipeline", 4), ("data", 2))
    )

    told = with_bubble(compiled, ticks)

    assert step_milliseconds(without_bubble(told)) == pytest.approx(8 * (chunks * 3 + 0.5) + 1)
    assert step_milliseconds(told) == pytest.approx(8 * (chunks * 3 + 0.5) + 1 + bubble)


def test_a_timetable_of_unlike_stages_is_that_of_the_one_with_most_work():
    """The second of 3 stages of 1, 2 and 1 layers; the others wait with it for a layer each, the
    embedding and the loss."""
    ticks = PipelineTicks("1f1b", stages=3, microbatches=8)

    def layers(name: str, milliseconds: float) -> Loop:
        one = (matmul(name, milliseconds),)
        gate = Loop(name=f"layer_of_stage#{name}", trip_count=1, body=one)
        return Loop(name=f"layers#{name}", trip_count=2, body=(gate,))

    first, last = (
        Loop(name=f"{name}_part", trip_count=1, body=(matmul(name, each),))
        for name, each in (("first", 0.25), ("last", 0.5))
    )
    forward = Loop(name="forward_pass", trip_count=1, body=(first, layers("f", 1), last))
    backward = Loop(name="backward_pass", trip_count=1, body=(layers("b", 2),))
    slots = Loop(name="slots", trip_count=len(timetable(ticks).slots), body=(forward, backward))
    compiled = replace(program_of(slots), mesh_axes=(("pipeline", 3), ("data", 2)))

    told = with_bubble(compiled, ticks, (1, 2, 1))

    assert step_milliseconds(without_bubble(told)) == pytest.approx(8 * 6)
    assert step_milliseconds(told) == pytest.approx(8 * 6 + 2 * 3 + 0.25 + 0.5)


def test_stages_are_ranked_by_what_they_send_too():
    """The first of two has more to multiply, and the second a layer more, that sends 1 GB."""
    ticks = PipelineTicks("1f1b", stages=2, microbatches=8)
    sent = sent_between_stages(2, 10**9, is_divided=False, tensor=1, stage_devices=1)
    gate = Loop(name="layer_of_stage", trip_count=1, body=sent[:1])
    layers = Loop(name="layers", trip_count=2, body=(gate,))
    first = Loop(name="first_part", trip_count=1, body=(matmul("dense", 0.5),))
    one = Loop(name="forward_pass", trip_count=1, body=(first, layers))
    slots = Loop(name="slots", trip_count=len(timetable(ticks).slots), body=(one,))
    compiled = replace(program_of(slots), mesh_axes=(("pipeline", 2),))

    told = without_bubble(with_bubble(compiled, ticks, (1, 2)))

    assert told.flop == 0


def test_passes_over_weights_fill_part_of_the_bubble():
    """Of passes of 1 ms each, 4 stages idle for 3 (forward + backward - weights) = 3 ms (Qi et al.
    2023, table 2); 1F1B for 9."""
    ticks = PipelineTicks("zb_h1", stages=4, microbatches=8)
    body = tuple(
        Loop(name=f"{name}_pass", trip_count=1, body=(matmul(name, 1),))
        for name in ("forward", "backward", "weights")
    )
    slots = Loop(name="slots", trip_count=len(timetable(ticks).slots), body=body)
    compiled = replace(program_of(slots), mesh_axes=(("pipeline", 4), ("data", 2)))

    told = with_bubble(compiled, ticks)

    assert step_milliseconds(without_bubble(told)) == pytest.approx(24)
    assert step_milliseconds(told) == pytest.approx(24 + 3)


def compiled_dualpipe(*forward: Operation | Loop, stages: int = 4) -> tuple[Program, PipelineTicks]:
    """The slots of 1F1B with 8 microbatches, and the ticks of DualPipe: forward passes of 1 ms, and
    what is given, and backward passes of 2."""
    ticks = PipelineTicks("dualpipe", stages=stages, microbatches=8)
    backward = (matmul("of_input", 1), matmul("of_weights", 1))
    body = tuple(
        Loop(name=f"{name}_pass", trip_count=1, body=items)
        for name, items in (("forward", (matmul("forward", 1), *forward)), ("backward", backward))
    )
    slots = len(timetable(ticks._replace(schedule="1f1b")).slots)
    program = program_of(Loop(name="slots", trip_count=slots, body=body))
    return replace(program, mesh_axes=(("pipeline", stages), ("data", 2))), ticks


def test_dualpipe_takes_its_bubble_and_no_more():
    """8 microbatches of 3 ms, and (4/2 - 1) (F&B + B - 3W) = 3 + 2 - 3 ms: what the schedule takes
    pass by pass (`tests/config/test_pipeline_schedule.py`); 1F1B idles for 9."""
    program, ticks = compiled_dualpipe()

    told = with_paired_passes(with_bubble(program, ticks))

    assert step_milliseconds(without_bubble(told)) == pytest.approx(8 * 3)
    assert step_milliseconds(told) == pytest.approx(8 * 3 + 2)
    names = [item.name for item, _ in told.walk()]
    assert len(names) == len(set(names))
    two = with_bubble(*compiled_dualpipe(stages=2))
    assert step_milliseconds(two) == pytest.approx(8 * 3)
    assert without_bubble(two) == two


def test_dualpipe_sends_beside_what_it_computes():
    """Of 8 microbatches 3 forward passes are beside backward ones, and hide what they send; in the
    other 5 it is time of its own. A pair that sends for longer, 100 ms, takes so long and not 3 ms
    more; so does the bubble, 40 ms."""
    sent = sent_between_stages(4, 10**8, is_divided=False, tensor=1, stage_devices=1)[:1]
    program, ticks = compiled_dualpipe(Loop(name="layers", trip_count=2, body=sent))

    apart = with_bubble(program, ticks)
    before, after = (timeline(each, PAPER) for each in (apart, with_paired_passes(apart)))

    shares = 3 + 5 + 2 / 5  # the bubble is two fifths of a pair and a backward pass
    assert after.communication_seconds == pytest.approx(before.communication_seconds)
    assert after.exposed_seconds == pytest.approx(before.exposed_seconds * 5 / shares, rel=1e-3)
    assert before.exposed_seconds / shares < 3e-3

    large = sent_between_stages(4, 10**10, is_divided=False, tensor=1, stage_devices=1)[:1]
    program, ticks = compiled_dualpipe(*large)
    after = timeline(with_paired_passes(with_bubble(program, ticks)), PAPER)
    assert after.step_seconds == pytest.approx((3 * 100 + 5 * 103 + 40) * 1e-3, rel=1e-3)


def test_a_device_of_dualpipe_holds_two_stages():
    """Twice the parameters in bfloat16 and their gradients in float32, and 5 microbatches in place
    of 4; without ZeRO their state as well."""
    ticks = PipelineTicks("dualpipe", stages=4, microbatches=8)
    memory = MemoryUse(
        argument_bytes=100, output_bytes=90, alias_bytes=90, temporary_bytes=6 * 10 + 4 * 7
    )

    sharded = with_second_stage(memory, ticks, parameters=10, state_bytes=0)
    whole = with_second_stage(memory, ticks, parameters=10, state_bytes=120)

    assert sharded == replace(memory, temporary_bytes=2 * 6 * 10 + 5 * 7)
    assert whole.peak_bytes == sharded.peak_bytes + 120


def test_all_stages_wait_for_the_host_of_most_blocks():
    """A last stage of 2 blocks and logits, before which one has 3. A host of 10 ms an operation
    launches 2 of a block: 8 x 20 ms more for the third one than this stage's own 8 x 50 ms, the
    bubble's 10 x 20 and one after. A faster one, which no device waits for, changes nothing."""
    program = pipelined(_stage(_work(8, 2, (LOGITS,))), pipeline(layers=(2, 3, 3, 2)))
    equal = replace(program, most_blocks=1.0)

    def host_milliseconds(of: Program, each: float) -> float:
        attainable = replace(PAPER.chip.attainable, dispatch_seconds=each)
        cluster = replace(PAPER, chip=replace(PAPER.chip, attainable=attainable))
        return timeline(of, cluster).dispatch_seconds * 1e3

    more = host_milliseconds(program, 10e-3) - host_milliseconds(equal, 10e-3)
    assert program.most_blocks == pytest.approx(1.5)
    assert more == pytest.approx(8 * 2 * 10)
    fast = replace(PAPER.chip.attainable, dispatch_seconds=1e-9)
    quick = replace(PAPER, chip=replace(PAPER.chip, attainable=fast))
    assert timeline(program, quick).step_seconds == timeline(equal, quick).step_seconds
