"""Charges of operations: what adds up to the step."""

import math
from dataclasses import replace

import pytest
from hardware_cases import CHIP
from program_cases import PAPER, fusion, gather, matmul, program_of, resnet50_on_256, wait

from scalejax.hardware import SharedChip, load_cluster
from scalejax.simulator.program import Loop
from scalejax.simulator.timeline.attribution import attributions, device_terms
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.timeline.trace import trace_step


def test_each_operation_is_charged_for_all_its_runs():
    """Ten iterations of 2 ms of work that hide 2 of 3 ms of gathering."""
    body = (gather("g", 3), matmul("m", 2), wait("g"))
    program = program_of(Loop(name="layers", trip_count=10, body=body), fusion("f", 1))

    by_name = {
        attribution.operation.name: attribution for attribution in attributions(program, PAPER)
    }

    assert list(by_name) == ["g", "m", "f"]
    assert by_name["m"].runs == 10
    assert by_name["m"].seconds == pytest.approx(20e-3)
    assert by_name["m"].peak_seconds == pytest.approx(20e-3)
    assert by_name["g"].seconds == pytest.approx(30e-3)
    assert by_name["g"].step_seconds == pytest.approx(10e-3)
    assert [attribution.bound for attribution in by_name.values()] == [
        "communication",
        "compute",
        "memory",
    ]


def test_charges_and_terms_add_up_to_a_real_step():
    """ResNet-50 on 256 H100: 1,504 operations, some of them hidden."""
    program, cluster = resnet50_on_256(), load_cluster("dgx-h100")
    times = timeline(program, cluster)
    rest = times.contention_seconds + times.overhead_seconds

    attributed = math.fsum(
        attribution.step_seconds for attribution in attributions(program, cluster)
    )
    terms = dict(device_terms(program, cluster))

    assert attributed + rest == pytest.approx(times.step_seconds)
    assert math.fsum(terms.values()) + times.exposed_seconds + rest == pytest.approx(
        times.step_seconds
    )
    assert terms["launch"] == pytest.approx(times.launch_seconds)
    assert all(seconds >= 0 for seconds in terms.values())


def test_charges_are_those_of_the_devices_as_they_are_when_all_are_busy():
    """Eight devices of a machine that has cores for four: twice the time, and in all views.

    On a chip of half the rates, what the FLOP take at the peak is twice as long too.
    """
    rates = {name: rate / 2 for name, rate in CHIP.peak_flop_per_second.items()}
    half = replace(CHIP, peak_flop_per_second=rates, memory_bytes_per_second=5e11)
    cluster = replace(PAPER, shared=(SharedChip(device_count=8, chip=half),))
    program = program_of(matmul("m", 3), fusion("f", 1))

    assert timeline(program, cluster).step_seconds == pytest.approx(8e-3)
    assert sum(each.step_seconds for each in attributions(program, cluster)) == pytest.approx(8e-3)
    assert sum(dict(device_terms(program, cluster)).values()) == pytest.approx(8e-3)
    assert trace_step(program, cluster).step_seconds == pytest.approx(8e-3)
