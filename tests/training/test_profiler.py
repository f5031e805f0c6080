"""Which steps the profiler records, and what is read back of them."""

import jax
import jax.numpy as jnp
import pytest

from scalejax.core.errors import ConfigError
from scalejax.simulator.perfetto import read_trace
from scalejax.training.profiler import StepTraces, TraceSchedule, parse_schedule, require_room


def recorded_steps(monkeypatch, tmp_path, schedule: TraceSchedule, steps: int) -> list[list[int]]:
    """The steps of each trace that is kept, with a profiler that only listens."""
    kept: list[list[int]] = []
    running: list[str] = []
    monkeypatch.setattr(
        "jax.profiler.start_trace", lambda folder, profiler_options: running.append(folder)
    )
    monkeypatch.setattr("jax.profiler.stop_trace", running.clear)
    traces = StepTraces(tmp_path, schedule)
    for step in range(1, steps + 1):
        if traces.is_boundary:
            traces.cross(step - 1)
            if running and "step-" in running[0]:
                kept.append([])
        with traces.step(step):
            if running and "step-" in running[0]:
                kept[-1].append(step)
    traces.close()
    assert not running
    return kept


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ("3,2,2,1", [[6, 7]]),
        ("1,1,2,2", [[3, 4], [7, 8]]),
        ("0,0,1,2", [[1], [2]]),
        ("8,2,5,1", [[11, 12]]),  # the run ends first
    ],
)
def test_steps_are_recorded_as_scheduled(monkeypatch, tmp_path, numbers, expected):
    """Wait, warm up, record; and once more."""
    assert recorded_steps(monkeypatch, tmp_path, parse_schedule(numbers), steps=12) == expected


def test_a_schedule_of_other_than_four_numbers_is_refused():
    """The form is shown."""
    with pytest.raises(ConfigError, match="WAIT,WARMUP,ACTIVE,REPEAT"):
        parse_schedule("10,2,5")


def test_a_run_too_short_to_record_is_refused():
    """Before it starts, with a schedule that would do."""
    with pytest.raises(ConfigError, match="0,0,5,1 records the first"):
        require_room(TraceSchedule(), 12)

    require_room(TraceSchedule(), 13)


def test_a_trace_tells_what_each_operation_took(tmp_path):
    """Three executions of a matrix product: found by the name the compiler gave it."""
    x = jnp.ones((256, 256))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            jax.block_until_ready(compiled(x))

    trace = read_trace(tmp_path)

    assert (trace.step_count, trace.device_count) == (3, 1)
    text = compiled.as_text() or ""
    assert trace.seconds_by_name
    assert all(name in text for name in trace.seconds_by_name)
    assert all(0 < seconds < 10 for seconds in trace.seconds_by_name.values())


def test_a_folder_without_a_trace_is_refused(tmp_path):
    """With the command that records one."""
    with pytest.raises(ConfigError, match="--profile records one"):
        read_trace(tmp_path)
