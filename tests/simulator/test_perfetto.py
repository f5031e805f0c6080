"""Traces of predicted steps: every event is where the timeline has it."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_cases import (
    PAPER,
    contended,
    fusion,
    gather,
    matmul,
    program_of,
    resnet50_on_256,
    schedules,
    wait,
)

from scalejax.hardware import load_cluster
from scalejax.simulator.perfetto import trace_of, write_trace
from scalejax.simulator.program import Loop, Operation
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.timeline.trace import trace_step

LAYERS = Loop(name="layers", trip_count=3, body=(gather("g", 3), matmul("m", 2), wait("g")))


def test_trace_events_by_hand():
    """Each iteration gathers for 3 ms, works for 2 and waits for 1."""
    trace = trace_step(program_of(LAYERS, fusion("f", 1)), PAPER)

    of_second = [
        (event.name, event.stream, round(event.start_seconds * 1e3), event.bound)
        for event in trace.events
        if event.iteration == (1,)
    ]
    assert sorted(of_second) == [
        ("g", "links", 3, "communication"),
        ("m", "compute", 3, "compute"),
        ("wait for g", "compute", 5, "wait"),
    ]
    assert trace.step_seconds == pytest.approx(10e-3)


@given(schedules(), st.sampled_from([0.0, 0.3]))
def test_a_trace_ends_when_the_step_does(items: tuple[Operation | Loop, ...], share: float):
    """The walk of single operations and the walk of segments are one; no stream does two at once.

    This is the plain walk against which the fast one is held: every operation by itself, every
    iteration of every loop.
    """
    program, cluster = program_of(*items), contended(share)

    trace = trace_step(program, cluster)

    step_seconds = timeline(program, cluster).step_seconds
    assert trace.step_seconds == pytest.approx(step_seconds, rel=1e-9)
    for stream in ("compute", "links", "network"):
        own = [event for event in trace.events if event.stream == stream]
        assert all(a.end_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(own))


def test_a_trace_of_a_real_step_agrees_with_its_timeline():
    """1,504 operations of ResNet-50 on 256 H100, with contention and overhead."""
    cluster = load_cluster("dgx-h100")
    attainable = replace(
        cluster.chip.attainable, contention_fraction=0.05, step_overhead_seconds=1e-3
    )
    cluster = replace(cluster, chip=replace(cluster.chip, attainable=attainable))

    trace = trace_step(resnet50_on_256(), cluster)

    step_seconds = timeline(resnet50_on_256(), cluster).step_seconds
    assert trace.step_seconds == pytest.approx(step_seconds, rel=1e-12)


def test_long_loops_are_cut_and_the_step_keeps_its_length(tmp_path: Path):
    """1,000 iterations in 100 events: what is left out is one event, and the file says so."""
    program = program_of(replace(LAYERS, trip_count=1000), fusion("f", 1))

    write_trace(program, PAPER, tmp_path / "trace.json", most_events=100)

    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    assert len(names) < 150
    assert "layers: 969 more iterations" in names
    assert names[-1] == "f"
    assert trace["otherData"]["loops"] == "the first 31 iterations of each"
    assert trace["otherData"]["step_seconds"] == pytest.approx(3.001)


def test_events_of_a_stream_do_not_overlap_by_a_nanosecond():
    """Viewers would nest one into the other: ResNet-50 with gaps of all lengths."""
    cluster = load_cluster("dgx-h100")

    trace = trace_of(trace_step(resnet50_on_256(), cluster), resnet50_on_256(), cluster)

    ends: dict[int, int] = {}
    for event in json.loads(json.dumps(trace))["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert start >= ends.get(event["pid"], 0)
            ends[event["pid"]] = start + length


def test_a_trace_holds_what_its_viewers_read(tmp_path: Path):
    """Complete events in microseconds, a named process per stream, and the user's own lines."""
    work = replace(matmul("m", 2), source="model.py:7")

    write_trace(program_of(gather("g", 3), work, wait("g")), PAPER, tmp_path / "trace.json")

    trace = json.loads((tmp_path / "trace.json").read_text())
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    # None of copies to the host, of which there are none.
    assert names == {"compute (predicted)", "links (predicted)", "network (predicted)"}
    assert events["m"]["ts"] == 0
    assert events["m"]["dur"] == pytest.approx(2000)
    assert events["m"]["args"]["source"] == "model.py:7"
    assert events["m"]["args"]["flop"] == 2 * 10**11
    assert events["g"]["args"]["axes"] == "fsdp"
    assert events["g"]["pid"] != events["m"]["pid"]
    assert all({"ts", "dur", "pid", "tid"} <= event.keys() for event in events.values())
