"""What-ifs are quick, and what they keep from one cluster never shows in the next."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hardware_cases import CHIP
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
    wait,
)
from test_properties import (
    faster_arithmetic,
    faster_links,
    faster_memory,
    faster_network,
    shorter_hops,
    shorter_launches,
)

from scalejax.hardware import Cluster, load_cluster
from scalejax.simulator.program import Loop
from scalejax.simulator.timeline.timeline import (
    NOMINAL,
    OperationCosts,
    Scales,
    WhatIf,
    timeline,
    total,
    what_if,
)

CHANGES = (
    faster_arithmetic,
    faster_links,
    faster_memory,
    faster_network,
    shorter_hops,
    shorter_launches,
)
PROGRAM = program_of(gather("g", 3), matmul("m", 2), fusion("f", 1), wait("g"))


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.floats(0.5, 2)), max_size=8))
def test_a_program_that_was_costed_before_costs_the_same(
    changes: list[tuple[Callable[[Cluster, float], Cluster], float]],
):
    """Clusters made from each other one change at a time, there and back."""
    used, cluster = WhatIf(PROGRAM), PAPER
    for change, factor in changes:
        cluster = change(cluster, factor)

        assert used.timeline(cluster) == WhatIf(PROGRAM).timeline(cluster)
        assert used.timeline(PAPER) == WhatIf(PROGRAM).timeline(PAPER)


def test_more_chips_than_are_kept_are_told_apart():
    """A hundred of them, each twice."""
    used = WhatIf(PROGRAM)
    for _ in range(2):
        for percent in range(1, 101):
            attainable = replace(CHIP.attainable, launch_seconds=percent * 1e-5)
            cluster = replace(PAPER, chip=replace(CHIP, attainable=attainable))

            assert used.timeline(cluster).launch_seconds == pytest.approx(2 * percent * 1e-5)


def test_more_programs_than_are_kept_are_told_apart():
    """Twenty of them, each twice; one that is kept is not read again."""
    programs = [program_of(matmul("m", milliseconds)) for milliseconds in range(1, 21)]
    for _ in range(2):
        for milliseconds, program in enumerate(programs, start=1):
            assert timeline(program, PAPER).step_seconds == pytest.approx(milliseconds * 1e-3)

    assert what_if(programs[-1]) is what_if(programs[-1])


def test_scales_are_factors_on_classes_of_cost():
    """3 ms of gathering hides 2 of compute and 1 of memory; twice of each is seen."""
    used = WhatIf(PROGRAM)

    def step(**factors: float) -> float:
        return used.timeline(PAPER, Scales(**factors)).step_seconds

    assert used.timeline(PAPER, NOMINAL).step_seconds == pytest.approx(3e-3)
    assert step(compute=2) == pytest.approx(5e-3)
    assert step(memory=2) == pytest.approx(4e-3)
    assert step(communication=2) == pytest.approx(6e-3)
    assert used.timeline(PAPER, NOMINAL).step_seconds == pytest.approx(3e-3)


def test_timelines_of_parts_add_up_to_that_of_the_step():
    """Three runs of a group that hides 3 ms of work behind 4 of gathering, and one of another."""
    cluster = replace(contended(0.1), launch_mode="blocking")
    host = replace(cluster.chip.attainable, collective_dispatch_seconds=1e-3)
    cluster = replace(cluster, chip=replace(cluster.chip, attainable=host))
    group = gather("g", 4), matmul("m", 2), fusion("f", 1), wait("g")
    other = gather("h", 2, axis="data"), matmul("n", 5), wait("h")
    costs = OperationCosts(cluster)
    parts = total(((costs.timeline(group), 3), (costs.timeline(other), 1)))
    whole = timeline(program_of(Loop(name="l", trip_count=3, body=group), *other), cluster)

    assert parts.step_seconds == pytest.approx(whole.step_seconds)
    assert parts.host_seconds == pytest.approx(whole.host_seconds) == pytest.approx(4e-3)
    assert dict(parts.exposed) == pytest.approx(dict(whole.exposed))
    assert parts.contention_seconds == pytest.approx(whole.contention_seconds)


def test_ten_thousand_what_ifs_take_less_than_ten_seconds():
    """On a core on which Python counts to two million in a twentieth of a second: a hundred of them
    take less than twice that. Here they take half of it, however slow the machine is just now."""
    program, cluster = resnet50_on_256(), load_cluster("dgx-h100")
    timeline(program, cluster)

    start = time.process_time()
    for _ in range(2_000_000):
        pass
    counted = time.process_time()
    for percent in range(100):
        timeline(program, faster_network(cluster, 1 + percent / 100))

    assert time.process_time() - counted < 2 * (counted - start)
