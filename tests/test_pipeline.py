"""Pipelines from one of their stages, by hand: work of all microbatches, and the bubble."""

from dataclasses import replace
from typing import Any

import pytest
from program_cases import PAPER, matmul, program_of

from scalejax.cost import Pipeline, pipelined, timeline
from scalejax.errors import ConfigError
from scalejax.predict import predict
from scalejax.program import Loop, Program, with_bubble, without_bubble


def stage() -> Program:
    """Eight microbatches of 3 blocks, 1 ms forward and 2 ms back, and 2 ms of logits; then 1 ms."""
    forward = Loop(name="forward", trip_count=3, body=(matmul("f", 1),))
    backward = Loop(name="backward", trip_count=3, body=(matmul("b", 2),))
    work = Loop(name="work", trip_count=8, body=(forward, matmul("logits", 2), backward))
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
    program = pipelined(stage(), pipeline(boundary_bytes=10**6, chunks=3))
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
    told = replace(whole, operations=with_bubble(whole.operations, ticks=11, idle_ticks=3))

    times = timeline(told, PAPER).step_seconds
    assert times == pytest.approx(timeline(whole, PAPER).step_seconds)
    assert times - timeline(without_bubble(told), PAPER).step_seconds == pytest.approx(12e-3)
    assert without_bubble(whole) is whole
