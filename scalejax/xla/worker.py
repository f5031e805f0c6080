"""What a compile worker does: `compile_job`, a job in, a program out.

It runs in a process of its own, so that the caller's JAX keeps its platform, and so that a compiler
that aborts causes an error message, not a crash.
"""

import hashlib
import importlib
import math
import os
import runpy
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalejax.config.model import DecoderConfig
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.simulator.program import Program
from scalejax.xla.functions import unpickled
from scalejax.xla.job import Compiled, FunctionJob, RunJob
from scalejax.xla.target import Target, cudnn_version


def compile_job(job: RunJob | FunctionJob) -> Compiled:
    """The result of `job`; to be called once per process, whose JAX it sets up."""
    return Compiled(program=_compile(job), sources=_user_sources())


def _compile(job: RunJob | FunctionJob) -> Program:
    from scalejax.xla.compiled import read_compiled, read_step

    devices = _devices(job.target)
    has_fused_attention = job.target.backend != "cuda" or _describe_cudnn(job.target)
    if isinstance(job, RunJob):
        from scalejax.training.mesh import build_mesh
        from scalejax.training.step import build_step

        run, notes = _in_trained_schedule(job.run), ()
        if not has_fused_attention:
            run, notes = _with_unfused_attention(run)
        mesh = build_mesh(run.layout, devices)
        step = build_step(run, mesh)
        lowered = step.lower()
        if job.target.backend != "cpu":
            _place_arguments(lowered)
        schedule = job.run.config.layout.pipeline_schedule
        compiled = lowered.compile(_compiler_options(job.target))
        program = read_step(compiled, mesh, run, schedule)
        return replace(program, notes=(*notes, *program.notes))

    mesh = _mesh(job.mesh_axes, devices)
    build = unpickled(job.pickled, job.path) if job.pickled else _imported(job.builder)
    function, arguments = _built(build, job.builder, mesh)
    compiled = function.lower(*arguments).compile(_compiler_options(job.target))
    return read_compiled(compiled, mesh, name=job.builder.rpartition("/")[2])


def _compiler_options(target: Target) -> dict[str, str | bool]:
    """The folder of the CUDA toolkit, as an option: JAX sets the flag to the folder of an installed
    NVIDIA package."""
    return {"xla_gpu_cuda_data_dir": os.environ["CUDA_HOME"]} if target.backend == "cuda" else {}


def _place_arguments(lowered: Any) -> None:
    """Place arguments in the memory of the host if they are donated to results there.

    Devices that are only described have no memories, so that JAX drops the memory of a sharding and
    writes it for results only (tried with jax 0.10.2). Changes `lowered` if any result is there.
    """
    from jax.extend.mlir import ir

    module = lowered.compiler_ir()
    functions = [each for each in module.body.operations if "sym_name" in each.attributes]
    main = next(each for each in functions if each.attributes["sym_name"].value == "main")

    def read(name: str) -> list[dict[str, Any]]:
        return [{item.name: item.attr for item in each} for each in main.attributes[name]]

    with module.context:
        host, device = map(ir.StringAttr.get, ("pinned_host", "device"))
        is_on_host = [host == each.get("mhlo.memory_kind", device) for each in read("res_attrs")]
        if not any(is_on_host):
            return
        placed = []
        for each in read("arg_attrs"):
            alias = each.get("tf.aliasing_output")
            goes = alias is not None and is_on_host[ir.IntegerAttr(alias).value]
            placed.append(ir.DictAttr.get({**each, "mhlo.memory_kind": host if goes else device}))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(placed)


