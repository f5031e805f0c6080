"""Bands around a step time: what the residuals of fits leave open."""

import math
from dataclasses import replace

import pytest
from hardware_cases import CHIP, cluster_of
from program_cases import PAPER, fusion, gather, matmul, program_of, wait

from scalejax.hardware import Residuals
from scalejax.simulator.timeline.timeline import WhatIf
from scalejax.simulator.uncertainty import band, residuals


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
    """Residual of the library only where there are collectives."""
    fitted = replace(CHIP, residuals=Residuals(compute=0.1, memory=0.2, launch=0.3))

    assert residuals(PAPER, communicates=False) is None
    assert residuals(cluster_of(chip=fitted), communicates=True) is None
    assert residuals(cluster_of(chip=fitted), communicates=False) == {
        "compute": 0.1,
        "memory": 0.2,
        "launch": 0.3,
        "communication": 0.0,
    }
