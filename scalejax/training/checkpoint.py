"""Checkpoints of a run: written atomically, verified by manifests, restored on any devices.

A thin class over Orbax, which writes in the background and commits by renaming; what it wrote is
flushed to disk here, before the manifest that makes it count. Knows states and steps; decides
neither when to save nor which checkpoint to restore.
"""

import contextlib
import gc
import logging
import re
import secrets
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
from jax.tree_util import DictKey
from orbax.checkpoint import v1 as orbax

from scalejax.core.errors import (
    OUT_OF_MEMORY,
    CheckpointMismatch,
    ConfigError,
    Damaged,
    Unavailable,
)
from scalejax.core.process_group import is_lost_contact
from scalejax.core.serialization import (
    JsonValue,
    build,
    make_folder,
    plain,
    sync_file,
    sync_folder,
)
from scalejax.core.units import format_bytes
from scalejax.models import parameter_path
from scalejax.training.checksums import checksums
from scalejax.training.manifest import (
    MANIFEST,
    Manifest,
    RunAtStep,
    first_difference,
    newest,
    read_manifest,
    set_newest,
    synced_files,
    write_manifest,
)
from scalejax.training.multihost import decided_by_first

Tree = TypeVar("Tree")

_CHECKSUMS = "checksums"
_DELETED = "deleted-"

