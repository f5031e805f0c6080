"""Checkpoints of a run: written atomically, restored on any number of devices.

A thin class over Orbax, which writes in the background and commits by renaming. Knows states
and steps; decides neither when to save nor which checkpoint to restore.
"""

import gc
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from scalejax.config.checks import MOST_STEPS
from scalejax.core.errors import CheckpointMismatch, ConfigError
from scalejax.core.process_group import is_lost_contact
from scalejax.core.serialization import JsonValue
from scalejax.core.units import format_bytes

# Checksums of arrays, by which restored arrays are verified.

_GOLDEN = 0x9E3779B1  # odd, and its multiples are spread: 2**32 over the golden ratio, Knuth 6.4


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of each array of `tree`, by its path; independent of its sharding.

    The sum over elements of (bits + 1) * (odd number of the position), modulo 2**32: integers, so
    that the order of addition does not matter. A change of one element always changes it; any
    other damage is missed with probability 2**-32. One pass over the tree on the devices; every
    process must call it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {path: int(each) for path, each in zip(paths, sums, strict=True)}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    # Where optimizer state is offloaded, its arithmetic is on the device too.
    return [checksum(jax.device_put(array, jax.memory.Space.Device)) for array in arrays]


def checksum(array: jax.Array) -> jax.Array:
    """The checksum of one array, uint32 []; for use in traced code."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = min(array.dtype.itemsize, 4)  # wider numbers become two words each
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * width}").astype(jnp.uint32)
    position, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position += index * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    odd = (position * jnp.uint32(2) + jnp.uint32(1)) * jnp.uint32(_GOLDEN)
    return jnp.sum((bits + jnp.uint32(1)) * odd, dtype=jnp.uint32)


Tree = TypeVar("Tree")

_ACCURACY, _CHECKSUMS = "test_accuracy", "checksums"

_UNREADABLE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""Status words of TensorStore and XLA, which raise them as `ValueError` and `RuntimeError`."""
_QUOTED_CHARACTERS = 160


class Checkpoints:
    """The checkpoints of one run: the latest few, the best, and the one that is pinned."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Open the checkpoints in `folder`, which is created if it does not exist.

        Args:
            folder: where they are, by step.
            keep: latest checkpoints to keep; the best by test accuracy is kept as well.

        Raises:
            CheckpointMismatch: if the folder is too damaged to be listed.
        """
        self.folder = folder.absolute()
        self.pinned_step: int | None = None
        """A step whose checkpoint is never deleted."""
        self.rated: dict[int, float] = {}
        """Test accuracies of steps that were saved before they were evaluated."""
        opened = _load(
            lambda: orbax.training.Checkpointer(
                str(self.folder),
                preservation_policy=_RetentionPolicy(self, latest=keep),
                cleanup_tmp_directories=True,
            )
        )
        if isinstance(opened, _Failure):
            raise CheckpointMismatch(
                f"{self.folder} cannot be opened: {opened.text}. "
                "Delete that folder to start over, or the damaged checkpoints in it."
            )
        self._checkpointer = opened
        self._saving: orbax.AsyncResponse[bool] | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints, ascending."""
        return tuple(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    @property
    def latest_step(self) -> int | None:
        """Step of the latest checkpoint; None if there is none.

        Raises:
            CheckpointMismatch: if it is larger than any run reaches.
        """
        latest = max(self.steps, default=None)
        if latest is not None and latest > MOST_STEPS:
            raise CheckpointMismatch(
                f"{self.folder / str(latest)} is refused: no run makes more than {MOST_STEPS} "
                "updates, which are counted in 32 bits. Delete or rename that folder."
            )
        return latest

    def save(self, step: int, state: object, *, test_accuracy: float | None = None) -> None:
        """Save `state` as that of `step`; returns when it is copied, and writes in the background.

        Every process must call it, with the same arguments. An existing checkpoint of the step is
        not overwritten.

        Raises:
            ConfigError: if this checkpoint, or the previous one, cannot be written.
        """
        if step in self.steps:
            return
        self._require_room(state)
        metrics: JsonValue = None if test_accuracy is None else {_ACCURACY: test_accuracy}
        written: JsonValue = {_CHECKSUMS: dict(checksums(state))}
        with _naming_unwritable(self.folder):
            self._await_last_save()
            self._saving = self._checkpointer.save_async(
                step,
                state,
                metrics=metrics,
                custom_metadata=written,
                force=True,
            )

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of `step`.

        Args:
            step: one of `steps`.
            like: the state's tree, of arrays or their shapes; its shardings are those of the
                result, whatever mesh the checkpoint was saved from.

        Raises:
            CheckpointMismatch: if the checkpoint is damaged, holds another state, or cannot be
                read at present.
        """
        self.wait()

        def load() -> tuple[Tree, object]:
            written = self._checkpointer.metadata(step).custom_metadata
            return self._checkpointer.load(step, like), written

        state = _verified(load)
        if isinstance(state, _Failure):
            raise CheckpointMismatch(self._mismatch(step, state))
        return state

    def _mismatch(self, step: int, failure: "_Failure") -> str:
        path = self.folder / str(step)
        if not failure.is_damage:
            return f"{path} cannot be read: {failure.text}."
        earlier = max((other for other in self.steps if other < step), default=None)
        outcome = "start over" if earlier is None else f"resume from step {earlier}"
        return (
            f"{path} is refused: it is damaged, or no state of this run ({failure.text}). "
            f"Delete that folder to {outcome}."
        )

    def wait(self) -> None:
        """Wait until all saves are on disk.

        Raises:
            ConfigError: if it cannot be written.
        """
        with _naming_unwritable(self.folder):
            self._checkpointer.wait()
            self._await_last_save()

    def close(self) -> None:
        """Finish pending writes, and release the folder.

        Raises:
            ConfigError: if it cannot be written.
        """
        with _naming_unwritable(self.folder):
            self._checkpointer.close()
            self._await_last_save()

    def _await_last_save(self) -> None:
        """Wait for the last save, and join Orbax's thread that watches it, which otherwise leaks
        with three open files."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _require_room(self, state: object) -> None:
        """Refuse a state that does not fit on the disk: if the write failed in one process, the
        others would wait for it.

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


