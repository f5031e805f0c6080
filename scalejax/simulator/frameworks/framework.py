"""Frameworks: how the step of each differs from the one that XLA compiles for scalejax.

A framework is a value: a name, a year, and properties, each with its source and a function from a
program to a program. `scalejax.xla` applies them to the compiled step. Independent of hardware.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from scalejax.config.model import (
    ELEMENT_BYTES,
    DecoderConfig,
    DecoderRemat,
    GptConfig,
    LlamaConfig,
)
from scalejax.config.pipeline_schedule import PipelineSchedule, TrainedSchedule
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.simulator.frameworks.eager import (
    VOCABULARY_FACTORS,
    temporary_bytes_at_loss,
    with_eager_blocks,
    with_eager_loss,
)
from scalejax.simulator.frameworks.expert_exchange import (
    with_exchange_beside_compute,
    with_exchange_in_turn,
    with_exchange_of_shards,
    with_experts_over_tensor,
)
from scalejax.simulator.frameworks.grouped_experts import Capacity, with_grouped_experts
from scalejax.simulator.frameworks.half_precision_weights import with_half_weights
from scalejax.simulator.frameworks.kept_activations import (
    named_activations,
    with_kept_activations,
)
from scalejax.simulator.frameworks.kernels import Kernels, with_kernels
from scalejax.simulator.frameworks.megatron import (
    with_attention_dropout,
    with_full_recompute,
    with_half_gradients,
    with_unpadded_heads,
)
from scalejax.simulator.frameworks.memory import MEGATRON_CORE, NANOTRON, EagerMemory, memory_use
from scalejax.simulator.frameworks.one_device import through_one_device
from scalejax.simulator.frameworks.overlap import (
    with_listed_gathers,
    with_overlapped_layers,
    with_overlapped_state,
    with_overlapped_tensor,
    with_sums_in_last_pass,
)
from scalejax.simulator.frameworks.software import Software, software_by_name
from scalejax.simulator.program import Program, with_channels_first
from scalejax.simulator.transformer.shape import TransformerShape
from scalejax.simulator.transforms.routed_tokens import routed_tokens

_KERNELS = "a tensor for each layer: no slices of stacks, buffers to clear or casts of matrices"
_NO_CLOSED_FORM = (
    "this run has no closed form: XLA's program stands for it, at rates fitted to others"
)
_CHANNELS_FIRST = "arrays of images have channels first (NCHW), unless channels_last is asked for"
_FUSED = "attention is one kernel on every chip"

Transform = Callable[[Program, ResolvedRun, Sequence[Program]], Program]
"""Makes a framework's program from the compiled one, its run, and the programs of the same run with
`Property.vocabulary_factors` times its vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """A difference between a framework's step and the one that XLA compiles."""

    title: str
    """The difference, in a few words."""
    source: str
    """Where it is documented: a file of the framework, or a publication."""
    transform: Transform
    """The function that makes the difference."""
    vocabulary_factors: tuple[int, ...] = ()
    """Multiples of the vocabulary with which the step must be compiled as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Software that trains, described by how its step differs from the one that XLA compiles.

    Example:
        >>> from scalejax import Framework
        >>> from scalejax.simulator.frameworks import FRAMEWORKS
        >>> FRAMEWORKS["megatron-lm-2022"].schedule
        '1f1b'
        >>> ours = Framework(name="ours", title="Our trainer", year=2026, schedule="1f1b")
        >>> ours.title_of("gpt on our cluster")
        'gpt on our cluster, by Our trainer'
    """

    name: str
    """Name that `--framework` takes."""
    title: str
    """Full name."""
    year: int
    """Year of the version."""
    properties: tuple[Property, ...] = ()
    """Differences from the compiled step, in the order in which they are applied."""
    schedule: TrainedSchedule = "gpipe"
    """Order of the microbatches of a pipeline; scalejax's own is GPipe by default. A schedule that
    is not trained is requested in a run, whose blocks and microbatches are checked for it."""
    kernels: Kernels | None = None
    """What its kernels do, if they differ from those of XLA's program: the step of a decoder is
    then its closed form with these kernels, if it has a closed form."""
    closed_form: tuple[Literal["stages_apart", "sums_gradients_once", "flat_state"], ...] = ()
    """How the closed form of its step differs from XLA's, by fields of `TransformerShape`; compiled
    steps, for which the differences are unknown, leave them out."""
    layers_of_stages: Literal["equal", "by_weight"] = "equal"
    """How its pipelines share the layers, unless the run counts the ends of the network."""
    channels_first: bool = False
    """Whether it keeps arrays of images with channels first (NCHW), as PyTorch does without
    `memory_format=torch.channels_last`; use `dataclasses.replace` to make a channels-last one."""
    memory: EagerMemory | None = None
    """What it holds in memory, and what its allocator reserves; None if that is what the compiled
    step holds, or unknown."""
    software_of: str | None = None
    """Framework that this one is part of, and whose rates it has if no row of its own was fitted;
    its band is then that of frameworks that nobody measured."""

    def __post_init__(self) -> None:
        accepted = get_args(TrainedSchedule)
        if self.schedule in accepted:
            return
        if self.schedule in get_args(PipelineSchedule):
            trained = ", ".join(accepted)
            asked = f"it must be one of {trained}; for this one set layout.pipeline_schedule"
            raise ConfigError(refusal("framework.schedule", self.schedule, asked))
        raise ConfigError(unknown_name("framework.schedule", self.schedule, accepted))

    @property
    def vocabulary_factors(self) -> tuple[int, ...]:
        """Multiples of the vocabulary with which the step must be compiled as well."""
        return tuple(factor for each in self.properties for factor in each.vocabulary_factors)

    @property
    def software(self) -> Software:
        """The framework's effects on a chip; if it was not fitted, the effects typical of others,
        with the band of frameworks that were left out as a whole."""
        known = software_by_name()
        unknown = known["unknown"]
        if self.name in known or self.software_of is None:
            return known.get(self.name, unknown)
        return replace(
            known[self.software_of],
            residual=unknown.residual,
            expert_residual=None,
            chip_residual=unknown.chip_residual,
            rows={},
        )

    def title_of(self, step: str) -> str:
        """Title of `step` as trained by this framework; names every framework but XLA."""
        return step if self == XLA else f"{step}, by {self.title}"

    def applied(
        self, program: Program, run: ResolvedRun, larger_vocabularies: Sequence[Program] = ()
    ) -> Program:
        """`program` of `run` as this framework would run it.

        Args:
            program: the compiled step; for a pipeline under 1F1B, the step of one stage.
            run: its run.
            larger_vocabularies: the programs for `vocabulary_factors`, in order.
        """
        self._require_exchange(program, run)
        rest, differences = list(larger_vocabularies), []
        if self.kernels is not None and program.backend == "closed_form":
            program = with_kernels(program, run, self.kernels)
            differences.append(_FUSED if self.kernels.keeps_stacks else _KERNELS)
        elif self.kernels is not None:
            differences.append(_NO_CLOSED_FORM)
        for each in self.properties:
            count = len(each.vocabulary_factors)
            changed = each.transform(program, run, rest[:count])
            rest = rest[count:]
            if changed != program:
                program, differences = changed, [*differences, each.title]
        if self.channels_first and (changed := with_channels_first(program)) != program:
            program, differences = changed, [*differences, _CHANNELS_FIRST]
        if self == XLA:
            return program
        note = f"the step of {self.title}: "
        note += "; ".join(differences) or "no difference from XLA's is known for this run"
        return replace(program, framework=self.name, notes=(*program.notes, note))

    def _require_exchange(self, program: Program, run: ResolvedRun) -> None:
        """Refuse settings of where experts are, and of their exchange, if the step has neither.

        Raises:
            ConfigError: naming the setting.
        """
        layout, knows = run.config.layout, _EXPERT_EXCHANGE in self.properties
        words = (
            ("expert_tensor", layout.spreads_experts),
            ("overlap_expert_exchange", layout.overlap_expert_exchange),
        )
        for name, is_asked in words:
            if is_asked and not (knows and program.backend == "closed_form"):
                having = [each.name for each in FRAMEWORKS.values() if each.kernels is not None
                          and _EXPERT_EXCHANGE in each.properties]  # fmt: skip
                lacking = f"the step of {self.title} has none"
                if knows:
                    lacking = "it is known of steps in closed form, and this run has none"
                accepted = f"{lacking}; leave it out, or use --framework {' or '.join(having)}"
                raise ConfigError(refusal(f"layout.{name}", getattr(layout, name), accepted))

    def shape(self, shape: TransformerShape) -> TransformerShape:
        """`shape` with the options of this framework's closed form."""
        dealt = {} if self.layers_of_stages == "equal" else {"layers_of_stages": "by_weight"}
        return replace(shape, **dealt, **dict.fromkeys(self.closed_form, True))

    def with_memory(self, program: Program, run: ResolvedRun) -> Program:
        """`program` of `run` with the memory that this framework holds, if it is known; applied
        last, as it is the memory of a whole step."""
        held = None if self.memory is None else memory_use(self.memory, run)
        if held is None:
            return program
        note = f"memory is that of {self.title}, whose blocks are not compiled"
        return replace(program, memory=held, notes=(*program.notes, note))