_NO_ANSWER = ("PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Status words of TensorStore and XLA, which raise them as `ValueError` and `RuntimeError`."""
_DISK_ERRORS = ("Input/output error", "Stale file handle")
"""Messages of system errors, for which TensorStore has no status word."""
_QUOTED_CHARACTERS = 160
_WITHOUT = " Delete it, or move it away, and --resume continues from the one before."
"""What can be done about a checkpoint whose numbers are not those that were written."""


class Checkpoints:
    """The checkpoints of one run: the latest few, the best, and the one that is pinned.

    A checkpoint counts once its manifest is written, after all its other files are on disk; only
    then are older ones deleted. The first process reads and writes manifests, and tells the others.
    """

    def __init__(self, folder: Path, *, keep: int, keeps_damaged: bool = True) -> None:
        """Open the checkpoints in `folder`, which is created if it does not exist; every process
        must call it.

        Args:
            folder: where they are, by step.
            keep: latest checkpoints to keep; the best by validation accuracy is kept as well.
            keeps_damaged: whether checkpoints that do not verify are set aside; else they are
                deleted.

        Raises:
            ConfigError: if the folder cannot be written.
        """
        self._keeps_damaged = keeps_damaged
        self.folder = folder.absolute()
        self.pinned_step: int | None = None
        """A step whose checkpoint is never deleted."""
        self.rated: dict[int, float] = {}
        """Validation accuracies of steps that were saved before they were evaluated."""
        self._keep = keep
        self._saving: _Saving | None = None
        found = cast("dict[str, list[Any]]", decided_by_first(self._open))
        self._accuracies: dict[int, float | None] = {
            int(step): accuracy for step, (accuracy, _) in found.items()
        }
        self._needed: dict[int, list[int]] = {int(step): each for step, (_, each) in found.items()}
        """For each step, those whose checkpoint a run resumed there ends with if none is better."""

    def _open(self) -> JsonValue:
        """Remove what a crash left unfinished; for each step with a manifest, return its validation
        accuracy and the steps that it needs."""
        with _naming_unwritable(self.folder):
            make_folder(self.folder)
            for path in self.folder.iterdir():
                if _is_unfinished(path):
                    shutil.rmtree(path)
        found: dict[str, JsonValue] = {}
        for step in sorted(self._folders()):
            with contextlib.suppress(Damaged):
                manifest = read_manifest(self.folder / str(step))
                stopping = [run.stopping for run in manifest.runs if run.stopping is not None]
                needed = [each.restored_step for each in stopping if each.restored_step]
                found[str(step)] = [manifest.validation_accuracy, [*needed]]
        return found

    def _folders(self) -> list[int]:
        """Steps that have a folder, whatever is in it."""
        return [
            int(path.name)
            for path in self.folder.iterdir()
            if re.fullmatch(r"0|[1-9][0-9]*", path.name) and path.is_dir()
        ]

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints, ascending."""
        return tuple(sorted(self._accuracies))

    @property
    def latest_step(self) -> int | None:
        """Step of the latest checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def newest_sound(self, objection: Callable[[Manifest], str | None]) -> "Found":
        """The newest checkpoint whose files are as they were written, and to whose manifest the
        first process has no `objection`; every process must call it.

        Raises:
            ScalejaxError: what `objection` raises.
        """
        return build(Found, decided_by_first(lambda: plain(self._newest_sound(objection))))

    def _newest_sound(self, objection: Callable[[Manifest], str | None]) -> "Found":
        newest_step, passed_over = newest(self.folder), {}
        steps = {*self._folders(), newest_step or 0} - {0}
        sound = 0
        for step in sorted(steps, reverse=True):
            try:
                manifest = read_manifest(self.folder / str(step))
                reason = self.difference(step, manifest) or objection(manifest)
            except Damaged as error:
                reason = str(error) if (self.folder / str(step)).exists() else "it is gone"
            if reason is None:
                sound = step
                break
            passed_over[str(step)] = reason
        return Found(
            step=sound,
            passed_over=passed_over,
            newest_step=newest_step,
            has_folders=bool(self._folders()),
        )

    def difference(self, step: int, manifest: Manifest | None = None) -> str | None:
        """How the files of a checkpoint differ from what was written; None if they do not."""
        folder = self.folder / str(step)
        try:
            return first_difference(folder, (manifest or read_manifest(folder)).files)
        except Damaged as error:
            return str(error)

    def resume_from(self, step: int) -> None:
        """Make the checkpoint of `step` the newest, or the last before it if the run resumes from
        elsewhere: later ones that once counted are set aside as damaged-STEP, damaged-STEP-2, ...,
        and unfinished ones deleted; every process must call it.

        Raises:
            ConfigError: if the folder cannot be written.
        """

        def set_aside() -> JsonValue:
            with _naming_unwritable(self.folder):
                for each in self._folders():
                    if each > step or self._was_never_whole(each):
                        self._set_aside(each)
                set_newest(
                    self.folder, max((each for each in self.steps if each <= step), default=0)
                )
                for each in (self.folder, *self.folder.parents):  # whoever made them
                    sync_folder(each)
            return None

        decided_by_first(set_aside)
        self._accuracies = {
            each: accuracy for each, accuracy in self._accuracies.items() if each <= step
        }

    def _set_aside(self, step: int) -> None:
        path = self.folder / str(step)
        if self._was_never_whole(step) or not self._keeps_damaged:
            _delete(path)
            return
        aside, count = self.folder / f"damaged-{step}", 1
        while aside.exists():
            count += 1
            aside = self.folder / f"damaged-{step}-{count}"
        path.rename(aside)

    def _was_never_whole(self, step: int) -> bool:
        """Whether a crash came before the checkpoint in the folder of `step` counted."""
        newest_step = newest(self.folder)
        is_later = newest_step is not None and step > newest_step
        return is_later and not (self.folder / str(step) / MANIFEST).exists()

    def save(
        self,
        step: int,
        state: object,
        *,
        validation_accuracy: float | None = None,
        runs: Sequence[RunAtStep] = (),
        records: Sequence[Path] = (),
    ) -> None:
        """Save `state` as that of `step`; returns once it is copied, and writes it in the
        background.

        Every process must call it, with the same arguments except the last two, which count in the
        first process only. An existing checkpoint of the step is not overwritten.

        Args:
            step: updates made.
            state: its arrays.
            validation_accuracy: of the state; None if it is not known.
            runs: what else the manifest says about the runs whose state it is.
            records: files that must be on the disk before it counts.

        Raises:
            ConfigError: if this checkpoint, or the previous one, cannot be written.
        """
        if step in self._accuracies or (self._saving and self._saving.step == step):
            return
        self.require_room(state)
        with _naming_unwritable(self.folder):
            self._await_last_save()
            arrays = checksums(state)
            path = self.folder / str(step)
            if jax.process_index() == 0 and path.exists():
                self._set_aside(step)
            written: JsonValue = {_CHECKSUMS: dict(arrays)}
            response = orbax.save_async(str(path), state, custom_metadata=written)
            accuracies = {**self._accuracies, step: validation_accuracy}
            self._needed[step] = [] if self.pinned_step is None else [self.pinned_step]
            kept = self._kept(accuracies)
            deleted = [each for each in accuracies if each not in kept]

            def finish() -> None:
                response.result()
                if jax.process_index():
                    return
                files = synced_files(path)
                for record in records:
                    sync_file(record)
                manifest = Manifest(
                    step=step,
                    files=files,
                    arrays=arrays,
                    validation_accuracy=validation_accuracy,
                    runs=tuple(runs),
                )
                write_manifest(path, manifest)
                set_newest(self.folder, step)
                for each in deleted:  # this checkpoint counts, whatever becomes of others
                    with contextlib.suppress(OSError):
                        _delete(self.folder / str(each))

            counted = {each: accuracies[each] for each in kept}
            self._saving = _Saving(step, finish, counted)

    def _kept(self, accuracies: Mapping[int, float | None]) -> set[int]:
        """The steps of these that are kept: the latest, the best, the pinned one, and those that
        resuming from them needs."""
        steps = sorted(accuracies)
        kept = set(steps[-self._keep :])
        rated = {step: accuracies[step] for step in steps if accuracies[step] is not None}
        rated |= {step: self.rated[step] for step in steps if step in self.rated}
        if rated:
            kept.add(max(rated, key=rated.__getitem__))  # type: ignore[arg-type]  none is None
        if self.pinned_step is not None and self.pinned_step in accuracies:
            kept.add(self.pinned_step)
        needed = {each for step in kept for each in self._needed.get(step, ())}
        return kept | (needed & set(steps))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            Damaged: if it is damaged.
        """
        path = self.folder / str(step)
        try:
            return read_manifest(path)
        except Damaged as error:
            raise Damaged(f"{path} is damaged: {error}.") from error

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of `step`.

        Args:
            step: one of `steps`.
            like: the state's tree, of arrays or their shapes; its shardings are those of the
                result, whatever mesh the checkpoint was saved from.

        Raises:
            Damaged: if the checkpoint is not what was written.
            Unavailable: if it cannot be read at present.
            CheckpointMismatch: if it holds another state, or one that there is no memory for.
        """
        self.wait()
        path = self.folder / str(step)
        arrays = self.manifest(step).arrays
        state = _verified(lambda: (orbax.load(str(path), like), arrays))
        if isinstance(state, _Failure):
            if not state.is_damage:
                kind = Unavailable if state.may_pass else CheckpointMismatch
                raise kind(f"{path} cannot be read: {state.text}.")
            if (difference := self.difference(step)) is not None:
                raise Damaged(f"{path} is damaged: {difference}.{_WITHOUT}")
            if state.is_of_numbers:
                raise Damaged(f"{path} is damaged: {state.text}.{_WITHOUT}")
            raise CheckpointMismatch(
                f"{path} is refused: it is not a state of this run ({state.text})."
            )
        return state

    def wait(self) -> None:
        """Wait until all saves count: until the first process has written their manifests; every
        process must call it.

        Raises:
            ConfigError: if one cannot be written.
        """
        if jax.process_index():
            self.close()
        decided_by_first(self.close)

    @property
    def is_saving(self) -> bool:
        """Whether this process's part of a save still runs in the background."""
        return self._saving is not None and self._saving.goes_on

    def close(self) -> None:
        """Finish this process's part of pending saves, without waiting for other processes.

        Raises:
            ConfigError: if it cannot be written.
        """
        with _naming_unwritable(self.folder):
            self._await_last_save()

    def _await_last_save(self) -> None:
        """Wait for the last save, which counts from then on."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()
            self._accuracies = saving.counted

    def require_room(self, state: object) -> None:
        """Refuse a state that does not fit on the disk; every process must call it.

        Raises:
            ConfigError: in every process.
        """
        decided_by_first(partial(self._require_room, state))

    def _require_room(self, state: object) -> None:
        """Refuse a state that does not fit on the disk, in all processes alike: if the write failed
        in one, the others would wait for it.

        Raises:
            ConfigError: saying how much is free.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ConfigError(
                f"{self.folder} cannot be written: {format_bytes(free)} are free there, and a "
                f"checkpoint takes {format_bytes(needed)}."
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_failing = error is not None and not isinstance(error, SystemExit)
        if is_failing and jax.process_count() > 1:
            return  # other processes may have failed already, and waiting for them would hang
        try:
            self.close()
        except ConfigError:
            if not is_failing:  # else the first error is reported, often of the same cause
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest sound checkpoint of a folder."""

    step: int
    """Its step; 0 if there is none."""
    passed_over: dict[str, str]
    """Later steps, newest first, with the reason why each does not count."""
    newest_step: int | None
    """Step of the newest checkpoint that there ever was, 0 if none was finished; None if unknown,
    as in folders of earlier versions."""
    has_folders: bool
    """Whether there is a checkpoint in any state."""


class _Saving:
    """A save in the background: a thread that finishes it, and what it raised."""

    def __init__(
        self, step: int, finish: Callable[[], None], counted: dict[int, float | None]
    ) -> None:
        self.step = step
        self.counted = counted
        """Validation accuracies of the checkpoints that there are once it is done."""
        self._error: BaseException | None = None
        self._finish = finish
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # noqa: BLE001  raised again by `result`
            self._error = error

    @property
    def goes_on(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def result(self) -> None:
        """Wait until it is done; raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _is_unfinished(path: Path) -> bool:
    """Whether a crash left this: what never became a checkpoint, or one that was being deleted."""
    return ".orbax-checkpoint-tmp" in path.name or path.name.startswith(_DELETED)


def _delete(path: Path) -> None:
    """Delete a folder, which is never seen half deleted under its name."""
    gone = path.with_name(f"{_DELETED}{path.name}-{secrets.token_hex(4)}")
    path.rename(gone)
    shutil.rmtree(gone)


def save_weights(path: Path, weights: object) -> None:
    """Save a tree of arrays to `path`, overwriting it; returns when it is on disk.

    Raises:
        ConfigError: if it cannot be written.
    """
    arrays = checksums(weights)
    written: JsonValue = {_CHECKSUMS: dict(arrays)}
    with _naming_unwritable(path):
        orbax.save(str(path.absolute()), weights, overwrite=True, custom_metadata=written)
        if jax.process_index() == 0:
            synced_files(path)


def load_weights(path: Path, like: Tree) -> Tree:
    """The tree of arrays that `save_weights` wrote, in the shapes and shardings of `like`.

    Raises:
        CheckpointMismatch: if there is none, it is damaged, of other shapes, or cannot be read.
    """

    def load() -> tuple[Tree, object]:
        where = str(path.absolute())
        written = orbax.metadata(where).custom_metadata
        return orbax.load(where, like), (
            written.get(_CHECKSUMS) if isinstance(written, dict) else None
        )

    weights = _verified(load)
    if isinstance(weights, _Failure):
        raise CheckpointMismatch(
            f"{path} is refused: it is missing, damaged, or of another network ({weights.text})."
            if weights.is_damage
            else f"{path} cannot be read: {weights.text}."
        )
    return weights


def written_checksums(path: Path) -> dict[str, int]:
    """The checksums that `save_weights` wrote with the arrays.

    Raises:
        CheckpointMismatch: if there are none.
    """
    written = _load(lambda: orbax.metadata(str(path.absolute())).custom_metadata)
    found = written.get(_CHECKSUMS) if isinstance(written, dict) else None
    if not isinstance(found, dict):
        raise CheckpointMismatch(f"{path} is refused: it is damaged, or has no checksums.")
    return cast("dict[str, int]", found)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a checkpoint or of weights, by their paths.

    Raises:
        CheckpointMismatch: if they cannot be read.
    """
    tree = _load(lambda: orbax.metadata(str(path.absolute())).metadata)
    if isinstance(tree, _Failure):
        raise CheckpointMismatch(f"{path} cannot be read: {tree.text}.")
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {
        parameter_path(key): tuple(leaf.shape) for key, leaf in leaves if hasattr(leaf, "shape")
    }
    if not found:
        raise CheckpointMismatch(f"{path} is damaged: it names no arrays.")
    return found


def load_leaves(
    path: Path, stored: Mapping[str, int], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Some arrays of a checkpoint or of weights, by their paths as in `shapes_of`, in the types and
    shardings of `shapes`.

    Args:
        path: of what was saved.
        stored: checksums of its arrays.
        shapes: of the arrays that are read.

    Raises:
        CheckpointMismatch: if they cannot be read, or are not what was written.
    """
    by_path = {"/".join(_PATH_PARTS.findall(key)): value for key, value in stored.items()}

    def load() -> tuple[dict[str, jax.Array], dict[str, int]]:
        where = str(path.absolute())
        tree = orbax.metadata(where).metadata

        def like(key: Any, leaf: Any) -> Any:
            if (wanted := shapes.get(parameter_path(key))) is None:
                return orbax.PLACEHOLDER
            # In the type that was written, which the checksums are of.
            return jax.ShapeDtypeStruct(wanted.shape, leaf.dtype, sharding=wanted.sharding)

        loaded = orbax.load(where, jax.tree_util.tree_map_with_path(like, tree))
        leaves, _ = jax.tree_util.tree_flatten_with_path(loaded)
        arrays = {parameter_path(key): leaf for key, leaf in leaves}
        arrays = {name: arrays[name] for name in shapes}
        sums = {jax.tree_util.keystr((DictKey(name),)): by_path.get(name, -1) for name in shapes}
        return arrays, sums

    arrays = _verified(load)
    if isinstance(arrays, _Failure):
        raise CheckpointMismatch(f"{path} is damaged, or cannot be read: {arrays.text}.")
    cast_to = {name: leaf.dtype for name, leaf in shapes.items()}
    return {name: array.astype(cast_to[name]) for name, array in arrays.items()}


_PATH_PARTS = re.compile(r"[^\[\].']+")
"""Parts of a path as `jax.tree_util.keystr` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why something could not be loaded."""

    text: str
    """Type and first line of the root exception."""
    is_damage: bool
    """Whether the cause is the files, not the disk, permissions or memory."""
    may_pass: bool = False
    """Whether the disk or the store does not answer now, but may later."""
    is_of_numbers: bool = False
    """Whether everything could be read, but numbers are not those that were written."""


@contextmanager
def _naming_unwritable(path: Path) -> Iterator[None]:
    """Turn Orbax's various exceptions for failed writes into `ConfigError`."""
    try:
        yield
    except Exception as error:
        if is_lost_contact(error) or (failure := _failure(error)).is_damage:
            raise
        raise ConfigError(f"{path} cannot be written: {failure.text}.") from error


def _verified(load: Callable[[], tuple[Tree, object]]) -> Tree | _Failure:
    """The tree of `load`, which also returns the checksums that were written with it; or why it
    failed, or the first array that differs from its checksum. Without checksums it fails."""
    loaded = _load(load)
    if isinstance(loaded, _Failure):
        return loaded
    tree, stored = loaded
    if not isinstance(stored, dict):
        return _Failure(text="it has no checksums", is_damage=True, is_of_numbers=True)
    for path, checksum in checksums(tree).items():
        if stored.get(path) != checksum:
            text = f"{path} does not match its checksum"
            return _Failure(text=text, is_damage=True, is_of_numbers=True)
    return tree


def _failure(error: BaseException) -> _Failure:
    """The root cause of `error`, which Orbax wraps in errors about its handlers."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    unreadable = [cause for cause in chain if _is_unreadable(cause)]
    root = unreadable[-1] if unreadable else chain[-1]
    line = next(iter(str(root).strip().splitlines()), "").removesuffix(".")
    if len(line) > _QUOTED_CHARACTERS:
        line = f"{line[:_QUOTED_CHARACTERS]}..."
    text = f"{type(root).__name__}: {line}" if line else type(root).__name__
    may_pass = bool(unreadable) and _may_pass(root)
    return _Failure(text=text, is_damage=not unreadable, may_pass=may_pass)


def _is_unreadable(error: BaseException) -> bool:
    """Whether reading the same files may succeed later; a missing file never does."""
    is_of_memory = isinstance(error, MemoryError) or str(error).startswith(OUT_OF_MEMORY)
    return is_of_memory or _may_pass(error)


def _may_pass(error: BaseException) -> bool:
    """Whether the disk or the store does not answer, or refuses."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    words = str(error)
    return words.startswith(_NO_ANSWER) or any(said in words for said in _DISK_ERRORS)


def _load(load: Callable[[], Tree]) -> Tree | _Failure:
    """The result of `load`, or why it failed, without any output of Orbax.

    Orbax has no common class for bad files, and prints pages of tracebacks in addition to what it
    raises. The exception is turned into text, not chained: it references unfinished reads, which
    would print errors when garbage-collected later.
    """
    logger, report = logging.getLogger("absl"), sys.unraisablehook
    was_disabled, logger.disabled = logger.disabled, True
    sys.unraisablehook = partial(_report_others, report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = load()
        except Exception as error:
            if is_lost_contact(error):
                logger.disabled = was_disabled
                raise
            tree = _failure(error)
        if isinstance(tree, _Failure):
            logging.getLogger("asyncio").addFilter(_is_no_abandoned_task)
            gc.collect()
        else:
            sys.unraisablehook = report  # not restored after a failure: some reads still run
    logger.disabled = was_disabled
    return tree


def _is_no_abandoned_task(record: logging.LogRecord) -> bool:
    return "Task exception was never retrieved" not in record.getMessage()


def _report_others(report: Callable, unraisable: "sys.UnraisableHookArgs") -> None:
    """Report unraisable errors except those of reads that Orbax abandoned at the first bad file."""
    code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
    is_abandoned_read = code is not None and "orbax" in code.co_filename
    if not is_abandoned_read and "Event loop is closed" not in str(unraisable.exc_value):
        report(unraisable)