class _RetentionPolicy:
    """Which checkpoints are kept: the latest, the best and the pinned one.

    Orbax's own `best_fn` would delete the newest checkpoint when the metric worsens, and its
    `BestN` would keep every checkpoint between two evaluations (google/orbax#526).
    """

    def __init__(self, owner: Checkpoints, *, latest: int) -> None:
        self._owner = owner
        self._latest = latest

    def should_preserve(self, checkpoints: Sequence, *, context: object) -> list[bool]:
        """Whether each of `checkpoints`, by ascending step, is kept."""
        kept = {checkpoint.step for checkpoint in checkpoints[-self._latest :]}
        kept.add(self._owner.pinned_step)
        rated = {
            checkpoint.step: checkpoint.metrics[_ACCURACY]
            for checkpoint in checkpoints
            if checkpoint.metrics
        }
        rated |= self._owner.rated
        there = [checkpoint.step for checkpoint in checkpoints if checkpoint.step in rated]
        if there:
            kept.add(max(there, key=rated.__getitem__))
        return [checkpoint.step in kept for checkpoint in checkpoints]


def save_weights(path: Path, weights: object) -> None:
    """Save a tree of arrays to `path`, overwriting it; returns when it is on disk.

    Raises:
        ConfigError: if it cannot be written.
    """
    written: JsonValue = {_CHECKSUMS: dict(checksums(weights))}
    with _naming_unwritable(path):
        orbax.save(str(path.absolute()), weights, overwrite=True, custom_metadata=written)


def load_weights(path: Path, like: Tree) -> Tree:
    """The tree of arrays that `save_weights` wrote, in the shapes and shardings of `like`.

    Raises:
        CheckpointMismatch: if there is none, it is damaged, of other shapes, or cannot be read.
    """

    def load() -> tuple[Tree, object]:
        where = str(path.absolute())
        return orbax.load(where, like), orbax.metadata(where).custom_metadata

    weights = _verified(load)
    if isinstance(weights, _Failure):
        raise CheckpointMismatch(
            f"{path} is refused: it is missing, damaged, or of another network ({weights.text})."
            if weights.is_damage
            else f"{path} cannot be read: {weights.text}."
        )
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why something could not be loaded."""

    text: str
    """Type and first line of the root exception."""
    is_damage: bool
    """Whether the cause is the files, not the disk, permissions or memory."""


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
    """The tree of `load`, which returns what was written beside it too; or why it failed, or the
    first array that differs from its stored checksum. Earlier versions stored none."""
    loaded = _load(load)
    if isinstance(loaded, _Failure):
        return loaded
    tree, written = loaded
    stored = written.get(_CHECKSUMS) if isinstance(written, dict) else None
    if isinstance(stored, dict):
        for path, checksum in checksums(tree).items():
            if stored.get(path, checksum) != checksum:
                text = f"{path} has another checksum than was written"
                return _Failure(text=text, is_damage=True)
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
    return _Failure(text=text, is_damage=not unreadable)


def _is_unreadable(error: BaseException) -> bool:
    """Whether reading the same files may succeed later; a missing file never does."""
    if isinstance(error, OSError | MemoryError):
        return not isinstance(error, FileNotFoundError)
    return str(error).startswith(_UNREADABLE)


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
