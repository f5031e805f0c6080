"""Timetables of pipelines: what the papers say of them, and that they can be computed at all."""

from hypothesis import given
from hypothesis import strategies as st

from scalejax.config.pipeline_schedule import PipelineTicks, Timetable, timetable


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
