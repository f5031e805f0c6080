"""The manifest of a checkpoint: what proves that its files, and the record up to its step, are as
they were written.

It is written last, when all that it describes is on disk, so that a checkpoint with a manifest is
complete. Knows files and their sums; neither arrays nor how a run is trained.
"""

import errno
import hashlib
import json
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scalejax.config.training import MOST_STEPS
from scalejax.core.errors import ConfigError, Damaged, Unavailable
from scalejax.core.serialization import (
    JsonValue,
    build,
    document,
    load,
    make_folder,
    plain,
    save,
    save_bytes,
    save_text,
    stamped,
    sync_file,
    sync_folder,
    unstamped,
)
from scalejax.training.record import RecordPosition, RunFolder

MANIFEST = "manifest.json"
"""Name of the manifest in the folder of a checkpoint."""
_KIND, _VERSION, _SHA256, _BODY = "checkpoint_manifest", 1, "sha256", "manifest"
_BLOCK_BYTES = 2**22
_READERS = 4  # a checksum is computed without Python's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """One file as it was written."""

    size_bytes: int
    """Its size."""
    crc32: int
    """CRC-32 of its content, that of zlib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingState:
    """The state of early stopping, which a resumed run works out from its record."""

    best_step: int | None
    """Updates after which it saw the best evaluation; None if it saw none."""
    evaluated_step: int | None
    """Updates after which the latest evaluation was made; None if there was none."""
    wait: int
    """Evaluations since the best one."""
    restored_step: int | None
    """The best step, if the run is to end with its weights, and so needs its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAtStep:
    """A run after the updates that a checkpoint holds."""

    config: dict[str, str]
    """Fields of its config by dotted name, each as JSON."""
    data: str
    """SHA-256 of the facts of its data, and of the fingerprints of its files."""
    epoch: float
    """Position in the data: passes over it so far; with the seed it says which example is next."""
    global_batch: int
    """Samples of the next update, to which the batch has grown."""
    record: RecordPosition
    """Its record so far."""
    stopping: StoppingState | None
    """State of early stopping; None if the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and what it belongs to."""

    step: int
    """Updates made."""
    files: dict[str, FileSum]
    """Its files, by path in its folder."""
    arrays: dict[str, int]
    """Checksums of its arrays, by path."""
    validation_accuracy: float | None = None
    """Validation accuracy of the state; None if it was not evaluated before it was saved, or there
    are no validation data."""
    test_accuracy: float | None = None
    """From versions before there were validation data; no longer used to choose anything."""
    runs: tuple[RunAtStep, ...] = ()
    """The run, or those that one program trains together."""


@document("newest_checkpoint")
@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest checkpoint that a folder has had, so that it is noticed if that is gone."""

    step: int
    """Updates made; 0 if none was finished yet."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in `folder`, with its own checksum.

    Raises:
        ConfigError: if it cannot be written.
    """
    body = plain(manifest)
    fields: dict[str, JsonValue] = {_SHA256: digest(body), _BODY: body}
    save_text(stamped(_KIND, _VERSION, fields), folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        Damaged: if there is none, it is not as it was written, or it is of another step than the
            name of the folder says; the message says which, without the folder.
        Unavailable: if it cannot be read at present.
    """
    path = folder / MANIFEST
    if _size_bytes(path) is None:
        raise Damaged("it has no manifest")
    try:
        fields = unstamped(_KIND, _VERSION, load(dict, path))
        body = fields.get(_BODY)
        if fields.get(_SHA256) != digest(body):
            raise Damaged("its manifest does not match its checksum")
        manifest = build(Manifest, body)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise Unavailable(str(error)) from error
        raise Damaged("its manifest cannot be read") from error
    if folder.name.isdecimal() and int(folder.name) != manifest.step:
        raise Damaged(f"its manifest is that of step {manifest.step}")
    if manifest.step > MOST_STEPS:
        raise Damaged(f"no run makes more than {MOST_STEPS} updates, counted in 32 bits")
    return manifest


def synced_files(folder: Path) -> dict[str, FileSum]:
    """Flush the files in `folder`, and their names, to the disk; returns their sums, by path."""
    paths = list(_files_below(folder))
    with ThreadPoolExecutor(_READERS) as pool:
        sums = list(pool.map(_synced, paths))
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync_folder(inner)
    sync_folder(folder)
    sync_folder(folder.parent)
    return {_name(path, folder): each for path, each in zip(paths, sums, strict=True)}


