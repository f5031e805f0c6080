"""The closed form of a run's step: its shape and strategy, and the program that follows from them.

A framework whose kernels are not XLA's (`Framework.kernels`) has no compiled step here, so that
decoders that it trains are costed by this form.
"""

from dataclasses import fields, replace
from importlib import metadata
from typing import get_args

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import (
    ELEMENT_BYTES,
    BlockConfig,
    DecoderConfig,
    LlamaConfig,
)
from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.facts import fitting_facts
from scalejax.hardware import Chip
from scalejax.simulator.frameworks.kept_activations import named_activations
from scalejax.simulator.frameworks.kernels import Kernels
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import (
    AMPERE_WORKSPACE_BYTES,
    Adapters,
    Compiler,
    Recompute,
    Strategy,
    TransformerShape,
    compiler_of,
    transformer_program,
)
from scalejax.xla.derive import ProfileJob, require_type

HOPPER_WORKSPACE_BYTES = 32 * 1024**2
"""Workspace that XLA gives to cuBLAS from Hopper on; see `AMPERE_WORKSPACE_BYTES`."""
_HOPPER = (9, 0)


def installed_compiler() -> Compiler:
    """The XLA of the installed jaxlib, which would compile the steps; the oldest known one if there
    is no jaxlib."""
    try:
        return compiler_of(metadata.version("jaxlib"))
    except metadata.PackageNotFoundError:
        return "0.10"


def shape_of(
    config: RunConfig,
    chip: Chip,
    facts: DatasetFacts | None = None,
    *,
    compiler: Compiler = "0.10",
    kernels: Kernels | None = None,
) -> TransformerShape:
    """Dimensions of the network of `config`, as it would run on `chip`.

    Args:
        config: the run.
        chip: a device.
        facts: counts and shapes of its data; if None, they are read.
        compiler: what would compile its step.
        kernels: kernels of its framework; None for XLA's program. If their attention has windows
            and sinks, experts may drop tokens, and biases, sinks and norms after each half of a
            block, which take little time, are left out.

    Raises:
        ConfigError: if it is no transformer of equal blocks, is fine-tuned in parts, has gradient
            compression, or the chip lacks its type.
    """
    model = config.model
    if not isinstance(model, DecoderConfig):
        accepted = "the closed form covers gpt and llama only; use scalejax predict"
        raise ConfigError(refusal("model.name", model.name, accepted))
    moe = model.moe if isinstance(model, LlamaConfig) else None
    is_own = kernels is not None and kernels.window_block is not None
    if moe is not None and moe.capacity_factor is not None and not is_own:
        accepted = "the closed form knows experts that drop no tokens; use scalejax predict"
        raise ConfigError(refusal("model.moe.capacity_factor", moe.capacity_factor, accepted))
    adapters = _adapters(config)
    if config.fine_tuning is not None and config.fine_tuning.trainable:
        accepted = "the closed form costs training in full; use scalejax predict"
        raise ConfigError(refusal("fine_tuning.trainable", config.fine_tuning.trainable, accepted))
    if config.dropout is not None:
        raise ConfigError("[dropout] is refused: the closed form has no masks; use predict.")
    if config.loss.is_own:
        accepted = "the closed form knows the cross-entropy; use scalejax predict"
        raise ConfigError(refusal("loss.kind", config.loss.kind, accepted))
    if not config.optimizer.is_in_closed_form:
        accepted = "the closed form counts moments and no matrices of an optimizer; use predict"
        raise ConfigError(refusal("optimizer.name", config.optimizer.name, accepted))
    for name in ("mu_dtype", "nu_dtype", "main_params_dtype"):
        if getattr(config.optimizer, name, "float32") != "float32":
            accepted = 'the closed form counts state in float32; use "float32", or scalejax predict'
            found = getattr(config.optimizer, name)
            raise ConfigError(refusal(f"optimizer.{name}", found, accepted))
    if config.layout.optimizer_memory_host_offload:
        accepted = "the closed form knows no offload; leave it out, or use scalejax predict"
        raise ConfigError(refusal("layout.optimizer_memory_host_offload", True, accepted))
    if config.gradient_sync is not None:
        accepted = "the closed form sums uncompressed gradients; use scalejax predict"
        raise ConfigError(refusal("gradient_sync.name", config.gradient_sync.name, accepted))
    if isinstance(model, LlamaConfig):
        known = model.block
        if is_own:  # as wide, and computed in as many passes, whatever these are
            usual = BlockConfig()
            known = replace(known, **{name: getattr(usual, name) for name in _OF_OWN_KERNELS})
            known = replace(known, activation="silu") if known.activation == "gelu" else known
        _require_known_block(known)
        if is_own and config.layout.context > 1 and model.block.sliding_window is not None:
            accepted = "the closed form knows windows without a context axis; use scalejax predict"
            raise ConfigError(
                refusal("model.block.sliding_window", model.block.sliding_window, accepted)
            )
        accepted = "the closed form knows Llama's own blocks; use scalejax predict"
        if model.mtp is not None:
            raise ConfigError(refusal("model.mtp.loss_weight", model.mtp.loss_weight, accepted))
        if model.scaled_embeddings and not is_own:
            raise ConfigError(refusal("model.scaled_embeddings", True, accepted))
    if config.layout.pipeline_counts_ends and kernels is None:
        accepted = "it is known of Megatron-Core's frameworks: --framework megatron-core-2026"
        raise ConfigError(refusal("layout.pipeline_counts_ends", True, accepted))
    require_type(model, chip)
    dataset = fitting_facts(config, facts)
    capability = chip.cuda and chip.cuda.compute_capability
    is_fused = kernels is not None and kernels.has_fused_attention
    known = model
    if is_own and isinstance(model, LlamaConfig):
        known = replace(model, block=replace(model.block, attention_sinks=False))
    lacks = None if is_fused else known.lacks_for_fused_attention(capability)
    if isinstance(model, LlamaConfig) and model.mla is not None and lacks is not None:
        accepted = f"the closed form knows it in one kernel, and {chip.name} has {lacks}"
        raise ConfigError(refusal("model.mla", "given", accepted))
    return TransformerShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.head_counts.get("kv_heads", model.heads),
        ffn_hidden=model.inner_width,
        is_gated=model.is_gated,
        is_plain=isinstance(model, LlamaConfig) and not model.is_gated,
        has_tied_embeddings=model.tied_embeddings,
        has_learned_positions=model.has_learned_positions,
        vocabulary=dataset.classes,
        tokens=dataset.input_shape[0],
        is_fused=model.attention != "unfused" and lacks is None,
        scores_share=_scores_share(model, dataset.input_shape[0], kernels),
        compute_dtype=model.compute_dtype,
        head_width=model.head_size,
        normalises_heads=isinstance(model, LlamaConfig) and model.block.qk_norm == "head",
        latent=model.mla if isinstance(model, LlamaConfig) else None,
        experts=moe,
        adapters=adapters,
        layers_of_stages="with_ends" if config.layout.pipeline_counts_ends else "equal",
        compiler=compiler,
    )


