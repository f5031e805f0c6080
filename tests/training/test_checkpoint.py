"""A state that was saved comes back bit for bit, or is refused in one sentence."""

import gc
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalejax.core.errors import CheckpointMismatch, ConfigError, Damaged, Unavailable
from scalejax.training import checkpoint as module
from scalejax.training.checkpoint import Checkpoints, load_weights, save_weights
from scalejax.training.checksums import checksums
from scalejax.training.manifest import (
    RunAtStep,
    StoppingState,
    read_manifest,
    set_newest,
    write_manifest,
)
from scalejax.training.record import EMPTY_RECORD
from scalejax.training.state import TrainState


def state_on(devices, *, optimizer=None, width=8, value=0.0):
    """A small state whose kernel is divided over `devices`."""
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    kernel = np.arange(width * 4, dtype=np.float32).reshape(width, 4) / 3 + value
    params = {
        "dense": {"kernel": jax.device_put(kernel, split)},
        "bias": jax.device_put(np.array([0.1, np.nan], np.float32), whole),
    }
    opt_state = (optimizer or optax.sgd(0.1, momentum=0.9)).init(params)
    return TrainState(
        step=jax.device_put(np.int32(3), whole),
        params=params,
        model_state={},
        opt_state=jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), opt_state),
    )


def shapes_of(state):
    """Shapes and shardings of a state, as a `Step` states them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(restored, state):
    """The two trees hold the same bits."""
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def open_files():
    """Files that this process holds open, once what nobody refers to any more is gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow  # writes many checkpoints
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_many_checkpoints_hold_no_more_files_and_threads_than_few(tmp_path):
    """A run of a month saves some thousand times."""
    state = state_on(1)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        held = []
        for step in range(1, 7):
            checkpoints.save(step, state)
            checkpoints.wait()
            held.append((open_files(), threading.active_count()))
    assert held[-1] <= held[1]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_state_comes_back_bit_for_bit_on_any_number_of_devices(tmp_path, devices):
    """Saved on four devices, restored on others: the same bits where the new mesh wants them."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state_on(4))
    like = shapes_of(state_on(devices))

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        restored = checkpoints.restore(3, like)

    assert_same(restored, state_on(4))
    assert restored.params["dense"]["kernel"].sharding == like.params["dense"]["kernel"].sharding


def test_training_goes_on_while_a_state_is_written(tmp_path):
    """The next updates reuse the state's memory; what is written is the state as it was."""
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = state_on(8, width=8192)
    expected = jax.tree.map(np.array, state)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state)
        for _ in range(5):
            state = update(state)
        restored = checkpoints.restore(3, shapes_of(state))

    assert_same(restored, expected)


def test_the_latest_the_best_and_the_pinned_are_kept(tmp_path):
    """A worse metric never deletes the newest; a state without metric is not kept for ever."""
    accuracies = {1: 0.2, 2: 0.9, 3: 0.5, 4: None, 5: 0.9, 6: None, 7: 0.1, 8: 0.3}

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, accuracy in accuracies.items():
            if step == 3:
                checkpoints.pinned_step = 3
            checkpoints.save(step, state_on(2), validation_accuracy=accuracy)
        checkpoints.wait()

        assert checkpoints.steps == (2, 3, 7, 8)
        assert checkpoints.latest_step == 8
    on_disk = {int(path.name) for path in tmp_path.iterdir()}
    assert on_disk == {2, 3, 7, 8}


@pytest.mark.parametrize("is_opened_anew", [False, True])
def test_what_a_kept_checkpoint_needs_is_kept_with_it(tmp_path, is_opened_anew):
    """Early stopping ends with the best epoch: a run that goes back to the checkpoint before one
    with a better epoch needs that of the best before."""

    def save(checkpoints, step):
        """Steps 2 and 6 are the best so far."""
        best = 6 if step >= 6 else 2
        checkpoints.pinned_step = best
        stopping = StoppingState(best_step=best, evaluated_step=step, wait=0, restored_step=best)
        run = RunAtStep(
            config={}, data="", epoch=1, global_batch=1, record=EMPTY_RECORD, stopping=stopping
        )
        accuracy = {2: 0.5, 6: 0.7}.get(step, 0.4)
        checkpoints.save(step, state_on(2), validation_accuracy=accuracy, runs=[run])

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 5):
            save(checkpoints, step)
        if not is_opened_anew:
            save(checkpoints, 6)
    if is_opened_anew:
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            save(checkpoints, 6)

    assert {int(path.name) for path in tmp_path.iterdir()} == {2, 5, 6}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save(checkpoints, 8)
        save(checkpoints, 9)
    assert {int(path.name) for path in tmp_path.iterdir()} == {6, 8, 9}


