"""Programs that are derived from compiled ones: for a framework, a chip, or more devices.

Determines which runs are compiled for a requested program, and derives that program from theirs;
compiles nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalejax.config.model import (
    ELEMENT_BYTES,
    FLOAT8_TYPES,
    CostedType,
    DecoderConfig,
    GptConfig,
    LlamaConfig,
    ModelConfig,
    narrow_type,
)
from scalejax.config.parallelism import stage_layers
from scalejax.config.run import ResolvedRun, resolve
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted
from scalejax.hardware import Chip, Cluster, RateType
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.program import Program
from scalejax.simulator.transforms.dualpipe import with_paired_passes
from scalejax.simulator.transforms.float8 import in_float8
from scalejax.simulator.transforms.pipeline import Pipeline, pipelined
from scalejax.simulator.transforms.scale_out import reduced, scaled_out
from scalejax.xla.job import RunJob
from scalejax.xla.target import OLDEST_CAPABILITY, Backend, target_for

_PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """A run whose program is requested for a cluster."""

    run: ResolvedRun
    """The run; its layout gives the device count."""
    cluster: Cluster
    """The cluster to compile for."""
    framework: Framework = XLA
    """The framework that trains it."""
    name: str = ""
    """Name to show with progress; if empty, the number of devices."""

    @property
    def title(self) -> str:
        """What is shown while it is compiled."""
        return self.name or counted(self.run.layout.device_count, "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """How a requested program is made from compiled ones."""

    job: ProfileJob
    """What is requested."""
    compiled: tuple[RunJob, ...]
    """What is compiled: the step, and then the same step with each of the framework's multiples of
    the vocabulary."""
    run: ResolvedRun
    """The run that the compiled step is scaled out to: all devices and microbatches, or those of
    one stage of a pipeline."""

    def program(self, compiled: Sequence[Program]) -> Program | None:
        """The requested program, from those of `compiled`; None if it cannot be scaled out.

        Raises:
            ConfigError: if the pipeline cannot be derived from its stage.
        """
        step, *larger_vocabularies = compiled
        program = scaled_out(step, self.compiled[0].run, self.run)
        if program is None:
            return None
        framework = self.job.framework
        program = framework.applied(program, self.run, larger_vocabularies)
        program = with_paired_passes(restored(program, self.job.run, self.run))
        if self.run.layout.pipeline != self.job.run.layout.pipeline:
            whole = pipelined(program, _pipeline(self.job.run, self.run))
            program = replace(whole, model_flop=_model_flop(program, self.job.run, self.run))
        return framework.with_memory(program, self.job.run)


def derivation(
    job: ProfileJob, *, is_reduced: bool = False, backend: Backend | None = None
) -> Derivation:
    """How the program of `job` is made.

    Args:
        job: what is requested.
        is_reduced: whether the fewest devices and microbatches are compiled, and the program
            scaled out; otherwise all of them.
        backend: compiler backend; if None, that of the cluster's chip where it is installed, else
            the CPU's.

    Raises:
        ConfigError: if the chip or the framework cannot run it.
        DoesNotFit: if the cluster has fewer devices.
    """
    job.cluster.require_devices(job.run.layout.device_count)
    run = for_chip(_in_schedule_of(job.framework, job.run), job.cluster.chip)
    has_server = job.cluster.library.name == _PARAMETER_SERVER
    step = reduced(run, has_server=has_server) if is_reduced else run
    target = target_for(job.cluster, step.layout.device_count, backend)
    larger = (_with_vocabulary(step, times) for times in job.framework.vocabulary_factors)
    return Derivation(
        job=job,
        compiled=tuple(RunJob(run=each, target=target) for each in (step, *larger)),
        run=run,
    )


def _in_schedule_of(framework: Framework, run: ResolvedRun) -> ResolvedRun:
    """What is compiled for `run` in the pipeline schedule of `framework`: one stage if the rest of
    the step follows from it, otherwise all stages.

    A run that names a schedule other than GPipe, the default, keeps it.
    """
    layout, model = run.config.layout, run.config.model
    is_given = layout.pipeline_schedule != "gpipe"
    if layout.pipeline == 1 or framework.schedule == "gpipe" or is_given:
        return run
    is_gpt = isinstance(model, GptConfig) and model.remat == "full"
    if is_gpt and run.split.microbatches > 1:
        return stage_run(run)
    config = replace(run.config, layout=replace(layout, pipeline_schedule=framework.schedule))
    return replace(run, config=config)


def stage_run(run: ResolvedRun) -> ResolvedRun:
    """The run of the longest stage of a pipeline of gpt with full recompute, as a network of its
    own."""
    config, stages = run.config, run.layout.pipeline
    model = config.model
    assert isinstance(model, GptConfig)  # noqa: S101  other networks are compiled with all stages
    stage = replace(
        config,
        model=replace(model, layers=-(-model.layers // stages)),
        layout=replace(config.layout, pipeline=1, pipeline_chunks=1),
    )
    return resolve(stage, run.layout.device_count // stages, run.dataset)


def _pipeline(run: ResolvedRun, stage: ResolvedRun) -> Pipeline:
    """The pipeline of `run`, one stage of which is `stage`."""
    model, layout = stage.config.model, run.config.layout
    assert isinstance(model, GptConfig)  # noqa: S101  stage_run refuses others
    assert isinstance(run.config.model, GptConfig)  # noqa: S101
    layers = run.config.model.layers
    is_even = layout.pipeline_chunks > 1 or layers % layout.pipeline == 0
    (tokens,) = stage.dataset.input_shape
    element_bytes = ELEMENT_BYTES[model.compute_dtype]
    rows = stage.split.microbatch * tokens // stage.layout.context
    return Pipeline(
        stages=layout.pipeline,
        chunks=layout.pipeline_chunks,
        layers=None if is_even else stage_layers(layers, layout.pipeline),
        microbatches=stage.split.microbatches,
        boundary_bytes=rows * model.hidden * element_bytes,
        is_boundary_divided=layout.sequence_parallel,
    )


def _model_flop(program: Program, run: ResolvedRun, stage: ResolvedRun) -> int | None:
    """FLOP of the model over all stages: those of the blocks grow with the layers, those of the
    logits (three products with the embedding) are in the stage that is compiled."""
    model, whole = stage.config.model, run.config.model
    if program.model_flop is None or not (
        isinstance(model, GptConfig) and isinstance(whole, GptConfig)
    ):
        return None
    (tokens,) = stage.dataset.input_shape
    logits = 6 * stage.split.global_batch * tokens * model.hidden * stage.dataset.classes
    return (program.model_flop - logits) * whole.layers // model.layers + logits


def _with_vocabulary(run: ResolvedRun, times: int) -> ResolvedRun:
    """`run`, of a transformer, with a vocabulary `times` as large.

    Raises:
        ConfigError: if its data do not have a vocabulary of any size.
    """
    data, words = run.config.data, run.dataset.classes * times
    if not data.has_any_vocabulary:
        accepted = (
            "this framework's loss is costed from larger vocabularies, which only "
            "synthetic_tokens have"
        )
        raise ConfigError(refusal("data.name", data.name, accepted))
    config = replace(run.config, data=replace(data, vocabulary=words))
    return replace(run, config=config, dataset=replace(run.dataset, classes=words))


# Substitutes for runs that a chip cannot be compiled for, and restoration of their programs.


def for_chip(run: ResolvedRun, chip: Chip) -> ResolvedRun:
    """The run that is compiled as a substitute for `run` on `chip`.

    It has unfused attention for older chips, which are compiled for as newer ones, and is in
    bfloat16 for float8 and float4, whose products `restored` derives.

    Raises:
        ConfigError: if fused attention or fp8 is requested and the chip has none.
    """
    model = run.config.model
    require_type(model, chip)
    if not isinstance(model, DecoderConfig):
        return run
    compiled = model
    moe = getattr(model, "moe", None)
    if model.compute_dtype in _UNITS and moe is not None and moe.capacity_factor is not None:
        accepted = (
            f"in {model.compute_dtype} XLA's experts are costed where no token is dropped; leave "
            'it out, or use model.compute_dtype="bfloat16"'
        )
        raise ConfigError(refusal("model.moe.capacity_factor", moe.capacity_factor, accepted))
    if model.compute_dtype in _UNITS:
        compiled = replace(compiled, compute_dtype="bfloat16")
    is_old = chip.cuda is not None and chip.cuda.compute_capability < OLDEST_CAPABILITY
    if is_old and model.attention == "fused":
        accepted = f'{chip.name} is older than fused attention; use "auto" or "unfused"'
        raise ConfigError(refusal("model.attention", model.attention, accepted))
    if is_old:
        compiled = replace(compiled, attention="unfused")
    return run if compiled == model else replace(run, config=replace(run.config, model=compiled))


_UNITS: dict[CostedType, RateType] = {
    **dict.fromkeys(FLOAT8_TYPES, "fp8"),
    "float4": "fp4",
}
"""The chip's units for compute types that only products are in."""


