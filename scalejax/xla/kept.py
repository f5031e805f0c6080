"""Compiled programs that come with scalejax: those of the quickstart, by version of JAX.

Predictions of the unchanged examples then need no compiler. The programs have no source lines, so
that only callers that name none may use them. Whatever differs from what was compiled (a field of
the run, the chip, JAX, the user's flags for XLA) is compiled as usual.
"""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from scalejax.core.environment import compiler_settings
from scalejax.simulator.program import Program
from scalejax.xla.archive import read_archive, write_archive
from scalejax.xla.cache import case_key, has_own_source
from scalejax.xla.job import RunJob

KEPT = Path(__file__).parent / "kept.jsonl.xz"
"""The programs; tests/cli/test_quickstart.py makes them again."""


def kept_program(job: RunJob) -> Program | None:
    """The program of `job` that comes with scalejax; None if there is no such program for the
    installed JAX."""
    if compiler_settings() or has_own_source(job):
        return None
    return read_archive(KEPT).program(_key(job))


def keep_with_scalejax(jobs: Sequence[RunJob], programs: Sequence[Program]) -> None:
    """Replace the programs that are kept for the installed JAX by `programs` of `jobs`; those of
    other JAX versions are kept.

    Raises:
        ConfigError: if the file cannot be read or written.
    """
    known, ours = read_archive(KEPT), _version()
    others = {
        key: program
        for key in known.lines
        if not key.endswith(f"-{ours}") and (program := known.program(key)) is not None
    }
    write_archive(others | dict(zip(map(_key, jobs), programs, strict=True)), KEPT)
    read_archive.cache_clear()


def _key(job: RunJob) -> str:
    return f"{case_key(job)}-{_version()}"


def _version() -> str:
    """Version of the compiler; plug-ins for GPUs have the version of JAX."""
    return f"jax-{metadata.version('jax')}-jaxlib-{metadata.version('jaxlib')}"
