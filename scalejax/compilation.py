"""The programs of several cases, with word of each: when its compilation begins, when it is done.

Knows which programs are remembered, and nothing of what they are for.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from scalejax.profile import ProfileJob, profile_many, remembered
from scalejax.program import Program
from scalejax.units import counted

Stage = Literal["begun", "compiled", "remembered"]
"""What has become of a case: remembered ones were compiled for an earlier question."""
OnCase = Callable[[Stage, str], None]
"""Called with each turn of a case, and the name of the case."""


def nothing_said(stage: Stage, case: str) -> None:
    """An `OnCase` that tells nobody."""


def in_words(device_count: int) -> str:
    """So many devices, as the name of a case."""
    return counted(device_count, "device")


def compile_cases(
    jobs: Sequence[ProfileJob], cases: Sequence[str], on_case: OnCase = nothing_said
) -> list[Program]:
    """The programs of `jobs`, compiled side by side where they are not remembered.

    Args:
        jobs: runs and clusters.
        cases: the name of each, for people: "256 devices".
        on_case: told of each case that begins, is done, or is remembered.

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
