"""Program of each row: which of the runs that it may mean is used."""

import math
from collections.abc import Sequence
from pathlib import Path

from scalejax.core.environment import compiler_settings
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.progress import OnProgress, no_display
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.timeline import timeline
from scalejax.validation.cases import Case, one_line
from scalejax.xla import ProfileJob
from scalejax.xla.archive import Archive, read_archive
from scalejax.xla.batch import Programs
from scalejax.xla.closed_form import program_in_closed_form

ARCHIVE = Path(__file__).parent / "programs.jsonl.xz"
"""The programs of the project's open ledger."""


class ClosedFormPrograms:
    """Programs of many runs: kept ones, else those that the closed form knows, else compiled
    ones."""

    def __init__(self, kept: Programs, made: Programs | None) -> None:
        """Ask `kept` first, which compiles nothing, and `made` last; without `made`, other runs are
        errors."""
        self.compiled = kept.compiled if made is None else made.compiled
        """The compiled programs that were needed."""
        self._kept = kept
        self._made = made

    def find(self, jobs: Sequence[ProfileJob]) -> list[Program | ScalejaxError]:
        """Program of each job, or the reason why there is none."""
        answers = list(self._kept.find(jobs))
        others = []
        for index, job in enumerate(jobs):
            if not isinstance(answers[index], ScalejaxError):
                continue
            try:
                answers[index] = program_in_closed_form(job)
            except ScalejaxError:
                others.append(index)
        if self._made is not None:
            made = self._made.find([jobs[index] for index in others])
            for index, answer in zip(others, made, strict=True):
                answers[index] = answer
            return answers
        for index in others:
            if isinstance(answers[index], ProfileError):
                answers[index] = ProfileError(NEITHER)
        return answers


NEITHER = "its program is not kept, and the closed form does not know it: --compile compiles it"
"""Why a row is skipped whose step needs the compiler, if nothing is compiled."""


def archived_programs(
    archive: Archive | None = None,
    on_progress: OnProgress = no_display,
    *,
    compiles: bool = True,
    closed_form: bool = False,
) -> Programs | ClosedFormPrograms:
    """Programs that are read from an archive if it has them.

    Args:
        archive: archive to read first; if None, the one that comes with scalejax.
        on_progress: called with the number of programs compiled, and of all that must be.
        compiles: whether programs that are not in the archive are read from the user's cache or
            compiled; otherwise they are skipped.
        closed_form: whether to use the closed form of the step if it knows the run and the archive
            has no program.
    """
    if archive is None:
        # The user's own compiler flags change the programs; those of the archive have none.
        archive = Archive({}) if compiler_settings() else read_archive(ARCHIVE)

    def source(*, compiles: bool) -> Programs:
        # Archived programs are for GPUs, whether or not their compiler is installed.
        return Programs(
            archived=archive.program, on_progress=on_progress, backend="cuda", compiles=compiles
        )

    if not closed_form:
        return source(compiles=compiles)
    return ClosedFormPrograms(source(compiles=False), source(compiles=True) if compiles else None)


def find_programs(
    cases: Sequence[Case], programs: Programs | ClosedFormPrograms
) -> list[Program | str]:
    """Program of each case, or the reason why there is none.

    The first candidate run of a case whose program fits the device's memory is used, or else the
    last. For a pipeline it is the fastest that fits: the largest microbatch may leave too few
    microbatches to fill the stages.
    """
    answers: list[Program | str] = [""] * len(cases)
    shortest = [math.inf] * len(cases)
    open_cases, choice = list(range(len(cases))), 0
    while open_cases:
        found = programs.find([cases[index].job(choice) for index in open_cases])
        still_open = []
        for index, program in zip(open_cases, found, strict=True):
            case = cases[index]
            answer = one_line(program) if isinstance(program, ScalejaxError) else program
            seconds = _fitting_seconds(answer, case)
            if seconds is not None and seconds < shortest[index]:
                shortest[index], answers[index] = seconds, answer
            elif shortest[index] == math.inf:
                answers[index] = answer
            is_choice = seconds is None or _has_stages(case)
            if choice + 1 < len(case.runs) and is_choice:
                still_open.append(index)
        open_cases = still_open
        choice += 1
    return answers


def _has_stages(case: Case) -> bool:
    return case.runs[0].layout.pipeline > 1


def _fitting_seconds(answer: Program | str, case: Case) -> float | None:
    """Step time of the program; None if it is missing or does not fit.

    Programs that the compiler refuses often do not fit. If a case has no choice between runs, the
    time is not computed but 0.
    """
    if isinstance(answer, str) or not memory_verdict(answer.memory, case.cluster.chip).fits:
        return None
    if not _has_stages(case) or len(case.runs) == 1:
        return 0.0
    return timeline(answer, case.cluster).step_seconds
