"""Comparison of two revisions of a training step: finds or compiles both programs, compares them.

A revision is a program file, a run file, or a run file at a commit, whose code is checked out and
compiled in a separate process. Knows neither compiler nor equations: those are in `profile` and
`compare`.
"""

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from scalejax.config.run import ResolvedRun, load_config
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, ProfileError, refusal
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue
from scalejax.core.workers import Worker, WorkerFailed
from scalejax.data.facts import resolve
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.planning.git_checkout import CommittedFile, checked_out, committed_file
from scalejax.simulator.comparison import Bounds, Comparison, compare
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.program import Program, load_program
from scalejax.training.record import facts_of
from scalejax.xla import ProfileJob, profile_many

CASES = 2
"""Largest number of programs that a comparison compiles."""

_COMPILE = """
import ctypes, os, signal, sys
if sys.platform == "linux" and (process := int(sys.argv[2])):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its caller
    if os.getppid() != process:
        os.kill(os.getpid(), signal.SIGKILL)
from multiprocessing.connection import Connection
from pathlib import Path
from pydantic import TypeAdapter
from scalejax import Program, ScalejaxError, load_cluster, load_config, resolve
from scalejax.xla import profile

caller = Connection(int(sys.argv[1]))
wanted = caller.recv()
chosen = {}
if wanted["framework"] is not None:
    from scalejax.simulator.frameworks import framework_named
    chosen["framework"] = framework_named(wanted["framework"])
try:
    run = resolve(load_config(Path(wanted["file"]), wanted["overrides"]), wanted["devices"])
    own = getattr(run.config.model, "path", None) if run.config.model.name == "custom" else None
    if own is not None:
        chosen["cache"] = None
    program = profile(run, load_cluster(wanted["cluster"]), **chosen)
    answer = {"program": TypeAdapter(Program).dump_python(program, mode="json"), "own": own}
except ScalejaxError as error:
    answer = {"refused": str(error)}
caller.send(("answer", answer))
"""
"""Script that compiles a run file at a commit. In a checkout of scalejax itself an older scalejax
runs it, so it uses only what every version offers. A user's own network is not cached: its key is
the path of its file, and a checkout never has the same path again."""


Revision = Program | ResolvedRun | CommittedFile
"""One of the steps that are compared: where its program comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Devices and framework that both steps are compiled for, and fields that both replace."""

    cluster: Cluster
    """The cluster."""
    cluster_name: str
    """Name or file of the cluster, as typed."""
    site: Site = NO_SITE
    """Conditions and input of its hosts."""
    device_count: int | None
    """Number of devices; None for the number in the layout, or in a program file."""
    framework: Framework = XLA
    """The framework that trains it."""
    overrides: dict[str, JsonValue]
    """Values for fields of the run files by dotted name."""


def find_revision(text: str, request: Request) -> Revision:
    """The step that `text` names: FILE.json, RUN.toml or RUN.toml@COMMIT.

    Raises:
        ConfigError: if there is no such file or commit, or the file is refused.
    """
    # Names of commits, and of files, may contain an @ too.
    named = None if Path(text).is_file() else re.fullmatch(r"(.*?\.(?:toml|json))@(.*)", text)
    path, commit = named.groups() if named else (text, "")
    at = named is not None
    if not path.endswith(".json"):
        if at:
            file = committed_file(Path(path), commit)
            _require_own_scalejax(text, file.repository)
            return file
        config = load_config(Path(path), request.overrides)
        facts = facts_of(config, Path(path), request.overrides)
        return resolve(config, request.device_count, facts)
    if at:
        accepted = "a program is compiled already; only a run file can be taken at a commit"
        raise ConfigError(refusal("program file", text, accepted))
    program = load_program(Path(path))
    if request.device_count not in (None, program.device_count):
        accepted = f"{path} is for {program.device_count}"
        raise ConfigError(refusal("devices", request.device_count, accepted))
    return program


