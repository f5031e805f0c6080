"""A run does what its config says, and its folder tells the whole story."""

import importlib
import io
import json
import math
import re
import shutil
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import scalejax.training.logger
import scalejax.training.loop as loop_module
from scalejax.api import train
from scalejax.cli.main import main
from scalejax.config.run import RunConfig, load_config, resolve, with_fields
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, Damaged, DoesNotFit
from scalejax.core.heartbeat import Heartbeat
from scalejax.data.datasets import open_source
from scalejax.data.loader.loader import evaluation_batches
from scalejax.simulator.predict import Prediction
from scalejax.simulator.program import Program
from scalejax.training.evaluation import build_evaluation, trained_weights
from scalejax.training.logger import MetricsLogger
from scalejax.training.mesh import build_mesh
from scalejax.training.record import EMPTY_RECORD, RunFolder, RunRecord, StatusChange, figures
from scalejax.training.reporter import PlainLines, ProgressBar, Silent, reporter_for
from scalejax.training.resume import RunIdentity
from scalejax.training.run_folder import describe_run, refuse_other_run
from scalejax.training.time_accounting import RunClock

# `scalejax.training.train` as an attribute is the function, where the package re-exports it.
train_module = importlib.import_module("scalejax.training.train")

CONFIG = serialization.build(
    RunConfig,
    {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {
            "name": "synthetic_images",
            "image_size": 4,
            "channels": 1,
            "classes": 4,
            "train_examples": 50,
            "test_examples": 21,
        },
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
        "train": {"epochs": 3, "log_every_steps": 4},
    },
)
STEPS_PER_EPOCH = 6
HELD_OUT: dict[str, Any] = {"data.validation_fraction": 0.1}
"""Five of its examples are held out, and an epoch has a step less."""


class Listener(Silent):
    """Remembers what was measured, and what the folder held when the loop began."""

    def __init__(self, folder):
        self.folder = folder
        self.measurements = []
        self.files_at_begin = set()

    def begin(self, step, total_steps):
        """Look into the folder."""
        self.files_at_begin = {path.name for path in self.folder.iterdir()}

    def measured(self, measurement):
        """Remember."""
        self.measurements.append(measurement)


def run(folder, fields=None, *, device_count: int | None = 2, resume=False, reporter=None):
    """Train the small run with `fields` replaced."""
    config = with_fields(CONFIG, fields or {})
    return train(
        config,
        folder,
        device_count=device_count,
        resume=resume,
        reporter=reporter or Silent(),
    )


def load_newest(files):
    """Step of the newest checkpoint, as the folder says."""
    return json.loads(files.newest_checkpoint.read_text())["step"]


def contents_of(folder):
    """The bytes of every file of a run but its checkpoints."""
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def weights_of(folder, device_count=2):
    """What the run in `folder` ended with."""
    return trained_weights(resolve(CONFIG, device_count), folder)