def test_a_step_that_is_there_is_left_as_it_is(tmp_path):
    """An interruption right after a checkpoint asks for the same one again."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.save(3, state_on(2, value=1.0))
        restored = checkpoints.restore(3, shapes_of(state_on(2)))

    assert_same(restored, state_on(2))


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path):
    """A save that was not committed is neither listed nor in the way."""
    half = tmp_path / "4.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    (half / "state").mkdir()

    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step is None
        checkpoints.save(4, state_on(2))
        checkpoints.wait()
        assert checkpoints.steps == (4,)
    assert not half.exists()


def test_a_checkpoint_counts_when_all_of_it_is_on_the_disk_and_not_before(tmp_path, monkeypatch):
    """The manifest is last; older checkpoints, and the record, are only then gone or relied on."""
    events = []

    def noting(name):
        original = getattr(module, name)

        def noted(*arguments):
            there = {path.name for path in tmp_path.iterdir() if path.name.isdecimal()}
            events.append((name, arguments[0].name, there))
            return original(*arguments)

        monkeypatch.setattr(module, name, noted)

    record = tmp_path / "measurements.jsonl"
    record.write_text("line\n")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.wait()
        for name in ("synced_files", "sync_file", "write_manifest", "set_newest"):
            noting(name)
        checkpoints.save(5, state_on(2), records=[record])
        checkpoints.wait()
        assert checkpoints.steps == (5,)

    both = {"3", "5"}
    assert events == [
        ("synced_files", "5", both),
        ("sync_file", record.name, both),
        ("write_manifest", "5", both),
        ("set_newest", tmp_path.name, both),
    ]


def test_no_process_goes_on_before_the_first_has_made_the_checkpoint_count(tmp_path, monkeypatch):
    """One that ended meanwhile would have launchers kill the first; an end after an error, which
    others may have had already, waits for nobody."""
    events, synced, decided = [], module.synced_files, module.decided_by_first

    def slow(path):
        time.sleep(0.3)
        return synced(path)

    def noting(decide):
        said = decided(decide)
        events.append((tmp_path / "3" / "manifest.json").exists())
        return said

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        monkeypatch.setattr(module, "synced_files", slow)
        checkpoints.save(3, state_on(2))
        monkeypatch.setattr(module, "decided_by_first", noting)
        checkpoints.wait()
        assert events == [True]
    assert events == [True]


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch):
    """Somebody was there before, or nobody may."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.wait()
        shutil.rmtree(tmp_path / "3")
        checkpoints.save(4, state_on(2))
        checkpoints.wait()

        def refused(path):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(module, "_delete", refused)
        checkpoints.save(5, state_on(2))
        checkpoints.wait()
        assert checkpoints.steps == (5,)


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A folder with the checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.save(5, state_on(2))
    return folder


def rename(folder):
    """A damage: the newest checkpoint has the name of another step."""
    (folder / "5").rename(folder / "7")


def swap(folder):
    """A damage: each of two checkpoints has the name of the other."""
    (folder / "5").rename(folder / "x")
    (folder / "3").rename(folder / "5")
    (folder / "x").rename(folder / "3")


def edit(name, change):
    """A damage: the content of the file `name` of checkpoint 5 is changed."""

    def damage(folder):
        (path,) = (folder / "5").glob(name)
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)

    return damage


def link_to_itself(folder):
    """A damage: a file is a link that leads nowhere, and that no waiting mends."""
    path = folder / "5" / "state" / "_METADATA"
    path.unlink()
    path.symlink_to(path.name)


