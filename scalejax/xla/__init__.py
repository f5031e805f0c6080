"""Programs of steps compiled ahead of time for absent devices: compiled in a worker, read, cached.

Three entry points: a run of scalejax, any jitted function of the user, and a step that JAX has
already compiled. Importing this package, and reading a cached program, needs no JAX.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalejax.config.run import ResolvedRun
from scalejax.core.environment import compiler_settings
from scalejax.core.errors import require_at_least
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.hardware import Cluster
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.program import Program
from scalejax.xla.batch import CacheFolder, profile_each, profile_many
from scalejax.xla.cache import digest_of
from scalejax.xla.compiled import read_compiled, read_step
from scalejax.xla.derive import ProfileJob, require_type
from scalejax.xla.functions import Builder, Call, call_of, name_of, pickled
from scalejax.xla.job import Compiled, FunctionJob
from scalejax.xla.target import Backend, has_cuda_compiler, target_for
from scalejax.xla.worker_pool import run_jobs

__all__ = [
    "ProfileJob",
    "has_cuda_compiler",
    "profile",
    "profile_call",
    "profile_calls",
    "profile_each",
    "profile_function",
    "profile_many",
    "read_compiled",
    "read_step",
    "require_type",
]


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


def profile_function(
    build: str | Builder,
    *,
    cluster: Cluster,
    mesh_axes: Mapping[str, int],
    backend: Backend | None = None,
) -> Program:
    """Program of one call of a jitted, sharded function, compiled for `cluster`.

    Example:
        >>> import jax
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from scalejax import load_cluster, profile_function
        >>> def build(mesh):
        ...     sharding = NamedSharding(mesh, PartitionSpec("data"))
        ...     rows = jax.ShapeDtypeStruct((64, 512), "float32", sharding=sharding)
        ...     return jax.jit(lambda rows: jax.numpy.tanh(rows).sum()), (rows,)
        >>> cluster = load_cluster("dgx-h100")
        >>> program = profile_function(build, cluster=cluster, mesh_axes={"data": 8})
        >>> program.mesh_axes, program.collective_bytes("all_reduce")
        ((('data', 8),), 4)

    Args:
        build: a function of a mesh that returns (jitted function, its arguments as arrays or
            shapes with shardings); the function itself, from anywhere, or "module:name".
        cluster: the cluster to compile for; none of its devices need be present.
        mesh_axes: devices along each axis of the mesh, major to minor.
        backend: see `profile`.

    Raises:
        ConfigError: if `build` cannot be imported or pickled.
        ProfileError: if the compiler refuses, or is not installed.
        DoesNotFit: if the cluster has fewer devices.
    """
    device_count = 1
    for axis, size in mesh_axes.items():
        require_at_least(f"mesh_axes.{axis}", size, 1)
        device_count *= size
    is_name = isinstance(build, str)
    name = build if isinstance(build, str) else name_of(build)
    job = FunctionJob(
        target=target_for(cluster, device_count, backend),
        builder=name,
        mesh_axes=tuple(mesh_axes.items()),
        pickled="" if is_name else pickled(build, name),
        path=tuple(sys.path),
    )
    return _compiled([job])[0]


_FUNCTIONS: dict[tuple[FunctionJob, str], Compiled] = {}
"""Functions that this process has compiled: a notebook requests the same step many times."""
_MOST_FUNCTIONS = 64


def _compiled(jobs: Sequence[FunctionJob], on_progress: OnProgress = no_display) -> list[Program]:
    """Program of each job; several compile at a time. Jobs that this process has compiled already
    are not compiled again, unless a user's file that they import has changed."""
    settings = str(compiler_settings())
    keys = [(job, settings) for job in jobs]
    missing = [key for key in dict.fromkeys(keys) if not _is_fresh(_FUNCTIONS.get(key))]
    while len(_FUNCTIONS) > _MOST_FUNCTIONS:
        _FUNCTIONS.pop(next(iter(_FUNCTIONS)))
    found = {key: _FUNCTIONS[key] for key in keys if key not in missing}
    for job, _ in missing:
        on_progress(Progress(part=job.title))

    def done(position: int, result: Compiled) -> None:
        found[missing[position]] = _FUNCTIONS[missing[position]] = result
        on_progress(Progress(part=missing[position][0].title, done=1))

    if missing:
        run_jobs([job for job, _ in missing], done)
    return [found[key].program for key in keys]


def _is_fresh(compiled: Compiled | None) -> bool:
    try:
        return compiled is not None and all(
            digest_of(Path(path)) == known for path, known in compiled.sources.items()
        )
    except OSError:  # a file is gone
        return False


def profile_call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    cluster: Cluster,
    device_count: int,
    batch_argnums: int | Sequence[int] | None = None,
    backend: Backend | None = None,
) -> Program:
    """Program of `function(*arguments)` on `device_count` devices, compiled for `cluster`.

    Example:
        >>> import jax
        >>> from scalejax import load_cluster, profile_call
        >>> def step(weights, rows):
        ...     return jax.numpy.tanh(rows @ weights).sum()
        >>> weights = jax.ShapeDtypeStruct((512, 256), "float32")
        >>> rows = jax.ShapeDtypeStruct((64, 512), "float32")
        >>> cluster = load_cluster("dgx-h100")
        >>> program = profile_call(step, (weights, rows), cluster=cluster, device_count=8)
        >>> program.global_batch, program.flop == 2 * (64 // 8) * 512 * 256
        (64, True)

    Args:
        function: jitted or not; may be typed into a notebook.
        arguments: arrays or `jax.ShapeDtypeStruct`, of the whole step over all devices; those with
            a `NamedSharding`, over an abstract mesh for example, keep it. Close over static ones.
        cluster: the cluster to compile for; none of its devices need be present.
        device_count: devices to run on.
        batch_argnums: if no argument has a sharding, positions of those that hold samples, which
            are divided along their first dimension; if None, the last.
        backend: see `profile`.

    Raises:
        ConfigError: if samples do not divide, or the function cannot be pickled.
        ProfileError: if the compiler refuses, or is not installed.
        DoesNotFit: if the cluster has fewer devices.
    """
    return profile_calls(
        function, [(arguments, cluster, device_count)], batch_argnums=batch_argnums, backend=backend
    )[0]


def profile_calls(
    function: Callable[..., Any],
    cases: Sequence[tuple[Sequence[Any], Cluster, int]],
    *,
    batch_argnums: int | Sequence[int] | None = None,
    backend: Backend | None = None,
    on_progress: OnProgress = no_display,
) -> list[Program]:
    """Programs of `function`, one for each (arguments, cluster, devices), as from `profile_call`;
    several compile at a time."""
    calls, jobs = [], []
    for arguments, cluster, device_count in cases:
        require_at_least("devices", device_count, 1)
        cluster.require_devices(device_count)
        call = call_of(function, arguments, device_count, batch_argnums)
        calls.append(call)
        jobs.append(
            FunctionJob(
                target=target_for(cluster, device_count, backend),
                builder=call.name,
                mesh_axes=tuple(call.mesh_axes.items()),
                pickled=pickled(call.builder, call.name),
                path=tuple(sys.path),
            )
        )
    return [_named(*each) for each in zip(_compiled(jobs, on_progress), calls, strict=True)]


def _named(program: Program, call: Call) -> Program:
    program = replace(program, name=call.name, global_batch=call.global_batch)
    if call.global_batch is None:
        return program
    note = (
        f"data parallel: {', '.join(call.batch_names)} of {call.name!r} is divided along "
        "its first dimension, all others are replicated (batch_argnums, or shardings of your own)"
    )
    return replace(program, notes=(*program.notes, note))