def loss_of(weights):
    """The loss of some weights over the test data."""
    resolved = resolve(CONFIG, 2)
    evaluation = build_evaluation(resolved, build_mesh(resolved.layout))
    source = open_source(CONFIG.data, "test", seed=CONFIG.seed)
    sums = [
        evaluation.function(weights["params"], weights["model_state"], batch)
        for batch in evaluation_batches(source, evaluation.batch)
    ]
    return math.fsum(float(part["loss_sum"]) for part in sums) / len(source)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The record of the small run."""
    folder = tmp_path_factory.mktemp("finished")
    listener = Listener(folder)
    record = run(folder, reporter=listener)
    return record, listener


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """The record of the small run over five epochs, on all devices."""
    return run(tmp_path_factory.mktemp("longer"), {"train.epochs": 5}, device_count=8)


def test_the_folder_explains_itself(finished):
    """Config, program, prediction, measurements and weights are there and can be read."""
    record, _ = finished
    files = record.folder

    assert load_config(files.config).batch.global_batch == 8
    assert load_config(files.config).layout.data == 2
    assert serialization.load(Program, files.program).global_batch == 8
    assert serialization.load(Prediction, files.prediction).cluster == "this-machine"
    for path in files.path.iterdir():
        assert path.name in files.readme.read_text() or path == files.readme
    assert sorted(int(path.name) for path in files.checkpoints.iterdir())[-2:] == [12, 18]
    assert load_newest(files) == 18


def test_the_prediction_is_written_before_training_starts(finished):
    """What is held against the measurement cannot have seen it."""
    _, listener = finished

    assert {"run.toml", "program.json", "prediction.json"} <= listener.files_at_begin


def test_the_record_holds_updates_evaluations_and_turns(finished):
    """Every fourth update and the last, an evaluation per epoch, begin and end."""
    record, listener = finished

    assert [m.step for m in record.training] == [4, 8, 12, 16, 18]
    assert [m.step for m in record.evaluations] == [6, 12, 18]
    assert [m.status for m in record.statuses] == ["started", "completed"]
    assert list(record.measurements) == listener.measurements
    for package in ("scalejax", "jax"):
        assert f"{package} {version(package)}" in record.statuses[0].message
    elapsed = [m.elapsed_seconds for m in record.measurements]
    assert elapsed == sorted(elapsed)
    assert all(m.step_seconds > 0 for m in record.training)
    assert all(m.epoch == m.step / STEPS_PER_EPOCH for m in record.training)


def test_devices_that_stay_idle_are_named(tmp_path):
    """A layout of 2 where 8 are; none is idle where as many are asked for."""

    class Hearing(Silent):
        def __init__(self):
            self.said = []

        def say(self, text):
            self.said.append(text)

    fields = {"layout.data": 2, "train.epochs": 1}
    hearing = {count: Hearing() for count in (None, 2)}
    for count, reporter in hearing.items():
        run(tmp_path / str(count), fields, device_count=count, reporter=reporter)

    note = "Note: the layout uses 2 of 8 devices; the others stay idle."
    assert note in hearing[None].said
    assert not any("idle" in text for text in hearing[2].said)


def test_every_test_example_counts_once(finished):
    """21 examples in batches of 8: the accuracy is a number of 21sts."""
    record, _ = finished

    for evaluation in record.evaluations:
        assert evaluation.examples == 21
        hits = evaluation.test_accuracy * 21
        assert hits == pytest.approx(round(hits), abs=1e-6)


def test_the_same_run_on_other_devices_gives_the_same_losses(finished, longer):
    """Data order and loss do not depend on the number of devices, but for float32 rounding."""
    record, _ = finished

    for one, other in zip(record.training[:4], longer.training[:4], strict=True):
        assert one.step == other.step
        assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_the_record_names_what_the_batch_changed(tmp_path):
    """Its first line holds every hyper-parameter that the scaling rule touched."""
    fields = {"schedule.scaling": "sqrt", "schedule.reference_batch": 2, "train.epochs": 1}

    record = run(tmp_path / "run", fields)

    (first, *_) = (each for each in record.measurements if isinstance(each, StatusChange))
    assert first.message.endswith("; learning_rate scaled from 0.1 to 0.2")


def test_a_second_run_in_the_same_folder_is_refused(finished):
    """Nothing is written over without being asked."""
    record, _ = finished
    before = record.folder.measurements.read_text()

    with pytest.raises(ConfigError, match="already holds a run: continue it with --resume"):
        run(record.folder.path)

    assert record.folder.measurements.read_text() == before
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(path=record.folder.path / "seen by the first process alone").refuse_second_run()


def test_resuming_where_there_is_no_run_is_refused(tmp_path):
    """A mistyped folder is no reason to begin anew."""
    with pytest.raises(ConfigError, match="holds no run to resume"):
        run(tmp_path / "elsewhere", resume=True)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seed": 7}, "seed=7 (was 0)"),
        ({"optimizer.momentum": 0.5}, "optimizer.momentum=0.5 (was 0.9)"),
        ({"batch.global_batch": 4}, "batch.global_batch=4 (was 8)"),
        ({"model.hidden": [9]}, "model.hidden=[9] (was [8])"),
        ({"train.epochs": 4, "schedule.decay": "cosine"}, "train.epochs=4 (was 3)"),
    ],
)
def test_resuming_with_another_config_is_refused(finished, fields, named):
    """What would change the figures is named; the run stays as it is."""
    record, _ = finished

    with pytest.raises(ConfigError, match="holds a run of another config") as caught:
        run(record.folder.path, fields, resume=True)

    assert named in str(caught.value)


@pytest.mark.slow
def test_a_run_can_be_made_longer_on_other_devices(finished, longer, tmp_path):
    """With a constant rate, three epochs and then two more are five."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")

    record = run(folder, {"train.epochs": 5}, device_count=4, resume=True)

    assert serialization.load(Prediction, record.folder.prediction).device_count == 4
    assert dict(serialization.load(Program, record.folder.program).mesh_axes)["data"] == 4
    statuses = [change.status for change in record.statuses]
    assert statuses == ["started", "completed", "resumed", "completed"]
    assert [m.step for m in record.evaluations] == [6, 12, 18, 24, 30]
    for one, other in zip(record.evaluations, longer.evaluations, strict=True):
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
def test_every_process_resumes_with_the_same_record(finished, tmp_path, monkeypatch, is_first):
    """Lines after the checkpoint are gone for all, also where the first has not cut them yet."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    files, lines_at_barrier = RunFolder(path=folder), []
    monkeypatch.setattr(scalejax.training.logger, "is_first", lambda: is_first)
    monkeypatch.setattr(
        scalejax.training.logger,
        "sync_global_devices",
        lambda name: lines_at_barrier.append(len(RunRecord.load(folder).measurements)),
    )

    logger = MetricsLogger(files, Silent(), Heartbeat(None), RunClock(), after_step=12)
    logger.close()

    expected = tuple(m for m in finished[0].measurements if m.step <= 12)
    assert logger.earlier == expected
    whole = len(finished[0].measurements)
    assert lines_at_barrier == [len(expected) if is_first else whole]


def test_the_record_is_read_when_all_processes_have_ended(tmp_path, monkeypatch):
    """What the first process wrote last is in the record of the others too."""
    said = []

    def barrier(name):
        status = RunRecord.load(tmp_path / "run").status
        said.append((name, status))

    for module in (scalejax.training.logger, train_module):
        monkeypatch.setattr(module, "sync_global_devices", barrier)

    run(tmp_path / "run", {"train.epochs": 1})

    assert said == [("the record is cut", None), ("the record is whole", "completed")]


def test_another_mode_is_predicted_again_and_the_same_is_not(finished, tmp_path):
    """The prediction beside a config is of that config."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    files = RunFolder(path=folder)
    files.prediction.write_text(before := files.prediction.read_text() + "\n")

    run(folder, resume=True)
    assert files.prediction.read_text() == before

    run(folder, {"layout.mode": "shard_map"}, resume=True)
    assert files.prediction.read_text() != before


