"""Programs of steps compiled ahead of time for absent devices: compiled in a worker, read, cached.

Three entry points: a run of scalejax, any jitted function of the user's, and a step that JAX has
already compiled. Importing this, and reading a cached program, needs no JAX.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scalejax.config.run import ResolvedRun
from scalejax.core.cache import user_folder
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.hardware import Cluster
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.program import Program
from scalejax.xla.cache import cached_program, keep
from scalejax.xla.compiled import read_compiled, read_step
from scalejax.xla.derive import Derivation, ProfileJob, derivation
from scalejax.xla.job import Compiled, FunctionJob, RunJob
from scalejax.xla.substitution import for_chip, require_type, restored
from scalejax.xla.target import Backend, has_cuda_compiler, target_for
from scalejax.xla.worker_pool import run_jobs

__all__ = [
    "ProfileJob",
    "for_chip",
    "has_cuda_compiler",
    "profile",
    "profile_function",
    "profile_many",
    "read_compiled",
    "read_step",
    "remembered",
    "require_type",
    "restored",
]

CacheFolder = Path | None | Literal["user"]
"""Cache of programs: a folder, none, or the user's cache folder."""


def profile(
    run: ResolvedRun,
    cluster: Cluster,
    *,
    framework: Framework = XLA,
    cache: CacheFolder = "user",
    backend: Backend | None = None,
) -> Program:
    """Program of one step of `run`, compiled for `cluster`.

    Args:
        run: the run; its layout gives the device count.
        cluster: the cluster to compile for; none of its devices need be present.
        framework: the framework that trains it.
        cache: cache to read the program from and to write it to.
        backend: compiler backend; if None, that of the cluster's chip where it is installed, else
            the CPU's.

    Raises:
        ProfileError: if the compiler refuses, or is not installed.
        DoesNotFit: if the cluster has fewer devices.
    """
    job = ProfileJob(run=run, cluster=cluster, framework=framework)
    return profile_many([job], cache=cache, backend=backend)[0]


def profile_many(
    jobs: Sequence[ProfileJob],
    on_done: Callable[[int, Program], None] | None = None,
    *,
    cache: CacheFolder = "user",
    backend: Backend | None = None,
) -> list[Program]:
    """Programs of `jobs`, compiled in parallel.

    Args:
        jobs: runs and clusters.
        on_done: called with the position and program of each job, as it is done.
        cache: cache to read programs from and to write them to.
        backend: see `profile`.

    Raises:
        ProfileError: if the compiler refuses one; the others are stopped.
        DoesNotFit: if a cluster has fewer devices.
    """
    folder = user_folder() if cache == "user" else cache
    found = [_Found(derivation(job, backend=backend)) for job in jobs]
    programs: dict[int, Program] = {}

    def done(position: int, index: int, program: Program) -> None:
        found[position].programs[index] = program
        if (derived := found[position].derived()) is not None:
            programs[position] = derived
            if on_done is not None:
                on_done(position, derived)

    requested: list[RunJob] = []
    waiting: list[list[tuple[int, int]]] = []
    for position, each in enumerate(found):
        for index, job in enumerate(each.derivation.compiled):
            program = None if folder is None else cached_program(folder, job)
            if program is not None:
                done(position, index, program)
            elif job in requested:
                waiting[requested.index(job)].append((position, index))
            else:
                requested.append(job)
                waiting.append([(position, index)])

    def compiled(number: int, result: Compiled) -> None:
        if folder is not None:
            keep(folder, requested[number], result)
        for position, index in waiting[number]:
            done(position, index, result.program)

    if requested:
        run_jobs(requested, compiled)
    return [programs[position] for position in range(len(jobs))]


@dataclass(frozen=True, slots=True)
class _Found:
    """The compiled programs of one derivation, as far as they are there."""

    derivation: Derivation
    programs: dict[int, Program] = field(default_factory=dict)

    def derived(self) -> Program | None:
        """The requested program; None while compiled ones are missing."""
        if len(self.programs) < len(self.derivation.compiled):
            return None
        return self.derivation.program([program for _, program in sorted(self.programs.items())])


def remembered(job: ProfileJob) -> Program | None:
    """The program of `job` in the user's cache; None if it is not there.

    Raises:
        DoesNotFit: if the cluster has fewer devices.
    """
    how = derivation(job)
    programs = [cached_program(user_folder(), each) for each in how.compiled]
    known = [each for each in programs if each is not None]
    return how.program(known) if len(known) == len(programs) else None


def profile_function(
    build: str | Callable[[Any], tuple[Any, tuple[Any, ...]]],
    *,
    cluster: Cluster,
    mesh_axes: Mapping[str, int],
    backend: Backend | None = None,
) -> Program:
    """Program of one call of a jitted, sharded function, compiled for `cluster`.

    Args:
        build: a function of a mesh that returns (jitted function, its arguments as arrays or
            shapes with shardings); itself or as "module:name". The worker imports it, so it
            must be at the top level of a module or script.
        cluster: the cluster to compile for; none of its devices need be present.
        mesh_axes: devices along each axis of the mesh, major to minor.
        backend: see `profile`.

    Raises:
        ConfigError: if `build` cannot be imported.
        ProfileError: if the compiler refuses, or is not there.
        DoesNotFit: if the cluster has fewer devices.
    """
    device_count = 1
    for axis, size in mesh_axes.items():
        require_at_least(f"mesh_axes.{axis}", size, 1)
        device_count *= size
    job = FunctionJob(
        target=target_for(cluster, device_count, backend),
        builder=build if isinstance(build, str) else _reference(build),
        mesh_axes=tuple(mesh_axes.items()),
    )
    results: list[Compiled] = []
    run_jobs([job], lambda _, result: results.append(result))
    return results[0].program


def _reference(build: Callable[..., Any]) -> str:
    """ "module:name" of a function, or "file.py:name" if it stands in the script being run."""
    name = getattr(build, "__qualname__", repr(build))
    if not name.isidentifier():  # "<lambda>", "outer.<locals>.inner"
        accepted = "it must be a function at the top level of a module, for a worker to import it"
        raise ConfigError(refusal("build", name, accepted))
    if build.__module__ != "__main__":
        return f"{build.__module__}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        accepted = "an interactive session cannot be imported by a worker; put it in a file"
        raise ConfigError(refusal("build", name, accepted))
    return f"{Path(file).resolve()}:{name}"
