"""Config of training: batch, layout, loss, fine-tuning, averaging, loop.

Each class checks its own fields when built; `checks` checks what involves several of them.
"""

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from scalejax.config.optimizer import OptionValue
from scalejax.config.parallelism import MODEL_AXES, ContextStrategy
from scalejax.config.pipeline_schedule import PipelineSchedule
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
    require_import_path,
    unknown_name,
)
from scalejax.core.filesystem import is_url
from scalejax.core.serialization import Family

MOST_STEPS = 2**31 - 1
"""Largest number of steps, that of int32, JAX's default integer type."""

_LARGEST_BATCH = 1e12
"""Samples of an update: more than any data set has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Samples per optimizer update; exactly one of the first two fields is given."""

    global_batch: int | None = None
    """Samples per update over all devices."""
    per_device_batch: int | None = None
    """Samples per update on each device; the global batch then grows with the devices."""
    microbatches: int = 1
    """Forward passes per update, their gradients accumulated."""
    ramp_epochs: tuple[int, ...] = ()
    """Epochs at which the batch is multiplied by `ramp_factor`, instead of a decay of the learning
    rate (Smith et al. 2018, arXiv 1711.00489); the schedule counts samples, as if the batch had not
    grown."""
    ramp_factor: int = 2
    """Factor by which the batch grows at each of `ramp_epochs`."""
    ramp_scaling: Literal["none", "linear", "root"] = "none"
    """How the learning rate grows with the batch at `ramp_epochs`, in addition to the changes of
    `schedule`: not at all, by the same factor (Goyal et al. 2017), or by its root (Krizhevsky 2014,
    arXiv 1404.5997, section 5)."""

    def __post_init__(self) -> None:
        if (self.global_batch is None) == (self.per_device_batch is None):
            raise ConfigError(
                f"batch.global_batch={self.global_batch} with "
                f"batch.per_device_batch={self.per_device_batch} is refused: "
                "exactly one of the two must be given; leave the other out."
            )
        for name in ("global_batch", "per_device_batch", "microbatches"):
            require_at_least(f"batch.{name}", getattr(self, name), 1)
            require_at_most(f"batch.{name}", getattr(self, name), _LARGEST_BATCH)
        require_at_least("batch.ramp_factor", self.ramp_factor, 2)
        if self.ramp_scaling != "none" and not self.ramp_epochs:
            accepted = "the batch does not grow; give batch.ramp_epochs, or leave it out"
            raise ConfigError(refusal("batch.ramp_scaling", self.ramp_scaling, accepted))
        if list(self.ramp_epochs) != sorted(set(self.ramp_epochs)) or any(
            epoch < 1 for epoch in self.ramp_epochs
        ):
            accepted = "epochs must be at least 1 and rise"
            raise ConfigError(refusal("batch.ramp_epochs", self.ramp_epochs, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """The mesh of devices, and how the step is sharded over it."""

    data: int | None = None
    """Devices along the data axis; if absent, all devices that the other axes leave."""
    fsdp: int = 1
    """Devices along the fsdp axis, which shards both the batch and the parameters (ZeRO 3)."""
    expert: int = 1
    """Devices along the expert axis, which shards the batch and the parameters of experts, but no
    others (mixtures of experts)."""
    expert_tensor: int | None = None
    """Devices of the tensor axis that shard each expert (Megatron-LM's
    --expert-tensor-parallel-size): all of them if absent; with 1 each device holds whole experts,
    to which tokens are sent, and the experts are spread over expert times tensor devices: costed,
    not trained."""
    overlap_expert_exchange: bool = False
    """Whether tokens travel to the experts and back while another microbatch computes
    (Megatron-LM's --overlap-moe-expert-parallel-comm): costed, not trained."""
    tensor: int = 1
    """Devices along the tensor axis, which shards each layer (Megatron tensor parallelism)."""
    context: int = 1
    """Devices along the context axis, which shards the tokens of a sample (transformers)."""
    context_strategy: ContextStrategy = "all_gather"
    """How attention sees tokens of other devices on the context axis: keys and values are gathered
    from all devices ("all_gather"); they travel around all devices (Ring Attention, "ring";
    Megatron's p2p); or heads are sharded over context instead of tokens (DeepSpeed Ulysses,
    "all_to_all"; Megatron's a2a), and context times tensor must divide them."""
    pipeline: int = 1
    """Stages along the pipeline axis, which splits the blocks of a transformer;
    `batch.microbatches` pass through them one after another."""
    pipeline_chunks: int = 1
    """Model chunks per pipeline stage, with chunks of the other stages between them (interleaved
    schedule; Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    pipeline_counts_ends: bool = False
    """Whether stages share embedding and loss as if each were a layer (Megatron-LM's
    --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split), so that 126
    layers are divided like 128: costed, not trained."""
    pipeline_schedule: PipelineSchedule = "gpipe"
    """Order of the microbatches in a pipeline: "gpipe", all forward and then all backward; "1f1b",
    alternating, which holds the activations of at most as many microbatches as there are stages
    (Narayanan et al. 2021, section 2.2; interleaved with `pipeline_chunks`); "zb_h1", which fills
    part of the bubble with the gradients of weights (Qi et al. 2023, arXiv 2401.10241, section 3);
    "dualpipe", from both ends, with all communication overlapped with compute (DeepSeek-V3, arXiv
    2412.19437, section 3.2.1): costed, not trained."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel layers are sharded over tokens along the tensor
    axis (Korthikanti et al. 2022, arXiv 2205.05198; transformers)."""
    zero_stage: Literal[0, 1, 2] = 0
    """What is sharded over the data axis: 0 nothing; 1 parameters and optimizer state, each device
    updating its shard and all-gathering the rest for use; 2 the gradients as well (Rajbhandari et
    al. 2020, arXiv 1910.02054). A parameter stays whole if `data` divides none of its dimensions.
    If there is an expert or a context axis, what stage 1 shards is sharded over it too
    (Megatron-LM's distributed optimizer: over data and context). The fsdp axis is stage 3."""
    optimizer_memory_host_offload: bool = False
    """Whether optimizer state is kept in pinned host memory, and copied to the devices and back for
    each update (MaxText's name; the idea is from Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840,
    where the update is on the host). The freed memory is available to the batch and the layers."""
    mode: Literal["jit", "shard_map", "pmap"] = "jit"
    """What places the collectives: the compiler ("jit"), or the step itself, per device
    ("shard_map", and "pmap", its older spelling; both for the data axis only)."""
    bn_scope: Literal["global", "local"] = "global"
    """Whether BatchNorm statistics are over the samples of all devices (synchronised) or of each
    device; in either case, of one microbatch."""
    bn_group_size: int | None = None
    """Samples that share local BatchNorm statistics: part of those of a device (ghost batches), or
    those of several whole devices; if absent, those of one device."""
    bn_running: Literal["mean", "in_turn"] = "mean"
    """How the statistics of several groups update the running ones: once, with their mean; or one
    group after the other (ghost batches; Hoffer et al. 2017, algorithm 1, arXiv 1705.08741)."""

    def __post_init__(self) -> None:
        for name in ("data", *MODEL_AXES, "pipeline_chunks", "bn_group_size"):
            require_at_least(f"layout.{name}", getattr(self, name), 1)
        for name in MODEL_AXES:
            size = getattr(self, name)
            if self.mode != "jit" and size > 1:
                accepted = f'layout.mode="{self.mode}" spreads over the data axis only; use "jit"'
                raise ConfigError(refusal(f"layout.{name}", size, accepted))
        if self.mode != "jit" and self.bn_running != "mean":
            accepted = 'the groups have an order over all devices only; it needs layout.mode="jit"'
            raise ConfigError(refusal("layout.bn_running", self.bn_running, accepted))
        if self.mode != "jit" and self.zero_stage:
            accepted = f'layout.mode="{self.mode}" keeps all state whole; use "jit"'
            raise ConfigError(refusal("layout.zero_stage", self.zero_stage, accepted))
        if self.pipeline == 1 and self.pipeline_chunks > 1:
            accepted = "it needs layout.pipeline above 1"
            raise ConfigError(refusal("layout.pipeline_chunks", self.pipeline_chunks, accepted))
        if self.pipeline == 1 and self.pipeline_counts_ends:
            accepted = "it needs layout.pipeline above 1"
            raise ConfigError(refusal("layout.pipeline_counts_ends", True, accepted))
        if self.context == 1 and self.context_strategy != "all_gather":
            accepted = "it needs layout.context above 1, between whose devices tokens are split"
            raise ConfigError(refusal("layout.context_strategy", self.context_strategy, accepted))
        if self.pipeline == 1 and self.pipeline_schedule != "gpipe":
            accepted = "it needs layout.pipeline above 1"
            raise ConfigError(refusal("layout.pipeline_schedule", self.pipeline_schedule, accepted))
        if self.pipeline_schedule == "dualpipe" and self.pipeline % 2:
            near = f"{self.pipeline - 1} or {self.pipeline + 1}"
            accepted = f'"dualpipe" pairs stages from both ends, an even number; use {near}'
            raise ConfigError(refusal("layout.pipeline", self.pipeline, accepted))
        if self.pipeline_schedule in ("zb_h1", "dualpipe") and self.pipeline_chunks > 1:
            schedule = self.pipeline_schedule
            accepted = (
                f'with layout.pipeline_schedule="{schedule}" stages have one chunk; use "1f1b"'
            )
            raise ConfigError(refusal("layout.pipeline_chunks", self.pipeline_chunks, accepted))
        if self.pipeline_schedule != "gpipe" and self.context_strategy == "ring":
            # On CPUs a collective permute is a rendezvous of all devices of the program, not only
            # of those in its pairs, and XLA distinguishes permutes by their channel, which in JAX
            # is 1 for all permutes in a `shard_map`: the ring of one stage meets the exchange of
            # another, and each takes the other's data (jax 0.10.2). With no exchange in between it
            # waits forever. NCCL matches peers, which could not be tried; gathers have groups.
            accepted = (
                f'with layout.pipeline_schedule="{self.pipeline_schedule}" stages send at '
                'different times, which XLA confuses with the ring; use "all_gather"'
            )
            raise ConfigError(refusal("layout.context_strategy", self.context_strategy, accepted))
        if self.expert_tensor not in (None, 1, self.tensor):
            accepted = f"it must be 1, or layout.tensor={self.tensor}"
            raise ConfigError(refusal("layout.expert_tensor", self.expert_tensor, accepted))
        if self.spreads_experts and not self.sequence_parallel:
            accepted = "tokens are sent from where they are: it needs layout.sequence_parallel=true"
            raise ConfigError(refusal("layout.expert_tensor", self.expert_tensor, accepted))
        if self.tensor == 1 and self.sequence_parallel:
            accepted = "it needs layout.tensor above 1, between whose devices tokens are split"
            raise ConfigError(refusal("layout.sequence_parallel", True, accepted))

    @property
    def pipeline_ends(self) -> int:
        """Number of layers that embedding and loss together count as in a pipeline."""
        return 2 if self.pipeline_counts_ends else 0

    @property
    def spreads_experts(self) -> bool:
        """Whether devices of the tensor axis hold different experts."""
        return self.tensor > 1 and self.expert_tensor == 1


_CROSS_ENTROPY = "cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The training loss, a cross-entropy or a function of your own; evaluation always uses the
    plain cross-entropy of the targets."""

    kind: str = "cross_entropy"
    """"cross_entropy", or the import path "module:function" of a loss of your own. It is called as
    function(logits, targets, **options) with logits float32 [..., classes] and targets int32 [...],
    and returns the loss of each target, floating-point numbers [...], whose mean is taken over the
    targets that count; targets in packed documents that do not count are -100. It is traced into
    the step, and sharded and costed like the rest: use JAX operations only, and where classes are
    split over tensor in `layout.mode = "shard_map"` a sum over one-hot classes instead of a gather,
    which crashes XLA's partitioner. The module is imported, which runs its code: name one that you
    trust."""
    options: dict[str, OptionValue] = field(default_factory=dict)
    """Keyword arguments of your own loss."""
    label_smoothing: float = 0.0
    """Share of a target that is spread evenly over all classes (Szegedy et al. 2015, section 7,
    arXiv 1512.00567), including the targets of multi-token prediction."""
    z_loss: float = 0.0
    """Weight of the mean square of the logarithm of the sum of exponentials of a target's logits,
    which keeps logits near 0 (Chowdhery et al. 2022, arXiv 2204.02311, section 5: 1e-4); only in
    training, including the targets of multi-token prediction."""

    def __post_init__(self) -> None:
        if self.is_own:
            if ":" not in self.kind:
                names = [_CROSS_ENTROPY, "module:function"]
                raise ConfigError(unknown_name("loss.kind", self.kind, names))
            require_import_path("loss.kind", self.kind, "optax:sigmoid_focal_loss")
        for name, is_of_own in (("label_smoothing", False), ("z_loss", False), ("options", True)):
            if (value := getattr(self, name)) and is_of_own != self.is_own:
                accepted = (
                    "it is for a loss of your own: name it in loss.kind"
                    if is_of_own
                    else f"it is for the cross-entropy, not for loss.kind={self.kind!r}"
                )
                raise ConfigError(refusal(f"loss.{name}", value, f"{accepted}; leave it out"))
        require_at_least("loss.z_loss", self.z_loss, 0)
        if not 0 <= self.label_smoothing < 1:
            accepted = "it must be from 0 to below 1"
            raise ConfigError(refusal("loss.label_smoothing", self.label_smoothing, accepted))

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own function."""
        return self.kind != _CROSS_ENTROPY

    @property
    def own_module(self) -> str | None:
        """The user's own module that `kind` names; None for the cross-entropy."""
        return self.kind.split(":")[0] if self.is_own else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """Dropout and stochastic depth in the residual stream of a transformer, only in training. Masks
    follow from the seed, the update, the row of the global batch and the layer, not from the
    layout, so that a run resumed elsewhere has the same masks."""

    rate: float = 0.0
    """Share of the entries, 0..1, that are dropped from the embedding and from the outputs of
    attention and feed-forward layers (Srivastava et al. 2014, JMLR 15; the resid_pdrop and
    embd_pdrop of GPT-2, 0.1 there). Not of attention probabilities, which fused kernels never
    store."""
    depth_rate: float = 0.0
    """Share of the samples, 0..1, for which attention or feed-forward of the last layer is skipped;
    layer l of L, counting the block of multi-token prediction, has l / L of it (Huang et al. 2016,
    arXiv 1603.09382, equation 4)."""

    def __post_init__(self) -> None:
        for name in ("rate", "depth_rate"):
            if not 0 <= getattr(self, name) < 1:
                accepted = "it must be from 0 to below 1"
                raise ConfigError(refusal(f"dropout.{name}", getattr(self, name), accepted))


_EVERY_LINEAR = "all-linear"
"""PEFT's name for all linear layers of the blocks."""

_LAYERS_OF = {
    _EVERY_LINEAR: (),
    "q_proj": ("qkv",),
    "k_proj": ("qkv",),
    "v_proj": ("qkv",),
    "o_proj": ("projection",),
    "gate_proj": ("gated",),
    "up_proj": ("gated", "up"),
    "down_proj": ("down",),
    "linear_qkv": ("qkv",),
    "linear_proj": ("projection",),
    "linear_fc1": ("gated", "up"),
    "linear_fc2": ("down",),
}
"""The linear layers of gpt and llama that a target stands for: PEFT's names for Llama's layers, and
Megatron Bridge's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of linear layers, trained instead of their matrices: x W + scale x (x A) B
    with A [in, rank] and B [rank, out] (LoRA; Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = 16
    """Columns of A and rows of B."""
    alpha: float = 32.0
    """Numerator of the scale of the adapters' output: alpha / rank."""
    rank_stabilized: bool = False
    """Whether the scale is alpha / sqrt(rank) (rsLoRA; Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: tuple[str, ...] = (_EVERY_LINEAR,)
    """Linear layers of the blocks that get adapters: by their names here ("qkv", "projection",
    "gated" or "up", "down"), by PEFT's ("q_proj", "o_proj", "gate_proj", ...) or by Megatron
    Bridge's ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"); or "all-linear". Queries,
    keys and values are one matrix here, with one A, as are gate and up: either all parts of a
    matrix are targets or none."""

    def __post_init__(self) -> None:
        require_at_least("fine_tuning.lora.rank", self.rank, 1)
        require_above("fine_tuning.lora.alpha", self.alpha, 0)
        if not self.targets:
            accepted = f'name at least one layer, or "{_EVERY_LINEAR}"'
            raise ConfigError(refusal("fine_tuning.lora.targets", [], accepted))
        heads = [f"{each}_proj" for each in "qkv"]
        if (named := set(heads).intersection(self.targets)) and len(named) < len(heads):
            accepted = f"queries, keys and values are one matrix here: name all of {heads}"
            raise ConfigError(refusal("fine_tuning.lora.targets", list(self.targets), accepted))

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """The names of the layers that each target stands for, of which a network has some; empty
        for all layers."""
        return {target: _LAYERS_OF.get(target, (target,)) for target in self.targets}


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningConfig:
    """Fine-tuning of a pretrained network: which parameters are trained, and at which rate.

    `trainable` and `rate_factors` select parameters by a prefix of their path: "blocks/1" selects
    those of the second block, and none of "blocks/10".
    """

    trainable: tuple[str, ...] = ()
    """Path prefixes of the parameters that are trained; the others are frozen, with no gradient and
    no optimizer state, and their BatchNorm uses the running statistics. If empty, all are trained,
    or with `lora` only the adapters."""
    lora: LoraConfig | None = None
    """Low-rank adapters, trained along with `trainable` (decoders); if absent, none."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type in which frozen matrices and embeddings are kept: bfloat16 takes half the memory
    and, with `model.compute_dtype = "bfloat16"`, gives the same results."""
    rate_factors: dict[str, float] = field(default_factory=dict)
    """Factor on the learning rate of the schedule, by path prefix; the longest match counts
    (Howard & Ruder 2018, section 3.2, arXiv 1801.06146)."""
    cache_features: bool = False
    """Whether to compute the input of the last layer, "head", once for each example, keep it on
    disk (in SCALEJAX_CACHE, or the user's cache folder), and train that layer on it: the results
    are identical, and no image is decoded and no other layer computed again. Only if nothing but
    the head is trained."""

    def __post_init__(self) -> None:
        for name, factor in self.rate_factors.items():
            require_above(f"fine_tuning.rate_factors.{name}", factor, 0)
        if self.cache_features and not self._is_head_alone:
            accepted = 'features stay the same only if nothing learns but trainable = ["head"]'
            raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))
        if not self.freezes and not self.rate_factors:
            accepted = "it would change nothing; name parts, or leave fine_tuning out"
            raise ConfigError(refusal("fine_tuning.trainable", [], accepted))
        if not self.freezes and self.base_dtype != "float32":
            accepted = "nothing is frozen; name fine_tuning.trainable or fine_tuning.lora"
            raise ConfigError(refusal("fine_tuning.base_dtype", self.base_dtype, accepted))

    @property
    def freezes(self) -> bool:
        """Whether some parameters are frozen."""
        return bool(self.trainable) or self.lora is not None

    @property
    def _is_head_alone(self) -> bool:
        parts = {part.split("/")[0] for part in self.trainable}
        return parts == {"head"} and self.lora is None


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingConfig(Family):
    """One of the averages of parameters, selected by `name`."""

    name: str
    samples_run: ClassVar[bool] = False
    """Whether it averages parameters that are far from each other, at steps counted at one batch
    size, so that it would need its own BatchNorm statistics."""

    @property
    def replaces_weights(self) -> bool:
        """Whether evaluation and the final weights use the average."""
        return getattr(self, "is_evaluated", True)

    def require_within(self, epochs: int) -> None:
        """Refuse an average that begins after the last epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig(AveragingConfig):
    """An exponential moving average of parameters and BatchNorm statistics over all updates."""

    name: Literal["ema"]
    """Selects this average."""
    decay: float = 0.999
    """Decay of the average: the share that an update keeps."""
    warms_up: bool = False
    """Whether the decay after t updates is at most (1 + t) / (10 + t), so that the initial
    parameters are soon forgotten (as TensorFlow's ExponentialMovingAverage with num_updates)."""
    is_evaluated: bool = True
    """Whether evaluation and the final weights use the average."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            accepted = "it must be from 0 to below 1"
            raise ConfigError(refusal("averaging.decay", self.decay, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwaConfig(AveragingConfig):
    """The equal average of parameters along the run (Izmailov et al. 2018, arXiv 1803.05407)."""

    samples_run = True
    name: Literal["swa"]
    """Selects this average."""
    start_epoch: float
    """Epoch after which parameters are first sampled; until then the average equals them."""
    every_epochs: float = 1.0
    """Epochs between the parameters that are averaged."""
    is_evaluated: bool = True
    """Whether evaluation and the final weights use the average."""

    def __post_init__(self) -> None:
        require_at_least("averaging.start_epoch", self.start_epoch, 0)
        require_above("averaging.every_epochs", self.every_epochs, 0)

    def require_within(self, epochs: int) -> None:
        """Refuse a start after the last epoch: the average would be the last parameters."""
        if self.start_epoch >= epochs:
            accepted = f"it must be below train.epochs={epochs}, such as {epochs - 1}"
            raise ConfigError(refusal("averaging.start_epoch", self.start_epoch, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingConfig:
    """Early stopping by the rules of `EarlyStopping` of Keras 3."""

    monitor: Literal["validation_loss", "validation_accuracy"] = "validation_loss"
    """Metric that must improve: loss downwards, accuracy upwards (Keras: "val_loss")."""
    min_delta: float = 0.0
    """Smallest change that counts as better."""
    patience: int = 0
    """Evaluations without improvement before the run stops (Keras: epochs, each evaluated)."""
    baseline: float | None = None
    """Value that must be beaten for patience to be renewed."""
    restores_best_weights: bool = True
    """Whether the run ends with the weights of its best epoch."""
    start_from_epoch: int = 0
    """Epochs at the start that are not monitored."""

    def __post_init__(self) -> None:
        for name in ("min_delta", "baseline"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                accepted = "it must be a finite number"
                raise ConfigError(refusal(f"train.early_stopping.{name}", value, accepted))
        require_at_least("train.early_stopping.patience", self.patience, 0)
        require_at_least("train.early_stopping.start_from_epoch", self.start_from_epoch, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleConfig:
    """Measurement of the gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162)."""

    decay: float = 0.99
    """Decay of its moving averages per update: 0.99 is a mean over about 100 updates."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            accepted = "it must be from 0 to below 1"
            raise ConfigError(refusal("train.noise_scale.decay", self.decay, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharpnessConfig:
    """Measurement of the sharpness: the largest eigenvalue of the Hessian of the training loss, by
    Lanczos with products of the Hessian and vectors, as during a warmup in Lewkowycz et al. 2020
    (arXiv 2003.02218), Cohen et al. 2021 (arXiv 2103.00065) and Gilmer et al. 2021 (2110.04369).

    It covers the parameters that learn, in float32, over the same training samples each time,
    without augmentation and dropout; BatchNorm normalises over all of these together; weight decay
    is not in the loss. With AdamW, as many products again give the sharpness of the Hessian
    preconditioned as its steps are (Cohen et al. 2022, 2207.14484). The step does not change, so
    `predict` ignores it.
    """

    every_steps: int = 10
    """Updates between measurements; the first is before any update."""
    samples: int = 1024
    """Training samples that the loss averages. All are held at once, with their activations and
    what a second derivative needs of these."""
    iterations: int = 32
    """Products with the Hessian, after which the largest eigenvalue is taken: the record says how
    far it can be from an eigenvalue. Each keeps a vector as large as the parameters in float32."""
    seed: int = 0
    """Seed of the choice of samples and of the first vector, independent of the run's own."""

    def __post_init__(self) -> None:
        require_at_least("train.sharpness.every_steps", self.every_steps, 1)
        require_at_most("train.sharpness.every_steps", self.every_steps, MOST_STEPS)
        require_at_least("train.sharpness.samples", self.samples, 1)
        require_at_least("train.sharpness.iterations", self.iterations, 2)
        require_at_most("train.sharpness.iterations", self.iterations, 1000)
        require_at_least("train.sharpness.seed", self.seed, 0)
        require_at_most("train.sharpness.seed", self.seed, MOST_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceConfig:
    """When a diverged run is stopped."""

    stops_not_finite: bool = True
    """Whether a training loss that is not finite ends the run."""
    stops_dead: bool = True
    """Whether an evaluation in which all examples get the same output ends the run."""
    max_gradient_growth: float | None = None
    """Largest gradient norm over the median of the norms before it; above this the run ends. If
    absent, the norm is not measured. Gradients clipped to half to ten times their mean norm train
    well (Pascanu et al. 2013, section 3.2, arXiv 1211.5063), so choose a factor well above 10."""
    patience: int = 3
    """Consecutive log lines with such a norm after which the run ends."""

    def __post_init__(self) -> None:
        require_above("train.divergence.max_gradient_growth", self.max_gradient_growth, 1)
        require_at_least("train.divergence.patience", self.patience, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    epochs: int = 1
    """Passes over the training data."""
    evaluate_every_epochs: int = 1
    """Epochs between evaluations; the last epoch is always evaluated. They use validation data if
    there are any, and test data are then evaluated once, at the end, with the final weights;
    otherwise they use test data, and nothing is chosen by them."""
    evaluate_every_steps: int | None = None
    """Steps between evaluations, instead of epochs: the resolution of steps to target."""
    metric_average: Literal["examples", "devices"] = "examples"
    """How metrics of evaluations are averaged: over all examples; or, to compare with Horovod's
    MetricAverageCallback, over the averages of the devices that share a batch, however many
    examples each has. Training metrics are over all unmasked rows of the batch."""
    log_every_steps: int = 10
    """Steps between log lines of the run record."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints; if absent, one at the end of every epoch."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep; the best one by validation accuracy, if there are
    validation data, is kept as well."""
    compare_replicas_every_steps: int | None = None
    """Steps between comparisons of arrays held on several devices, to find silent corruption; there
    is also one before each checkpoint. If absent, none. Only arrays held on several devices can
    differ: with all of the mesh on the fsdp axis there are few."""
    early_stopping: EarlyStoppingConfig | None = None
    """Early stopping; if absent, none."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """When a diverged run is stopped."""
    noise_scale: NoiseScaleConfig | None = None
    """Measurement of the gradient noise scale; if absent, it is not measured."""
    sharpness: SharpnessConfig | None = None
    """Measurement of the sharpness; if absent, it is not measured."""
    layer_gradient_norms: bool = False
    """Whether the norm of the gradient of each layer is measured, before clipping."""

    @property
    def measures_gradient_norm(self) -> bool:
        """Whether it needs the norm of the gradient."""
        return self.noise_scale is not None or self.divergence.max_gradient_growth is not None

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_every_epochs", "log_every_steps", "keep_checkpoints"):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        for name in (
            "evaluate_every_steps",
            "checkpoint_every_steps",
            "compare_replicas_every_steps",
        ):
            if getattr(self, name) is not None:
                require_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("evaluate_every_epochs", "evaluate_every_steps", "log_every_steps"):
            require_at_most(f"train.{name}", getattr(self, name), MOST_STEPS)
        if self.evaluate_every_steps is not None and self.early_stopping is not None:
            accepted = "train.early_stopping counts epochs; use train.evaluate_every_epochs"
            raise ConfigError(
                refusal("train.evaluate_every_steps", self.evaluate_every_steps, accepted)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """Initial weights of a run, instead of random ones; optimizer and schedule start afresh.

    Arrays that are missing, not of this network, or of another shape are refused by name.
    """

    weights: str
    """Where they are: the folder of an earlier run (its final weights, or its newest checkpoint
    that verifies), a safetensors file with the names of this network
    ("blocks.attention.qkv.kernel"), or the folder of a model as on hubs (config.json and
    safetensors): GPT-2 for gpt; Llama, Mistral, Qwen2 or Qwen3 for llama."""
    reinitialized: tuple[str, ...] = ()
    """Path prefixes of parameters that are initialised at random nevertheless, such as "head" if
    the data have other classes."""

    def __post_init__(self) -> None:
        if not self.weights:
            accepted = "name a run's folder, a safetensors file or a model's folder"
            raise ConfigError(refusal("start.weights", self.weights, accepted))
        if is_url(self.weights):
            accepted = "weights are read from this machine's disk; copy them there"
            raise ConfigError(refusal("start.weights", self.weights, accepted))


Tracker = Literal["tensorboard", "wandb", "mlflow"]
"""A program that shows the metrics of runs: TensorBoard, Weights & Biases, MLflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """Programs that receive the metrics of a run, in addition to its record."""

    trackers: tuple[Tracker, ...]
    """The programs; `pip install 'scalejax[trackers]'` installs their packages. They write to files
    below `trackers/` in the folder of the run, and use no network unless the environment asks for
    it: WANDB_MODE=online, or an MLFLOW_TRACKING_URI."""
    project: str = "scalejax"
    """Project of Weights & Biases and experiment of MLflow that the run belongs to."""
    run_name: str | None = None
    """Name of the run in them; if absent, that of its folder."""

    def __post_init__(self) -> None:
        if not self.trackers or len(set(self.trackers)) < len(self.trackers):
            accepted = f"each once, of {', '.join(get_args(Tracker))}; or leave [tracking] out"
            raise ConfigError(refusal("tracking.trackers", list(self.trackers), accepted))
        for name, value in (("project", self.project), ("run_name", self.run_name)):
            if value is not None and not _TRACKED_NAME.fullmatch(value):
                accepted = "1 to 100 letters, digits, spaces, dots, dashes and underscores"
                raise ConfigError(refusal(f"tracking.{name}", value, accepted))


_TRACKED_NAME = re.compile(r"[\w .-]{1,100}")