def test_a_run_that_diverges_ends_and_says_so(tmp_path):
    """A loss that is not finite is null in the record, ends the run, and is no error."""
    record = run(tmp_path / "run", {"schedule.base_learning_rate": 1e6, "train.log_every_steps": 1})

    lines = record.folder.measurements.read_text().splitlines()
    assert record.status == "diverged"
    assert record.training[-1].loss is None
    assert record.training[-1].step < 3 * STEPS_PER_EPOCH
    assert record.statuses[-1].cause == "not_finite"
    assert not record.folder.weights.exists()  # which somebody might take for a result
    for line in lines:
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_the_command_of_a_run_that_diverges_ends_with_its_code(tmp_path):
    """And takes the weights of an earlier session with it, which was completed."""
    rises = {"decay": "step", "decay_epochs": [1.5], "decay_factor": 9e8}
    schedule = {"base_learning_rate": 1e-3, **rises}
    folder = run(tmp_path / "run", {"train.epochs": 1, "schedule": schedule}).folder.path
    words = ["train", str(folder / "run.toml"), "--folder", str(folder), "--resume"]
    assert (folder / "weights").exists()

    with pytest.raises(SystemExit) as ended:
        main([*words, "--train.epochs", "6"])

    assert ended.value.code == 3
    assert not (folder / "weights").exists()


