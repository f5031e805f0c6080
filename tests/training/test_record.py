"""The record of a run survives what happens to runs."""

import io
import math
from contextlib import closing
from dataclasses import replace

import pytest

from scalejax.core.errors import ConfigError
from scalejax.training import reporter as reporter_module
from scalejax.training.record import (
    EvaluationMeasurement,
    MeasurementLog,
    ProcessesChange,
    RunFolder,
    RunRecord,
    StatusChange,
    TrainMeasurement,
    finite,
    has_steps,
)
from scalejax.training.reporter import PlainLines


def update(step, loss: float | None = 0.5):
    """The measurement of one update."""
    return TrainMeasurement(
        step=step,
        epoch=step / 10,
        loss=loss,
        accuracy=0.1,
        learning_rate=0.02,
        step_seconds=0.003,
        samples_per_second=100.0,
        elapsed_seconds=float(step),
    )


EVALUATION = EvaluationMeasurement(
    step=3,
    epoch=1.0,
    test_loss=0.7,
    test_accuracy=0.8,
    examples=21,
    seconds=0.1,
    elapsed_seconds=3.5,
)
CHANGE = ProcessesChange(
    step=2,
    before=8,
    after=5,
    reason="process 0 was killed by SIGKILL",
    repeated_steps=7,
    seconds=12.5,
    elapsed_seconds=2.5,
)
STARTED = StatusChange(step=0, status="started", message="on 8 devices", elapsed_seconds=0.0)


def write(path, *measurements, after_step=None):
    """Append `measurements` to the record in the folder `path`."""
    log = MeasurementLog(RunFolder(path=path).measurements, after_step=after_step)
    with closing(log):
        for measurement in measurements:
            log.append(measurement)


def test_what_is_written_is_read(tmp_path):
    """Every kind of line survives the round trip, to the last bit of a float."""
    odd = update(1, loss=0.1 + 0.2)

    write(tmp_path, STARTED, odd, CHANGE, EVALUATION)
    record = RunRecord.load(tmp_path)

    assert record.measurements == (STARTED, odd, CHANGE, EVALUATION)
    assert record.processes == (CHANGE,)
    assert record.training == (odd,)
    assert record.evaluations == (EVALUATION,)
    assert record.status == "started"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null(tmp_path, value):
    """JSON has no word for NaN; strict readers in other languages must not choke."""
    write(tmp_path, update(1, loss=finite(value)))

    assert '"loss": null' in RunFolder(path=tmp_path).measurements.read_text()
    assert RunRecord.load(tmp_path).training[0].loss is None


def test_a_line_cut_off_by_a_kill_is_passed_over(tmp_path):
    """Half a last line is no damage; the next session writes over it."""
    write(tmp_path, update(1), update(2))
    path = RunFolder(path=tmp_path).measurements
    path.write_text(path.read_text()[:-20])

    assert RunRecord.load(tmp_path).training == (update(1),)
    write(tmp_path, update(2), after_step=2)
    assert RunRecord.load(tmp_path).training == (update(1), update(2))


def test_resuming_removes_what_will_be_measured_again(tmp_path):
    """No step stands twice in the record of a resumed run."""
    write(tmp_path, STARTED, update(1), update(2), update(3), EVALUATION, update(4))

    with closing(MeasurementLog(RunFolder(path=tmp_path).measurements, after_step=2)) as log:
        elapsed = log.elapsed_seconds

    assert RunRecord.load(tmp_path).measurements == (STARTED, update(1), update(2))
    assert elapsed == 2.0


@pytest.mark.parametrize("is_proved", [True, False])
def test_changes_of_processes_are_kept_whatever_is_measured_again(tmp_path, is_proved):
    """They happened: a second loss, after which the run goes on from an earlier step, does not
    take the first one out of the record; nor is it a step of the run."""
    write(tmp_path, STARTED, update(1), update(2))
    path = RunFolder(path=tmp_path).measurements
    with closing(MeasurementLog(path, after_step=1)) as log:
        proved = log.position if is_proved else None
        log.append(CHANGE)
        log.append(update(2))

    with closing(MeasurementLog(path, after_step=1, proved=proved)):
        pass

    assert RunRecord.load(tmp_path).measurements == (STARTED, update(1), CHANGE)
    write(tmp_path / "other", STARTED, CHANGE)
    assert not has_steps(RunFolder(path=tmp_path / "other").measurements)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a measurement"),
        (
            "[]",
            "one of train, evaluation, validation, sharpness, unreadable, input, processes, status",
        ),
        ('{"kind": "gossip"}', "its kind must be one of"),
        ('{"kind": "status", "step": 1}', "status is missing"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    """Damage in the middle is no kill, and is refused with its place."""
    write(tmp_path, update(1))
    path = RunFolder(path=tmp_path).measurements
    path.write_text(path.read_text() + line + "\n" + path.read_text())

    with pytest.raises(ConfigError, match=message):
        RunRecord.load(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    """`report` of the wrong folder says so."""
    with pytest.raises(ConfigError, match=r"holds no run: it has no measurements\.jsonl"):
        RunRecord.load(tmp_path)
    assert not RunFolder(path=tmp_path).holds_run


def test_figures_fit_eighty_columns_where_there_is_no_terminal(monkeypatch):
    """On a second line, indented, where they are many; no word is cut."""
    monkeypatch.setattr(reporter_module, "_SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    reporter = PlainLines(out)
    reporter.begin(0, 100_000)
    reporter.measured(
        TrainMeasurement(
            step=50_000, epoch=12.5, loss=2.3456, accuracy=0.1, learning_rate=0.1,
            step_seconds=0.1, samples_per_second=12_345.0, elapsed_seconds=9.0,
            data_wait_seconds=0.02, gradient_norm=123.456, noise_scale=12_345.0,
            loss_scale=65_536.0, skipped_updates=3,
        )
    )  # fmt: skip

    first, *more = out.getvalue().splitlines()
    assert first.startswith("step 50000/100000: loss 2.3456, 12.3 k samples/s")
    assert more
    assert all(line.startswith("  ") for line in more)
    assert max(map(len, [first, *more])) <= 80
    assert out.getvalue().split()[-1] == "left"


def test_one_process_is_told_as_one():
    """As is one step that is trained again."""
    out = io.StringIO()
    reporter = PlainLines(out)
    reporter.begin(2, 9)
    reporter.measured(replace(CHANGE, after=1, repeated_steps=1))

    assert "continued in 1 process, 8 before" in out.getvalue()
    assert "1 step repeated" in out.getvalue()


def test_a_notebook_shows_a_loss_that_is_not_above_zero(tmp_path):
    """As losses of one's own may be; each update with a loss is a point of the curve."""
    lines = tuple(update(step, loss) for step, loss in ((1, 0.5), (2, 0.0), (3, -0.5), (4, None)))

    html = RunRecord(folder=RunFolder(path=tmp_path), measurements=lines)._repr_html_()

    assert html.count("<circle") == 3