def _for_gpt(
    change: Callable[[Program, ResolvedRun, GptConfig], Program],
    applies: Callable[[GptConfig], bool] = lambda model: True,
) -> Transform:
    """Transform that changes networks `gpt` if `applies` holds, and leaves others unchanged."""

    def transform(program: Program, run: ResolvedRun, larger: Sequence[Program]) -> Program:
        del larger
        model = run.config.model
        if isinstance(model, GptConfig) and applies(model):
            return change(program, run, model)
        return program

    return transform


def _is_half(model: GptConfig) -> bool:
    return ELEMENT_BYTES[model.compute_dtype] == 2


def _tokens(run: ResolvedRun) -> int:
    """Tokens of a microbatch on one device."""
    return run.split.microbatch * run.dataset.input_shape[0] // run.layout.context


def _recomputed_products(remat: DecoderRemat, *, has_matrices_once: bool) -> int:
    """Products of experts that run again before the backward pass.

    With "selective_op", which keeps every second product of a block and none of experts: all but
    the last, whose result nothing needs (pytorch/torchtitan, distributed/activation_checkpoint.py:
    the list of operations kept). MaxText weights results of experts (layers/moe.py: unpermute), so
    the gradient of the weights also needs the last product, whatever else is kept by name.
    """
    if has_matrices_once and remat not in ("none", "selective"):
        return 2
    match remat:
        case "none" | "selective":
            return 0
        case "full":
            return 2
        case _:
            return 1