def _scores_share(model: DecoderConfig, tokens: int, kernels: Kernels | None) -> float:
    """Share of the scores of causal attention that remains with windows, the mean over layers:
    scores of the blocks that a window reaches into."""
    block = model.block if isinstance(model, LlamaConfig) else None
    if block is None or block.sliding_window is None or block.sliding_window >= tokens:
        return 1.0
    if kernels is None or kernels.window_block is None:
        return 1.0
    window, every = block.sliding_window, block.global_every
    blocks = -(-tokens // kernels.window_block)
    reached = min(blocks, 1 + -(-(window - 1) // kernels.window_block))
    local = reached * (2 * blocks - reached + 1) / (blocks * (blocks + 1))
    whole = model.layers // every if every else 0
    return (whole + (model.layers - whole) * local) / model.layers


_OF_NEMOTRON = {"activation": "squared_relu", "is_gated": False, "norm": "layer"}
"""Fields in which a block of Nemotron-4 differs from Llama's, accepted only together."""


_OF_OWN_KERNELS = (
    *("qkv_bias", "sliding_window", "global_every", "local_rope_theta", "attention_sinks"),
    "post_norms",
)
"""Further fields of blocks that frameworks with their own blockwise attention support."""


def _require_known_block(block: BlockConfig) -> None:
    """Refuse blocks that are neither Llama's nor those of Nemotron-4, in any size of heads.

    Raises:
        ConfigError: naming what they have.
    """
    usual = replace(BlockConfig(), head_size=block.head_size, rope_fraction=block.rope_fraction)
    if block.qk_norm == "head":
        usual = replace(usual, qk_norm="head")
    if all(getattr(block, name) == value for name, value in _OF_NEMOTRON.items()):
        usual = replace(usual, activation="squared_relu", is_gated=False, norm="layer")
    for field in fields(usual):
        if (value := getattr(block, field.name)) != getattr(usual, field.name):
            accepted = "the closed form knows blocks of Llama and Nemotron-4; use scalejax predict"
            raise ConfigError(refusal(f"model.block.{field.name}", value, accepted))


def _adapters(config: RunConfig) -> Adapters | None:
    """The adapters of a run; None if its whole network is trained.

    Raises:
        ConfigError: if the closed form does not know adapters of this network.
    """
    tuning, model = config.fine_tuning, config.model
    if tuning is None or tuning.lora is None:
        return None
    if (
        not isinstance(model, LlamaConfig)
        or not model.is_gated
        or model.mla is not None
        or model.tied_embeddings
    ):
        accepted = "the closed form knows adapters of Llama's own blocks; use scalejax predict"
        raise ConfigError(refusal("fine_tuning.lora", "given", accepted))
    known = {"qkv": "qkv", "projection": "projection", "gated": "up", "down": "down"}
    wanted = {layer for layers in tuning.lora.layers.values() for layer in layers or known}
    return Adapters(
        rank=tuning.lora.rank,
        matrices=tuple(name for layer, name in known.items() if layer in wanted),
        base_bytes=ELEMENT_BYTES[tuning.base_dtype],
    )


def strategy_of(run: ResolvedRun, *, knows_names: bool = False) -> Strategy:
    """The strategy of a run, as in `search`; pipelines are 1F1B.

    Args:
        run: the run.
        knows_names: whether its framework knows activations that are kept by name, and leaves these
            out of full recompute.

    Raises:
        ConfigError: if the closed form has no such strategy.
    """
    config = run.config
    layout, model = config.layout, config.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(refusal("model.name", model.name, "the closed form knows gpt and llama"))
    if layout.pipeline > 1 and (schedule := layout.pipeline_schedule) in ("zb_h1", "dualpipe"):
        accepted = "the closed form of a pipeline is that of 1F1B; use scalejax predict"
        raise ConfigError(refusal("layout.pipeline_schedule", schedule, accepted))
    recompute = next((each for each in get_args(Recompute) if each == model.remat), None)
    if knows_names and named_activations(model.remat) is not None:
        recompute = "full"
    if recompute is None or layout.optimizer_memory_host_offload:
        name = "layout.optimizer_memory_host_offload" if recompute else "model.remat"
        accepted = "the closed form does not know it; use scalejax predict"
        raise ConfigError(refusal(name, True if recompute else model.remat, accepted))
    return Strategy(
        split=run.split,
        recompute=recompute,
        zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        pipeline_chunks=layout.pipeline_chunks,
        context_strategy=layout.context_strategy,
        moments=config.optimizer.moments,
    )


def workspace_bytes(chip: Chip) -> int:
    """Workspace of the matrix-product library on `chip`."""
    is_recent = chip.cuda is not None and chip.cuda.compute_capability >= _HOPPER
    return HOPPER_WORKSPACE_BYTES if is_recent else AMPERE_WORKSPACE_BYTES


def program_in_closed_form(job: ProfileJob) -> Program:
    """The step of a job in closed form, as its framework runs it.

    Raises:
        ConfigError: if the closed form does not know the network or the layout, or what is
            different in the framework needs more than one program.
    """
    job.cluster.require_devices(job.run.layout.device_count)
    if job.framework.vocabulary_factors:
        accepted = "what it differs in is read off compiled programs of several vocabularies"
        raise ConfigError(refusal("framework", job.framework.name, accepted))
    config, chip, kernels = job.run.config, job.cluster.chip, job.framework.kernels
    schedule = config.layout.pipeline_schedule
    if job.run.layout.pipeline > 1 and "gpipe" == schedule == job.framework.schedule:
        accepted = "the closed form knows pipelines in 1F1B"
        raise ConfigError(refusal("layout.pipeline_schedule", schedule, accepted))
    shape = shape_of(config, chip, job.run.dataset, kernels=kernels)
    program = transformer_program(
        job.framework.shape(shape),
        strategy_of(job.run, knows_names=kernels is not None and kernels.has_fused_attention),
        workspace_bytes=workspace_bytes(chip),
    )
    return job.framework.with_memory(job.framework.applied(program, job.run), job.run)