def test_early_stopping_ends_the_run_with_the_best_weights(tmp_path):
    """A rate that makes it worse in the end: what is left has the lowest loss there was."""
    fields = {
        "train.epochs": 30,
        "train.keep_checkpoints": 1,
        "schedule.base_learning_rate": 0.1,
        "data.validation_fraction": 0.2,
        "train.early_stopping": {"patience": 2},
    }

    record = run(tmp_path / "run", fields)

    losses = [validation.validation_loss or math.inf for validation in record.validations]
    best = record.validations[-3]
    assert record.status == "stopped_early"
    assert losses.index(min(losses)) == len(losses) - 3
    (tested,) = record.evaluations
    assert (tested.step, tested.chosen_step) == (record.validations[-1].step, best.step)
    assert tested.chosen_by == "validation_loss"
    assert loss_of(weights_of(record.folder.path)) == tested.test_loss


def test_a_table_that_run_toml_lost_is_told_by_its_name(finished):
    """Early stopping is a table that may be absent: without it the run ends with other weights."""
    fields: dict[str, Any] = {**HELD_OUT, "train.early_stopping": {"patience": 50}}
    stopping = with_fields(CONFIG, fields)
    files = finished[0].folder
    plain = with_fields(CONFIG, HELD_OUT)
    with_it, without = (RunIdentity.of(resolve(each, 2), files) for each in (stopping, plain))

    for one, other in ((with_it, without), (without, with_it)):
        saved = one.at(6, EMPTY_RECORD, None)
        one.require_same(6, saved, files)
        with pytest.raises(ConfigError, match=r"a config other .*train\.early_stopping"):
            other.require_same(6, saved, files)


def at(folder, step, name="manifest.json"):
    """A file of a checkpoint."""
    return folder / "checkpoints" / str(step) / name


def cut_record(folder, lines):
    """Leave some of the lines of a record; it still says that the run is completed."""
    path = folder / "measurements.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines(kept)))


def test_a_report_says_that_a_completed_run_has_too_few_lines(finished, tmp_path):
    """Its last status alone would be believed."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    page = tmp_path / "report.html"
    main(["report", str(folder), "--output", str(page)])
    assert "is damaged" not in page.read_text()

    cut_record(folder, lambda lines: [*lines[:3], *lines[4:]])
    main(["report", str(folder), "--output", str(page)])

    assert RunRecord.load(folder).status == "completed"
    # shorter than at the checkpoint, if what was written after it is shorter than the lost line
    assert re.search("run is damaged: .*(is not what was written|bytes)", page.read_text())


PASSED_OVER = {
    "a file gone": (lambda folder: at(folder, 18, "state/manifest.ocdbt").unlink(), [18]),
    "an empty record": (lambda folder: cut_record(folder, lambda lines: []), [18, 12, 6]),
    "a line of the record gone": (
        lambda folder: cut_record(folder, lambda lines: [*lines[:-4], *lines[-3:]]),
        [18],
    ),
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_damaged_run_goes_on_where_checkpoint_and_record_are_sound(finished, tmp_path, name):
    """Each checkpoint that does not count is named with the reason, and the run ends bit for bit as
    if nothing had happened; or it is refused, and nothing is changed."""
    damage, passed_over = PASSED_OVER[name]
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    kept = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    passed_over = [step for step in passed_over if step in kept]
    damage(folder)
    before = contents_of(folder)
    said = io.StringIO()

    if passed_over == kept[::-1]:
        with pytest.raises(Damaged, match=r"steps are recorded .* --start-over") as refused:
            run(folder, resume=True)
        assert contents_of(folder) == before
        assert refused.value.exit_code == 4
        train(CONFIG, folder, device_count=2, resume=True, start_over=True, reporter=Silent())
    else:
        run(folder, resume=True, reporter=PlainLines(said))
        for step in passed_over:
            assert f"checkpoint {step} is passed over: " in said.getvalue()

    assert figures(folder) == figures(finished[0].folder.path)
    assert same_weights(folder, finished[0].folder.path)


def same_weights(folder, other):
    """Whether two runs ended with the same bits."""
    pairs = zip(
        jax.tree.leaves(weights_of(folder)), jax.tree.leaves(weights_of(other)), strict=True
    )
    return all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_by_itself(finished, tmp_path):
    """It has recorded steps, which somebody trained; and a new run does not take what is left."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    before = contents_of(folder)

    with pytest.raises(Damaged, match=r"no checkpoint in .* verifies \(18: it is gone\)"):
        run(folder, resume=True)
    assert contents_of(folder) == before

    other = shutil.copytree(finished[0].folder.path, tmp_path / "other")
    for name in ("run.toml", "measurements.jsonl"):
        (other / name).unlink()
    with pytest.raises(ConfigError, match="holds checkpoints of a run that is no longer here"):
        run(other)