def require_type(model: ModelConfig, chip: Chip) -> None:
    """Refuse float8 or float4 on a chip that has no rate for it.

    Raises:
        ConfigError: naming the nearest available type.
    """
    units = _UNITS.get(model.compute_dtype)
    if units is not None and units not in chip.peak_flop_per_second:
        accepted = f'{chip.name} has no rate for {units}; use "bfloat16", or a chip with one'
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))


def restored(program: Program, run: ResolvedRun, compiled: ResolvedRun | None = None) -> Program:
    """Program of `run`, derived from `program`, the program of its substitute from `for_chip`.

    Args:
        program: the substitute's, of all stages of a pipeline or of one.
        run: what is requested.
        compiled: the run that `program` is of; if None, `program` is of all stages.

    Raises:
        ConfigError: if its linear layers cannot be distinguished from other products.
    """
    model, tuning = run.config.model, run.config.fine_tuning
    kind = narrow_type(model.compute_dtype)
    if kind is None or not isinstance(model, DecoderConfig):
        return program
    stage = run if compiled is None else compiled
    stack = stage.config.model
    assert isinstance(stack, DecoderConfig)  # noqa: S101  as the model of the run
    alone = _layers_in_no_loop(stack, stage.layout.pipeline)
    if alone >= stack.layers:
        accepted = (
            f"costs in {kind} need blocks in a loop, two periods of layers of a stage; use more, "
            'or "bfloat16"'
        )
        raise ConfigError(refusal("model.layers", model.layers, accepted))
    lora = None if tuning is None else tuning.lora
    if lora is not None and lora.rank in _sides(model, run):
        accepted = (
            f"costs in {kind} tell adapters by their rank, which must not be a width of a layer, "
            'or the tokens, of a device; use another, or "bfloat16"'
        )
        raise ConfigError(refusal("fine_tuning.lora.rank", lora.rank, accepted))
    program = in_float8(program, kind, None if lora is None else lora.rank)
    if not alone:
        return program
    note = f"{counted(alone, 'layer')} outside of the loop over blocks costed in bf16"
    return replace(program, notes=(*program.notes, note))


