"""States of a run on disk: written whole or not at all, read back on any number of devices.

A thin class over Orbax, which writes in the background and commits by renaming. Knows states
and steps; decides neither when to save nor what to do with what it reads.
"""

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from orbax.checkpoint import v1 as orbax

from scalejax.errors import CheckpointMismatch

Tree = TypeVar("Tree")

_ACCURACY = "test_accuracy"

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
        """Step of the latest checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, state: object, *, test_accuracy: float | None = None) -> None:
        """Save `state` as that of `step`; returns when it is copied, and writes in the background.

        Every process must call it, with the same arguments. A step that is there already is left
        as it is.
        """
        if step in self.steps:
            return
        self._let_go()
        self._saving = self._checkpointer.save_async(
            step,
            state,
            metrics=None if test_accuracy is None else {_ACCURACY: test_accuracy},
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
        state = _load(lambda: self._checkpointer.load(step, like))
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
        """Return when all that was saved is on disk."""
        self._checkpointer.wait()
        self._let_go()

    def close(self) -> None:
        """Finish what is being written, and let go."""
        self._checkpointer.close()
        self._let_go()

    def _let_go(self) -> None:
        """Wait for the last save, and end the thread that Orbax has begun to watch it: nobody else
        does, and it holds three open files."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
        rated = [checkpoint for checkpoint in checkpoints if checkpoint.metrics]
        if rated:
            kept.add(max(rated, key=lambda checkpoint: checkpoint.metrics[_ACCURACY]).step)
        return [checkpoint.step in kept for checkpoint in checkpoints]


def save_weights(path: Path, weights: object) -> None:
    """Save a tree of arrays by itself, in place of what `path` held; returns when it is on disk."""
    orbax.save(str(path.absolute()), weights, overwrite=True)


def load_weights(path: Path, like: Tree) -> Tree:
    """The tree of arrays that `save_weights` wrote, in the shapes and shardings of `like`.

    Raises:
        CheckpointMismatch: if there is none, it is damaged, of other shapes, or cannot be read.
    """
    weights = _load(lambda: orbax.load(str(path.absolute()), like))
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
    """Type and first line of what was raised first."""
    is_damage: bool
    """Whether the files are to blame, and not the disk, the rights or the memory."""


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
        except Exception as error:  # noqa: BLE001  see above
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
