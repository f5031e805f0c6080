"""Tables say what is known, and tell nothing from unknown."""

from io import StringIO

import pytest
from rich.console import Console

from scalejax.core.units import counted
from scalejax.hardware import load_chip
from scalejax.report.terminal import tables


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


def test_a_chip_says_whose_its_rates_are():
    """Where other frameworks than XLA have rates of their own."""
    note = "other frameworks attainable_by_others."

    assert note in printed(*tables.entry(load_chip("h200")))
    assert note not in printed(*tables.entry(load_chip("h100")))


def test_one_of_a_thing_is_no_plural():
    """None is."""
    counts = [counted(count, "device") for count in (0, 1, 2, "1", "8,16")]

    assert counts == ["0 devices", "1 device", "2 devices", "1 device", "8,16 devices"]
