"""Tables say what is known, and tell nothing from unknown."""

import math
from io import StringIO

import pytest
from rich.console import Console

from scalejax.core.units import counted, format_seconds
from scalejax.report.terminal import tables
from scalejax.simulator.frameworks import Framework, Software
from scalejax.simulator.frameworks.software import Rates


def printed(*parts: object) -> str:
    """What an 80-column terminal shows."""
    console = Console(width=80, file=StringIO())
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


@pytest.mark.parametrize(
    ("rates", "points"),
    [
        ([0.1, 0.2, 0.3, 0.3, 0.03], [(0, "start"), (2, "peak"), (4, "end")]),
        ([0.3, 0.3, 0.03, 0.03], [(0, "start and peak"), (2, "step of the decay"), (3, "end")]),
        ([0.3, 0.29, 0.28], [(0, "start and peak"), (2, "end")]),
        ([0.3, 0.27, 0.2, 0.11, 0.03, 0.0], [(0, "start and peak"), (5, "end")]),
        ([0.1], [(0, "start and peak, end")]),
        ([0.1, 0.2], [(0, "start"), (1, "peak, end")]),
    ],
)
def test_turning_points_of_a_schedule(rates: list[float], points: list[tuple[int, str]]):
    """Start, peak, sudden falls and end; smooth decay has none between."""
    assert tables.turning_points(rates) == points


def test_a_framework_says_what_its_software_makes_of_chips(monkeypatch):
    """Of any chip, and of those with rates of their own; chips with equal rates once."""
    own = Rates(gap_seconds=2e-6, step_cv=0.0)
    software = Software(
        gap_seconds=9e-6,
        on_chip={"h100": own, "h200": own, "a100-80gb": Rates()},
        rows={"h100": 12, "v100": 3},
        residual=0.08,
        chip_residual=0.05,
        sources={"gap_seconds": "a fit of steps"},
    )
    monkeypatch.setattr(
        "scalejax.simulator.frameworks.framework.software_by_name",
        lambda: {"ours": software, "unknown": Software(residual=0.25)},
    )

    def said(name: str) -> str:
        framework = Framework(name=name, title="Ours", year=2026)
        return " ".join(printed(*tables.framework(framework)).split())

    assert said("ours").endswith(
        "of XLA's programs, it has: on any chip gap_seconds = 9e-06 "
        "on h100, h200 gap_seconds = 2e-06 step_cv = 0 on a100-80gb nothing else "
        "held against published steps: 12 on h100, 3 on v100 "
        "log standard deviation of measured over predicted: 0.08, and 0.05 besides on other chips "
        "gap_seconds: a fit of steps"
    )
    assert said("theirs").endswith(
        "Its operations run at the rates of a chip's file, which are of XLA's programs. "
        "held against published steps: none log standard deviation of measured over predicted: 0.25"
    )


def test_one_of_a_thing_is_no_plural():
    """None is."""
    counts = [counted(count, "device") for count in (0, 1, 2, "1", "8,16")]

    assert counts == ["0 devices", "1 device", "2 devices", "1 device", "8,16 devices"]


def test_a_duration_that_is_none_is_unknown():
    """Stored predictions may hold any number."""
    assert [format_seconds(each) for each in (None, math.nan, math.inf)] == ["n/a"] * 3
