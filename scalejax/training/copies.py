"""Copies of the training state in memory, from which an elastic run resumes in other processes.

A copy is a checkpoint in the folder that the launcher has in memory, with the same manifest, so
that an unfinished one never counts. The first process decides when one is made. Knows where copies
are and what they cost; neither the loop nor how processes are started.
"""

import enum
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile

import jax

from scalejax.core.elastic import COPY_SECONDS, MEMORY, SharedFolder
from scalejax.core.errors import ConfigError, Unavailable
from scalejax.core.units import format_bytes
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.manifest import MANIFEST, RunAtStep
from scalejax.training.multihost import all_gather_text, decided_by_first, is_first
from scalejax.training.state import TrainState

_KEPT = 2
_OVERHEAD_BYTES = 2**20
"""The most that a copy takes besides the state."""
_TRIED_BYTES = 2**14
_LEAST_SHARE = 50
"""A copy is made after this many times the time for which the last one held up training."""
_SECONDS_BETWEEN_LOOKS = 1.0


class Wish(enum.IntEnum):
    """What the first process wants all processes to do after an update."""

    NOTHING = 0
    COPY = 1
    """Copy the state."""
    STOP = 2
    """Copy it, and stop for others to join."""
    SAVE_AND_STOP = 3
    """Write a checkpoint, as there is no room for a copy, and stop for others to join."""


class Copies:
    """The copies of one run, and when the next is due; every process has one."""

    def __init__(
        self,
        shared: SharedFolder,
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the copies; every process must call it.

        Args:
            shared: the folder of the launcher.
            seconds: minimum time between two copies; 0 for no copies.
            say: called with the reason why none are made.
            clock: monotonic clock in seconds.
        """
        self.shared = shared
        self._seconds = seconds
        self._say = say
        self._clock = clock
        self._looked = self._last = clock()
        self._blocked_seconds = 0.0
        self._is_first_copy = True
        self._has_told = False
        self._state_bytes = 0
        self.store: Checkpoints | None = None
        """The copies, as checkpoints; None once they could not be written."""
        with self._optional():
            self.store = Checkpoints(shared.copies, keep=_KEPT, keeps_damaged=False)

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Make no more copies if the block cannot write them: the run has its checkpoints."""
        try:
            yield
        except ConfigError as error:
            self._tell(f"{error}", self.store and self.store.latest_step)
            self.store = None
            if is_first():
                self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Free the memory of copies that never count."""
        with suppress(OSError):
            for path in self.shared.copies.iterdir():
                if not (path / MANIFEST).exists():
                    shutil.rmtree(path, ignore_errors=True)

    def _tell(self, reason: str, newest_step: int | None) -> None:
        """Say once why no copies are made, or no more of them."""
        if not self._has_told:
            self._has_told = True
            reason = reason.removesuffix(".")
            after = "" if newest_step is None else f" after that of step {newest_step}"
            self._say(f"Note: no copies in memory{after}, only checkpoints: {reason}.")

    def resume_from(self, step: int) -> None:
        """Like `Checkpoints.resume_from`; every process must call it."""
        with self._optional():
            if self.store is not None:
                self.store.resume_from(step)

    def begin(self, state: TrainState) -> None:
        """Note that training begins from `state`; the first copy is due some seconds later."""
        self._state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._last = self._clock()

    def wish(self) -> Wish:
        """What the first process wants now; the wishes of others do not count."""
        now = self._clock()
        if not is_first() or now < self._looked + _SECONDS_BETWEEN_LOOKS:
            return Wish.NOTHING
        self._looked = now
        if self.store is not None:
            # Here no other process waits for this one; if it failed in the next copy, all would
            # wait for it.
            if self.store.is_saving:
                return Wish.NOTHING
            with self._optional():
                self.store.close()
        if self.shared.is_asked_to_stop:
            return Wish.STOP if self._has_room() else Wish.SAVE_AND_STOP
        wait = max(self._seconds, _LEAST_SHARE * self._blocked_seconds)
        is_due = self._seconds > 0 and now >= self._last + wait
        return Wish.COPY if is_due and self._has_room() else Wish.NOTHING

    def _has_room(self) -> bool:
        """Whether a copy may be made: copies are in memory, and there is room for those that are
        kept and for the next, before which none is removed."""
        if self.store is None or not self._seconds or MEMORY not in self.shared.path.parents:
            return False
        missing = max(1, _KEPT + 1 - len(self.store.steps))
        needed = missing * (self._state_bytes + _OVERHEAD_BYTES)
        free = shutil.disk_usage(self.shared.path).free
        if free < needed:
            self._tell(
                f"{format_bytes(free)} are free in {MEMORY}, and copies take "
                f"{format_bytes(needed)} more",
                self.store.latest_step,
            )
        return free >= needed

    def save(self, step: int, state: TrainState, runs: Sequence[RunAtStep]) -> None:
        """Copy `state`; returns once it has left the devices. Every process must call it.

        Raises:
            Unavailable: if one of several processes failed in it, and others wait for that one.
        """
        with self._optional():
            if self.store is not None:
                self._require_writable()
                self.store.require_room(state)
        if self.store is None:
            return
        begin = self._clock()
        with self._optional() if jax.process_count() == 1 else _unavailable():
            self.store.save(step, state, runs=runs)
        is_first_copy, self._is_first_copy = self._is_first_copy, False
        self._last = self._looked = self._clock()
        # The first includes the compilation of its checksums.
        self._blocked_seconds = 0.0 if is_first_copy else self._last - begin

    def _require_writable(self) -> None:
        """Refuse in all processes alike what one of them cannot write, before any waits for it."""
        reason = ""
        try:
            with TemporaryFile(dir=self.shared.copies) as file:
                file.write(bytes(_TRIED_BYTES))
        except OSError as error:
            reason = f"{self.shared.copies} cannot be written: {error}"
        if reasons := [each for each in all_gather_text(reason) if each]:
            raise ConfigError(reasons[0])

    def wait(self) -> bool:
        """Whether the last copy counts, once it does or could not be written; every process must
        call it."""
        with self._optional():
            if self.store is not None:
                self.store.close()
        # The first process finishes a copy once the others have written their parts.
        return bool(decided_by_first(lambda: self.store is not None))


def copies_here(say: Callable[[str], None]) -> Copies | None:
    """The copies in the folder that the environment names; None if it names none. Every process
    must call it."""
    shared = SharedFolder.from_environment()
    if shared is None:
        return None
    return Copies(shared, float(os.environ.get(COPY_SECONDS, "0")), say)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Have the run restarted from the previous copy or checkpoint."""
    try:
        yield
    except ConfigError as error:
        raise Unavailable(f"no copy could be made: {error}") from error
