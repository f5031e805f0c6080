"""How long devices waited for input: counted, recorded, said with what to do."""

import re
import time
from dataclasses import replace

import pytest
from test_record import update
from test_train import run

from scalejax.config.input import InputConfig
from scalejax.config.run import load_config
from scalejax.core.units import format_seconds
from scalejax.data.readers.synthetic import SyntheticImages
from scalejax.report.terminal import tables
from scalejax.report.terminal.data import life
from scalejax.training.input_stalls import wait_in_words, wait_share, wait_with_advice
from scalejax.training.record import RunFolder, figures
from scalejax.training.run_folder import kept_prediction
from scalejax.training.sample_life import life_of


def waited(*seconds):
    """Updates of 3 ms, of which so much went by without a batch."""
    return [replace(update(step), data_wait_seconds=wait) for step, wait in enumerate(seconds)]


def test_the_share_is_of_all_updates_that_were_measured():
    """(0 + 1.5 ms) / (3 ms + 3 ms); lines of earlier versions count for nothing."""
    assert wait_share(waited(0.003, 0.0, 0.0015, None)) == pytest.approx(0.25)  # less the first
    assert wait_share(waited(0.0015)) == pytest.approx(0.5)
    assert wait_share(waited(None)) is None
    assert wait_share([]) is None


def test_a_word_is_said_from_three_percent_on():
    """Less is within what a measurement is worth."""
    assert wait_in_words(waited(0.0015)) == ", waited 50.0 % of the time for input"
    assert wait_in_words(waited(0.00008)) == ""
    assert wait_in_words(waited(None)) == ""


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        (0, 'input.workers = "auto" has processes make batches on the 4 cores'),
        (2, "input.workers can be raised to the 4 cores of this host"),
        (4, "its 4 cores are busy: smaller examples, as scalejax data convert makes"),
    ],
)
def test_the_advice_is_what_is_left_to_do(workers, advice):
    """More processes while there are cores; then less work."""
    how = InputConfig(workers=workers)

    assert wait_with_advice(waited(0.0001, 0.0), how, 4) == ""
    with_advice = wait_with_advice(waited(0.0015), how, 4)

    tuned = wait_with_advice(waited(0.0015), how, 4, is_tuned=True)
    assert "its 4 cores are busy" in tuned
    assert with_advice.startswith(", waited 50.0 % of the time for input (")
    assert re.search(advice, with_advice)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The record of a run whose batches threads make."""
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.slow
def test_a_run_with_a_slow_source_says_that_it_waited(tmp_path, monkeypatch, plain):
    """50 ms a batch and a step of a few: every line has most of it, and the end says so."""
    take = SyntheticImages.take

    def slowly(self, indices, epoch=None):
        if epoch is not None:
            time.sleep(0.05)
        return take(self, indices, epoch)

    monkeypatch.setattr(SyntheticImages, "take", slowly)
    starved = run(tmp_path / "starved")

    for line in starved.training[1:]:  # the first has what was made ahead while evaluating
        assert 0 <= (line.data_wait_seconds or -1) <= line.step_seconds
    share = wait_share(starved.training)
    assert share is not None
    assert share > 0.5
    assert "of the time for input (" in starved.statuses[-1].message
    assert figures(plain.folder.path) == figures(starved.folder.path)


def test_a_run_chooses_its_processes_and_says_why(tmp_path, plain):
    """What was chosen stands in the record, what was asked for in run.toml; a run may go on with
    another number, and all of them train alike."""
    record = run(tmp_path / "auto", {"input.workers": "auto"})
    run(tmp_path / "one", {"input.workers": 1, "train.epochs": 1})
    other = run(tmp_path / "one", resume=True)

    assert "; input.workers = 0 (samples/s: " in record.statuses[0].message
    assert "the devices take " in record.statuses[0].message
    assert load_config(RunFolder(path=tmp_path / "auto").config).input.workers == "auto"
    of_plain = figures(plain.folder.path)
    assert figures(record.folder.path) == of_plain
    assert figures(other.folder.path)[-1] == of_plain[-1]


def test_a_run_records_the_life_of_its_batches(plain, capsys):
    """A line an epoch; the table has 80 columns, and the prediction beside the measurement."""
    assert [each.epoch for each in plain.input] == [1, 2, 3]
    assert {each.batches for each in plain.input} == {plain.input[0].step}
    for each in plain.input:
        assert each.decode_seconds > 0
        assert (each.step_seconds or 0) > each.copy_seconds > 0
    prediction, measured = kept_prediction(plain.folder), plain.input[-1]
    assert prediction is not None
    known = replace(prediction, input_stages=(("decode", 0.025),))
    tables.show(life(measured, life_of(measured, known)))
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= 80
    (decode,) = [line for line in lines if line.startswith("decode ")]
    assert "25 ms" in decode
    assert "exchange" in [each.stage for each in life_of(measured, known)]
    assert [line for line in lines if line.startswith("  of it exchange ")]
    (step,) = [line for line in lines if line.startswith("compute + exchange ")]
    for seconds in (measured.step_seconds, prediction.step_seconds):
        assert format_seconds(seconds) in step
