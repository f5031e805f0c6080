"""Programs of many runs: compiled in parallel, or scaled out from few compiled ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from scalejax.core.cache import user_folder
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.progress import OnCase, nothing_said
from scalejax.core.units import counted
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.program import Program
from scalejax.xla import ProfileJob, profile_many, remembered
from scalejax.xla.cache import cached_program, case_key, keep
from scalejax.xla.derive import Derivation, derivation
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.target import Backend, Target, has_cuda_compiler
from scalejax.xla.worker_pool import run_jobs

# Compilation of several cases, with progress of each.


def in_words(device_count: int) -> str:
    """Name of a case with `device_count` devices: "256 devices"."""
    return counted(device_count, "device")


def compile_cases(
    jobs: Sequence[ProfileJob], cases: Sequence[str], on_case: OnCase = nothing_said
) -> list[Program]:
    """Programs of `jobs`, compiled in parallel where they are not cached.

    Args:
        jobs: runs and clusters.
        cases: title of each job: "256 devices".
        on_case: called as each case starts to compile, is done, or is cached.

    Raises:
        ProfileError: if the compiler refuses one; the others are stopped.
        DoesNotFit: if a cluster has fewer devices.
    """
    programs: dict[int, Program] = {}
    for position, job in enumerate(jobs):
        program = remembered(job)
        if program is not None:
            programs[position] = program
            on_case("remembered", cases[position])
    missing = [position for position in range(len(jobs)) if position not in programs]
    for position in missing:
        on_case("begun", cases[position])

    def done(index: int, program: Program) -> None:
        programs[missing[index]] = program
        on_case("compiled", cases[missing[index]])

    if missing:
        profile_many([jobs[position] for position in missing], done)
    return [programs[position] for position in range(len(jobs))]


OnProgress = Callable[[int, int], None]
"""Called with the number of programs that have been compiled, and of all that must be."""


class Programs:
    """Programs of many runs, scaled out from few compiled ones, each of which is compiled once.

    Runs that differ in the size of the data axis or in the number of microbatches share compiled
    programs. A program that cannot be scaled out is compiled for all its devices.
    """

    def __init__(
        self,
        *,
        archived: Callable[[str], Program | None] = lambda key: None,
        on_progress: OnProgress = lambda done, total: None,
        backend: Backend | None = None,
        compiles: bool = True,
    ) -> None:
        """Start without programs.

        Args:
            archived: compiled program of a `case_key` that needs no compiler; None without one.
            on_progress: see `OnProgress`.
            backend: compiler backend; if None, that of the cluster's chip where it is installed,
                else the CPU's.
            compiles: whether programs that are not archived are read from the user's cache or
                compiled; otherwise they are errors.
        """
        self.known: dict[str, Program | ScalejaxError] = {}
        """Compiled program of each `case_key`, or the reason why there is none."""
        self._derived: dict[tuple[str, str, Framework], Program | ScalejaxError | None] = {}
        self._archived = archived
        self._folder = user_folder()
        self._on_progress = on_progress
        self._backend: Backend | None = backend
        self._compiles = compiles
        self._done = self._total = 0

    def find(self, jobs: Sequence[ProfileJob]) -> list[Program | ScalejaxError]:
        """Program of each job, or the reason why there is none; one object for equal jobs."""
        answers: dict[int, Program | ScalejaxError] = {}
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
        key = (keys[0], whole, how.job.framework)
        if key not in self._derived:
            self._derived[key] = self._derive(how, [self.known[each] for each in keys])
        return self._derived[key]

    def _derive(
        self, how: Derivation, compiled: Sequence[Program | ScalejaxError]
    ) -> Program | ScalejaxError | None:
        programs: list[Program] = []
        for each in compiled:
            if isinstance(each, ScalejaxError):
                return each
            programs.append(each)
        try:
            return how.program(programs)
        except ScalejaxError as error:
            return error

    def _require(self, jobs: Iterable[RunJob]) -> None:
        """Find or compile the programs of `jobs`."""
        missing: dict[str, RunJob] = {}
        for job in jobs:
            key = case_key(job)
            if key in self.known or key in missing:
                continue
            program = self._archived(key)
            if program is None and self._compiles:
                job = _compilable(job)
                program = cached_program(self._folder, job)
            if program is not None:
                self.known[key] = program
            elif self._compiles:
                missing[key] = job
            else:
                self.known[key] = ProfileError("its program is not in the archive.")
        self._total += len(missing)
        if missing:
            self._compile(list(missing), list(missing.values()))

    def _compile(self, keys: list[str], jobs: list[RunJob]) -> None:
        self._on_progress(self._done, self._total)

        def answer(index: int, program: Program | ScalejaxError) -> None:
            self.known[keys[index]] = program
            self._done += 1
            self._on_progress(self._done, self._total)

        def on_done(index: int, compiled: Compiled) -> None:
            keep(self._folder, jobs[index], compiled)
            answer(index, compiled.program)

        run_jobs(jobs, on_done, answer)


def programs_of(
    jobs: Sequence[ProfileJob], on_progress: OnProgress = lambda done, total: None
) -> list[Program]:
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


def _compilable(job: RunJob) -> RunJob:
    """`job` for the CPU, whose FLOP carry over, where no compiler for GPUs is installed."""
    if job.target.backend != "cuda" or has_cuda_compiler():
        return job
    substitute = Target(backend="cpu", name="cpu", device_count=job.target.device_count)
    return replace(job, target=substitute)
