"""The folder in memory is there as long as its launcher, and not longer."""

import errno
import os
import time
from dataclasses import replace

import pytest

from scalejax.core import elastic
from scalejax.core.elastic import Change, SharedFolder, shared_folder
from scalejax.core.errors import ConfigError

CHANGE = Change(before=8, after=5, reason="process 0 was killed", step=57, since_seconds=12.5)


def test_the_folder_goes_with_its_launcher(tmp_path):
    """At its end, and also when it is interrupted: memory is not given back by itself."""

    def interrupted():
        with shared_folder(tmp_path) as shared:
            shared.copies.mkdir()
            assert shared.path.stat().st_mode & 0o77 == 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_the_next_launcher_removes_what_one_that_was_killed_left(tmp_path):
    """Which could not do so itself; those of launchers that are there stay, or are about to be, and
    what is not a folder of a launcher."""
    with shared_folder(tmp_path) as living:
        prefix = living.path.name.rpartition("-")[0]
        killed, begun = tmp_path / f"{prefix}-killed", tmp_path / f"{prefix}-begun"
        half_removed = tmp_path / f"{prefix}-half"
        for folder in (killed, begun, half_removed):
            (folder / "copies").mkdir(parents=True)
        (killed / "owner").touch()
        then = time.time() - 700
        os.utime(half_removed, (then, then))
        (tmp_path / f"{prefix}-link").symlink_to(living.path)
        with shared_folder(tmp_path):
            assert not killed.exists()
            assert not half_removed.exists()
        assert living.path.exists()
        assert begun.exists()


def test_a_launcher_goes_on_where_memory_is_full(tmp_path, monkeypatch):
    """With temporary files, where no copies are made, and says so; others see no such folder."""
    memory, instead = tmp_path / "memory", tmp_path / "instead"
    for folder in (memory, instead):
        folder.mkdir()
    monkeypatch.setattr(elastic.tempfile, "gettempdir", lambda: str(instead))
    locked, said = elastic._locked, []

    def full(path):
        if path.parent == memory:
            raise OSError(errno.ENOSPC, "No space left on device")
        return locked(path)

    monkeypatch.setattr(elastic, "_locked", full)
    with shared_folder(memory, say=said.append) as shared:
        assert shared.path.parent == instead
    (note,) = said
    assert note.startswith("Note: no copies in memory, only checkpoints: ")
    assert "No space left" in note
    assert not [*memory.iterdir(), *instead.iterdir()]
    with pytest.raises(ConfigError, match="cannot be written"), shared_folder(memory):
        pass


def test_what_is_not_in_the_record_yet_is_kept(tmp_path):
    """Until the first process has told it; what is damaged ends no run."""
    shared = SharedFolder(tmp_path)

    assert shared.change is None
    shared.set_change(CHANGE)
    assert shared.change == CHANGE
    (tmp_path / "change.json").write_text("{")
    assert shared.change is None
    shared.set_change(None)
    assert list(tmp_path.iterdir()) == []


def test_a_change_that_cannot_be_told_ends_no_run(tmp_path, monkeypatch):
    """As where memory is full; nor is the one before told then, which is no longer true."""

    def full(*unused):
        raise ConfigError("no space left")

    shared = SharedFolder(tmp_path)
    shared.set_change(CHANGE)
    monkeypatch.setattr(elastic, "save", full)
    shared.set_change(replace(CHANGE, after=4))

    assert shared.change is None


def test_the_wish_that_others_join_can_be_taken_back(tmp_path):
    """As at each start: it was for the processes before."""
    shared = SharedFolder(tmp_path)
    for asks in (True, False):
        shared.ask_to_stop(asks=asks)
        assert shared.is_asked_to_stop == asks
