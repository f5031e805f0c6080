"""An elastic run goes on from the newest sound copy in memory, or checkpoint on the disk."""

import errno
import shutil
import signal
import time
from functools import partial

import jax
import numpy as np
import pytest

from scalejax.config.run import load_config
from scalejax.core import elastic
from scalejax.core.elastic import Change, SharedFolder
from scalejax.core.errors import ConfigError
from scalejax.training import checkpoint
from scalejax.training import copies as module
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.copies import Copies, Wish
from scalejax.training.manifest import newest, save_newest_copy
from scalejax.training.record import RunFolder, RunRecord, figures
from scalejax.training.reporter import Silent
from scalejax.training.resume import checkpoint_to_resume_from
from scalejax.training.signals import Interrupted
from scalejax.training.train import train

STATE = {"weights": np.arange(6.0, dtype=np.float32)}
ONE_COPY = 24 + 2**20
"""Bytes that a copy of it takes at most."""
RUN = """
seed = 3
[model]
name = "mlp"
hidden = [8]
[data]
name = "synthetic_images"
image_size = 4
channels = 1
classes = 3
train_examples = 48
test_examples = 12
[batch]
global_batch = 12
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
[train]
epochs = 4
log_every_steps = 1
checkpoint_every_steps = 10
evaluate_every_epochs = 4
"""


@pytest.fixture
def stores(tmp_path):
    """Copies of steps 12 and 14, and a checkpoint of step 10; opened anew by each call."""

    def opened():
        copies = Checkpoints(tmp_path / "copies", keep=2, keeps_damaged=False)
        return copies, Checkpoints(tmp_path / "checkpoints", keep=2)

    copies, checkpoints = opened()
    for store, steps in ((copies, (9, 12, 14)), (checkpoints, (10,))):
        for step in steps:
            store.save(step, jax.tree.map(jax.numpy.asarray, STATE))
        store.wait()
    return opened


def damage(folder):
    """Change a byte of the largest file of arrays."""
    files = [each for each in (folder / "state").rglob("*") if each.is_file()]
    path = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def begun(stores, said):
    """Where the next processes go on: step, and whether from a copy."""
    copies, checkpoints = stores()
    manifest, source = checkpoint_to_resume_from(checkpoints, [], say=said.append, copies=copies)
    step = manifest.step if manifest else 0
    for each in (copies, checkpoints):
        each.resume_from(step)
    return step, source is copies


def test_the_newest_copy_that_is_whole_is_gone_on_from(stores, tmp_path):
    """Two are kept. One whose writer was killed has no manifest, and does not count; one that
    differs from what was written is passed over by name; without any the checkpoint is taken. What
    does not count takes no memory any more."""
    said, copies = [], tmp_path / "copies"
    assert sorted(path.name for path in copies.iterdir()) == ["12", "14"]
    assert begun(stores, said) == (14, True)
    assert not said

    (copies / "14" / "manifest.json").unlink()
    assert begun(stores, said) == (12, True)
    assert said == ["Note: the copy of step 14 in memory is passed over: it has no manifest."]
    assert [path.name for path in copies.iterdir()] == ["12"]
    assert newest(tmp_path / "checkpoints") == 10

    damage(copies / "12")
    assert begun(stores, said) == (10, False)
    assert "step 12 in memory is passed over" in said[-1]
    assert list(copies.iterdir()) == []


def test_a_later_checkpoint_is_gone_on_from(stores, tmp_path):
    """As after a signal, at which one is saved; from the copy again where it is damaged."""
    checkpoints = stores()[1]
    checkpoints.save(20, jax.tree.map(jax.numpy.asarray, STATE))
    checkpoints.wait()

    assert begun(stores, []) == (20, False)
    damage(tmp_path / "checkpoints" / "20")
    assert begun(stores, []) == (14, True)
    assert (tmp_path / "checkpoints" / "damaged-20").exists()


