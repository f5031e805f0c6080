"""Programs of one run on many device counts, scaled out from few compiled ones.

Knows which sizes can be scaled out from which; nothing of what the programs are for.
"""

from collections.abc import Callable, Sequence

from scalejax.config.run import ResolvedRun
from scalejax.core.progress import OnCase, Stage, nothing_said
from scalejax.core.units import counted
from scalejax.hardware import Cluster
from scalejax.simulator.program import Program
from scalejax.simulator.transforms.scale_out import reduced, scaled_out
from scalejax.xla import ProfileJob, profile_many, remembered

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


def programs_of(
    runs: Sequence[tuple[ResolvedRun, Cluster]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[Program]:
    """Program of each run on its cluster, scaled out from few compiled ones.

    The compiler runs once for each cluster and per-device batch; other sizes of the data axis are
    scaled out from its program, or, where that is not possible, compiled too.

    Args:
        runs: runs of one config, each with its cluster.
        on_progress: called with the number of programs that have been compiled, and of all that
            must be.

    Raises:
        ProfileError: if the compiler refuses one.
    """
    jobs: dict[str, ProfileJob] = {}

    def request(run: ResolvedRun, cluster: Cluster) -> str:
        name = (
            f"{cluster.name}, {counted(run.layout.device_count, 'device')}, "
            f"{counted(run.split.per_device_batch, 'sample')} on each"
        )
        jobs[name] = ProfileJob(run=run, cluster=cluster)
        return name

    requested = [
        (reduced_run := reduced(run), request(reduced_run, cluster)) for run, cluster in runs
    ]
    known = _compiled(jobs, on_progress)
    found = [
        scaled_out(known[name], reduced_run, run)
        for (run, _), (reduced_run, name) in zip(runs, requested, strict=True)
    ]
    # Programs that cannot be scaled out are compiled for all devices.
    jobs.clear()
    names = [
        None if program else request(run, cluster)
        for (run, cluster), program in zip(runs, found, strict=True)
    ]
    whole = _compiled(jobs, on_progress)
    return [
        program if program is not None else whole[name or ""]
        for program, name in zip(found, names, strict=True)
    ]


def _compiled(jobs: dict[str, ProfileJob], on_progress: OnProgress) -> dict[str, Program]:
    if not jobs:
        return {}
    programs = compile_cases(list(jobs.values()), list(jobs), _counting(on_progress))
    return dict(zip(jobs, programs, strict=True))


def _counting(on_progress: OnProgress) -> OnCase:
    """`OnCase` callback that counts the compiled cases and reports them to `on_progress`."""
    done = total = 0

    def count(stage: Stage, case: str) -> None:
        nonlocal done, total
        total += stage == "begun"
        done += stage == "compiled"
        if stage == "compiled":
            on_progress(done, total)

    return count
