"""Programs of many runs: read from the cache or compiled in parallel, or scaled out from few."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from scalejax.core.cache import user_folder
from scalejax.core.errors import ConfigError, ProfileError, ScalejaxError
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.program import Program
from scalejax.xla.cache import cached_program, case_key, keep
from scalejax.xla.closed_form import program_in_closed_form
from scalejax.xla.derive import Derivation, ProfileJob, derivation
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.kept import kept_program
from scalejax.xla.target import Backend, Target, has_cuda_compiler
from scalejax.xla.worker_pool import run_jobs

CacheFolder = Path | None | Literal["user"]
"""Cache of programs: a folder, none, or the user's cache folder."""


class CompiledPrograms:
    """Compiled programs by `case_key`, each of which is read from the cache, or compiled, once."""

    def __init__(self, cache: CacheFolder = "user", *, takes_kept: bool = False) -> None:
        """Start without programs; `cache` is where they are read from and kept.

        With `takes_kept`, programs that come with scalejax, without source lines, are read too.
        """
        self.known: dict[str, Program] = {}
        """The programs that were found or compiled."""
        self._folder = user_folder() if cache == "user" else cache
        self._takes_kept = takes_kept

    def missing(self, wanted: Mapping[str, RunJob]) -> dict[str, RunJob]:
        """Those of `wanted` that must be compiled; the others are put into `known`."""
        missing: dict[str, RunJob] = {}
        for key, job in wanted.items():
            if key in self.known:
                continue
            program = None if self._folder is None else cached_program(self._folder, job)
            if program is None and self._takes_kept:
                program = kept_program(job)
            if program is None:
                missing[key] = job
            else:
                self.known[key] = program
        return missing

    def compile(
        self,
        missing: Mapping[str, RunJob],
        on_done: Callable[[], None],
        on_error: Callable[[str, ScalejaxError], None] | None = None,
    ) -> None:
        """Compile `missing`, in parallel; `on_done` is called after each.

        Raises:
            ProfileError: of the first that is refused, if there is no `on_error`.
        """
        keys, jobs = list(missing), list(missing.values())

        def done(index: int, result: Compiled) -> None:
            if self._folder is not None:
                keep(self._folder, jobs[index], result)
            self.known[keys[index]] = result.program
            on_done()

        if jobs:
            run_jobs(jobs, done, on_error and (lambda index, error: on_error(keys[index], error)))


def profile_many(
    jobs: Sequence[ProfileJob],
    on_progress: OnProgress = no_display,
    *,
    cache: CacheFolder = "user",
    backend: Backend | None = None,
    takes_kept: bool = False,
) -> list[Program]:
    """Programs of `jobs`, compiled in parallel.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_cluster, load_config, profile_many, resolve
        >>> from scalejax.xla import ProfileJob
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> config, cluster = load_config(path), load_cluster("dgx-h100")
        >>> jobs = [ProfileJob(run=resolve(config, n), cluster=cluster) for n in (1, 2)]
        >>> [program.device_count for program in profile_many(jobs)]
        [1, 2]

    Args:
        jobs: runs and clusters.
        on_progress: called with the title of each job when it starts to compile and when it is
            done; for one in the cache only when it is done.
        cache: cache to read programs from and to write them to.
        backend: see `profile`.
        takes_kept: whether programs that come with scalejax, which have no source lines of
            operations, are used too.

    Raises:
        ProfileError: if the compiler refuses one; the others are stopped.
        DoesNotFit: if a cluster has fewer devices.
    """
    compiled = CompiledPrograms(cache, takes_kept=takes_kept)
    made = _profiled(jobs, on_progress, compiled, backend, None)
    return [made[position] for position in range(len(jobs))]


def profile_each(
    jobs: Sequence[ProfileJob],
    on_progress: OnProgress = no_display,
    *,
    cache: CacheFolder = "user",
    backend: Backend | None = None,
) -> list[Program | ScalejaxError]:
    """Programs of `jobs`, compiled in parallel as by `profile_many`, or the reasons why there are
    none; the failure of one does not stop the others."""
    errors: dict[int, ScalejaxError] = {}
    made = _profiled(jobs, on_progress, CompiledPrograms(cache), backend, errors)
    return [made.get(position) or errors[position] for position in range(len(jobs))]


def _profiled(
    jobs: Sequence[ProfileJob],
    on_progress: OnProgress,
    compiled: CompiledPrograms,
    backend: Backend | None,
    errors: dict[int, ScalejaxError] | None,
) -> dict[int, Program]:
    """Program of each job by its position; those that are refused are added to `errors`.

    Raises:
        ScalejaxError: of the first that is refused, if there are no `errors`.
    """
    ways: dict[int, Derivation] = {}
    wanted: dict[int, dict[str, RunJob]] = {}
    programs = dict[int, Program]()

    def refuse(position: int, error: ScalejaxError) -> None:
        if errors is None:
            raise error
        errors[position] = error
        on_progress(Progress(part=jobs[position].title, done=1))

    def refuse_key(key: str, error: ScalejaxError) -> None:
        for position, needed in wanted.items():
            if key in needed and position not in (errors or ()):
                refuse(position, error)

    def derive() -> None:
        for position, needed in wanted.items():
            is_made = position in programs or position in (errors or ())
            if is_made or not needed.keys() <= compiled.known.keys():
                continue
            try:
                program = ways[position].program([compiled.known[key] for key in needed])
            except ScalejaxError as error:
                refuse(position, error)
                continue
            assert program is not None  # noqa: S101  it is of all devices already
            programs[position] = program
            on_progress(Progress(part=jobs[position].title, done=1))

    for position, job in enumerate(jobs):
        try:
            if (found := _in_closed_form(job)) is not None:
                programs[position] = found
                continue
            ways[position] = derivation(job, backend=backend)
        except ScalejaxError as error:
            refuse(position, error)
        else:
            wanted[position] = {case_key(each): each for each in ways[position].compiled}
    missing = compiled.missing({k: job for needed in wanted.values() for k, job in needed.items()})
    derive()
    for position in wanted:
        if position not in programs and position not in (errors or ()):
            on_progress(Progress(part=jobs[position].title))
    compiled.compile(missing, derive, None if errors is None else refuse_key)
    return programs


