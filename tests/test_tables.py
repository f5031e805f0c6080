"""Tables say what is known, and tell nothing from unknown."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from test_report import prediction

from scalejax import tables
from scalejax.predict import scaling_prediction


def printed(*parts: object) -> str:
    """What an 80-column terminal shows."""
    console = Console(width=80, file=StringIO())
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def test_hidden_communication_is_zero_and_unknown_is_not_shown():
    """A term without a name took no time; one without a value is not in the table."""
    hidden = replace(prediction(8, 0.2), waterfall=(("compute", 0.2), ("input", None)))

    rows = printed(tables.time_split([hidden, prediction(16, 0.25)])).splitlines()

    assert rows[0].split() == ["devices", "compute", "communication", "data"]
    assert rows[1].split() == ["8", "100.0", "%", "0.0", "%"]
    assert rows[2].split() == ["16", "90.0", "%", "10.0", "%"]


def test_bands_are_shown_where_they_are_known():
    """A fifth below and a quarter above 200 ms; no table where all is unknown."""
    known = scaling_prediction([prediction(8, 0.2)], "weak", "title")
    bare = replace(prediction(8, 0.2), p10_step_seconds=None, p90_step_seconds=None)
    unknown = scaling_prediction([bare], "weak", "title")

    assert ["8", "160", "ms", "200", "ms", "250", "ms", "n/a"] in [
        line.split() for line in printed(*tables.scaling(known)).splitlines()
    ]
    assert "step p10" not in printed(*tables.scaling(unknown))


def test_terms_go_down_where_they_are_too_many():
    """Ten of them and two numbers of devices in 80 columns, no name broken."""
    names = ("compute", "memory", "launch", "communication data", "communication fsdp")
    names += ("overhead", "stragglers", "input", "checkpoints", "failures")
    many = replace(prediction(8, 0.2), waterfall=tuple((name, 0.02) for name in names))

    rows = printed(tables.time_split([many, replace(many, device_count=4096)])).splitlines()

    assert rows[0].split() == ["devices", "8", "4096"]
    assert [row.partition("10.0")[0].strip() for row in rows[1:]] == list(names)
    assert rows[4].split() == ["communication", "data", "10.0", "%", "10.0", "%"]
    assert max(map(len, rows)) <= 80


def test_what_does_not_fit_is_loud():
    """20 GiB on a device of 16."""
    study = scaling_prediction([prediction(8, 0.2, used_gib=20.0)], "weak", "title")

    assert "20.0 GiB   NO" in printed(*tables.scaling(study))


def test_figures_of_a_long_run_fit_80_columns():
    """Hours, millions and thousands of devices, all at once."""
    study = scaling_prediction(
        [prediction(8, 7.1, used_gib=15.8), prediction(16384, 35.9)], "strong", "title"
    )

    assert max(map(len, printed(*tables.scaling(study)).splitlines())) <= 80


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
