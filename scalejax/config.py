"""One `run.toml`, read, checked and resolved: what `train` and `predict` both start from.

Knows every part of a run and what must agree between them; builds nothing, and needs no JAX.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalejax import metrics
from scalejax.batch_ramp import Phase, ramp
from scalejax.data_config import DataConfig, DatasetFacts, facts
from scalejax.documents import JsonValue, build, load_toml, plain
from scalejax.errors import ConfigError, refusal, require_multiple
from scalejax.layout import MODEL_AXES, BatchSplit, Layout, bn_group_count, fill_data_axis
from scalejax.model_config import (
    BertConfig,
    CausalConfig,
    CnnConfig,
    CustomConfig,
    GptConfig,
    ImageNetworkConfig,
    LlamaConfig,
    MlpConfig,
    ModelConfig,
    ResNetConfig,
    VitConfig,
)
from scalejax.noise_scale import require_parts
from scalejax.optimizer_config import OptimizerConfig, ScheduleFreeConfig
from scalejax.presets import PRESETS, with_preset
from scalejax.scaling import Change, changes, scaled_optimizer
from scalejax.schedule_config import LearningRateConfig, ScheduleConfig
from scalejax.training_config import (
    AveragingConfig,
    BatchConfig,
    FineTuningConfig,
    LayoutConfig,
    LossConfig,
    SwaConfig,
    TrainConfig,
)

_BATCHES = ("batch.global_batch", "batch.per_device_batch")
"""Two ways to give one thing, of which a run has exactly one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that a `run.toml` says."""

    model: ModelConfig
    """The network."""
    data: DataConfig
    """What it learns."""
    batch: BatchConfig
    """Samples per update."""
    optimizer: OptimizerConfig
    """How an update is made of a gradient."""
    schedule: LearningRateConfig
    """How large an update is, step by step."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What is made small."""
    averaging: AveragingConfig | None = None
    """An average of the parameters, kept beside them; if absent, none."""
    fine_tuning: FineTuningConfig | None = None
    """Which parameters learn, and how fast; if absent, all alike."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Over which devices, and how."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    seed: int = 0
    """Decides initial parameters and the order of the data."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:  # JAX keeps 32 bits of it, and NumPy all
            raise ConfigError(refusal("seed", self.seed, "it must be from 0 to 4294967295"))
        for name, count in _divided_heads(self.model):
            require_multiple(f"model.{name}", count, self.layout.tensor, "layout.tensor")
        _require_fitting_data(self.model, self.data)
        _require_divisible_blocks(self)
        has_batch_norm = _has_batch_norm(self.model)
        if self.layout.zero_stage == 2 and has_batch_norm:
            accepted = "with BatchNorm the compiler sums gradients, and keeps them whole; use 1"
            raise ConfigError(refusal("layout.zero_stage", 2, accepted))
        _require_reached_ramp(self)
        if has_batch_norm:
            _require_own_statistics(self)
        if isinstance(self.optimizer, ScheduleFreeConfig):
            _require_no_other_average(self)
            _require_one_rate(self)
        _require_begun_average(self)


def _require_reached_ramp(config: RunConfig) -> None:
    """Refuse growth after the end, and what counts its steps from the first batch."""
    epochs = config.batch.ramp_epochs
    if epochs and epochs[-1] >= config.train.epochs:
        accepted = f"they must be below train.epochs={config.train.epochs}"
        raise ConfigError(refusal("batch.ramp_epochs", epochs, accepted))
    if epochs and isinstance(config.averaging, SwaConfig):
        accepted = 'its steps are those of one batch; use "ema", or leave batch.ramp_epochs out'
        raise ConfigError(refusal("averaging.name", "swa", accepted))


def _require_begun_average(config: RunConfig) -> None:
    """Refuse an average that begins when the run is over: it would be the last parameters."""
    averaging, epochs = config.averaging, config.train.epochs
    if isinstance(averaging, SwaConfig) and averaging.start_epoch >= epochs:
        accepted = f"it must be below train.epochs={epochs}, such as {epochs - 1}"
        raise ConfigError(refusal("averaging.start_epoch", averaging.start_epoch, accepted))


def _has_batch_norm(model: ModelConfig) -> bool:
    """Whether `model` keeps running statistics; of a user's own, only the network itself knows."""
    return isinstance(model, CnnConfig | ResNetConfig) or model.name in (
        "inception_v3",
        "xception",
        "efficientnet_lite0",
    )