def test_a_checkpoint_of_another_config_is_refused(finished, tmp_path):
    """A field of run.toml that turned on the disk is not trained on: it is told by its name."""
    folder = shutil.copytree(finished[0].folder.path, tmp_path / "run")
    path = folder / "run.toml"
    path.write_text(
        path.read_text().replace("base_learning_rate = 0.1", "base_learning_rate = 0.3")
    )

    with pytest.raises(
        ConfigError, match=r"a config other .*: schedule\.base_learning_rate=0\.3 \(was 0\.1\)"
    ):
        run(folder, {"schedule.base_learning_rate": 0.3}, resume=True)


def test_resuming_with_fewer_epochs_than_are_trained_is_refused(finished):
    """What is trained cannot be taken back; the run stays as it is."""
    folder = finished[0].folder.path
    before = contents_of(folder)

    with pytest.raises(
        ConfigError, match=r"train\.epochs=2 is refused: 3 are trained; give at least 3"
    ):
        run(folder, {"train.epochs": 2}, resume=True)

    assert contents_of(folder) == before


def test_evaluations_may_be_a_number_of_steps_apart(tmp_path):
    """Every fourth step, whatever an epoch is, and the last."""
    record = run(tmp_path / "run", {"train.evaluate_every_steps": 4})

    assert [m.step for m in record.evaluations] == [4, 8, 12, 16, 18]


@pytest.mark.parametrize(("epochs_before", "is_refused"), [(3, True), (4, False)])
def test_early_stopping_must_see_what_a_longer_run_would_show(tmp_path, epochs_before, is_refused):
    """An evaluation after a last odd epoch would count as one without improvement."""
    stopping = HELD_OUT | {
        "train.evaluate_every_epochs": 2,
        "train.early_stopping": {"patience": 5},
    }
    before, after = (
        resolve(with_fields(CONFIG, {**stopping, "train.epochs": epochs}), 2)
        for epochs in (epochs_before, 6)
    )
    folder = RunFolder(path=tmp_path)
    describe_run(folder, before, "scalejax train")

    if is_refused:
        with pytest.raises(ConfigError, match=r"train\.epochs=6 is refused: .* keep 3"):
            refuse_other_run(folder, after)
    else:
        refuse_other_run(folder, after)


def test_a_run_that_stops_early_at_no_line_of_the_record_can_have_diverged(tmp_path):
    """No line says so: it is judged by the loss of the last update and by the last test loss."""
    fields = {
        "train.epochs": 9,
        "train.log_every_steps": 1000,
        "data.validation_fraction": 0.1,
        "train.early_stopping": {"patience": 2},
        "schedule.base_learning_rate": 1e6,
    }

    record = run(tmp_path / "run", fields)

    assert record.statuses[-1].step < 9 * STEPS_PER_EPOCH
    assert record.training == ()
    assert record.status == "diverged"


def test_a_mesh_larger_than_the_machine_is_refused_before_anything_is_written(tmp_path):
    """The folder of a run that cannot be is not made."""
    with pytest.raises(DoesNotFit, match="takes 16 devices"):
        run(tmp_path / "run", {"batch.global_batch": 16}, device_count=16)
    assert not (tmp_path / "run").exists()


def test_missing_weights_are_refused_before_anything_compiles(tmp_path, monkeypatch):
    """Which takes minutes for such a network."""
    monkeypatch.setattr("scalejax.models.pretrained.PACKAGE", "no-such-package")
    monkeypatch.setattr(train_module, "compile_run", lambda run, mesh: pytest.fail("compiled"))
    model = {"name": "efficientnet_lite0", "pretrained": "imagenet"}

    with pytest.raises(ConfigError, match="pip install no-such-package"):
        run(tmp_path / "run", {"model": model, "data.image_size": 32, "data.channels": 3})
    assert not (tmp_path / "run").exists()