def _grouped_experts(
    program: Program,
    run: ResolvedRun,
    larger: Sequence[Program],
    *,
    has_matrices_once: bool = False,
) -> Program:
    del larger
    tokens, model = routed_tokens(run), run.config.model
    if tokens is None or not isinstance(model, LlamaConfig) or model.moe is None:
        return program
    factor, capacity = model.moe.capacity_factor, None
    if factor is not None:
        # Padded to the mean load, experts take as long as with even loads.
        is_even = factor == 1 and not has_matrices_once
        if program.backend != "closed_form":
            return program
        if not (has_matrices_once or is_even):
            accepted = "this framework's experts are costed dropless, or padded to the mean load, 1"
            raise ConfigError(refusal("model.moe.capacity_factor", factor, accepted))
        sample = run.dataset.input_shape[0]
        if not is_even:
            capacity = Capacity(factor, run.split.microbatch, sample, model.hidden)
    width, layout = ELEMENT_BYTES[model.compute_dtype], run.config.layout
    program = with_grouped_experts(
        program,
        tokens,
        model.hidden * width,
        element_bytes=width,
        recomputed_products=_recomputed_products(model.remat, has_matrices_once=has_matrices_once),
        has_matrices_once=has_matrices_once,
        capacity=capacity,
    )
    if layout.spreads_experts:
        return with_experts_over_tensor(program, layout.tensor, tokens, model.hidden * width)
    if layout.sequence_parallel and program.backend == "closed_form":
        return with_exchange_of_shards(program, layout.tensor)
    return program