def _require_no_other_average(config: RunConfig) -> None:
    """Refuse what an optimizer that averages takes the place of."""
    schedule = config.schedule
    if not isinstance(schedule, ScheduleConfig) or schedule.decay != "constant":
        accepted = 'it averages in place of a decay; use schedule.decay="constant"'
        raise ConfigError(refusal("optimizer.name", config.optimizer.name, accepted))
    if config.averaging is not None:
        accepted = f"optimizer.name={config.optimizer.name!r} averages already; leave it out"
        raise ConfigError(refusal("averaging.name", config.averaging.name, accepted))


def _require_one_rate(config: RunConfig) -> None:
    """Refuse rates that an average which is weighed by the rate would not know of."""
    fine_tuning = config.fine_tuning
    if fine_tuning is not None and fine_tuning.rate_factors:
        accepted = f"optimizer.name={config.optimizer.name!r} averages by one rate; use another"
        raise ConfigError(refusal("fine_tuning.rate_factors", fine_tuning.rate_factors, accepted))


def _require_own_statistics(config: RunConfig) -> None:
    """Refuse averages of parameters far apart, whose BatchNorm statistics nobody has measured.

    Izmailov et al. 2018, section 3.2, measure them in another pass over the data; nothing here
    does. An exponential average is of near neighbours, and keeps that of their statistics.
    """
    accepted = "the average would need BatchNorm statistics of its own; use a network without"
    if isinstance(config.averaging, SwaConfig):
        raise ConfigError(refusal("averaging.name", "swa", f'{accepted}, or "ema"'))
    if isinstance(config.optimizer, ScheduleFreeConfig):
        raise ConfigError(refusal("optimizer.name", config.optimizer.name, accepted))


def _divided_heads(model: ModelConfig) -> list[tuple[str, int]]:
    """The fields of `model` that count heads, which the tensor axis divides, and their values."""
    match model:
        case GptConfig() | VitConfig():
            return [("heads", model.heads)]
        case LlamaConfig():
            return [("heads", model.heads), ("kv_heads", model.kv_heads)]
        case BertConfig():
            _, _, heads = model.size
            return [("heads", heads)]
        case _:
            return []


def _require_divisible_blocks(config: RunConfig) -> None:
    """Refuse axes that divide the blocks and tokens of a transformer unevenly, or no transformer.

    Raises:
        ConfigError: naming the axis, and the nearest that divides.
    """
    model, layout = config.model, config.layout
    if not isinstance(model, CausalConfig):
        used = [name for name in ("context", "pipeline") if getattr(layout, name) > 1]
        used += ["sequence_parallel"] if layout.sequence_parallel else []
        for name in used:
            accepted = (
                f"it splits transformers with stacked blocks (gpt, llama), not {model.name!r}"
            )
            raise ConfigError(refusal(f"layout.{name}", getattr(layout, name), accepted))
        return
    if layout.context > 1 and model.attention == "fused":
        accepted = 'over layout.context it is computed unfused; use "auto" or "unfused"'
        raise ConfigError(refusal("model.attention", model.attention, accepted))
    stages, chunks = layout.pipeline, layout.pipeline_chunks
    if model.layers < stages:
        accepted = f"each of layout.pipeline={stages} stages needs a layer; at least {stages}"
        raise ConfigError(refusal("model.layers", model.layers, accepted))
    if chunks > 1:
        require_multiple("model.layers", model.layers, stages * chunks, "layout.pipeline*chunks")
        microbatches = config.batch.microbatches
        require_multiple("batch.microbatches", microbatches, stages, "layout.pipeline")
    (tokens, *_) = facts(config.data).input_shape
    shared = layout.tensor if layout.sequence_parallel else 1
    require_multiple("data.tokens", tokens, layout.context * shared, "the parts of a sample")


