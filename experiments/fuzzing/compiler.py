"""Stands in for the compiler: the step of every run is one stored program, on the run's devices.

Ten seconds for each case would be a day for all. What is fuzzed is all that comes before the
compiler, and all that is made of its program.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import scalejax.xla
import scalejax.xla.batch
from scalejax.simulator.program import Program
from scalejax.validation.programs import ARCHIVE
from scalejax.xla.archive import read_archive
from scalejax.xla.job import Compiled, FunctionJob, RunJob


@cache
def _stored() -> Program:
    archive = read_archive(ARCHIVE)
    for key in archive.lines:
        program = archive.program(key)
        if program is not None and program.device_count == 8:
            return program
    raise RuntimeError("the archive holds no program for 8 devices")


def substitute(
    jobs: Sequence[RunJob | FunctionJob],
    on_done: Callable[[int, Compiled], None],
    on_failed: Callable[[int, Exception], None] | None = None,
) -> None:
    """Answer every job at once."""
    for index, job in enumerate(jobs):
        program = _stored()
        if isinstance(job, RunJob):
            axes = tuple(job.run.layout.axis_sizes.items())
            batch = job.run.split.global_batch
            program = replace(program, mesh_axes=axes, global_batch=batch)
        on_done(index, Compiled(program=program))


def install() -> None:
    """Take the place of the compiler in this process."""
    scalejax.xla.run_jobs = substitute
    scalejax.xla.batch.run_jobs = substitute
