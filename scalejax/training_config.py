"""How a run trains: batch, layout, optimizer, schedule, loop. Descriptions only.

Each class checks its own fields when built; what involves two of them is checked in `config`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from scalejax.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.layout import MODEL_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Samples per optimizer update; exactly one of the first two fields is given."""

    global_batch: int | None = None
    """Samples per update over all devices."""
    per_device_batch: int | None = None
    """Samples per update on each device; the global batch then grows with the devices."""
    microbatches: int = 1
    """Forward passes per update, their gradients accumulated."""

    def __post_init__(self) -> None:
        if (self.global_batch is None) == (self.per_device_batch is None):
            raise ConfigError(
                f"batch.global_batch={self.global_batch} with "
                f"batch.per_device_batch={self.per_device_batch} is refused: "
                "exactly one of the two must be given; leave the other out."
            )
        for name in ("global_batch", "per_device_batch", "microbatches"):
            value = getattr(self, name)
            if value is not None:
                require_at_least(f"batch.{name}", value, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How devices are arranged, and how the step is spread over them."""

    data: int | None = None
    """Devices along the data axis; if absent, all that the other axes leave."""
    fsdp: int = 1
    """Devices along the axis that splits batch and parameters."""
    tensor: int = 1
    """Devices along the axis that splits each layer."""
    context: int = 1
    """Devices along the axis that splits the tokens of a sample (transformers)."""
    pipeline: int = 1
    """Stages along the axis that splits the blocks of a transformer; `batch.microbatches` pass
    through them in turn."""
    pipeline_chunks: int = 1
    """Parts of the blocks of one stage, with blocks of the other stages between them
    (interleaved stages; Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    sequence_parallel: bool = False
    """Whether devices along tensor each hold a part of the tokens between the layers that they
    share (Korthikanti et al. 2022, arXiv 2205.05198; transformers)."""
    zero_stage: Literal[0, 1, 2] = 0
    """What the data axis keeps in parts: 0 nothing, 1 the optimizer's state, each device updating
    its part of the parameters, 2 the gradients as well (Rajbhandari et al. 2020, arXiv
    1910.02054). The fsdp axis is stage 3."""
    mode: Literal["jit", "shard_map", "pmap"] = "jit"
    """Who places the collectives: the compiler ("jit"), or the step itself, per device
    ("shard_map", and "pmap", its older spelling; both for the data axis only)."""
    bn_scope: Literal["global", "local"] = "global"
    """Whether BatchNorm sees the samples of all devices, or of its own; of one microbatch."""
    bn_group_size: int | None = None
    """Samples that share local BatchNorm statistics; if absent, those of one device."""

    def __post_init__(self) -> None:
        for name in ("data", *MODEL_AXES, "pipeline_chunks", "bn_group_size"):
            value = getattr(self, name)
            if value is not None:
                require_at_least(f"layout.{name}", value, 1)
        for name in MODEL_AXES:
            size = getattr(self, name)
            if self.mode != "jit" and size > 1:
                accepted = f'layout.mode="{self.mode}" spreads over the data axis only; use "jit"'
                raise ConfigError(refusal(f"layout.{name}", size, accepted))
        if self.mode != "jit" and self.zero_stage:
            accepted = f'layout.mode="{self.mode}" keeps all state whole; use "jit"'
            raise ConfigError(refusal("layout.zero_stage", self.zero_stage, accepted))
        if self.pipeline == 1 and self.pipeline_chunks > 1:
            accepted = "it needs layout.pipeline above 1"
            raise ConfigError(refusal("layout.pipeline_chunks", self.pipeline_chunks, accepted))
        if self.tensor == 1 and self.sequence_parallel:
            accepted = "it needs layout.tensor above 1, between whose devices tokens are split"
            raise ConfigError(refusal("layout.sequence_parallel", True, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdConfig:
    """Stochastic gradient descent; the learning rate stays outside the momentum buffer
    (Goyal et al. 2017, equation 9), so a changing rate needs no momentum correction."""

    name: Literal["sgd"] = "sgd"
    """Selects this optimizer."""
    momentum: float = 0.9
    """Part of the buffer that is kept; 0 for none."""
    nesterov: bool = False
    """Whether the gradient is taken ahead of the momentum step."""
    weight_decay: float = 0.0
    """Added to the gradient per unit of parameter (before momentum)."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also holds for biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.momentum", self.momentum)
        require_at_least("optimizer.weight_decay", self.weight_decay, 0)
        if self.nesterov and self.momentum == 0:
            raise ConfigError(refusal("optimizer.nesterov", True, "it needs a momentum above 0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """Selects this optimizer."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also holds for biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_moments(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsConfig:
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888)."""

    name: Literal["lars"] = "lars"
    """Selects this optimizer."""
    momentum: float = 0.9
    """Part of the buffer that is kept."""
    nesterov: bool = False
    """Whether the gradient is taken ahead of the momentum step."""
    weight_decay: float = 1e-4
    """Added to the gradient per unit of parameter."""
    trust_coefficient: float = 0.001
    """Step size as a part of the layer's norm."""
    decays_norm_and_bias: bool = False
    """Whether decay and trust ratio also hold for biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.momentum", self.momentum)
        require_at_least("optimizer.weight_decay", self.weight_decay, 0)
        require_above("optimizer.trust_coefficient", self.trust_coefficient, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LambConfig:
    """Adam with layer-wise trust ratios (You et al. 2019, arXiv 1904.00962)."""

    name: Literal["lamb"] = "lamb"
    """Selects this optimizer."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay, inside the trust ratio."""
    decays_norm_and_bias: bool = False
    """Whether decay and trust ratio also hold for biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_moments(self)


OptimizerConfig = Annotated[
    SgdConfig | AdamWConfig | LarsConfig | LambConfig, Field(discriminator="name")
]
"""One of the optimizers, told apart by `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate as a function of the step: scaling, then warmup, then decay."""

    base_learning_rate: float
    """Learning rate that suits `reference_batch`."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak grows with k = global_batch / reference_batch: not, by k, by root k."""
    reference_batch: int = 256
    """Global batch for which `base_learning_rate` is right."""
    warmup: Literal["none", "constant", "gradual"] = "none"
    """How the peak is reached: at once; held at the start value, then a jump; in a straight
    line, step by step (Goyal et al. 2017, section 2.2)."""
    warmup_epochs: float = 0.0
    """Length of the warmup."""
    warmup_from: Literal["base", "zero"] = "base"
    """Start value of a warmup: `base_learning_rate`, or zero."""
    decay: Literal["constant", "step", "cosine", "polynomial"] = "constant"
    """What follows the warmup."""
    decay_epochs: tuple[float, ...] = ()
    """Epochs, from the start of training, at which a step decay multiplies by its factor."""
    decay_factor: float = 0.1
    """Factor of a step decay."""
    decay_power: float = 2.0
    """Exponent of a polynomial decay."""
    end_learning_rate: float = 0.0
    """Where a cosine or polynomial decay ends."""

    def __post_init__(self) -> None:
        require_above("schedule.base_learning_rate", self.base_learning_rate, 0)
        require_at_least("schedule.reference_batch", self.reference_batch, 1)
        require_at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        require_at_least("schedule.end_learning_rate", self.end_learning_rate, 0)
        require_above("schedule.decay_factor", self.decay_factor, 0)
        require_above("schedule.decay_power", self.decay_power, 0)
        if (self.warmup == "none") != (self.warmup_epochs == 0):
            accepted = f'warmup="{self.warmup}" needs ' + (
                "it to be 0" if self.warmup == "none" else "it above 0"
            )
            raise ConfigError(refusal("schedule.warmup_epochs", self.warmup_epochs, accepted))
        if self.warmup == "constant" and self.warmup_from == "zero":
            accepted = "a constant warmup from zero would not train"
            raise ConfigError(refusal("schedule.warmup_from", self.warmup_from, accepted))
        if self.warmup != "none" and self.warmup_from == "base" and self.scaling == "none":
            raise ConfigError(
                refusal(
                    "schedule.warmup_from",
                    self.warmup_from,
                    'with scaling="none" the base is already the peak; use warmup_from="zero"',
                )
            )
        if (self.decay == "step") != bool(self.decay_epochs):
            accepted = f'decay="{self.decay}" needs ' + (
                "at least one epoch" if self.decay == "step" else "it empty"
            )
            raise ConfigError(refusal("schedule.decay_epochs", self.decay_epochs, accepted))
        if list(self.decay_epochs) != sorted(set(self.decay_epochs)) or any(
            not 0 < epoch < math.inf for epoch in self.decay_epochs
        ):
            accepted = "epochs must be above 0 and rise"
            raise ConfigError(refusal("schedule.decay_epochs", self.decay_epochs, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStoppingConfig:
    """When to stop before the last epoch; every rule is that of Keras 3 `EarlyStopping`."""

    monitor: Literal["test_loss", "test_accuracy"] = "test_loss"
    """Evaluation metric that must improve: loss downwards, accuracy upwards."""
    min_delta: float = 0.0
    """Smallest change that counts as better."""
    patience: int = 0
    """Evaluations without improvement that are borne (Keras: epochs, each evaluated)."""
    baseline: float | None = None
    """Value that must be beaten for patience to be renewed."""
    restores_best_weights: bool = True
    """Whether the run ends with the weights of its best epoch."""
    start_from_epoch: int = 0
    """Epochs that are not watched."""

    def __post_init__(self) -> None:
        for name in ("min_delta", "baseline"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                accepted = "it must be a finite number"
                raise ConfigError(refusal(f"train.early_stopping.{name}", value, accepted))
        require_at_least("train.early_stopping.patience", self.patience, 0)
        require_at_least("train.early_stopping.start_from_epoch", self.start_from_epoch, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    epochs: int = 1
    """Passes over the training data."""
    evaluate_every_epochs: int = 1
    """Epochs between evaluations on the test data; the last epoch is always evaluated."""
    log_every_steps: int = 10
    """Steps between lines in the record."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints; if absent, one at the end of every epoch."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept; the best one by test accuracy is kept besides."""
    early_stopping: EarlyStoppingConfig | None = None
    """When to stop early; if absent, never."""

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_every_epochs", "log_every_steps", "keep_checkpoints"):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        if self.checkpoint_every_steps is not None:
            require_at_least("train.checkpoint_every_steps", self.checkpoint_every_steps, 1)


def _require_fraction(field: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(refusal(field, value, "it must be from 0 to below 1"))


def _require_moments(config: AdamWConfig | LambConfig) -> None:
    _require_fraction("optimizer.beta1", config.beta1)
    _require_fraction("optimizer.beta2", config.beta2)
    require_above("optimizer.epsilon", config.epsilon, 0)
    require_at_least("optimizer.weight_decay", config.weight_decay, 0)