def _describe_cudnn(target: Target) -> bool:
    """Patch JAX to check the cuDNN and capability of `target`, not of this machine.

    JAX checks the local GPU and cuDNN when it traces fused attention. Returns whether this JAX has
    the functions that are replaced, which are private (tried with jax 0.10.2 and 0.12.0).
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    if not all(hasattr(fused, name) for name in names):
        return False
    digits = target.name.removeprefix("sm_")
    own = (int(digits[:-1]), int(digits[-1]))

    def asked(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    major, minor = cudnn_version(own)
    fused.check_cudnn_version = lambda: 10_000 * major + 100 * minor
    fused.check_compute_capability = lambda capability: own >= asked(capability)
    fused.is_cuda_compute_capability_equal = lambda capability: own == asked(capability)
    return True


def _in_trained_schedule(run: ResolvedRun) -> ResolvedRun:
    """`run`, but in 1F1B if its own schedule is only costed."""
    layout = run.config.layout
    if layout.pipeline_schedule != "dualpipe":
        return run
    layout = replace(layout, pipeline_schedule="1f1b")
    return replace(run, config=replace(run.config, layout=layout))


def _with_unfused_attention(run: ResolvedRun) -> tuple[ResolvedRun, tuple[str, ...]]:
    """`run` with unfused attention, which this JAX can compile without a GPU, and a note on it."""
    model = run.config.model
    if not isinstance(model, DecoderConfig) or model.attention == "unfused":
        return run, ()
    config = replace(run.config, model=replace(model, attention="unfused"))
    note = "this JAX cannot compile fused attention without a GPU: costed unfused, too slow"
    return replace(run, config=config), (note,)


def _devices(target: Target) -> list[Any]:
    """The devices to compile for, in order of their ids; none of them is present."""
    import jax

    if target.backend == "cpu":
        jax.config.update("jax_num_cpu_devices", target.device_count)
        return jax.devices()
    from jax.experimental import topologies

    if target.backend == "tpu":
        # A host holds 2 x 2 chips, or all of a smaller slice.
        sides = [int(side) for side in target.topology.partition(":")[2].split("x")]
        host = [*(min(side, 2) for side in sides[:2]), 1] if math.prod(sides) < 4 else (2, 2, 1)
        description = topologies.get_topology_desc(
            target.topology,
            "tpu",
            chips_per_host_bounds=tuple(host),
            chip_config_name=target.description,
        )
    else:
        description = topologies.get_topology_desc(
            target.name, "cuda", target_config=target.description, topology=target.topology
        )
    return sorted(description.devices, key=lambda device: device.id)[: target.device_count]


def _mesh(mesh_axes: tuple[tuple[str, int], ...], devices: list[Any]) -> Any:
    import numpy as np
    from jax.sharding import AxisType, Mesh

    names, sizes = zip(*mesh_axes, strict=True)
    grid = np.asarray(devices, dtype=object).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _built(build: Callable[[Any], Any], builder: str, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """The jitted function, and the shapes to compile it for, that the user's builder returns."""
    answer = build(mesh)
    if not (isinstance(answer, tuple) and len(answer) == 2 and hasattr(answer[0], "lower")):
        accepted = "it must return (jitted function, arguments), arguments being a tuple"
        raise ConfigError(refusal(builder, answer, accepted))
    function, arguments = answer
    return function, tuple(arguments)


def _imported(builder: str) -> Callable[[Any], Any]:
    module, _, name = builder.rpartition(":")
    if module.endswith(".py"):
        names = runpy.run_path(module, run_name="__scalejax_profile__")
    else:
        sys.path.append(os.getcwd())
        names = vars(importlib.import_module(module))
    if name not in names:
        raise ConfigError(refusal("builder", builder, f"{module} has no {name!r}"))
    return names[name]


def _user_sources() -> dict[str, str]:
    """Digests of the imported files that belong neither to Python, nor to an installed package,
    nor to scalejax (whose own sources the cache knows)."""
    paths = sysconfig.get_paths()
    foreign = [Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign.append(Path(__file__).parents[1])
    digests = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or any(Path(file).is_relative_to(folder) for folder in foreign):
            continue
        if Path(file).is_file():
            digests[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return digests