def _expert_exchange(program: Program, run: ResolvedRun, larger: Sequence[Program]) -> Program:
    del larger
    program = with_exchange_in_turn(program)
    if run.config.layout.overlap_expert_exchange:
        program = with_exchange_beside_compute(program)
    return program


def _kept_activations(program: Program, run: ResolvedRun, larger: Sequence[Program]) -> Program:
    del larger
    model = run.config.model
    kept = named_activations(model.remat) if isinstance(model, DecoderConfig) else None
    if kept is None:
        return program
    has_post_norms = isinstance(model, LlamaConfig) and model.block.post_norms
    return with_kept_activations(
        program, kept, ELEMENT_BYTES[model.compute_dtype], has_post_norms=has_post_norms
    )


def _eager_loss(
    program: Program, run: ResolvedRun, larger_vocabularies: Sequence[Program]
) -> Program:
    if not isinstance(run.config.model, DecoderConfig):
        return program
    tensor = run.layout.tensor
    at_loss = temporary_bytes_at_loss([each.memory.temporary_bytes for each in larger_vocabularies])
    logits = _tokens(run) * run.dataset.classes // tensor
    return with_eager_loss(program, logits, at_loss, is_divided=tensor > 1)


def _eager_blocks(
    program: Program, run: ResolvedRun, larger_vocabularies: Sequence[Program]
) -> Program:
    del larger_vocabularies
    model = run.config.model
    if not isinstance(model, DecoderConfig) or model.remat != "selective_op":
        return program
    size = _tokens(run) * model.hidden * ELEMENT_BYTES[model.compute_dtype]
    return with_eager_blocks(program, size, model.layers)


def _listed_gathers(program: Program, run: ResolvedRun, larger: Sequence[Program]) -> Program:
    del larger
    recomputes = getattr(run.config.model, "remat", "none") != "none"
    return with_listed_gathers(program, recomputes=recomputes)


def _through_one_device(program: Program, run: ResolvedRun, *, is_relayed: bool) -> Program:
    part = run.split.per_device_batch * math.prod(run.dataset.input_shape) * _INPUT_BYTES
    return through_one_device(program, is_relayed=is_relayed, input_bytes=part)