def flip(content):
    """One bit near the end turned."""
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DAMAGES = {
    "renamed": (rename, 3, {"7": "manifest is that of step 5", "5": "it is gone"}),
    "swapped": (swap, 0, {"5": "manifest is that of step 3", "3": "manifest is that of step 5"}),
    "gone": (lambda folder: shutil.rmtree(folder / "5"), 3, {"5": "it is gone"}),
    "no manifest": (edit("manifest.json", lambda _: None), 3, {"5": "it has no manifest"}),
    "empty manifest": (edit("manifest.json", lambda _: b""), 3, {"5": "cannot be read"}),
    "flipped manifest": (edit("manifest.json", flip), 3, {"5": "manifest"}),
    "stripped manifest": (
        edit("manifest.json", lambda c: re.sub(rb'"arrays": {[^}]*}', b'"arrays": {}', c)),
        3,
        {"5": "its manifest does not match its checksum"},
    ),
    "empty metadata": (
        edit("_CHECKPOINT_METADATA", lambda _: b""),
        3,
        {"5": "_CHECKPOINT_METADATA has 0 bytes, and was written with"},
    ),
    "flipped numbers": (
        edit("state/d/*", flip),
        3,
        {"5": "state/d/.* does not match its checksum"},
    ),
    "a link to itself": (link_to_itself, 3, {"5": "state/_METADATA is gone"}),
    "a file gone": (edit("state/_METADATA", lambda _: None), 3, {"5": "state/_METADATA is gone"}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(two_saved, tmp_path, name):
    """Whatever is damaged, its manifest and its metadata too: checking is never off."""
    damage, sound, reasons = DAMAGES[name]
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    shutil.copy(two_saved.with_name("checkpoints.json"), tmp_path)
    damage(folder)

    with Checkpoints(folder, keep=2) as checkpoints:
        found = checkpoints.newest_sound(lambda manifest: None)
        checkpoints.resume_from(found.step)
        checkpoints.save(5, state_on(2, value=1.0))
        restored = checkpoints.restore(5, shapes_of(state_on(2)))

    assert found.step == sound
    assert found.newest_step == 5
    assert list(found.passed_over) == list(reasons)
    for step, reason in reasons.items():
        assert re.search(reason, found.passed_over[step])
    assert_same(restored, state_on(2, value=1.0))  # what was damaged is not in the way
    aside = {path.name for path in folder.glob("damaged-*")}
    assert aside == {
        f"damaged-{step}" for step, why in found.passed_over.items() if why != "it is gone"
    }


@pytest.mark.parametrize("name", ["manifest.json", "_CHECKPOINT_METADATA"])
@pytest.mark.parametrize("method", ["stat", "open"])
def test_a_read_that_fails_passes_no_checkpoint_over(
    two_saved, tmp_path, monkeypatch, name, method
):
    """The next try may read it: nothing is renamed, and the launcher starts the run again."""
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    shutil.copy(two_saved.with_name("checkpoints.json"), tmp_path)
    original = getattr(Path, method)

    def failing(path, *arguments, **options):
        if path == folder / "5" / name:
            raise OSError(5, "Input/output error")
        return original(path, *arguments, **options)

    def found():
        with Checkpoints(folder, keep=2) as checkpoints:
            return checkpoints.newest_sound(lambda manifest: None)

    monkeypatch.setattr(Path, method, failing)
    with pytest.raises(Unavailable, match=rf"5/{name}'? cannot be read.*Input/output"):
        found()
    monkeypatch.undo()

    assert found().step == 5

    assert {path.name for path in folder.iterdir()} == {"3", "5"}


def test_what_was_set_aside_is_never_deleted(two_saved, tmp_path):
    """Nor what comes to lie beside it when the step is damaged once more."""
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    shutil.copy(two_saved.with_name("checkpoints.json"), tmp_path)
    (folder / "damaged-5").mkdir()
    (folder / "damaged-5" / "kept").touch()

    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.resume_from(3)

    assert {path.name for path in folder.iterdir()} == {"3", "damaged-5", "damaged-5-2"}
    assert (folder / "damaged-5" / "kept").exists()


def test_what_a_crash_left_without_a_manifest_is_deleted(two_saved, tmp_path):
    """It never counted; what has lost its manifest since is kept, as that of an earlier version."""
    folder = shutil.copytree(two_saved, tmp_path / "checkpoints")
    for step in ("3", "5"):
        (folder / step / "manifest.json").unlink()
    set_newest(folder, 3)

    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest_sound(lambda manifest: None).step == 0
        checkpoints.resume_from(0)

    assert [path.name for path in folder.iterdir()] == ["damaged-3"]


@pytest.mark.slow_except("_METADATA-cut", "d/*-garbled")
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.ocdbt", "gone"),
        ("_METADATA", "gone"),
        ("_METADATA", "cut"),
        ("d/*", "cut"),
        ("d/*", "garbled"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path, capfd, file, damage):
    """The message names the folder and the cause; Orbax's pages of tracebacks stay inside."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.save(5, state_on(2))
    for path in (tmp_path / "5" / "state").glob(file):
        content = path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"?" * 99)

    with (
        Checkpoints(tmp_path, keep=2) as checkpoints,
        pytest.raises(Damaged, match=r"/5 is damaged: state/.*") as caught,
    ):
        checkpoints.restore(5, shapes_of(state_on(2)))

    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            PermissionError(13, "Permission denied"),
            Unavailable,
            r"PermissionError: \[Errno 13\] Permission",
        ),
        (ValueError("UNAVAILABLE: Stale file"), Unavailable, "Stale file"),
        (
            ValueError("UNKNOWN: Error reading: [OS error 5: Input/output error]"),
            Unavailable,
            "OS error 5",
        ),
        (MemoryError(), CheckpointMismatch, "MemoryError"),
        (
            ValueError("RESOURCE_EXHAUSTED: Out of memory\nwhile"),
            CheckpointMismatch,
            "Out of memory",
        ),
    ],
)
def test_what_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch, raised, kind, said):
    """No rights, no answer, or no memory: nobody is told to delete a good checkpoint, and what may
    pass is to be tried again."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state_on(2))
        checkpoints.wait()

        def load(step, like):
            raise KeyError("no handler") from raised

        monkeypatch.setattr(module.orbax, "load", load)
        with pytest.raises(kind, match=f"/3 cannot be read: .*{said}") as caught:
            checkpoints.restore(3, shapes_of(state_on(2)))

    assert "elete" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [{"width": 16}, {"optimizer": optax.adam(0.1)}],
    ids=["shape", "optimizer"],
)
def test_a_state_of_another_run_is_refused(tmp_path, other):
    """Arrays of other shapes are never cut or padded to fit."""
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, state_on(2))

        with pytest.raises(CheckpointMismatch, match=r"/3 is refused: .*not a state of this run"):
            checkpoints.restore(3, shapes_of(state_on(2, **other)))