def _require_fitting_data(model: ModelConfig, data: DataConfig) -> None:
    """Refuse a network that cannot read the examples of `data`."""
    dataset = facts(data)
    has = (
        "text" if dataset.is_text else f"images of {' x '.join(map(str, dataset.input_shape[:2]))}"
    )
    if dataset.is_masked:
        has = "text with hidden words"
    if dataset.is_table:
        has = f"rows of {dataset.input_shape[0]} numbers"
    match model:
        case CustomConfig():
            return
        case _ if dataset.is_table:
            wants = has if isinstance(model, MlpConfig) else "none (an mlp does)"
        case GptConfig() | LlamaConfig():
            wants = "text"
        case VitConfig():
            wants = "images"
            if not dataset.is_text:
                for side in dataset.input_shape[:2]:
                    require_multiple("data.image_size", side, model.patch, "model.patch")
                return
        case BertConfig():
            wants = "text with hidden words"
            if dataset.is_masked and dataset.input_shape[0] > model.max_tokens:
                accepted = f"it must be at most model.max_tokens={model.max_tokens}"
                raise ConfigError(refusal("data.tokens", dataset.input_shape[0], accepted))
        case ImageNetworkConfig():
            side, is_small = (
                model.smallest_image,
                min(dataset.input_shape[:2]) < model.smallest_image,
            )
            wants = f"images of at least {side} x {side}"
            if model.pretrained and not dataset.is_text and dataset.input_shape[2] != 3:
                accepted = "its weights read colours, 3 channels; leave it out"
                raise ConfigError(refusal("model.pretrained", model.pretrained, accepted))
            if not dataset.is_text and not is_small:
                return
        case _:
            wants = "images"
            if not dataset.is_text:
                return
    if wants != has:
        accepted = f"it reads {wants}, but data.name={data.name!r} holds {has}"
        raise ConfigError(refusal("model.name", model.name, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A config on a number of devices, with all that follows from the two."""

    config: RunConfig
    """What was asked for."""
    layout: Layout
    """Devices along each axis."""
    split: BatchSplit
    """Global, per-device and micro batch."""
    dataset: DatasetFacts
    """What the data set holds."""
    bn_groups: int
    """Groups into which one forward pass (one microbatch of all devices) is cut for BatchNorm."""
    steps_per_epoch: int
    """Optimizer updates in one pass over the data."""

    @property
    def total_steps(self) -> int:
        """Optimizer updates in the run."""
        last = self.phases[-1]
        epochs = self.config.train.epochs - last.first_epoch
        return last.first_step + epochs * last.steps_per_epoch

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The batches of the run one after another; `split` is the first."""
        batch = self.config.batch
        examples = self.dataset.train_examples
        return ramp(self.split, batch.ramp_epochs, batch.ramp_factor, examples)

    def phase_of(self, step: int) -> Phase:
        """The phase of the update after `step` updates."""
        return [phase for phase in self.phases if phase.first_step <= step][-1]

    def epoch_of(self, step: int) -> float:
        """Passes over the data after `step` updates."""
        phase = self.phase_of(step)
        return phase.first_epoch + (step - phase.first_step) / phase.steps_per_epoch

    def is_evaluated(self, step: int) -> bool:
        """Whether the run is evaluated after `step` updates."""
        wanted = self.config.train
        every = wanted.evaluate_every_steps
        is_due = step % every if every else self.epoch_of(step) % wanted.evaluate_every_epochs
        return is_due == 0 or step == self.total_steps

    @property
    def changes(self) -> tuple[Change, ...]:
        """The hyper-parameters that the batch changes, by the rule of the schedule."""
        config = self.config
        return changes(config.schedule, config.optimizer, self.split.global_batch)


def resolve(config: RunConfig, device_count: int | None = None) -> ResolvedRun:
    """What `config` comes to on `device_count` devices.

    Args:
        config: the run.
        device_count: devices to use; if None, those that the config's axes multiply to.

    Raises:
        ConfigError: if axes, batch or data do not divide, naming the nearest that do.
    """
    wanted = config.layout
    others = {axis: getattr(wanted, axis) for axis in MODEL_AXES}
    if wanted.data is not None:
        layout = Layout(data=wanted.data, **others)
    elif device_count is not None:
        layout = fill_data_axis(device_count, **others)
    else:
        raise ConfigError("layout.data is missing: without it the number of devices is needed.")
    if device_count is not None and layout.device_count != device_count:
        accepted = (
            f"the layout {layout} takes {layout.device_count}; "
            "leave layout.data out to take all there are"
        )
        raise ConfigError(refusal("devices", device_count, accepted))
    per_device = config.batch.per_device_batch
    global_batch = config.batch.global_batch or (per_device or 0) * layout.batch_shards
    split = BatchSplit(
        global_batch=global_batch, layout=layout, microbatches=config.batch.microbatches
    )
    if config.train.noise_scale is not None:
        has_batch_norm = _has_batch_norm(config.model)
        require_parts(split, mode=wanted.mode, has_batch_norm=has_batch_norm)
    dataset = _as_read(facts(config.data), config.model)
    if per_device is not None and per_device <= dataset.train_examples < global_batch:
        shards, most = layout.batch_shards, dataset.train_examples // per_device
        accepted = (
            f"{per_device} samples x data*fsdp={shards} are {global_batch} a step, more than the "
            f"{dataset.train_examples} training examples (at most data*fsdp={most})"
        )
        raise ConfigError(refusal("devices", layout.device_count, accepted))
    scaled_optimizer(config.schedule, config.optimizer, global_batch)  # refuses what cannot be
    groups = _bn_groups(wanted, split)
    if wanted.mode != "jit" and wanted.bn_scope == "local" and groups < layout.data:
        accepted = 'more than a device has; statistics of several need layout.mode="jit"'
        raise ConfigError(refusal("layout.bn_group_size", wanted.bn_group_size, accepted))
    run = ResolvedRun(
        config=config,
        layout=layout,
        split=split,
        dataset=dataset,
        bn_groups=groups,
        steps_per_epoch=metrics.steps_per_epoch(dataset.train_examples, global_batch),
    )
    for phase in run.phases[1:]:  # refuses what cannot be
        _bn_groups(wanted, phase.split)
    return run


def _as_read(dataset: DatasetFacts, model: ModelConfig) -> DatasetFacts:
    """`dataset`, its pixels scaled as those with which the weights of `model` were trained."""
    pixels = model.pretrained_pixels if isinstance(model, ImageNetworkConfig) else None
    if pixels is None:
        return dataset
    mean, std = pixels
    return replace(dataset, pixel_mean=mean, pixel_std=std)


def in_phase(run: ResolvedRun, phase: Phase) -> ResolvedRun:
    """`run` with the batch of `phase`, as its step is built."""
    groups = _bn_groups(run.config.layout, phase.split)
    return replace(run, split=phase.split, bn_groups=groups, steps_per_epoch=phase.steps_per_epoch)


def _bn_groups(layout: LayoutConfig, split: BatchSplit) -> int:
    return bn_group_count(
        split, is_local=layout.bn_scope == "local", group_size=layout.bn_group_size
    )


def load_config(path: Path, overrides: Mapping[str, JsonValue] | None = None) -> RunConfig:
    """The config in a `run.toml`, with fields replaced.

    `model.name` may be that of a published size (`scalejax.presets`).

    Args:
        path: the file.
        overrides: values by dotted field name, such as {"train.epochs": 3}. One of
            batch.global_batch and batch.per_device_batch also replaces the other of the file.

    Raises:
        ConfigError: one line per problem.
    """
    return _built(_tables(path, overrides))


def given_model_name(path: Path, overrides: Mapping[str, JsonValue] | None = None) -> str | None:
    """What `model.name` is in a `run.toml`, as it was given: that of a published size too.

    Args:
        path: the file.
        overrides: as of `load_config`.

    Raises:
        ConfigError: if there is no such file, or it is not TOML.
    """
    model = _tables(path, overrides).get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def _tables(path: Path, overrides: Mapping[str, JsonValue] | None) -> dict[str, JsonValue]:
    if str(path) in PRESETS and not path.exists():
        raise ConfigError(
            f"{str(path)!r} is a published network, and no file: name it in a run.toml "
            f'(model.name = "{path}") beside data, batch, optimizer and schedule.'
        )
    tables, replaced = load_toml(path), dict(overrides or {})
    given = [name for name in _BATCHES if replaced.get(name) is not None]
    if len(given) == 1:
        replaced = dict.fromkeys(_BATCHES) | replaced
    for name, value in replaced.items():
        _replace(tables, name.split("."), value)
    return tables


def with_fields(config: RunConfig, overrides: Mapping[str, JsonValue]) -> RunConfig:
    """A copy of `config` with fields replaced by dotted name, checked again.

    Raises:
        ConfigError: one line per problem.
    """
    tables = plain(config)
    assert isinstance(tables, dict)  # noqa: S101  a dataclass is a table
    for name, value in overrides.items():
        _replace(tables, name.split("."), value)
    return _built(tables)


def _built(tables: dict[str, JsonValue]) -> RunConfig:
    """The config in `tables`, whose model may be named as it was published."""
    return build(RunConfig, with_preset(tables))


def parse_value(text: str) -> JsonValue:
    """The value of a flag: TOML where it is TOML ("3", "true", "[1, 2]"), else the text itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        json.dumps(value)
    except (tomllib.TOMLDecodeError, TypeError):
        return text
    return value


def _replace(tables: dict[str, JsonValue], path: list[str], value: JsonValue) -> None:
    table = tables
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[path[-1]] = value
