"""What an elastic launcher and its processes share: a folder in memory that outlives processes.

It holds copies of the run's state, the change of processes that the record does not have yet, and
the request that others join. Knows files, but neither states nor how processes are started.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import document, load, save

FOLDER, COPY_SECONDS = "SCALEJAX_ELASTIC", "SCALEJAX_COPY_SECONDS"
"""Variables, set by the launcher: the folder; least seconds between two copies, 0 for no copies."""
MEMORY = Path("/dev/shm")  # a tmpfs: shm_overview(7)
_OWNER = "owner"
_SECONDS_TO_LOCK = 600.0
"""A folder that nobody has locked for this long is abandoned."""


@document("change_of_processes")
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the processes of a run, kept until the record has it."""

    before: int
    """Number of processes before the change."""
    after: int
    """Number of processes that continue."""
    reason: str
    """Why, in words."""
    step: int
    """Updates that any process had begun."""
    since_seconds: float
    """When it was noticed, in seconds since 1970, since processes may be on other machines."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder, as seen by launcher and processes."""

    path: Path
    """The folder itself."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """The folder that the environment names; None if it names none."""
        path = os.environ.get(FOLDER)
        return cls(Path(path)) if path else None

    @property
    def copies(self) -> Path:
        """Copies of the state, by step."""
        return self.path / "copies"

    @property
    def programs(self) -> Path:
        """Programs that JAX has compiled."""
        return self.path / "programs"

    @property
    def change(self) -> Change | None:
        """The change that the record does not have yet; None if there is none."""
        try:
            return load(Change, self._change) if self._change.exists() else None
        except ConfigError:  # somebody wrote into it: an unreported change does no harm
            return None

    def set_change(self, change: Change | None) -> None:
        """Note a change, or with None that the record has it; if it cannot be written, because
        memory is full, none is reported."""
        try:
            if change is not None:
                save(change, self._change)
                return
        except ConfigError:
            pass  # and the previous one is no longer true
        with contextlib.suppress(OSError):
            self._change.unlink(missing_ok=True)

    def keep(self) -> Path:
        """Have the folder outlive its launcher and the next one; returns its new place.

        Raises:
            OSError: if it cannot be renamed.
        """
        kept = self.path.with_name(f"kept-{self.path.name}")
        self.path.rename(kept)
        return kept

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the processes are to stop at the next copy so that others can join."""
        return self._joining.exists()

    def ask_to_stop(self, *, asks: bool) -> None:
        """Say whether the processes are to stop so that others can join.

        Raises:
            OSError: if this cannot be written.
        """
        if asks:
            self._joining.touch()
        else:
            self._joining.unlink(missing_ok=True)

    @property
    def _change(self) -> Path:
        return self.path / "change.json"

    @property
    def _joining(self) -> Path:
        return self.path / "joining"


@contextmanager
def shared_folder(
    memory: Path = MEMORY, *, say: Callable[[str], None] | None = None
) -> Iterator[SharedFolder]:
    """A new folder in `memory`, removed after the block unless it is kept; folders of killed
    launchers are removed.

    Args:
        memory: the parent folder.
        say: receives the reason if nothing can be created in `memory` and the folder is among the
            system's temporary files instead, where no copies are made; if None, that is refused.

    Raises:
        ConfigError: if it cannot be created.
    """
    try:
        path, owner = _made(memory)
    except OSError as error:
        if say is None:
            raise ConfigError(f"{str(memory)!r} cannot be written: {error}.") from error
        if memory.is_dir():  # else the system has no such folder
            say(f"Note: no copies in memory, only checkpoints: {memory} is refused ({error}).")
        instead = Path(tempfile.gettempdir())
        try:
            path, owner = _made(instead)
        except OSError as again:
            raise ConfigError(f"{str(instead)!r} cannot be written: {again}.") from again
    try:
        yield SharedFolder(path)
    finally:
        _remove(path)
        os.close(owner)


def _made(parent: Path) -> tuple[Path, int]:
    """A new folder in `parent`, and its owner file from `_locked`."""
    prefix = f"scalejax-{os.getuid()}-"
    for other in parent.glob(f"{prefix}*"):
        _remove_abandoned(other)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # 0700, with a random name
    try:
        return path, _locked(path)
    except OSError:
        _remove(path)
        raise


def _locked(path: Path) -> int:
    """The open file whose lock, which ends with this process, marks `path` as in use."""
    draft = path / f"{_OWNER}.new"
    file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(path / _OWNER)  # never visible without its lock
    return file


def _remove_abandoned(path: Path) -> None:
    """Remove the folder of a launcher that is gone."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            return
        if not (path / _OWNER).exists():  # a launcher is about to lock it, or was killed before
            if time.time() > path.stat().st_mtime + _SECONDS_TO_LOCK:
                _remove(path)
            return
        file = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while it lives
            _remove(path)
        finally:
            os.close(file)


def _remove(path: Path) -> None:
    """Remove a folder, its owner file last."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != _OWNER:
                each.unlink()
    shutil.rmtree(path, ignore_errors=True)
