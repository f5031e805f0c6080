"""Memory that a PyTorch framework holds if its step is not compiled.

It counts what autograd saves for each operation of a block, what the loss holds, and parameters,
gradients and optimizer state; for each pipeline stage, with the microbatches that are in flight
there. The stage that holds most decides. Memory that PyTorch's caching allocator holds free between
its blocks is counted separately: it is released when memory is short, so whether a run fits depends
on what is in use.

Types below 16 bits are counted as 16: operands are kept in 8 bits, a quarter less at most. Left
out: scores of unfused attention, optimizers other than Adam in float32, fully sharded parameters,
offloaded arrays, and the state of adapters, about 1 % of the frozen weights. Independent of
hardware, except that a node has eight devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalejax.config.model import NARROW_TYPES, DecoderConfig, LlamaConfig
from scalejax.config.moe import MoeConfig
from scalejax.config.parallelism import balanced_layers, stage_layers
from scalejax.config.run import ResolvedRun
from scalejax.simulator.program import MemoryUse, ReservedBytes

_STATE_BYTES = 12
"""Bytes per parameter of the float32 parameter and the two moments of Adam."""
_MOMENTS = 2
_WEIGHT_BYTES, _HALF = 2, 2
_NODE = 8  # devices of a node in every system whose rows these constants are fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerMemory:
    """What a framework holds in memory, and what its allocator reserves."""

    gradient_bytes: int
    """Bytes of gradients per parameter: float32 sums, and 16-bit gradients if a separate operation
    adds them to the sums."""
    logit_bytes: int
    """Bytes per logit at the loss: in 16 bits, and copies in float32."""
    inner_arrays: int
    """Arrays of the feed-forward layer's width, in 16 bits, that autograd saves for a block with a
    gate: 4 for two halves, the activation and the product; 3 if these are one operation."""
    keeps_dummy_gradients: bool = False
    """Whether a 16-bit array of each matrix shape is kept, as a placeholder that autograd takes for
    the gradient."""
    frozen_bytes: int | None = None
    """Bytes per frozen weight, and per element saved for the activation of the feed-forward layer,
    if products are in 8 or 4 bits; None if adapters are not counted."""
    balances_output: bool = False
    """Whether layers are dealt to pipeline stages by FLOP, including those of the output layer;
    otherwise as equally as possible."""
    reserve_bytes: int = 0
    """Bytes that do not depend on the run, such as workspaces."""
    fragmentation: float = 0.0
    """Share of activations and logits that the allocator additionally holds free in a run of many
    microbatches: blocks of one microbatch are split by the next."""
    spare_gathers: tuple[float, float] = (0.0, 0.0)
    """Share of the tokens gathered by tensor-parallel layers, twice per block and microbatch in
    flight, that is held free: gathered within a node, and over nodes. Memory that another stream
    reads is not reused before that stream is done."""
    band: tuple[float, float] = (1.0, 1.0)
    """Published over predicted reserved memory, at p10 and p90 of held-out rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes that a device of a pipeline stage holds."""

    state: float
    """Parameters, gradients and optimizer state."""
    activations: float
    """What is saved for the microbatches in flight, and what the loss holds for one."""
    gathered: float
    """Tokens gathered over tensor, twice per block, for the microbatches in flight."""


def memory_use(held: EagerMemory, run: ResolvedRun) -> MemoryUse | None:
    """Memory of the device that holds most; None for a run that is not counted."""
    stages = tuple(stage_memories(held, run))
    if not stages:
        return None
    many = 1 - 1 / run.split.microbatches
    gathers = held.spare_gathers[run.layout.tensor > _NODE]

    def in_use(stage: StageMemory) -> float:
        return stage.state + stage.activations + held.reserve_bytes

    def reserved(stage: StageMemory) -> float:
        free = held.fragmentation * stage.activations + gathers * stage.gathered
        return in_use(stage) + many * free

    peak, total = max(map(in_use, stages)), max(map(reserved, stages))
    state = max(stages, key=in_use).state
    low, high = held.band
    return MemoryUse(
        argument_bytes=round(state),
        output_bytes=round(state),
        alias_bytes=round(state),
        temporary_bytes=round(peak) - round(state),
        reserved=ReservedBytes(
            bytes=round(total), p10_bytes=round(low * total), p90_bytes=round(high * total)
        ),
    )


def _has_half_state(run: ResolvedRun) -> bool:
    names = ("mu_dtype", "nu_dtype", "main_params_dtype")
    return any(getattr(run.config.optimizer, name, "float32") != "float32" for name in names)


def stage_memories(held: EagerMemory, run: ResolvedRun) -> Iterator[StageMemory]:
    """Yield what each pipeline stage holds; nothing for a run that is not counted."""
    model, layout = run.config.model, run.layout
    if not isinstance(model, DecoderConfig) or model.remat not in ("none", "selective", "full"):
        return
    scores = model.attention == "unfused" and model.remat != "full"
    if scores or run.config.optimizer.moments != _MOMENTS or _has_half_state(run):
        return
    if model.remat == "selective":  # the activation is recomputed
        held = replace(held, inner_arrays=held.inner_arrays - 1)
    tuning = run.config.fine_tuning
    is_adapted = tuning is not None and tuning.lora is not None and _experts(model) is None
    if tuning is not None and not (is_adapted and held.frozen_bytes):
        return
    if model.compute_dtype == "float32" or layout.fsdp > 1:
        return
    tensor, stages, moe = layout.tensor, layout.pipeline, _experts(model)
    kinds = _layers_of_stages(held, run, model)
    tokens = run.split.microbatch * run.dataset.input_shape[0] // layout.context
    vocabulary = run.dataset.classes // tensor
    for stage, layers in enumerate(kinds):
        is_last = stage == stages - 1
        before = sum(kinds[:stage])
        dense = min(layers, max(0, (moe.dense_layers if moe else model.layers) - before))
        experts = layers - dense
        tables = int(stage == 0) + int(is_last and not (stages == 1 and model.tied_embeddings))
        parameters = dense * sum(_dense_matrices(model).values()) / tensor
        parameters += tables * vocabulary * model.hidden
        of_experts = 0.0
        if moe is not None:
            one_expert = 3 * model.hidden * moe.expert_hidden
            beside = _attention_elements(model) + moe.shared_experts * one_expert
            parameters += experts * beside / tensor
            of_experts = experts * moe.experts * one_expert / (layout.expert * tensor)
        state = _state_bytes(held, run, parameters, of_experts)
        if is_adapted:
            frozen = dense * sum(_dense_matrices(model).values()) / tensor
            state = frozen * _frozen_bytes(held, model) + _HALF * tables * vocabulary * model.hidden
        elif held.keeps_dummy_gradients:
            shapes = _dense_matrices(model) if dense else _attention_matrices(model)
            state += _HALF * sum(shapes.values()) / tensor
        one = _HALF * tokens * _width(held, run, model, None)
        if is_adapted:
            one = tokens * _adapted_bytes(held, run, model)
        of_moe = _HALF * tokens * _width(held, run, model, moe) if experts else 0.0
        in_flight = _in_flight(run, stage)
        whole = in_flight * (dense * one + experts * of_moe)
        if model.remat == "full":
            kept = _HALF * tokens * model.hidden / (tensor if layout_divides(run) else 1)
            whole = in_flight * layers * kept + max(one, of_moe)
        if is_last:
            whole += tokens * vocabulary * held.logit_bytes
        gathered = 2 * _HALF * tokens * model.hidden * in_flight * layers
        yield StageMemory(
            state=state,
            activations=whole,
            gathered=gathered if tensor > 1 and layout_divides(run) else 0.0,
        )


def _frozen_bytes(held: EagerMemory, model: DecoderConfig) -> int:
    is_narrow = model.compute_dtype in NARROW_TYPES
    return held.frozen_bytes if held.frozen_bytes and is_narrow else _WEIGHT_BYTES


def _adapted_bytes(held: EagerMemory, run: ResolvedRun, model: DecoderConfig) -> float:
    """Bytes per token that a device saves for a block with frozen matrices: the inputs of norms and
    adapters, of attention, and of the gate and what it multiplies; frozen matrices save no
    input."""
    tensor = run.layout.tensor
    keys = model.head_counts.get("kv_heads", model.heads)
    heads = (2 * model.heads + 2 * keys) * model.head_size
    stream = 3 * model.hidden / (tensor if layout_divides(run) else 1)
    inner = (held.inner_arrays - 1) * model.inner_width / tensor
    return _HALF * (stream + heads / tensor) + _frozen_bytes(held, model) * inner


def layout_divides(run: ResolvedRun) -> bool:
    """Whether tokens are sharded over tensor between its layers."""
    return run.config.layout.sequence_parallel


def _experts(model: DecoderConfig) -> MoeConfig | None:
    return model.moe if isinstance(model, LlamaConfig) else None


def _state_bytes(
    held: EagerMemory, run: ResolvedRun, parameters: float, of_experts: float
) -> float:
    """Bytes of weights, gradients and optimizer state; ZeRO shards the optimizer state from stage 1
    on, and gradients from stage 2."""
    layout, zero = run.layout, run.config.layout.zero_stage
    found = 0.0
    for count, shards in (
        (parameters, layout.data * layout.context * layout.expert),
        (of_experts, layout.data * layout.context),
    ):
        state = _STATE_BYTES / (shards if zero >= 1 else 1)
        gradients = held.gradient_bytes / (shards if zero >= 2 else 1)
        found += count * (_WEIGHT_BYTES + gradients + state)
    return found


def _attention_matrices(model: DecoderConfig) -> dict[str, int]:
    """Elements of the matrices of attention."""
    hidden, heads = model.hidden, model.heads
    mla = model.mla if isinstance(model, LlamaConfig) else None
    out = heads * model.value_head_size * hidden
    if mla is None:
        keys = model.head_counts.get("kv_heads", heads)
        width = heads * model.head_size + keys * (model.head_size + model.value_head_size)
        return {"qkv": hidden * width, "out": out}
    rank, queries = mla.q_lora_rank, heads * model.head_size
    found = {"q": hidden * queries}
    if rank is not None:
        found = {"q_down": hidden * rank, "q_up": rank * queries}
    found["kv_down"] = hidden * (mla.kv_lora_rank + mla.rope_head_size)
    made = heads * (mla.nope_head_size + mla.value_head_size)
    return {**found, "kv_up": mla.kv_lora_rank * made, "out": out}


def _attention_elements(model: DecoderConfig) -> int:
    return sum(_attention_matrices(model).values())


def _dense_matrices(model: DecoderConfig) -> dict[str, int]:
    """Elements of the matrices of a block without experts."""
    size = model.hidden * model.inner_width
    return {**_attention_matrices(model), "up": size * (1 + model.is_gated), "down": size}


def _width(
    held: EagerMemory, run: ResolvedRun, model: DecoderConfig, moe: MoeConfig | None
) -> float:
    """Elements per token that autograd saves for a block, on a device: inputs and results of both
    norms; queries, keys, values and the result of attention; for the feed-forward layer what
    `EagerMemory.inner_arrays` says; for experts that too, for each copy of a token sent to one,
    plus the copy itself."""
    tensor, hidden = run.layout.tensor, model.hidden
    stream = 4 * hidden / (tensor if layout_divides(run) else 1)
    heads = model.heads * model.value_head_size
    mla = model.mla if isinstance(model, LlamaConfig) else None
    if mla is None:
        keys = model.head_counts.get("kv_heads", model.heads)
        heads += model.heads * model.head_size + keys * (model.head_size + model.value_head_size)
    else:
        heads += 2 * model.heads * model.head_size
        heads += model.heads * (mla.nope_head_size + mla.value_head_size)
        stream += 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.rope_head_size
    arrays = held.inner_arrays if model.is_gated else 2
    if moe is None:
        return stream + (heads + arrays * model.inner_width) / tensor
    routed = moe.experts_per_token * (hidden + arrays * moe.expert_hidden)
    return stream + (heads + routed + arrays * moe.shared_experts * moe.expert_hidden) / tensor


def _in_flight(run: ResolvedRun, stage: int) -> float:
    """Microbatches for which all layers of a stage are saved at once, in 1F1B, interleaved or not
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Megatron-LM, schedules.py)."""
    stages, microbatches = run.layout.pipeline, run.split.microbatches
    chunks = run.config.layout.pipeline_chunks
    if chunks == 1:
        return min(stages - stage, microbatches)
    warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warmup + 1, microbatches * chunks) / chunks


def _layers_of_stages(held: EagerMemory, run: ResolvedRun, model: DecoderConfig) -> tuple[int, ...]:
    stages, layout = run.layout.pipeline, run.config.layout
    if layout.pipeline_counts_ends:
        first, *others, last = stage_layers(model.layers + layout.pipeline_ends, stages)
        return (first - 1, *others, last - 1)
    if not held.balances_output or stages == 1:
        return stage_layers(model.layers, stages)
    layer = sum(_dense_matrices(model).values())
    return balanced_layers(model.layers, stages, layer, run.dataset.classes * model.hidden)


NANOTRON = EagerMemory(
    gradient_bytes=4 + _HALF,
    logit_bytes=_HALF + 4 + 4 + _HALF,
    inner_arrays=4,
    balances_output=True,
    reserve_bytes=200 * 10**6,
    fragmentation=0.21,
    spare_gathers=(0.36, 0.05),
    band=(0.85, 1.19),
)
"""nanotron of 2025: FP32GradientAccumulator beside the gradients of bfloat16 weights; logits, their
float32 copy, its softmax, and the gradient; GLUActivation in PyTorch; layers by get_block_compute
costs (huggingface/nanotron: optim/gradient_accumulator.py, parallel/tensor_parallel/functional.py,
models/llama.py). Reserve, fragmentation, spare gathers and band are fitted to 899 runs on H100
(`experiments/framework_memory`)."""
MEGATRON_CORE = EagerMemory(
    gradient_bytes=4,
    logit_bytes=_HALF + 4 + _HALF,
    inner_arrays=3,
    keeps_dummy_gradients=True,
    reserve_bytes=500 * 10**6,
    band=(0.97, 1.02),
)
"""Megatron-Core of 2025 with Transformer Engine: gradients added to float32 sums in the product,
fused cross entropy and SwiGLU, and dummies for autograd, one for each shape
(NVIDIA/TransformerEngine, pytorch/module/base.py: get_dummy_wgrad). Workspaces and the band come
from ten settings on 8 B200 (`experiments/framework_memory`)."""