def first_difference(folder: Path, files: Mapping[str, FileSum]) -> str | None:
    """How the files in `folder` differ from what was written; None if they do not.

    Raises:
        Unavailable: if one cannot be read at present.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        differences = pool.map(lambda name: _difference(folder / name, files[name]), sorted(files))
        for name, words in zip(sorted(files), differences, strict=True):
            if words is not None:
                return f"{name} {words}"
    return None if files else "its manifest names no file"


def record_damage(files: RunFolder) -> str | None:
    """How the record of a run differs from what it was at its newest checkpoint; None if it does
    not, or no manifest tells."""
    steps = (int(path.name) for path in files.checkpoints.glob("*") if path.name.isdecimal())
    for step in sorted(steps, reverse=True):
        try:
            runs = read_manifest(files.checkpoints / str(step)).runs
        except Damaged:
            continue
        try:
            if len(runs) == 1:
                runs[0].record.part_of(files.measurements)
        except Damaged as error:
            return f"{error} (checkpoint {step}); --resume brings it back, or says what is missing"
        break
    return None


def digest(value: object) -> str:
    """SHA-256 of plain data, whatever the order of its fields."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def newest_file(folder: Path) -> Path:
    """The file next to a folder of checkpoints that says which was the newest."""
    return folder.with_name(f"{folder.name}.json")


def newest(folder: Path) -> int | None:
    """Step of the newest checkpoint that there ever was in `folder`; None if that is not known."""
    try:
        return load(Newest, newest_file(folder)).step
    except ConfigError:
        return None


def set_newest(folder: Path, step: int) -> None:
    """Note that the newest checkpoint in `folder` is that of `step`."""
    save(Newest(step=step), newest_file(folder))


def save_newest_copy(copies: Path, files: RunFolder) -> int | None:
    """Make the newest sound copy of the state a checkpoint of the run, its manifest last; returns
    its step, or None if there is none or a checkpoint is as new.

    Args:
        copies: copies by step, which nobody writes any more.
        files: the run.

    Raises:
        ConfigError: if it cannot be written.
        Unavailable: if what is there cannot be read at present.
    """
    folder = files.checkpoints
    saved = max(_whole(folder), default=0)
    for step, manifest in sorted(_whole(copies).items(), reverse=True):
        if step <= saved:
            break
        if first_difference(copies / str(step), manifest.files) is None:
            if files.measurements.exists():
                sync_file(files.measurements)
            _copy(copies / str(step), folder / str(step), manifest)
            set_newest(folder, step)
            return step
    return None


def _whole(folder: Path) -> dict[int, Manifest]:
    """The manifests in `folder`, by step."""
    found = {}
    for path in folder.glob("*"):
        if path.name.isdecimal():
            with suppress(Damaged):
                found[int(path.name)] = read_manifest(path)
    return found


def _copy(source: Path, target: Path, manifest: Manifest) -> None:
    """Copy the files of a checkpoint, its manifest last; nothing is left of them if that fails.

    Raises:
        ConfigError: if they cannot be written.
    """
    try:
        if not (target / MANIFEST).exists():  # a save was not finished
            shutil.rmtree(target, ignore_errors=True)
        make_folder(target.parent)
        target.mkdir()
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error
    try:
        ignored = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
        if synced_files(target) != manifest.files:
            raise OSError("what is there is not what was written")
        save_bytes((source / MANIFEST).read_bytes(), target / MANIFEST)
    except (OSError, ConfigError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error}.") from error


def _files_below(folder: Path) -> Iterable[Path]:
    return (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST and not path.name.startswith(".nfs")
    )


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _synced(path: Path) -> FileSum:
    sync_file(path)
    return _sum(path)


def _sum(path: Path) -> FileSum:
    size_bytes = crc32 = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            size_bytes += len(block)
            crc32 = zlib.crc32(block, crc32)
    return FileSum(size_bytes=size_bytes, crc32=crc32)


def _size_bytes(path: Path) -> int | None:
    """Size of a file; None if there is none.

    Raises:
        Unavailable: if that is unknown at present, which is not damage.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself, now and always
            return None
        raise _unavailable(path, error) from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _unavailable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{str(path)!r} cannot be read: {error}.")


def _difference(path: Path, written: FileSum) -> str | None:
    size_bytes = _size_bytes(path)
    if size_bytes is None:
        return "is gone"
    if size_bytes != written.size_bytes:
        return f"has {size_bytes:,} bytes, and was written with {written.size_bytes:,}"
    try:
        is_same = _sum(path) == written
    except OSError as error:
        raise _unavailable(path, error) from error
    return None if is_same else "does not match its checksum"
