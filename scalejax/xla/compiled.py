"""Converts a step that JAX has compiled into a `Program`.

Uses the objects that JAX has made and does not import JAX, so that this module can be imported
without it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from scalejax.config.model import LlamaConfig, activation_type
from scalejax.config.pipeline_schedule import EXCHANGE, PipelineSchedule, PipelineTicks
from scalejax.config.run import ResolvedRun, condition_shares, with_fields
from scalejax.core.errors import ProfileError
from scalejax.simulator.expert_load import EVEN_LOADS
from scalejax.simulator.program import MemoryUse, Operation, Program, each_changed
from scalejax.simulator.transforms.dualpipe import DUALPIPE, with_second_stage
from scalejax.simulator.transforms.pipeline import with_bubble
from scalejax.simulator.transforms.routed_tokens import with_routed_tokens
from scalejax.xla.flop import padded_sides
from scalejax.xla.hlo import Array, Module, bytes_of, parse_module
from scalejax.xla.reader import read_program

if TYPE_CHECKING:
    import jax

_BACKENDS: dict[str, Literal["cuda", "cpu", "tpu"]] = {
    "cpu": "cpu",
    "gpu": "cuda",
    "cuda": "cuda",
    "tpu": "tpu",
}


_COMPUTE_TYPES = {"bfloat16": "bf16", "float16": "f16"}
"""XLA's names for the compute types that its CPU compiler widens to f32."""


def read_step(
    compiled: "jax.stages.Compiled",
    mesh: "jax.sharding.Mesh",
    run: ResolvedRun,
    schedule: PipelineSchedule | None = None,
) -> Program:
    """Program of the compiled step of a run, with its state size and model FLOP; in the pipeline
    schedule `schedule`, if it is not the one that was compiled.

    Raises:
        ProfileError: if the compiler's text cannot be read.
    """
    from scalejax.training.state import stage_parameters, state_bytes

    program = read_compiled(
        compiled,
        mesh,
        name=f"{run.config.model.name} train step",
        global_batch=run.split.global_batch,
        tokens_per_sample=run.dataset.tokens_per_sample,
        model_flop=_model_flop(run),
        shares={**condition_shares(run), EXCHANGE: 0.5},
    )
    program = replace(program, state_bytes=state_bytes(run, mesh))
    program = with_routed_tokens(program, run)
    model = run.config.model
    moe = model.moe if isinstance(model, LlamaConfig) else None
    if moe is not None and moe.capacity_factor is None:
        program = replace(program, notes=(*program.notes, EVEN_LOADS))
    layout, stages = run.config.layout, run.layout.pipeline
    if stages > 1:
        ticks = PipelineTicks(
            schedule or layout.pipeline_schedule,
            stages,
            run.split.microbatches,
            layout.pipeline_chunks,
        )
        counts = None
        if isinstance(model, LlamaConfig) and moe is not None:
            counts = moe.layers_of_stages(model.layers, stages, ticks.chunks, model.period)
        unlike = counts if counts and min(counts) < max(counts) else None
        program = with_bubble(program, ticks, unlike)
        if ticks.schedule == "dualpipe":
            own, state = stage_parameters(run, mesh)
            memory = with_second_stage(program.memory, ticks, parameters=own, state_bytes=state)
            program = replace(program, memory=memory, notes=(*program.notes, DUALPIPE))
    compute_type = _COMPUTE_TYPES.get(activation_type(run.config.model))
    if program.backend == "cpu" and compute_type is not None:
        typed = partial(_with_product_type, compute_type=compute_type)
        return replace(program, operations=each_changed(program.operations, typed))
    return program


def _model_flop(run: ResolvedRun) -> int:
    """FLOP that the model of `run` needs for a step."""
    from scalejax.training.step import forward, forward_and_backward
    from scalejax.xla.model_flop import forward_flop

    if run.config.model.expert_count:
        # Whatever is padded or dropped, a token goes through as many experts as it chooses.
        whole = with_fields(run.config, {"model.moe.capacity_factor": None})
        run = replace(run, config=whole)
    if run.config.fine_tuning is not None and run.config.fine_tuning.freezes:
        # Recompute does not count as model FLOP (Chowdhery et al. 2022, arXiv 2204.02311,
        # appendix B).
        function, arguments = forward_and_backward(_without_remat(run))
        return forward_flop(function, *arguments)
    function, arguments = forward(run)
    # Each product of the forward pass has two in the backward pass: one per operand's gradient.
    return 3 * forward_flop(function, *arguments)


