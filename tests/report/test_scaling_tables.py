"""Tables of a scaling study say what is known, and tell nothing from unknown."""

from dataclasses import replace

import pytest
from test_report import prediction
from test_tables import printed

from scalejax.report.terminal import scaling as scaling_tables
from scalejax.simulator.predict import scaling_prediction


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


def test_a_sample_that_devices_share_is_not_said_to_be_of_each():
    """256 samples on 8 devices; divided among two groups of 4, 128 on every four of them."""
    alone = prediction(8, 0.2)
    shared = replace(alone, per_device_batch=128)

    assert "32 samples per device." in printed(
        *scaling_tables.scaling(scaling_prediction([alone], "weak", "title"))
    )
    assert "128 samples on every 4 devices." in printed(
        *scaling_tables.scaling(scaling_prediction([shared], "weak", "title"))
    )


def test_what_does_not_fit_is_loud():
    """20 GiB on a device of 16."""
    study = scaling_prediction([prediction(8, 0.2, used_gib=20.0)], "weak", "title")

    assert "20.0 GiB   NO" in printed(*scaling_tables.scaling(study))


@pytest.mark.parametrize("tokens", [None, 1.15e6])
def test_figures_of_a_long_run_stay_on_their_lines(tokens: float | None):
    """Minutes, hours, days and thousands of devices at once: no cell is broken at 80 columns."""
    first, last = (
        replace(prediction(count, seconds, used_gib=15.8), tokens_per_second=tokens)
        for count, seconds in ((8, 7.1), (16384, 35.9))
    )
    first = replace(first, epoch_seconds=2570.0, run_seconds=39.5 * 3600)
    last = replace(last, epoch_seconds=3590.0, run_seconds=47.123 * 3600, peak_memory_bytes=2**38)
    study = scaling_prediction([first, last], "strong", "title")

    lines = printed(*scaling_tables.scaling(study)).splitlines()

    assert max(map(len, lines)) <= 80
    rows = [next(line for line in lines if line.startswith(f"{n} ")) for n in (8, 16384)]
    cells = [" ".join(row.split()) for row in rows]
    assert cells[0].startswith("8 7.1 s 42.8 min 39.5 h 36.1 ")
    assert cells[1].startswith("16384 35.9 s 59.8 min 47.1 h 14.6 k ")
    assert [row.rstrip()[-15:] for row in rows] == ["  15.8 GiB  yes", " 256.0 GiB  yes"]
    assert ["1.15 M" in row for row in rows] == [tokens is not None] * 2
    assert " ".join(lines).count("tokens") == (tokens is not None)


def test_times_are_written_out_where_there_is_room():
    """With minutes beside hours, as elsewhere."""
    study = scaling_prediction([prediction(8, 0.4)], "weak", "title")

    assert " 1 h 00 min " in printed(*scaling_tables.scaling(study))
