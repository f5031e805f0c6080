"""Tables of a scaling study say what is known, and tell nothing from unknown."""

from dataclasses import replace

from test_report import prediction
from test_tables import printed

from scalejax import scaling_tables
from scalejax.predict import scaling_prediction


def test_hidden_communication_is_zero_and_unknown_is_not_shown():
    """A term without a name took no time; one without a value is not in the table."""
    hidden = replace(prediction(8, 0.2), waterfall=(("compute", 0.2), ("input", None)))

    rows = printed(scaling_tables.time_split([hidden, prediction(16, 0.25)])).splitlines()

    assert rows[0].split() == ["devices", "compute", "communication", "data"]
    assert rows[1].split() == ["8", "100.0", "%", "0.0", "%"]
    assert rows[2].split() == ["16", "90.0", "%", "10.0", "%"]


def test_bands_are_shown_where_they_are_known():
    """A fifth below and a quarter above 200 ms; no table where all is unknown."""
    known = scaling_prediction([prediction(8, 0.2)], "weak", "title")
    bare = replace(prediction(8, 0.2), p10_step_seconds=None, p90_step_seconds=None)
    unknown = scaling_prediction([bare], "weak", "title")

    assert ["8", "160", "ms", "200", "ms", "250", "ms", "n/a"] in [
        line.split() for line in printed(*scaling_tables.scaling(known)).splitlines()
    ]
    assert "step p10" not in printed(*scaling_tables.scaling(unknown))


def test_terms_go_down_where_they_are_too_many():
    """Ten of them and two numbers of devices in 80 columns, no name broken."""
    names = ("compute", "memory", "launch", "communication data", "communication fsdp")
    names += ("overhead", "stragglers", "input", "checkpoints", "failures")
    many = replace(prediction(8, 0.2), waterfall=tuple((name, 0.02) for name in names))

    rows = printed(scaling_tables.time_split([many, replace(many, device_count=4096)])).splitlines()

    assert rows[0].split() == ["devices", "8", "4096"]
    assert [row.partition("10.0")[0].strip() for row in rows[1:]] == list(names)
    assert rows[4].split() == ["communication", "data", "10.0", "%", "10.0", "%"]
    assert max(map(len, rows)) <= 80


def test_what_does_not_fit_is_loud():
    """20 GiB on a device of 16."""
    study = scaling_prediction([prediction(8, 0.2, used_gib=20.0)], "weak", "title")

    assert "20.0 GiB   NO" in printed(*scaling_tables.scaling(study))


def test_figures_of_a_long_run_fit_80_columns():
    """Hours, millions and thousands of devices, all at once."""
    study = scaling_prediction(
        [prediction(8, 7.1, used_gib=15.8), prediction(16384, 35.9)], "strong", "title"
    )

    assert max(map(len, printed(*scaling_tables.scaling(study)).splitlines())) <= 80