def test_a_warmup_that_the_run_does_not_finish_is_said_at_its_start(tmp_path, capsys):
    """By the scaled length: with "legw", twice the batch has twice the epochs."""
    fields = {"schedule.scaling": "legw", "schedule.reference_batch": 4, "train.epochs": 1}
    warmup = {"schedule.warmup": "gradual", "schedule.warmup_epochs": 0.75}

    run(tmp_path / "run", fields | warmup, reporter=PlainLines(sys.stderr))

    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("Note: the warmup of 1.5 epochs is longer than the run of 1:")


def test_a_run_on_one_device_says_so_in_the_singular(tmp_path):
    """Without a mesh of which every axis is 1."""
    record = run(tmp_path / "run", {"train.epochs": 1}, device_count=1)

    assert record.statuses[0].message.startswith("on 1 device; scalejax ")


def test_plain_lines_tell_the_same_story(finished, capsys):
    """Where there is no terminal: one line per evaluation and turn, nothing that moves."""
    record, _ = finished
    reporter = reporter_for(sys.stdout)
    assert isinstance(reporter, PlainLines)

    reporter.begin(0, 18)
    for measurement in record.measurements:
        reporter.measured(measurement)
    reporter.end()

    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    lines = printed.replace("\n  ", " ").splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("started: on 2 devices (data=2)")
    assert lines[1].startswith("epoch 1, step 6/18: test loss ")
    ending = r"completed: 18 steps in [^;]+; median step [\d.]+ \w+, predicted [\d.]+ \w+"
    assert re.fullmatch(rf"{ending}( \(\d+ times the predicted step: virtual .*\))?", lines[-1])
    assert RunRecord.load(record.folder.path).status == "completed"


def test_a_terminal_is_told_of_the_compiler(monkeypatch):
    """With the time it has taken; what is drawn is taken away when it is done."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    reporter = reporter_for(terminal)

    with reporter.compiling():
        pass

    drawn = terminal.getvalue()
    assert re.search(r"compiling\b.*0:00:00", drawn)
    assert drawn.endswith("\x1b[2K")


def test_lines_above_the_bar_fit_the_terminal(monkeypatch):
    """Broken between words; a path stays whole."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    terminal, path = io.StringIO(), "runs/" * 12 + "checkpoint"

    ProgressBar(terminal).say(f"stopped early: no validation loss was lower for 3 epochs: {path}")

    lines = terminal.getvalue().splitlines()
    assert lines[:2] == ["stopped early: no validation loss was", "  lower for 3 epochs:"]
    assert [line.strip() for line in lines[2:]] == [path]


LLAMA = """
[model]
name = "llama3-8b"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn_hidden = 48
remat = "selective"

[data]
name = "synthetic_tokens"
tokens = 8
vocabulary = 32
train_examples = 64
test_examples = 8

[batch]
global_batch = 16

[optimizer]
name = "adamw"

[schedule]
base_learning_rate = 0.01

[train]
epochs = 1

[layout]
tensor = 2
"""


@pytest.mark.slow  # conformance trains llama over every axis, and other runs go on
def test_a_small_llama_trains_and_goes_on(tmp_path):
    """Named as published, split over tensor; its stacked blocks survive a checkpoint."""
    (tmp_path / "run.toml").write_text(LLAMA)
    config, longer = (load_config(tmp_path / "run.toml", {"train.epochs": n}) for n in (1, 2))
    train(config, tmp_path / "run", device_count=2, reporter=Silent())

    record = train(longer, tmp_path / "run", device_count=2, resume=True, reporter=Silent())

    statuses = [change.status for change in record.statuses]
    assert statuses == ["started", "completed", "resumed", "completed"]
    assert record.statuses[-1].step == 8


@pytest.mark.parametrize(("together", "shares"), [("", [3]), ("; beside run 1", [])])
def test_memory_is_shared_with_input_workers_only_by_a_run_that_has_some(
    together, shares, monkeypatch
):
    """Runs in one program have none."""
    found = []
    source = SimpleNamespace(share_of=found.append)
    monkeypatch.setattr(loop_module, "open_examples", lambda *words: source)
    run = resolve(with_fields(CONFIG, {"input.workers": 2}), 1)

    heartbeat = SimpleNamespace(reads_a_store=lambda seconds: None)
    each: Any = SimpleNamespace(together=together, reporter=None, heartbeat=heartbeat)
    loop_module.TrainingLoop([run], each, each, [each], each, each, resume_command="")

    assert found == shares