def _without_remat(run: ResolvedRun) -> ResolvedRun:
    """`run` without recompute, and with all microbatches at once, which is GPipe on one device."""
    plain = {"layout.pipeline_schedule": "gpipe"}
    if getattr(run.config.model, "remat", "none") != "none":
        plain["model.remat"] = "none"
    return replace(run, config=with_fields(run.config, plain))


def _with_product_type(item: Operation, compute_type: str) -> Operation:
    """`item`, if it is an f32 product, in `compute_type`: the type requested of a CPU, which widens
    it, or the bf16 to which a TPU rounds operands by default."""
    return replace(item, dtype=compute_type) if item.flop and item.dtype == "f32" else item


def read_compiled(
    compiled: "jax.stages.Compiled",
    mesh: "jax.sharding.Mesh",
    *,
    name: str,
    global_batch: int | None = None,
    tokens_per_sample: int | None = None,
    model_flop: int | None = None,
    shares: Mapping[str, float] | None = None,
) -> Program:
    """Program of any compiled function.

    Args:
        compiled: result of `jax.jit(...).lower(...).compile()`.
        mesh: the mesh of all devices that it was compiled for.
        name: title of the program.
        global_batch: samples per call over all devices, if it is a training step.
        tokens_per_sample: tokens in a sample, if it is text.
        model_flop: FLOP that the model itself needs per call over all devices.
        shares: fraction of the calls in which the condition of a scope holds, by scope name.

    Raises:
        ProfileError: if the compiler's text cannot be read, or it keeps no account of memory.
    """
    device = mesh.devices.flat[0]
    mesh_axes = tuple((str(axis), int(size)) for axis, size in mesh.shape.items())
    text = compiled.as_text() or ""
    operations = read_program(text, mesh_axes, shares, has_host_memory=device.platform != "cpu")
    memory = _memory(compiled)
    if device.platform == "cpu" and " convolution(" in text:
        kernel_bytes = convolution_workspace_bytes(parse_module(text))
        memory = replace(memory, kernel_bytes=kernel_bytes)
    compilers = ["jax", "jaxlib"]
    if device.platform == "tpu":
        compilers.append("libtpu")
        operations = each_changed(operations, partial(_with_product_type, compute_type="bf16"))
    return Program(
        name=name,
        backend=_BACKENDS[device.platform],
        target=_target_name(device),
        compiler=", ".join(f"{name} {metadata.version(name)}" for name in compilers),
        mesh_axes=mesh_axes,
        operations=operations,
        memory=memory,
        global_batch=global_batch,
        tokens_per_sample=tokens_per_sample,
        model_flop=model_flop,
    )


def _target_name(device: Any) -> str:
    if device.platform == "tpu":
        return device.device_kind
    capability = getattr(device, "compute_capability", None)
    return "sm_" + str(capability).replace(".", "") if capability else device.platform


def _memory(compiled: "jax.stages.Compiled") -> MemoryUse:
    statistics = compiled.memory_analysis()
    if statistics is None:
        raise ProfileError("the compiler keeps no account of the memory of this program.")
    return MemoryUse.of_statistics(statistics)


CONVOLUTIONS_AT_ONCE = 2
"""Convolutions of a CPU that run concurrently: the two gradients of a layer are independent."""


def convolution_workspace_bytes(module: Module) -> int:
    """Peak workspace of the convolution kernels of a CPU program, which the compiler's account of
    memory lacks: that of the `CONVOLUTIONS_AT_ONCE` largest.

    A convolution of XLA's CPU runtime (Eigen) copies its input with padding and dilation filled
    in, and its kernel: seen in the growth of the process, for strides 1 and 2 and all three
    passes, to the megabyte (`experiments/memory_against_run`). Kernels of other back ends have
    their workspace in the program.
    """
    scratch = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode != "convolution":
                continue
            lhs, rhs = computation.operand_shapes(instruction)[:2]
            if isinstance(lhs, Array) and isinstance(rhs, Array):
                sides = padded_sides(instruction, lhs)
                grown = math.prod(padded / side for padded, side in sides if side)
                scratch.append(bytes_of(lhs.dtype, round(lhs.elements * grown)) + rhs.bytes)
    return sum(sorted(scratch, reverse=True)[:CONVOLUTIONS_AT_ONCE])
