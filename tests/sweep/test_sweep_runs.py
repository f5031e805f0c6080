"""Sweeps that are trained: together as alone, killed as run through."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scalejax.config.run import load_config, resolve
from scalejax.sweep.vmapped import MappedPrograms, mapped_programs, train_together
from scalejax.training import loop
from scalejax.training.mesh import build_mesh
from scalejax.training.record import (
    EvaluationMeasurement,
    MeasurementLog,
    RunFolder,
    RunRecord,
    figures,
    has_steps,
)
from scalejax.training.reporter import Silent
from scalejax.training.signals import Interrupted, StopSignals
from scalejax.training.state import state_bytes
from scalejax.training.train import train

ROOT = Path(__file__).parents[2]
RUN = """
[model]
name = "mlp"
hidden = [8]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 96
test_examples = 20
[batch]
global_batch = 8
[optimizer]
name = "sgd"
weight_decay = 1e-4
[schedule]
base_learning_rate = 0.01
[train]
epochs = 3
log_every_steps = 5
"""


@pytest.fixture
def run_file(tmp_path):
    """A small run."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ['name = "sgd"\nweight_decay = 1e-4', 'name = "lamb"'])
def test_runs_in_one_program_are_the_runs_one_by_one(run_file, tmp_path, optimizer):
    """Other seeds and other schedules, within rounding: 1e-5 after 36 steps."""
    run_file.write_text(
        RUN.replace('name = "sgd"\nweight_decay = 1e-4', optimizer) + "evaluate_every_steps = 7\n"
    )
    changes = [
        {"seed": 1, "schedule.base_learning_rate": 0.03},
        {
            "seed": 0,
            "schedule.warmup": "gradual",
            "schedule.warmup_from": "zero",
            "schedule.warmup_epochs": 1,
            "schedule.decay": "cosine",
        },
    ]
    runs = [resolve(load_config(run_file, fields), 1) for fields in changes]
    alone = [
        train(run.config, tmp_path / f"alone{i}", device_count=1, reporter=Silent())
        for i, run in enumerate(runs)
    ]
    folders = [RunFolder(path=tmp_path / f"together{i}") for i in range(len(runs))]

    train_together(runs, folders, tmp_path / "states", Silent())

    for folder, record in zip(folders, alone, strict=True):
        ours, theirs = figures(folder.path), figures(record.folder.path)
        assert RunRecord.load(folder.path).status == record.status == "completed"
        assert len(ours) == 7 + 1 + 6  # evaluations after 7, 14, 21, 28, 35, 36 steps
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert figures(folders[0].path) != figures(folders[1].path)


@pytest.mark.slow_except("20-100000.0")
@pytest.mark.parametrize(("every", "rate"), [(1, 1e6), (20, 1e5)])
def test_a_run_that_diverges_ends_as_it_does_alone(run_file, tmp_path, every, rate):
    """At the same update, for the same cause; the other one goes on as if it were alone."""
    run_file.write_text(
        RUN.replace("epochs = 3", "epochs = 2").replace("_steps = 5", f"_steps = {every}")
    )
    rates = {"small": 0.01, "huge": rate}
    runs = [
        resolve(load_config(run_file, {"schedule.base_learning_rate": rate}), 1)
        for rate in rates.values()
    ]
    folders = [RunFolder(path=tmp_path / name) for name in rates]
    alone = [
        train(run.config, tmp_path / f"alone{i}", device_count=1, reporter=Silent())
        for i, run in enumerate(runs)
    ]

    train_together(runs, folders, tmp_path / "states", Silent())

    for folder, record in zip(folders, alone, strict=True):
        ours, theirs = RunRecord.load(folder.path).statuses[-1], record.statuses[-1]
        assert (ours.status, ours.cause, ours.step) == (theirs.status, theirs.cause, theirs.step)
        steps, others = (
            [line[0] for line in figures(each)] for each in (folder.path, record.folder.path)
        )
        assert steps == others
    assert [RunRecord.load(f.path).status for f in folders] == ["completed", "diverged"]