def test_weights_come_back_and_are_replaced_whole(tmp_path):
    """What a run ends with can be loaded without its optimizer; missing weights say so."""
    path = tmp_path / "weights"
    first, second = state_on(2).params, state_on(2, value=1.0).params

    save_weights(path, first)
    save_weights(path, second)

    assert_same(load_weights(path, shapes_of(second)), second)
    (path / "_CHECKPOINT_METADATA").write_text(
        (path / "_CHECKPOINT_METADATA").read_text().replace("checksums", "other")
    )
    with pytest.raises(CheckpointMismatch, match=r"weights is refused: .*it has no checksums"):
        load_weights(path, shapes_of(second))
    with pytest.raises(CheckpointMismatch, match="elsewhere is refused: it is missing"):
        load_weights(tmp_path / "elsewhere", shapes_of(second))


def test_numbers_that_differ_from_their_checksums_are_refused_and_the_array_named(tmp_path):
    """Also where every file is as it was written: what is read is what was on the devices."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state_on(4))
    manifest = read_manifest(tmp_path / "3")
    arrays = {path: value ^ ("kernel" in path) for path, value in manifest.arrays.items()}
    write_manifest(tmp_path / "3", replace(manifest, arrays=arrays))

    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(
            Damaged, match=r"/3 is damaged: .*kernel.* does not match its checksum.*Delete it"
        ),
    ):
        checkpoints.restore(3, shapes_of(state_on(4)))


def test_checksums_are_those_of_the_bits_wherever_they_lie():
    """Computed here from the definition, in integers of any size."""
    state = state_on(4)

    found = checksums({"kernel": state.params["dense"]["kernel"]})["['kernel']"]

    bits = np.asarray(state.params["dense"]["kernel"]).view(np.uint32).ravel().tolist()
    odd = [(2 * position + 1) * 0x9E3779B1 for position in range(len(bits))]
    assert found == sum((each + 1) * by for each, by in zip(bits, odd, strict=True)) % 2**32
    assert checksums(state_on(2)) == checksums(state)


def test_numbers_of_64_bits_have_a_checksum_too():
    """As two words each."""
    with jax.enable_x64(True):
        values = jnp.asarray([1.5, -2.0])
        found = checksums({"mean": values})["['mean']"]

    words = np.array([1.5, -2.0]).view(np.uint32).tolist()
    odd = [(2 * position + 1) * 0x9E3779B1 for position in range(4)]
    assert found == sum((each + 1) * by for each, by in zip(words, odd, strict=True)) % 2**32


def test_another_process_that_is_gone_is_no_disk_that_cannot_be_written(tmp_path, monkeypatch):
    """What a barrier of Orbax raises is left as it is, for the launcher to start again; the same
    words of a store are of the disk."""
    said = "DEADLINE_EXCEEDED: Barrier timed out. Id: save"
    state = {"x": jnp.zeros(2)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()

        def fail(kind, *ignored, **also_ignored):
            raise kind(said)

        for kind, expected in ((jax.errors.JaxRuntimeError, None), (ValueError, ConfigError)):
            monkeypatch.setattr(module.orbax, "save_async", partial(fail, kind))
            with pytest.raises(expected or kind, match="Barrier timed out"):
                checkpoints.save(1, state)
            monkeypatch.setattr(module.orbax, "load", partial(fail, kind))
            with pytest.raises(kind if expected is None else Unavailable, match="Barrier"):
                checkpoints.restore(2, state)
