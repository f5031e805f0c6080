"""A file at a commit of its git repository, and a temporary checkout of that commit.

Knows git and folders, but nothing about runs.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scalejax.core.environment import terminated_as_interrupted
from scalejax.core.errors import ConfigError, refusal

_OF_ANOTHER_REPOSITORY = frozenset(
    (
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_COMMON_DIR",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_PREFIX",
    )
)
"""Variables that git sets for its hooks, from which scalejax may be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFile:
    """A file as it is in one commit."""

    repository: Path
    """Top folder of the repository's working tree, absolute."""
    commit: str
    """Full name of the commit."""
    path: Path
    """Path of the file in the repository."""


def committed_file(path: Path, revision: str) -> CommittedFile:
    """The file at `path` in the commit that `revision` names, in the repository of its folder.

    Args:
        path: where the file is, or was, in the working tree.
        revision: a branch, tag or commit, such as "HEAD~1".

    Raises:
        ConfigError: if there is no git, repository or commit, or the commit has no such file.
    """
    typed = f"{path}@{revision}"
    folder = path.parent.resolve()
    while not folder.is_dir():  # the file's folder may have been removed
        folder = folder.parent
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        accepted = f"{str(folder)!r} is in the working tree of no git repository ({_said(top)})"
        raise ConfigError(refusal("run file", typed, accepted))
    repository = Path(top.stdout.rstrip("\n"))
    # A revision that begins with "-" would be read as an option.
    found = None
    if revision and not revision.startswith("-"):
        found = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found is None or found.returncode:
        accepted = f"{revision!r} is not a commit of {str(repository)!r}"
        if (repository / ".git" / "shallow").is_file():
            accepted += "; the clone is shallow: fetch with more depth"
        raise ConfigError(refusal("run file", typed, accepted))
    commit = found.stdout.strip()
    inside = (path.parent.resolve() / path.name).relative_to(repository)
    if _git(repository, "cat-file", "-e", f"{commit}:{inside.as_posix()}").returncode:
        accepted = f"commit {commit[:12]} has no file {inside.as_posix()!r}"
        raise ConfigError(refusal("run file", typed, accepted))
    return CommittedFile(repository=repository, commit=commit, path=inside)


@contextlib.contextmanager
def checked_out(file: CommittedFile) -> Iterator[Path]:
    """A folder with the files of the commit of `file`, removed at the end, also on Ctrl-C.

    Does not run the repository's hooks.

    Raises:
        ConfigError: if the commit cannot be checked out.
        KeyboardInterrupt: on SIGTERM, as on Ctrl-C.
    """
    with terminated_as_interrupted():
        outer = Path(tempfile.mkdtemp(prefix="scalejax-"))
        folder = outer / f"{file.commit[:12]}-{outer.name}"  # git names its record after this
        try:
            add = ("worktree", "add", "--detach", "--quiet", str(folder), file.commit)
            done = _git(file.repository, "-c", f"core.hooksPath={os.devnull}", *add)
            if done.returncode:
                accepted = f"it cannot be checked out ({_said(done)})"
                raise ConfigError(refusal("commit", file.commit[:12], accepted))
            yield folder
        finally:
            # --force twice: a worktree whose creation was interrupted is locked.
            _git(file.repository, "worktree", "remove", "--force", "--force", str(folder))
            shutil.rmtree(outer, ignore_errors=True)


def _git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Result of a git command in `folder`, shielded from Ctrl-C, which the caller handles.

    Raises:
        ConfigError: if there is no git.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=kept,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ConfigError("run files at a commit need git, which is not installed.") from error


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    """The first line of what git printed about a failure."""
    lines = done.stderr.strip().splitlines() or [f"git ended with {done.returncode}"]
    return lines[0]