@pytest.mark.slow  # trains several runs
def test_runs_that_have_no_room_together_train_in_halves(run_file, tmp_path, monkeypatch):
    """By the memory of the compiled program, which grows with each run; a job that is resumed
    keeps its halves, and repeats none that is finished."""
    runs = [resolve(load_config(run_file, {"seed": seed}), 1) for seed in (0, 1, 2)]
    folders = [RunFolder(path=tmp_path / f"{seed}") for seed in (0, 1, 2)]
    whole = [RunFolder(path=tmp_path / f"whole{seed}") for seed in (0, 1, 2)]
    two, three = (mapped_programs(runs[:count]).memory_bytes for count in (2, 3))
    state = state_bytes(runs[0], build_mesh(runs[0].layout))
    assert two is not None
    assert three is not None
    assert three >= two + state
    train_together(runs, whole, tmp_path / "whole", Silent(), memory_bytes=three)
    save, saved = loop.save_weights, []

    def killed_at_the_third(path, weights):
        saved.append(path)
        if len(saved) == 3:
            raise KeyboardInterrupt
        save(path, weights)

    monkeypatch.setattr(loop, "save_weights", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        train_together(runs, folders, tmp_path / "states", Silent(), memory_bytes=three - 1)
    first = [folder.measurements.read_text() for folder in folders[:2]]

    train_together(runs, folders, tmp_path / "states", Silent())

    assert [folder.measurements.read_text() for folder in folders[:2]] == first
    assert saved[2:] == [folders[2].weights] * 2
    assert not (tmp_path / "states").exists()
    for folder, other in zip(folders, whole, strict=True):
        record = RunRecord.load(folder.path)
        assert record.status == "completed"
        words = "with 0 others" if folder is folders[2] else "with 1 others"
        assert words in record.statuses[-1].message
        assert "with 2 others" in RunRecord.load(other.path).statuses[-1].message
        np.testing.assert_allclose(figures(folder.path), figures(other.path), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_runs_that_were_killed_before_their_first_state_may_yet_be_halved(
    run_file, tmp_path, monkeypatch, is_recorded
):
    """As by want of memory, which a resumed job finds less of; the folder of states is there, and
    so may be steps in the records."""
    runs = [resolve(load_config(run_file, {"seed": seed}), 1) for seed in (0, 1)]
    folders = [RunFolder(path=tmp_path / f"{seed}") for seed in (0, 1)]

    def killed(*_: object, **__: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if is_recorded:
            patched.setattr(loop.TrainingLoop, "_pause", killed)
        else:
            patched.setattr(MappedPrograms, "initial_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train_together(runs, folders, tmp_path / "states", Silent(), memory_bytes=2**40)
    assert (tmp_path / "states").exists()
    assert all(has_steps(folder.measurements) == is_recorded for folder in folders)

    train_together(runs, folders, tmp_path / "states", Silent(), memory_bytes=1)

    for folder in folders:
        last = RunRecord.load(folder.path).statuses[-1]
        assert (last.status, "with 0 others" in last.message) == ("completed", True)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("of_evaluations", [1, 3])
def test_an_evaluation_of_several_runs_that_a_signal_fell_into_is_made_again(
    run_file, tmp_path, monkeypatch, of_evaluations
):
    """Also the last one, at the end, and where a kill then left one of the runs with it; the
    records are then as if nothing had happened."""
    runs = [resolve(load_config(run_file, {"seed": seed}), 1) for seed in (0, 1)]
    cut, whole = (
        [RunFolder(path=tmp_path / f"{name}{seed}") for seed in (0, 1)] for name in ("cut", "whole")
    )
    train_together(runs, whole, tmp_path / "whole", Silent())
    batches = []

    def agreed(signals, kind):
        if kind != "evaluating":
            return 0
        batches.append(kind)  # 20 examples, 8 at a time: the second of three
        return signal.SIGTERM if len(batches) == 3 * of_evaluations - 1 else 0

    with monkeypatch.context() as patched:
        patched.setattr(StopSignals, "agreed", agreed)
        with pytest.raises(Interrupted):
            train_together(runs, cut, tmp_path / "states", Silent())
    before = RunRecord.load(cut[0].path)
    assert len(before.evaluations) == of_evaluations - 1
    assert (before.status, before.statuses[-1].step) == ("interrupted", 12 * of_evaluations)
    append, evaluated = MeasurementLog.append, []

    def killed_at_the_second(log, line):
        evaluated.extend([line] if isinstance(line, EvaluationMeasurement) else [])
        if len(evaluated) == 2:
            raise KeyboardInterrupt
        append(log, line)

    with monkeypatch.context() as patched:
        patched.setattr(MeasurementLog, "append", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            train_together(runs, cut, tmp_path / "states", Silent())
    left = [len(RunRecord.load(folder.path).evaluations) for folder in cut]
    assert left == [of_evaluations, of_evaluations - 1]

    train_together(runs, cut, tmp_path / "states", Silent())

    for ours, theirs in zip(cut, whole, strict=True):
        assert RunRecord.load(ours.path).status == "completed"
        assert figures(ours.path) == figures(theirs.path)


SWEEP = (
    *("-V", "batch.global_batch=[8,16]"),
    *(
        "-E",
        '{"condition": {"batch.global_batch": 16}, "cases": [{}, {"optimizer.momentum": 0.5}]}',
    ),
)


@pytest.fixture(autouse=True, scope="module")
def programs(tmp_path_factory, compiles_quickly):
    """What is started compiles a program once, where another has not compiled it before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


def start(run_file, folder, *flags):
    """Start a sweep in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "scalejax", "sweep", run_file, "--folder", folder, *SWEEP, *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines_written(folder):
    """Lines in the records of the runs of a sweep."""
    return sum(
        path.read_bytes().count(b"\n") for path in Path(folder).glob("runs/*/measurements.jsonl")
    )


def wait_for_lines(process, folder, count):
    """Return once so many more lines are written, or the sweep has ended."""
    before = lines_written(folder)
    while process.poll() is None and lines_written(folder) < before + count:
        time.sleep(0.01)


def finish(process):
    """Wait for a sweep that is to succeed."""
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow  # four sweeps are begun, in processes that import JAX
def test_a_sweep_that_was_interrupted_and_killed_ends_with_the_same_tables(run_file, tmp_path):
    """Ctrl-C and SIGKILL reach the command alone; its workers save and end, or die with it.

    Of three runs nothing is lost, none is trained twice that was finished, the files are the same.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("-P", "train.epochs=16", "--one-by-one")
    finish(start(run_file, whole, *flags))
    lines = lines_written(whole)
    process = start(run_file, cut, *flags)
    wait_for_lines(process, cut, lines // 12)

    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)

    assert process.returncode == 130
    assert "the same command with --resume continues" in said
    assert "Traceback" not in said
    assert_nothing_runs(cut)
    # Of two workers one may have been stopped before its run began: it has no record yet.
    begun = (path.parent for path in cut.glob("runs/*/measurements.jsonl"))
    assert "interrupted" in {RunRecord.load(path).status for path in begun}

    process = start(run_file, cut, *flags, "--resume")
    wait_for_lines(process, cut, random.randrange(lines // 12, lines // 2))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_nothing_runs(cut)
    records = {path: path.read_text() for path in cut.glob("runs/*/measurements.jsonl")}

    finish(start(run_file, cut, *flags, "--resume"))

    assert_same_tables(cut, whole)
    statuses = (RunRecord.load(path).statuses for path in (cut / "runs").iterdir())
    assert "resumed" in {change.status for changes in statuses for change in changes}
    for path, text in records.items():
        if '"completed"' in text:
            assert path.read_text() == text


def assert_same_tables(some, others):
    """Byte for byte."""
    for name in ("results.parquet", "evaluations.parquet"):
        assert (some / name).read_bytes() == (others / name).read_bytes(), name


def assert_nothing_runs(folder):
    """No command names the folder for longer than its last breath takes."""
    end = time.monotonic() + 60
    while (found := subprocess.run(["pgrep", "-f", folder], capture_output=True)).stdout:
        assert time.monotonic() < end, found.stdout
        time.sleep(0.05)


def test_a_kill_between_the_ends_of_two_runs_repeats_neither(run_file, tmp_path, monkeypatch):
    """The first has ended, the second has not: only the end of the second is left to do."""
    runs = [resolve(load_config(run_file, {"seed": seed}), 1) for seed in (0, 1)]
    folders = [RunFolder(path=tmp_path / f"{seed}") for seed in (0, 1)]
    save, saved = loop.save_weights, []

    def killed_at_the_second(path, weights):
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(path, weights)

    monkeypatch.setattr(loop, "save_weights", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        train_together(runs, folders, tmp_path / "states", Silent())
    first = folders[0].measurements.read_text()
    assert '"completed"' in first
    second = figures(folders[1].path)

    train_together(runs, folders, tmp_path / "states", Silent())

    assert folders[0].measurements.read_text() == first
    assert figures(folders[1].path) == second
    assert [RunRecord.load(f.path).status for f in folders] == ["completed", "completed"]
    assert saved == [folders[0].weights, folders[1].weights, folders[1].weights]
    assert not (tmp_path / "states").exists()
