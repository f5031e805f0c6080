"""States of a run on disk: written whole or not at all, read back on any number of devices.

A thin class over Orbax, which writes in the background and commits by renaming. Knows states
and steps; decides neither when to save nor what to do with what it reads.
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
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from scalejax.config.checks import MOST_STEPS
from scalejax.core.errors import CheckpointMismatch, ConfigError
from scalejax.core.process_group import is_lost_contact
from scalejax.core.serialization import JsonValue
from scalejax.core.units import format_bytes

# A number for each array of a tree, by which arrays that were read are known to be those written.

_GOLDEN = 0x9E3779B1  # odd, and its multiples are spread: 2**32 over the golden ratio, Knuth 6.4


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of each array of `tree`, by its path: the same on whatever mesh it lies.

    The sum over elements of (bits + 1) * (odd number of the position), modulo 2**32: whole numbers,
    so that the order of addition does not count. One element that changes always changes it; any
    other damage goes unseen once in 2**32. A pass over the tree on the devices; every process must
    call it.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {path: int(each) for path, each in zip(paths, sums, strict=True)}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [checksum(array) for array in arrays]


def checksum(array: jax.Array) -> jax.Array:
    """That of one array, as a program computes it: uint32 []."""
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
        """Open the checkpoints in `folder`, which is made if it is not there.

        Args:
            folder: where they are, by step.
            keep: latest checkpoints to keep; the best by test accuracy is kept besides.

        Raises:
            CheckpointMismatch: if what is there is damaged beyond being listed.
        """
        self.folder = folder.absolute()
        self.pinned_step: int | None = None
        """A step that is kept whatever comes after it."""
        self.rated: dict[int, float] = {}
        """Test accuracies of steps that were saved before these were known."""
        opened = _load(
            lambda: orbax.training.Checkpointer(
                str(self.folder),
                preservation_policy=_Kept(self, latest=keep),
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
        """Steps of the checkpoints there are, rising."""
        return tuple(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    @property
    def latest_step(self) -> int | None:
        """Step of the latest checkpoint; None if there is none.

        Raises:
            CheckpointMismatch: if it is one that no run reaches.
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

        Every process must call it, with the same arguments. A step that is there already is left
        as it is.

        Raises:
            ConfigError: if this checkpoint, or the one before, cannot be written.
        """
        if step in self.steps:
            return
        self._require_room(state)
        metrics: JsonValue = None if test_accuracy is None else {_ACCURACY: test_accuracy}
        written: JsonValue = {_CHECKSUMS: dict(checksums(state))}
        with self._naming_unwritable():
            self._let_go()
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
            like: the state's tree, of arrays or their shapes; their shardings decide where the
                arrays come to lie, whatever mesh they were saved from.

        Raises:
            CheckpointMismatch: if the checkpoint is damaged or holds another state, or cannot be
                read here and now.
        """
        self.wait()

        def load() -> tuple[Tree, object]:
            written = self._checkpointer.metadata(step).custom_metadata
            return self._checkpointer.load(step, like), written

        loaded = _load(load)
        if isinstance(loaded, _Failure):
            raise CheckpointMismatch(self._mismatch(step, loaded))
        state, written = loaded
        if (damage := _damage(state, written)) is not None:
            raise CheckpointMismatch(self._mismatch(step, damage))
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
        """Return when all that was saved is on disk.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._naming_unwritable():
            self._checkpointer.wait()
            self._let_go()

    def close(self) -> None:
        """Finish what is being written, and let go.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._naming_unwritable():
            self._checkpointer.close()
            self._let_go()

    def _let_go(self) -> None:
        """Wait for the last save, and end the thread that Orbax has begun to watch it: nobody else
        does, and it holds three open files."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _require_room(self, state: object) -> None:
        """Refuse a state that the disk has no room for: a process whose write fails would leave
        the others waiting for it.

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

    @contextmanager
    def _naming_unwritable(self) -> Iterator[None]:
        """Word what cannot be written, to which Orbax gives its own kinds of exception."""
        try:
            yield
        except Exception as error:
            if is_lost_contact(error) or (failure := _failure(error)).is_damage:
                raise
            raise _unwritable(self.folder, failure) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_failing = error is not None and not isinstance(error, SystemExit)
        if is_failing and jax.process_count() > 1:
            return  # the others may have failed before, and what waits for them would not end
        try:
            self.close()
        except ConfigError:
            if not is_failing:  # else that is told, which is often the same
                raise