def compare_revisions(
    a: str,
    b: str,
    request: Request,
    *,
    bounds: Bounds | None = None,
    on_progress: OnProgress = no_display,
) -> tuple[Comparison, Program]:
    """Comparison of the steps that `a` and `b` name, and the program of `b`.

    Args:
        a: the step before: FILE.json, RUN.toml or RUN.toml@COMMIT.
        b: the step after, likewise.
        request: what both are compiled for.
        bounds: how much worse `b` may be; if None, the usual bounds.
        on_progress: called as each step starts to compile, is done, or is cached.

    Raises:
        ConfigError: if a file or commit is refused, or the steps cannot be compared.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    revisions = [find_revision(text, request) for text in (a, b)]
    if request.overrides and all(isinstance(each, Program) for each in revisions):
        names = ", ".join(f"--{name}" for name in request.overrides)
        raise ConfigError(f"{names} replaces a field of a run file, and A and B are programs.")
    notes: list[str] = []
    before, after = _programs((a, b), revisions, request, notes, on_progress)
    comparison = compare(before, after, request.cluster, bounds, site=request.site)
    return replace(comparison, notes=(*notes, *comparison.notes)), after


def _programs(
    titles: Sequence[str],
    revisions: Sequence[Revision],
    request: Request,
    notes: list[str],
    on_progress: OnProgress,
) -> list[Program]:
    """Programs of `revisions`, compiled concurrently; adds to `notes`."""
    programs: dict[int, Program] = {}
    runs: dict[int, ResolvedRun] = {}
    compiling: dict[int, _Compiling] = {}
    with contextlib.ExitStack() as leaving:
        for position, (title, each) in enumerate(zip(titles, revisions, strict=True)):
            match each:
                case Program():
                    programs[position] = each
                case ResolvedRun():
                    runs[position] = each
                case CommittedFile():
                    tree = leaving.enter_context(checked_out(each))
                    compiling[position] = _Compiling(title, each, tree, request)
                    leaving.callback(compiling[position].worker.close)
                    on_progress(Progress(part=title))
        cluster, framework = request.cluster, request.framework
        jobs = [
            ProfileJob(run=run, cluster=cluster, framework=framework, name=titles[position])
            for position, run in runs.items()
        ]
        programs |= zip(runs, profile_many(jobs, on_progress), strict=True)
        for position, each in compiling.items():
            programs[position] = each.program(notes)
            on_progress(Progress(part=titles[position], done=1))
    return [programs[position] for position in range(len(revisions))]


class _Compiling:
    """A process that compiles `file` in `tree`, its checkout.

    It keeps the current working folder, which holds data that are not committed, and imports the
    modules of the checkout instead of those of the working tree.
    """

    def __init__(self, title: str, file: CommittedFile, tree: Path, request: Request) -> None:
        self._title, self._file, self._tree = title, file, tree
        self._places = _search_path(file.repository, tree)
        wanted = {
            "file": str(tree / file.path),
            "overrides": request.overrides,
            "devices": request.device_count,
            "cluster": request.cluster_name,
            "framework": None if request.framework == XLA else request.framework.name,
        }
        self.worker = Worker(wanted, program=_COMPILE, search_path=self._places)
        self.worker.begin()

    def program(self, notes: list[str]) -> Program:
        """The program, once it is compiled; adds to `notes` if its code is not committed.

        Raises:
            ConfigError: if the run file is refused, or its network is not in the commit.
            ProfileError: if it does not compile.
        """
        try:
            found = self.worker.answer()
        except WorkerFailed as failed:
            raise ProfileError(f"{self._title} does not compile: {failed.reason}") from failed
        if "refused" in found:
            lines = (f"{self._title}: {line}" for line in found["refused"].splitlines())
            raise ConfigError("\n".join(lines))
        if found["own"] is not None:
            notes.extend(self._require_network_of_commit(found["own"]))
        return serialization.build(Program, found["program"])

    def _require_network_of_commit(self, network: str) -> Iterator[str]:
        """Refuse a network of the working tree; yield a note on one outside the repository."""
        top = network.split(":")[0].split(".")[0]
        spec = PathFinder.find_spec(top, [*self._places, os.getcwd()])
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
        place = next((Path(each).resolve() for each in places if each), None)
        if place is not None and place.is_relative_to(self._tree.resolve()):
            return
        if place is not None and _is_of_working_tree(place, self._file.repository):
            accepted = (
                f"commit {self._file.commit[:12]} has no module {top!r}, nor is one installed"
            )
            raise ConfigError(f"{self._title}: {refusal('model.path', network, accepted)}")
        yield f"{self._title}: {top!r} is not of the commit: found in {place or 'no folder'}"


def _search_path(repository: Path, tree: Path) -> tuple[str, ...]:
    """Folders in which Python finds modules in the checkout `tree` as it does in `repository`.

    The checkout's own folders come before installed packages, one of which may be a copy of the
    working tree, and after the standard library, since a file next to a run may have the name of a
    standard module.
    """
    here = Path.cwd().resolve()
    own = [tree, tree / "src"]
    if here.is_relative_to(repository):
        own.insert(0, tree / here.relative_to(repository))
    found: list[str] = []
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    for entry in sys.path:
        path = Path(entry or here).resolve()
        if _is_of_working_tree(path, repository):
            found.append(str(tree / path.relative_to(repository)))
            continue
        if {entry, str(path)} & installed:
            found.extend(map(str, own))
        found.append(str(entry or here))
    return tuple(dict.fromkeys((*found, *map(str, own))))


def _is_of_working_tree(path: Path, repository: Path) -> bool:
    """Whether `path` is part of a repository's code, not of a virtual environment inside it."""
    environments = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    return path.is_relative_to(repository) and not any(
        path.is_relative_to(each) and each.is_relative_to(repository) for each in environments
    )


def _require_own_scalejax(text: str, repository: Path) -> None:
    """Refuse commits of scalejax if another scalejax would compile the working tree.

    Raises:
        ConfigError: if the repository is scalejax's, and the running scalejax is not in it.
    """
    running = Path(__file__).resolve().parents[2]
    if (repository / "scalejax" / "__init__.py").is_file() and running != repository:
        accepted = (
            f"it is of scalejax's own repository, and the scalejax of {str(running)!r} runs; "
            f"there, run it as PYTHONPATH={repository} python -m scalejax compare"
        )
        raise ConfigError(refusal("run file", text, accepted))