class Programs:
    """Programs of many runs, scaled out from few compiled ones, each of which is compiled once.

    Runs that differ in the size of the data axis or in the number of microbatches share compiled
    programs. A program that cannot be scaled out is compiled for all its devices.
    """

    def __init__(
        self,
        *,
        archived: Callable[[str], Program | None] = lambda key: None,
        on_progress: OnProgress = no_display,
        backend: Backend | None = None,
        compiles: bool = True,
    ) -> None:
        """Start without programs.

        Args:
            archived: compiled program of a `case_key` that needs no compiler; None if unknown.
            on_progress: called with the number of programs that have been compiled, and the number
                that must be.
            backend: compiler backend; if None, that of the cluster's chip where it is installed,
                else the CPU's.
            compiles: whether programs that are not archived are read from the user's cache or
                compiled; otherwise they are errors.
        """
        self.compiled = CompiledPrograms()
        """The compiled programs that were needed."""
        self._refused: dict[str, ScalejaxError] = {}
        self._derived: dict[tuple[str, str, Framework], Program | ScalejaxError | None] = {}
        self._archived = archived
        self._on_progress = on_progress
        self._backend: Backend | None = backend
        self._compiles = compiles
        self._done = self._total = 0

    def find(self, jobs: Sequence[ProfileJob]) -> list[Program | ScalejaxError]:
        """Program of each job, or the reason why there is none; one object for equal jobs."""
        answers: dict[int, Program | ScalejaxError] = {}
        for index, job in enumerate(jobs):
            try:
                if (found := _in_closed_form(job)) is not None:
                    answers[index] = found
            except ScalejaxError as error:
                answers[index] = error
        for is_reduced in (True, False):
            requested: dict[int, Derivation] = {}
            for index, job in enumerate(jobs):
                if index in answers:
                    continue
                try:
                    requested[index] = derivation(job, is_reduced=is_reduced, backend=self._backend)
                except ScalejaxError as error:
                    answers[index] = error
            self._require(job for each in requested.values() for job in each.compiled)
            for index, each in requested.items():
                answer = self._answer(each)
                if answer is not None:
                    answers[index] = answer
        return [answers[index] for index in range(len(jobs))]

    def _answer(self, how: Derivation) -> Program | ScalejaxError | None:
        """The derived program; None if it cannot be scaled out."""
        keys = [case_key(job) for job in how.compiled]
        whole = case_key(replace(how.compiled[0], run=how.job.run))
        derived = (keys[0], whole, how.job.framework)
        if derived not in self._derived:
            try:
                answer = next((self._refused[key] for key in keys if key in self._refused), None)
                self._derived[derived] = answer or how.program(
                    [self.compiled.known[key] for key in keys]
                )
            except ScalejaxError as error:
                self._derived[derived] = error
        return self._derived[derived]

    def _require(self, jobs: Iterable[RunJob]) -> None:
        """Find or compile the programs of `jobs`."""
        wanted: dict[str, RunJob] = {}
        for job in jobs:
            key = case_key(job)
            if key in self._refused or key in self.compiled.known:
                continue
            if (program := self._archived(key)) is not None:
                self.compiled.known[key] = program
            elif self._compiles:
                wanted[key] = _compilable(job)
            else:
                self._refused[key] = ProfileError("its program is not in the archive.")
        missing = self.compiled.missing(wanted)
        self._total += len(missing)
        if missing:
            self._on_progress(Progress(done=self._done, total=self._total))
        self.compiled.compile(missing, self._count, self._refuse)

    def _count(self) -> None:
        self._done += 1
        self._on_progress(Progress(done=self._done, total=self._total))

    def _refuse(self, key: str, error: ScalejaxError) -> None:
        self._refused[key] = error
        self._count()


def programs_of(jobs: Sequence[ProfileJob], on_progress: OnProgress = no_display) -> list[Program]:
    """Program of each job, scaled out from few compiled ones; see `Programs`.

    Raises:
        ConfigError: if a chip or a framework cannot run one.
        DoesNotFit: if a cluster has fewer devices.
        ProfileError: if the compiler refuses one.
    """
    programs: list[Program] = []
    for answer in Programs(on_progress=on_progress).find(jobs):
        if isinstance(answer, ScalejaxError):
            raise answer
        programs.append(answer)
    return programs


def _in_closed_form(job: ProfileJob) -> Program | None:
    """The step of a framework with its own kernels; None for other frameworks, and for a network
    or a layout that has no closed form."""
    if job.framework.kernels is None:
        return None
    try:
        return program_in_closed_form(job)
    except ConfigError:
        return None


def _compilable(job: RunJob) -> RunJob:
    """`job` for the CPU, whose FLOP carry over, where no compiler for GPUs is installed."""
    if job.target.backend != "cuda" or has_cuda_compiler():
        return job
    substitute = Target(backend="cpu", name="cpu", device_count=job.target.device_count)
    return replace(job, target=substitute)