class _Kept:
    """Which checkpoints outlive the next one.

    Orbax's own `best_fn` would delete the newest checkpoint when the metric worsens, and its
    `BestN` would keep every checkpoint between two evaluations (google/orbax#526).
    """

    def __init__(self, owner: Checkpoints, *, latest: int) -> None:
        self._owner = owner
        self._latest = latest

    def should_preserve(self, checkpoints: Sequence, *, context: object) -> list[bool]:
        """Whether each of `checkpoints`, by rising step, is kept."""
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
    """Save a tree of arrays by itself, in place of what `path` held; returns when it is on disk.

    Raises:
        ConfigError: if it cannot be written.
    """
    written: JsonValue = {_CHECKSUMS: dict(checksums(weights))}
    try:
        orbax.save(str(path.absolute()), weights, overwrite=True, custom_metadata=written)
    except Exception as error:
        if is_lost_contact(error) or (failure := _failure(error)).is_damage:
            raise
        raise _unwritable(path, failure) from error


def load_weights(path: Path, like: Tree) -> Tree:
    """The tree of arrays that `save_weights` wrote, in the shapes and shardings of `like`.

    Raises:
        CheckpointMismatch: if there is none, it is damaged, of other shapes, or cannot be read.
    """

    def load() -> tuple[Tree, object]:
        where = str(path.absolute())
        return orbax.load(where, like), orbax.metadata(where).custom_metadata

    loaded = _load(load)
    found = loaded if isinstance(loaded, _Failure) else _damage(*loaded)
    if found is not None:
        raise CheckpointMismatch(
            f"{path} is refused: it is missing, damaged, or of another network ({found.text})."
            if found.is_damage
            else f"{path} cannot be read: {found.text}."
        )
    return loaded[0]  # type: ignore[index]  a failure was raised


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why something could not be loaded."""

    text: str
    """Type and first line of what was raised first."""
    is_damage: bool
    """Whether the files are to blame, and not the disk, the rights or the memory."""


def _unwritable(path: Path, failure: _Failure) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {failure.text}.")


def _damage(tree: object, written: object) -> _Failure | None:
    """What is not as it was written, as far as its checksums are there: earlier versions wrote
    none."""
    of_arrays = written.get(_CHECKSUMS) if isinstance(written, dict) else None
    if not isinstance(of_arrays, dict):
        return None
    for path, checksum in checksums(tree).items():
        if of_arrays.get(path, checksum) != checksum:
            return _Failure(text=f"{path} has another checksum than was written", is_damage=True)
    return None


def _failure(error: BaseException) -> _Failure:
    """What `error` says once unwrapped: Orbax hides the cause in errors about its handlers."""
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
    """Whether the same files may well be read another time; one that is gone will not."""
    if isinstance(error, OSError | MemoryError):
        return not isinstance(error, FileNotFoundError)
    return str(error).startswith(_UNREADABLE)


def _load(load: Callable[[], Tree]) -> Tree | _Failure:
    """What `load` returns, or why it fails, in silence.

    Orbax has no common class for bad files, and prints pages of tracebacks besides what it
    raises. The exception is put into words here, not chained: it holds on to half-done reads,
    which would complain when collected at some later time.
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
            sys.unraisablehook = report  # after a failure it stays: some reads still run
    logger.disabled = was_disabled
    return tree


def _is_no_abandoned_task(record: logging.LogRecord) -> bool:
    return "Task exception was never retrieved" not in record.getMessage()


def _report_others(report: Callable, unraisable: "sys.UnraisableHookArgs") -> None:
    """Report what is not of a read that Orbax abandoned at the first bad file."""
    code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
    is_abandoned_read = code is not None and "orbax" in code.co_filename
    if not is_abandoned_read and "Event loop is closed" not in str(unraisable.exc_value):
        report(unraisable)