def test_what_is_in_memory_alone_is_saved_before_memory_is_given_back(stores, tmp_path):
    """The newest sound copy, as a checkpoint that proves itself; not where one is as new, and
    nothing is left of one that cannot be written."""
    memory, files = tmp_path / "copies", RunFolder(path=tmp_path)
    damage(memory / "14")
    assert save_newest_copy(memory, files) == 12
    assert save_newest_copy(memory, files) is None
    assert newest(files.checkpoints) == 12
    shutil.rmtree(memory)
    copies, checkpoints = stores()
    assert begun(lambda: (copies, checkpoints), []) == (12, False)
    np.testing.assert_array_equal(checkpoints.restore(12, STATE)["weights"], STATE["weights"])

    copies.save(20, jax.tree.map(jax.numpy.asarray, STATE))
    copies.wait()
    (memory / "20" / "more").touch()
    with pytest.raises(ConfigError, match="20 cannot be written"):
        save_newest_copy(memory, files)
    assert not (files.checkpoints / "20").exists()


@pytest.fixture
def clocked(tmp_path, monkeypatch):
    """Copies every ten seconds of a clock that is set, in memory that is a folder here."""
    now = [0.0]
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    said = []
    shared = SharedFolder(tmp_path / "shared")
    shared.path.mkdir()
    made = Copies(shared, 10.0, said.append, lambda: now[0])
    made.begin(jax.tree.map(jax.numpy.asarray, STATE))
    return made, now, said


def test_copies_hold_training_up_for_a_fiftieth_at_most(clocked, monkeypatch):
    """Of the time between them, and they are not more often than asked for; the first, which has
    its checksums compiled, tells nothing."""
    copies, now, _ = clocked

    def save(step, seconds):
        slow = lambda *unused, **also: now.__setitem__(0, now[0] + seconds)  # noqa: E731
        monkeypatch.setattr(copies.store, "save", slow)
        copies.save(step, STATE, [])

    def seconds_until_due():
        begin = now[0]
        while copies.wish() == Wish.NOTHING:
            now[0] += 1
        return now[0] - begin

    assert seconds_until_due() == 10
    save(1, 5)
    assert seconds_until_due() == 10
    save(2, 0.5)
    assert seconds_until_due() == 25
    save(3, 0.1)
    assert seconds_until_due() == 10


def test_without_room_there_are_checkpoints_alone(clocked, monkeypatch):
    """Which is said once; who is to stop for others then saves one."""
    copies, now, said = clocked
    limit_memory(monkeypatch, 2 * 2**20)
    for _ in range(3):
        now[0] += 20
        assert copies.wish() == Wish.NOTHING
    copies.shared.ask_to_stop(asks=True)
    now[0] += 20

    assert copies.wish() == Wish.SAVE_AND_STOP
    assert said == [
        "Note: no copies in memory, only checkpoints: 2.0 MiB are free in "
        f"{module.MEMORY}, and copies take 3.0 MiB more."
    ]


def test_three_times_the_state_is_room_for_two_copies_and_the_next(clocked, monkeypatch):
    """Of what is free, two thirds are taken once two are kept: the room for the third is enough.
    With less there are no further copies, and the note says that there are some."""
    copies, now, said = clocked
    for step in range(1, 5):
        limit_memory(monkeypatch, (3 - min(step - 1, 2)) * ONE_COPY)
        now[0] += 20
        assert copies.wish() == Wish.COPY
        copies.save(step, jax.tree.map(jax.numpy.asarray, STATE), [])
        assert copies.wait()
    limit_memory(monkeypatch, ONE_COPY - 1)
    now[0] += 20

    assert copies.wish() == Wish.NOTHING
    (note,) = said
    assert note.startswith("Note: no copies in memory after that of step 4, only checkpoints:")


def limit_memory(monkeypatch, free):
    """Have so many bytes be free."""
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)


