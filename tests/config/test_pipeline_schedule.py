"""Timetables of pipelines: what the papers say of them, and that they can be computed at all."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.config.pipeline_schedule import Pass, PipelineTicks, Timetable, dualpipe, timetable


@st.composite
def pipelines(draw) -> PipelineTicks:
    """Any schedule of a few stages; with chunks, stages divide the microbatches."""
    stages, chunks = draw(st.integers(2, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    microbatches = draw(st.integers(1, 12)) if chunks == 1 else stages * draw(st.integers(1, 3))
    names = ["gpipe", "1f1b"] + (["zb_h1"] if chunks == 1 else [])
    return PipelineTicks(draw(st.sampled_from(names)), stages, microbatches, chunks)


@given(ticks=pipelines())
def test_every_pass_is_computed_once_and_after_what_it_waits_for(ticks):
    """One pass of each kind of each microbatch, chunk and stage; and no two things in one place."""
    table = timetable(ticks)
    kinds = ["forward", "backward"] + (["weights"] if ticks.schedule == "zb_h1" else [])

    assert len(table.when) == len(kinds) * ticks.stages * ticks.work
    assert len(table.when) == sum(each is not None for row in table.slots for each in row)
    for (stage, each), slot in table.when.items():
        if (waiting := table.sends(stage, each)) is not None:
            assert slot < table.when[waiting]
        if each.kind != "forward":
            before = kinds[kinds.index(each.kind) - 1]
            assert table.when[stage, each._replace(kind=before)] < slot
    for stage in range(ticks.stages):
        assert max(table.saved(stage).values()) + 1 == most_held(table, stage, kinds[-1])


def most_held(table: Timetable, stage: int, last: str) -> int:
    """Most microbatches that have gone forward in `stage` and are not done with, at once."""
    held, most = 0, 0
    for row in table.slots:
        each = row[stage]
        if each is not None:
            held += each.kind == "forward"
            most = max(most, held)
            held -= each.kind == last
    return most


@given(ticks=pipelines())
def test_first_stage_holds_what_the_paper_says(ticks):
    """The most of all stages, of one chunk each: `PipelineTicks.in_flight`."""
    held = [max(timetable(ticks).saved(stage).values()) + 1 for stage in range(ticks.stages)]

    assert max(held) == held[0] == round(ticks.in_flight * ticks.chunks)


def test_1f1b_of_two_stages_by_hand():
    """Forward and backward in turn, a slot apart (Narayanan et al. 2021, figure 3)."""
    slots = timetable(PipelineTicks("1f1b", 2, 3)).slots
    stages = [
        " ".join("." if each is None else f"{each.kind[0]}{each.microbatch}" for each in row)
        for row in zip(*slots, strict=True)
    ]

    assert stages == ["f0 . f1 b0 f2 b1 . b2", ". f0 b0 f1 b1 f2 b2 ."]


@given(ticks=pipelines(), forward=st.integers(1, 3), backward=st.integers(1, 3))
def test_step_is_as_long_as_the_papers_say(ticks, forward, backward):
    """(microbatches x chunks + stages - 1) times a forward and a backward pass of a chunk, whatever
    the two take, where each stage waits for its neighbours alone."""
    if ticks.schedule == "zb_h1":  # passes of one slot each: Qi et al. 2023, table 2
        least = 3 * ticks.work + ticks.idle
        assert len(timetable(ticks).slots) == least or ticks.microbatches < ticks.stages
        return
    table = timetable(ticks)
    length = {"forward": forward, "backward": backward}
    ended: dict[object, int] = {}
    free = [0] * ticks.stages
    inbox: dict[object, int] = {}
    for row in table.slots:
        for stage, each in enumerate(row):
            if each is None:
                continue
            start = max(free[stage], inbox.get((stage, each), 0))
            free[stage] = ended[stage, each] = start + length[each.kind]
            if (waiting := table.sends(stage, each)) is not None:
                inbox[waiting] = free[stage]

    assert max(free) == (ticks.work + ticks.idle) * (forward + backward)


def dualpipe_run(
    stages: int, microbatches: int, length: Mapping[str, float]
) -> tuple[list[float], list[int]]:
    """(Time that each device is idle until all are done, most microbatches that it holds) of
    DualPipe, in which a pass begins when its device is free and what it waits for was sent.

    `length` is of a "forward", a whole "backward", a "weights" pass and a "pair".
    """
    orders = [list(dualpipe(stages, microbatches, device)) for device in range(stages)]
    known = [{each for group in order for each in group} for order in orders]
    ended: dict[tuple[int, Pass], float] = {}
    free, busy = [0.0] * stages, [0.0] * stages
    held, most = [0] * stages, [0] * stages

    def stage_of(device: int, way: int) -> int:
        return device if way == 0 else stages - 1 - device

    def waits_for(device: int, each: Pass) -> tuple[int, Pass] | None:
        stage, step = stage_of(device, each.chunk), 1 if each.chunk == 0 else -1
        if each.kind == "forward":
            return None if stage == 0 else (device - step, each)
        if each.kind == "weights":
            return device, each._replace(kind="backward")
        is_last = stage == stages - 1
        return (device, each._replace(kind="forward")) if is_last else (device + step, each)

    def seconds(device: int, group: tuple[Pass, ...]) -> float:
        if len(group) > 1:
            return length["pair"]
        each = next(iter(group))
        is_apart = each._replace(kind="weights") in known[device]
        less = length["weights"] if each.kind == "backward" and is_apart else 0
        return length[each.kind] - less

    while any(orders):
        before = sum(map(len, orders))
        for device, order in enumerate(orders):
            while order:
                needed = [waits_for(device, each) for each in order[0]]
                if any(each is not None and each not in ended for each in needed):
                    break
                group = order.pop(0)
                begin = max([free[device], *(ended[each] for each in needed if each is not None)])
                free[device] = begin + seconds(device, group)
                busy[device] += seconds(device, group)
                for each in group:
                    ended[device, each] = free[device]
                    held[device] += each.kind == "forward"
                    most[device] = max(most[device], held[device])
                    is_done = each._replace(kind="weights") not in known[device]
                    held[device] -= each.kind == "weights" or (each.kind == "backward" and is_done)
        assert sum(map(len, orders)) < before, "devices wait for each other"
    assert len(ended) == sum(map(len, known))
    return [max(free) - each for each in busy], most


@pytest.mark.parametrize("pair", [2.0, 2.5, 3.0])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 22), (16, 40)])
def test_dualpipe_is_idle_and_holds_what_the_paper_says(stages, microbatches, pair):
    """(p/2 - 1) (F&B + B - 3W) on the devices in the middle, and no more on others, for passes of
    weights as long as half a backward pass, or a forward pass; p + 1 microbatches on all (DeepSeek-
    AI 2024, table 2)."""
    ticks = PipelineTicks("dualpipe", stages, microbatches)
    length = {"forward": 1.0, "backward": 2.0, "weights": 1.0, "pair": pair}

    idle, held = dualpipe_run(stages, microbatches, length)

    assert max(idle) == idle[stages // 2] == ticks.idle * (pair + 2 - 3)
    assert ticks.idle == stages // 2 - 1
    assert set(held) == {stages + 1} == {ticks.in_flight}


def test_dualpipe_computes_every_pass_of_both_ways_once():
    """On every device; those in the middle compute all but as many pairs as there are stages, and
    one for a shorter bubble."""
    stages, microbatches = 4, 12
    for device in range(stages):
        made = [each for group in dualpipe(stages, microbatches, device) for each in group]
        for kind in ("forward", "backward"):
            own = sorted((each.chunk, each.microbatch) for each in made if each.kind == kind)
            assert own == [(way, index) for way in (0, 1) for index in range(6)]
        assert len(made) == len(set(made))
    assert PipelineTicks("dualpipe", stages, microbatches).paired == microbatches - stages - 1
    assert PipelineTicks("1f1b", stages, microbatches).paired == 0