def _layers_in_no_loop(model: DecoderConfig, stages: int) -> int:
    """Layers that are compiled outside of loops: those beyond the last whole period, in a stack of
    one period, and for the token after the next. A stage of a pipeline has loops in any case."""
    moe = model.moe if isinstance(model, LlamaConfig) else None
    dense = 0 if moe is None else moe.dense_layers
    alone = 1 if isinstance(model, LlamaConfig) and model.mtp is not None else 0
    for layers in (dense, model.layers - dense) if stages == 1 else ():
        periods = layers // model.period
        alone += layers - (periods * model.period if periods > 1 else 0)
    return alone


def _sides(model: DecoderConfig, run: ResolvedRun) -> set[int]:
    """Sides of the products of linear layers, on one device or over all."""
    keys, values = model.head_size, model.value_head_size
    heads, own = model.heads, model.head_counts.get("kv_heads", model.heads)
    widths = [model.hidden, heads * values, model.inner_width, 2 * model.inner_width]
    widths += [heads * keys, own * keys, own * values, heads * keys + own * (keys + values)]
    if isinstance(model, LlamaConfig) and (mla := model.mla) is not None:
        latent = mla.kv_lora_rank + mla.rope_head_size
        widths += [mla.q_lora_rank or latent, mla.kv_lora_rank, latent, mla.rope_head_size]
        widths.append(heads * (mla.nope_head_size + values))
    rows = run.split.microbatch * run.dataset.input_shape[0]
    tensor = run.layout.tensor
    tokens = {rows, rows // run.layout.context, rows // run.layout.context // tensor}
    return tokens | {side for width in widths for side in (width, width // tensor)}