_INPUT_BYTES = 4  # of a float32 in an image, or a token number
_REENTRANT = Property(
    title="full recompute runs the whole block again, its last product too",
    source="Narayanan et al. 2021, arXiv 2104.04473, eq. 3; torch.utils.checkpoint, re-entrant",
    transform=_for_gpt(
        lambda program, *_: with_full_recompute(program), lambda model: model.remat == "full"
    ),
)
_DROPOUT = Property(
    title="dropout of unfused attention's scores is a kernel of its own",
    source="NVIDIA/Megatron-LM, megatron/arguments.py: attention_dropout = 0.1",
    transform=_for_gpt(
        lambda program, run, _: with_attention_dropout(program, run.dataset.input_shape[0]),
        lambda model: model.attention == "unfused",
    ),
)
_HALF_GRADIENTS = Property(
    title="gradients are summed, and ZeRO's parameters gathered, in fp16",
    source=(
        "NVIDIA/Megatron-LM, megatron/arguments.py: accumulate_allreduce_grads_in_fp32 is off "
        "for fp16; microsoft/DeepSpeed: communication_data_type"
    ),
    transform=_for_gpt(lambda program, *_: with_half_gradients(program), _is_half),
)
_BF16_GRADIENTS = Property(
    title="gradients are summed in bf16",
    source=(
        "NVIDIA/NeMo, scripts/performance: grad_reduce_in_fp32 = False; NVIDIA-NeMo/"
        "Megatron-Bridge, recipes: mixed precision with grad_reduce_in_fp32 = False"
    ),
    transform=lambda program, *_: with_half_gradients(program, "bf16"),
)
_HALF_WEIGHTS = Property(
    title="products read fp16 weights without a cast, and add to fp16 gradients",
    source=(
        "NVIDIA/Megatron-LM, megatron/optimizer/optimizer.py: Float16OptimizerWithFloat16Params; "
        "microsoft/DeepSpeed: FP16_Optimizer"
    ),
    transform=_for_gpt(lambda program, *_: with_half_weights(program), _is_half),
)
_UNPADDED = Property(
    title="products of attention heads are not padded to 8 elements",
    source="torch.baddbmm in NVIDIA/Megatron-LM, megatron/model/transformer.py; XLA pads",
    transform=_for_gpt(
        lambda program, _, model: with_unpadded_heads(program, model.hidden // model.heads)
    ),
)
_TENSOR_OVERLAP = Property(
    title="tensor-parallel collectives overlap with the products beside them",
    source=(
        "NVIDIA/Megatron-LM: --tp-comm-overlap; PyTorch: asynchronous tensor parallelism; "
        "Wang et al. 2023, doi 10.1145/3567955.3567959, section 3"
    ),
    transform=lambda program, *_: with_overlapped_tensor(program),
)
_STATE_OVERLAP = Property(
    title="the distributed optimizer's collectives overlap with the passes",
    source="NVIDIA/Megatron-LM: --overlap-param-gather, --overlap-grad-reduce",
    transform=lambda program, *_: with_overlapped_state(program),
)
_SUMS_OVERLAP = Property(
    title="gradients are summed while the last microbatch's backward pass runs",
    source="torch/nn/parallel/distributed.py: DistributedDataParallel, no_sync before the last",
    transform=lambda program, *_: with_sums_in_last_pass(program),
)
_LISTED_GATHERS = Property(
    title="parameters are gathered one by one into lists, while nothing computes",
    source=(
        "microsoft/DeepSpeed of 2021, runtime/zero/partition_parameters.py: _allgather_param; "
        "Rajbhandari et al. 2021, arXiv 2104.07857, section 4.1: three times with recompute"
    ),
    transform=_listed_gathers,
)
_DATA_PARALLEL = Property(
    title="one device sends weights out and sums gradients every step, while nothing computes",
    source=(
        "pytorch/pytorch, torch/nn/parallel/data_parallel.py and _functions.py: Broadcast, by "
        "NCCL (torch/csrc/cuda/comm.cpp)"
    ),
    transform=lambda program, run, _: _through_one_device(program, run, is_relayed=True),
)
_MULTI_GPU_MODEL = Property(
    title="towers read the weights of one device and send gradients back, each by itself",
    source="keras-team/keras 2.1, keras/utils/training_utils.py: multi_gpu_model",
    transform=lambda program, run, _: _through_one_device(program, run, is_relayed=False),
)
_EAGER_LOSS = Property(
    title="the loss is not compiled, and holds three or four float32 copies of the logits",
    source=(
        'pytorch/torchtitan of 2024, train.py: "compiling loss function causes CUDA errors, '
        'turning off for now"; pull request 1033 of April 2025 compiled it'
    ),
    transform=_eager_loss,
    vocabulary_factors=VOCABULARY_FACTORS,
)
_EAGER_BLOCKS = Property(
    title="blocks are not compiled; selective recompute keeps the result of their last product",
    source="torch/utils/checkpoint.py: _CachingTorchDispatchMode",
    transform=_eager_blocks,
)

_GROUPED_EXPERTS = Property(
    title="products of experts are grouped, and tokens are sent to them and back",
    source=(
        "NVIDIA/Megatron-LM: --moe-grouped-gemm, --moe-token-dispatcher-type alltoall; "
        "pytorch/torchtitan, models/moe: torch._grouped_mm, all_to_all_single"
    ),
    transform=_grouped_experts,
)

_MEGABLOX = Property(
    title="products of experts are grouped, and read each matrix where it lies",
    source="AI-Hypercomputer/maxtext, layers/moe.py: megablox, sparse_matmul (gmm, tgmm)",
    transform=partial(_grouped_experts, has_matrices_once=True),
)
_KEPT_ACTIVATIONS = Property(
    title="activations that are kept by name, or offloaded, are not computed again",
    source="AI-Hypercomputer/maxtext, MaxText/layers/decoders.py: get_remat_policy",
    transform=_kept_activations,
)
_LAYERS_OVERLAP = Property(
    title="gathers and sums over fsdp overlap with the layers before and after",
    source=(
        "AI-Hypercomputer/tpu-recipes, XLA_FLAGS: xla_tpu_enable_latency_hiding_layer_scheduler, "
        "xla_enable_async_all_gather, xla_tpu_enable_sparse_core_collective_offload_all_gather"
    ),
    transform=lambda program, *_: with_overlapped_layers(program),
)
_FSDP_OVERLAP = replace(
    _LAYERS_OVERLAP,
    source=(
        "NVIDIA/Megatron-LM, core/distributed/fsdp: --use-megatron-fsdp with "
        "--overlap-param-gather, --overlap-grad-reduce"
    ),
)
_EXPERT_EXCHANGE = Property(
    title="nothing computes while tokens are sent to their experts, unless another microbatch does",
    source=(
        "NVIDIA/Megatron-LM, core/transformer/moe/token_dispatcher.py, and "
        "--overlap-moe-expert-parallel-comm; pytorch/torchtitan, distributed/expert_parallel.py"
    ),
    transform=_expert_exchange,
)

_MEGATRON = (_GROUPED_EXPERTS, _REENTRANT, _DROPOUT, _UNPADDED)
_MEGATRON_FP16 = (_REENTRANT, _DROPOUT, _HALF_GRADIENTS, _HALF_WEIGHTS, _UNPADDED)

XLA = Framework(name="xla-2026", title="JAX and XLA, as scalejax trains", year=2026)
"""The framework of the compiled step itself."""

_of_pytorch = partial(Framework, schedule="1f1b")
"""Makes a framework based on PyTorch; all of these run pipelines in this order."""
_EAGER = Kernels()
"""Kernels of PyTorch without a compiler: a kernel adds gradients to float32 sums."""
_MEGATRON_CORE = Kernels(
    window_block=128,
    routes_on_matrix_units=True,
    balances_own_tokens=True,
    accumulates_in_products=True,
    overlaps_sends=True,
    casts_once=True,
)
"""Kernels of Megatron-Core on Transformer Engine, whose softmax_type "learnable" and window_size
use cuDNN's attention, in tiles of 128 (as in Dao 2023, arXiv 2307.08691)."""
_SPLASH_BLOCK = 1024
"""Queries and keys per block of splash attention on TPUs (sa_block_q, sa_block_kv of
AI-Hypercomputer/tpu-recipes: 1024 or 2048)."""


_NEMO_MEMORY = replace(MEGATRON_CORE, gradient_bytes=2, frozen_bytes=1, band=NANOTRON.band)
"""Memory of NeMo's performance recipes, which sum gradients in bfloat16 (NVIDIA-NeMo/NeMo,
scripts/performance: grad_reduce_in_fp32 = False), and of its fine-tuning in fp8, where frozen
weights and inputs of activations are kept in 8 bits (mlcommons/training_results_v5.1, Dell,
llama2_70b_lora: FP8_PARAMS, FP8_ACT). No published row states its memory, so the band is
nanotron's."""


def _of_megatron_core(
    name: str,
    title: str,
    year: int,
    memory: EagerMemory = MEGATRON_CORE,
    gradients: tuple[Property, ...] = (),
) -> Framework:
    return _of_pytorch(
        name=name,
        title=title,
        year=year,
        properties=(
            _GROUPED_EXPERTS,
            _EXPERT_EXCHANGE,
            *gradients,
            _TENSOR_OVERLAP,
            _FSDP_OVERLAP,
            _STATE_OVERLAP,
        ),
        kernels=_MEGATRON_CORE,
        closed_form=("sums_gradients_once", "flat_state", "stages_apart"),
        memory=memory,
    )


_of_nemo = partial(_of_megatron_core, memory=_NEMO_MEMORY, gradients=(_BF16_GRADIENTS,))


def _of_jax(name: str, title: str, year: int) -> Framework:
    return Framework(name=name, title=title, year=year)


FRAMEWORKS = {
    each.name: each
    for each in (
        XLA,
        _of_jax("pax-2023", "PaxML", 2023),
        Framework(
            name="maxtext-2025",
            title="MaxText",
            year=2025,
            properties=(_MEGABLOX, _KEPT_ACTIVATIONS, _LAYERS_OVERLAP),
            kernels=Kernels(
                keeps_stacks=True, has_fused_attention=True, window_block=_SPLASH_BLOCK
            ),
        ),
        _of_jax("tensorflow-2017", "TensorFlow 1, replicated", 2017),
        _of_jax("tensorflow-2020", "TensorFlow 2 with its own distribution strategies", 2020),
        _of_jax("tensorflow-2020-xla", "The same, its graph compiled by XLA", 2020),
        _of_jax("mxnet-2020", "MXNet with NVIDIA's examples, input by DALI", 2020),
        _of_jax("gluon-2020", "MXNet with the scripts of GluonCV and GluonNLP", 2020),
        _of_jax("mxnet-2023", "MXNet of NVIDIA's submissions to MLPerf, CUDA graphs", 2023),
        _of_jax("oneflow-2020", "OneFlow", 2020),
        _of_jax("mindspore-2020", "MindSpore", 2020),
        _of_jax("paddlepaddle-2020", "PaddlePaddle", 2020),
        _of_jax("horovod-2018", "Horovod with TensorFlow 1, as in NVIDIA's examples", 2018),
        _of_jax("horovod-2018-xla", "The same, its graph compiled by XLA", 2018),
        _of_pytorch(
            name="pytorch-eager-2020",
            title="PyTorch, not compiled",
            year=2020,
            channels_first=True,
        ),
        Framework(
            name="keras-multi-gpu-model",
            title="Keras' multi_gpu_model on TensorFlow 1",
            year=2018,
            properties=(_MULTI_GPU_MODEL,),
            software_of="tensorflow-2017",
        ),
        _of_pytorch(
            name="pytorch-dataparallel",
            title="PyTorch's DataParallel, one process for all devices",
            year=2020,
            properties=(_DATA_PARALLEL,),
            channels_first=True,
            software_of="pytorch-eager-2020",
        ),
        _of_pytorch(name="pytorch-fsdp-2023", title="PyTorch FSDP", year=2023),
        _of_pytorch(
            name="deepspeed-2021",
            title="DeepSpeed ZeRO-3, fp16",
            year=2021,
            properties=(_LISTED_GATHERS,),
        ),
        _of_pytorch(
            name="megatron-lm-2022",
            title="Megatron-LM or Megatron-DeepSpeed, bf16",
            year=2022,
            properties=_MEGATRON,
        ),
        _of_pytorch(
            name="megatron-lm-2021",
            title="Megatron-LM or Megatron-DeepSpeed, fp16",
            year=2021,
            properties=_MEGATRON_FP16,
        ),
        _of_megatron_core("megatron-core-2024", "Megatron-Core", 2024),
        _of_pytorch(
            name="megatron-core-2025",
            title="Megatron-LM 0.14 as it comes, nothing overlapped",
            year=2025,
            properties=(_GROUPED_EXPERTS, _EXPERT_EXCHANGE),
            kernels=replace(_MEGATRON_CORE, overlaps_sends=False),
            memory=MEGATRON_CORE,
        ),
        _of_nemo("nemo-2025", "NeMo, 24.11 to 25.09", 2025),
        _of_nemo(
            "megatron-bridge-2025",
            "Megatron-Bridge, 25.09 to 26.04, its recipes with parts of a layer in CUDA graphs",
            2025,
        ),
        _of_megatron_core(
            "megatron-core-2026", "Megatron-Bridge 0.4 as it comes, without CUDA graphs", 2026
        ),
        _of_nemo("nemo-2026", "Megatron-Bridge, from 26.06", 2026),
        _of_megatron_core("primus-2025", "AMD Primus on Megatron-LM, ROCm", 2025),
        _of_pytorch(
            name="nanotron-2025",
            title="nanotron",
            year=2025,
            properties=(_SUMS_OVERLAP,),
            kernels=_EAGER,
            closed_form=("stages_apart", "sums_gradients_once"),
            layers_of_stages="by_weight",
            memory=NANOTRON,
        ),
        _of_pytorch(name="neuronx-2025", title="torch-neuronx", year=2025),
        _of_pytorch(
            name="torchtitan-2024",
            title="torchtitan, its blocks compiled and its loss not",
            year=2024,
            properties=(_EAGER_LOSS,),
        ),
        _of_pytorch(
            name="torchtitan-2024-async-tp",
            title="torchtitan with asynchronous tensor parallelism, its loss not compiled",
            year=2024,
            properties=(_TENSOR_OVERLAP, _EAGER_LOSS),
        ),
        _of_pytorch(
            name="torchtitan-2024-eager",
            title="torchtitan, nothing compiled",
            year=2024,
            properties=(_EAGER_LOSS, _EAGER_BLOCKS),
        ),
        _of_pytorch(
            name="torchtitan-2025",
            title="torchtitan, compiled",
            year=2025,
            properties=(_GROUPED_EXPERTS, _EXPERT_EXCHANGE),
        ),
        _of_pytorch(
            name="torchtitan-2025-async-tp",
            title="torchtitan, compiled, with asynchronous tensor parallelism",
            year=2025,
            properties=(_GROUPED_EXPERTS, _EXPERT_EXCHANGE, _TENSOR_OVERLAP),
        ),
        _of_pytorch(
            name="torchtitan-2025-eager",
            title="torchtitan, only its loss compiled",
            year=2025,
            properties=(_GROUPED_EXPERTS, _EXPERT_EXCHANGE, _EAGER_BLOCKS),
        ),
    )
}
"""The frameworks, by name."""

SHORT_NAMES = {
    "xla": "xla-2026",
    "pytorch": "pytorch-fsdp-2023",
    "megatron-lm": "megatron-lm-2022",
    "megatron-lm-fp16": "megatron-lm-2021",
    "megatron-core": "megatron-core-2024",
    "nemo": "nemo-2026",
    "torchtitan": "torchtitan-2025",
    "torchtitan-async-tp": "torchtitan-2025-async-tp",
    "torchtitan-eager": "torchtitan-2025-eager",
}
"""Names without a year, which are accepted too: those of scalejax 0.2, for the version that was
meant there, and "nemo", for the newest."""


def known_framework(name: str) -> Framework | None:
    """The framework of that name, or of that short name; None if there is no such framework."""
    return FRAMEWORKS.get(SHORT_NAMES.get(name, name))


def framework_named(name: str) -> Framework:
    """The framework of that name, or of that short name.

    Raises:
        ConfigError: if there is no such framework.
    """
    found = known_framework(name)
    if found is None:
        raise ConfigError(unknown_name("framework", name, FRAMEWORKS))
    return found