def full(*unused):
    """Raises what the writers of files do where memory is full."""
    raise ConfigError("no space left") from OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "part", ["make_folder", "set_newest", "_require_room", "all_gather_text", "write_manifest"]
)
def test_full_memory_ends_no_run(tmp_path, monkeypatch, part):
    """When copies are opened, gone on from, begun, also by another process, and written beside
    training: there are none from
    then on, which is said once; who is to stop for others saves a checkpoint. What was not finished
    takes no memory any more, and the copy before is kept."""
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    now, said, shared = [0.0], [], SharedFolder(tmp_path / "shared")
    shared.path.mkdir()
    state = jax.tree.map(jax.numpy.asarray, STATE)

    def later_wish():
        now[0] += 100
        return copies.wish()

    if part == "make_folder":
        monkeypatch.setattr(checkpoint, part, full)
    copies = Copies(shared, 10.0, said.append, lambda: now[0])
    if part == "set_newest":
        monkeypatch.setattr(checkpoint, part, full)
    copies.resume_from(0)
    copies.begin(state)
    copies.save(1, state, [])
    if part in ("make_folder", "set_newest"):
        assert not copies.wait()
    else:
        assert copies.wait()
        if part == "all_gather_text":
            monkeypatch.setattr(module, part, lambda text: (text, "no space left"))
        else:
            monkeypatch.setattr(Checkpoints if part[0] == "_" else checkpoint, part, full)
        copies.save(2, state, [])
        while copies.store and copies.store.is_saving:
            time.sleep(0.01)

    assert later_wish() == Wish.NOTHING
    assert not copies.wait()
    shared.ask_to_stop(asks=True)
    assert later_wish() == Wish.SAVE_AND_STOP
    (note,) = said
    after = "" if part in ("make_folder", "set_newest") else " after that of step 1"
    assert note.startswith(f"Note: no copies in memory{after}, only checkpoints: ")
    assert "o space left" in note
    kept = [] if part in ("make_folder", "set_newest") else ["1"]
    assert [path.name for path in shared.path.glob("copies/*")] == kept


@pytest.mark.slow  # three layouts are compiled
def test_a_run_goes_on_elsewhere_from_memory(tmp_path, monkeypatch):
    """On two devices until others are to join, then on four, from the copy: there is no checkpoint.
    The record has each step once, and the change with them; the figures are those of a run that was
    left alone, but for the order of sums over devices: 1e-5 after 16 updates."""
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN)
    run = partial(train, load_config(file), reporter=Silent())
    shared = SharedFolder(tmp_path / "shared")
    shared.path.mkdir()
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setenv(elastic.FOLDER, str(shared.path))
    monkeypatch.setenv(elastic.COPY_SECONDS, "60")

    shared.ask_to_stop(asks=True)
    with pytest.raises(Interrupted) as stopped:
        run(folder, device_count=2)
    assert stopped.value.code == 128 + signal.SIGTERM
    files = RunFolder(path=folder)
    assert list(files.checkpoints.iterdir()) == []
    shared.ask_to_stop(asks=False)
    shared.set_change(Change(before=2, after=4, reason="others joined", step=1, since_seconds=0.0))
    run(folder, device_count=4, resume=True)
    monkeypatch.delenv(elastic.FOLDER)
    run(tmp_path / "alone", device_count=2)

    record = RunRecord.load(folder)
    assert record.status == "completed"
    assert [line.step for line in record.training] == list(range(1, 17))
    (change,) = record.processes
    assert (change.step, change.before, change.after, change.repeated_steps) == (1, 2, 4, 0)
    assert shared.change is None
    ours, alone = figures(folder), figures(tmp_path / "alone")
    assert [row[0] for row in ours] == [row[0] for row in alone]
    np.testing.assert_allclose(
        np.array([row[1:] for row in ours], float),
        np.array([row[1:] for row in alone], float),
        rtol=1e-5,
        atol=1e-6,
    )
