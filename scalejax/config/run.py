"""The config of a run, read from a `run.toml`, checked and resolved on a number of devices.

`train` and `predict` both start from it. Knows every table of the file; `checks` compares them with
each other. Builds no model and needs no JAX.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalejax.config.checks import (
    require_adaptable_model,
    require_cacheable_features,
    require_compatible_augmentation,
    require_compatible_data,
    require_compatible_gradient_sync,
    require_correction_in_every_step,
    require_divisible_blocks,
    require_divisible_experts,
    require_divisible_heads,
    require_divisible_tokens,
    require_droppable,
    require_evaluated_devices,
    require_finite_epochs,
    require_int32_steps,
    require_local_sgd_within_run,
    require_mixup_pairs,
    require_noise_scale_parts,
    require_offloadable_state,
    require_packable,
    require_parametrized_update,
    require_petastorm_batch,
    require_power_of_two_devices,
    require_ramp_within_run,
    require_sampled_labels,
    require_shardable_gradients,
    require_sharpness_defined,
    require_sharpness_samples,
    require_single_average,
    require_single_main_params,
    require_single_rate,
    require_supported_convolutions,
    require_unmasked_rows,
    require_validation,
)
from scalejax.config.data import DataConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.emulation import EmulationConfig
from scalejax.config.gradient_sync import GradientSyncConfig, LocalSgdConfig
from scalejax.config.input import InputConfig
from scalejax.config.migrate import current_fields, current_tables, load_run_file
from scalejax.config.model import ModelConfig
from scalejax.config.optimizer import ClippingConfig, OptimizerConfig
from scalejax.config.parallelism import (
    MODEL_AXES,
    BatchSplit,
    Layout,
    bn_group_count,
    fill_data_axis,
)
from scalejax.config.presets import PRESETS, with_preset
from scalejax.config.schedule import (
    Change,
    LearningRateConfig,
    Phase,
    changes,
    ramp,
    require_learnable,
)
from scalejax.config.training import (
    AveragingConfig,
    BatchConfig,
    DropoutConfig,
    FineTuningConfig,
    LayoutConfig,
    LossConfig,
    StartConfig,
    TrackingConfig,
    TrainConfig,
)
from scalejax.core import metrics
from scalejax.core.errors import ConfigError, prefixed, refusal, unknown_name
from scalejax.core.serialization import JsonValue, build, plain

_BATCHES = ("batch.global_batch", "batch.per_device_batch")
"""The two fields that give the batch; a run has exactly one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The config of a run: a field for each table of a `run.toml`.

    Example:
        >>> from scalejax import RunConfig, resolve
        >>> from scalejax.config.data import FashionMnistConfig
        >>> from scalejax.config.model import MlpConfig
        >>> from scalejax.config.optimizer import SgdConfig
        >>> from scalejax.config.schedule import ScheduleConfig
        >>> from scalejax.config.training import BatchConfig
        >>> config = RunConfig(
        ...     model=MlpConfig(hidden=(128, 128)),
        ...     data=FashionMnistConfig(),
        ...     batch=BatchConfig(per_device_batch=32),
        ...     optimizer=SgdConfig(momentum=0.9),
        ...     schedule=ScheduleConfig(base_learning_rate=0.02),
        ... )
        >>> resolve(config, 8).split.global_batch
        256
    """

    model: ModelConfig
    """The network."""
    data: DataConfig
    """The data set to train and evaluate on."""
    batch: BatchConfig
    """Samples per update."""
    optimizer: OptimizerConfig
    """The optimizer."""
    schedule: LearningRateConfig
    """The learning rate, step by step."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The training loss."""
    dropout: DropoutConfig | None = None
    """Dropout and stochastic depth; if absent, none."""
    clipping: ClippingConfig | None = None
    """Clipping of the gradient by its norm; if absent, none."""
    averaging: AveragingConfig | None = None
    """An average of the parameters, kept in addition to them; if absent, none."""
    start: StartConfig | None = None
    """Initial weights; if absent, random ones, or those of `model.pretrained`."""
    fine_tuning: FineTuningConfig | None = None
    """Which parameters are trained, and at which rate; if absent, all at the rate of `schedule`."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """The mesh of devices, and how the step is sharded over it."""
    gradient_sync: GradientSyncConfig | None = None
    """How devices along the data axis synchronise; if absent, by the mean of their gradients. It
    needs `layout.mode = "shard_map"`."""
    input: InputConfig = field(default_factory=InputConfig)
    """The input pipeline: workers, prefetch, augmentation."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop."""
    tracking: TrackingConfig | None = None
    """Programs that receive its metrics, in addition to its record; if absent, none."""
    emulation: EmulationConfig | None = None
    """How `scalejax emulate` trains with many workers in virtual time; `train` ignores it."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:  # JAX keeps 32 bits of it, NumPy keeps all
            raise ConfigError(refusal("seed", self.seed, "it must be from 0 to 4294967295"))
        model, layout, train = self.model, self.layout, self.train
        require_validation(self.data, train)
        require_divisible_heads(model, layout)
        require_divisible_blocks(model, self.batch, layout)
        require_divisible_experts(model, self.batch, layout)
        if (facts := self.data.known_facts) is not None:
            require_fitting_data(self, facts)
        require_shardable_gradients(model, layout)
        require_ramp_within_run(self.batch, self.averaging, train)
        if self.start is not None and model.pretrained_pixels is not None:
            accepted = "start.weights gives them already; leave one of the two out"
            raise ConfigError(refusal("model.pretrained", "imagenet", accepted))
        require_single_average(self.optimizer, self.schedule, self.averaging)
        require_single_rate(self.optimizer, self.fine_tuning)
        require_single_main_params(
            self.optimizer, self.fine_tuning, self.averaging, self.gradient_sync
        )
        require_offloadable_state(self.layout, self.optimizer, self.gradient_sync)
        require_cacheable_features(self.fine_tuning, self.input)
        require_adaptable_model(self.fine_tuning, model)
        require_parametrized_update(model, self.optimizer, self.fine_tuning)
        require_droppable(self.dropout, model, layout)
        require_sampled_labels(self.optimizer, model, layout, self.loss, self.gradient_sync)
        if self.averaging is not None:
            self.averaging.require_within(train.epochs)
        require_unmasked_rows(self.input, train)
        if train.sharpness is not None:
            require_sharpness_defined(
                model,
                self.data,
                layout,
                self.fine_tuning,
                has_local_weights=self.local_sgd is not None,
            )
        require_correction_in_every_step(self.gradient_sync, self.optimizer, self.input)
        require_finite_epochs(self.input, self.data)
        require_compatible_gradient_sync(
            self.gradient_sync, model, self.optimizer, self.averaging, layout, train
        )
        require_local_sgd_within_run(self.local_sgd, self.batch, train)

    @property
    def measures_gradient_norm(self) -> bool:
        """Whether the step computes the norm of its gradient."""
        return self.clipping is not None or self.train.measures_gradient_norm

    @property
    def averages_samples(self) -> bool:
        """Whether the evaluated parameters average ones that are far from each other, so that no
        batch was normalised with them in training."""
        averaging = self.averaging
        is_average = averaging is not None and averaging.samples_run and averaging.replaces_weights
        return is_average or self.optimizer.averages_iterates

    @property
    def local_sgd(self) -> LocalSgdConfig | None:
        """`gradient_sync`, if it averages parameters, in an update of its own."""
        return self.gradient_sync if isinstance(self.gradient_sync, LocalSgdConfig) else None


def require_fitting_data(config: RunConfig, facts: DatasetFacts) -> None:
    """Refuse the network, augmentation and layout of `config` if its data contradict them.

    Raises:
        ConfigError: naming the field and what it may be.
    """
    require_compatible_data(config.model, config.data, facts)
    require_compatible_augmentation(config.input.augmentation, config.data, facts)
    require_packable(config.model, config.train, facts)
    require_divisible_tokens(facts, config.model, config.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A config resolved on a number of devices: layout, batch, data set, steps.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 8)
        >>> run.layout.data, run.split.per_device_batch, run.steps_per_epoch
        (8, 4, 312)
    """

    config: RunConfig
    """The config as given."""
    layout: Layout
    """Devices along each axis."""
    split: BatchSplit
    """Global batch, per-device batch and microbatch."""
    dataset: DatasetFacts
    """Counts and shapes of the data set."""
    bn_groups: int
    """BatchNorm groups in one forward pass (one microbatch of all devices)."""
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
        """The phases of the run, each of one batch; `split` is the batch of the first."""
        batch = self.config.batch
        examples = self.dataset.train_examples
        is_filled = self.config.input.remainder == "pad"
        return ramp(self.split, batch.ramp_epochs, batch.ramp_factor, examples, is_filled=is_filled)

    @property
    def samples_per_epoch(self) -> int:
        """Rows of all batches of an epoch, including padding of the last one."""
        return self.steps_per_epoch * self.split.global_batch

    @property
    def is_weighted(self) -> bool:
        """Whether rows of a batch have weights, some of which may be 0 (padding, unreadable)."""
        is_filled = self.samples_per_epoch > self.dataset.train_examples
        return is_filled or self.config.input.unreadable == "skip"

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
    def is_mixed(self) -> bool:
        """Whether training examples are mixed in pairs (mixup, CutMix)."""
        augmentation = self.config.input.augmentation
        return self.is_cut or (augmentation is not None and augmentation.mixup_alpha > 0)

    @property
    def is_cut(self) -> bool:
        """Whether rectangles of training examples are replaced by their neighbours' (CutMix)."""
        augmentation = self.config.input.augmentation
        return augmentation is not None and augmentation.cutmix_alpha > 0

    @property
    def changes(self) -> tuple[Change, ...]:
        """The hyper-parameters that the scaling rule of the schedule changes for this batch."""
        config = self.config
        return changes(config.schedule, config.optimizer, self.split.global_batch)


def resolve(
    config: RunConfig, device_count: int | None = None, facts: DatasetFacts | None = None
) -> ResolvedRun:
    """The run of `config` on `device_count` devices: layout, batch, data set, steps.

    Opens no file: `scalejax.data.facts.resolve` reads the facts of data in files.

    Args:
        config: the run.
        device_count: devices to use; if None, the product of the config's axes.
        facts: counts and shapes of its data; if None, those that follow from the config.

    Raises:
        ConfigError: if axes, batch or data do not divide, naming the nearest values that do; if
            there are no facts.
    """
    if (known := config.data.known_facts) is not None:
        facts = config.data.divided(known)  # the config comes first
    if facts is None:
        accepted = "its counts and shapes are in files; give the facts that read_facts returns"
        raise ConfigError(refusal("data.name", config.data.name, accepted))
    require_fitting_data(config, facts)
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
    require_supported_convolutions(config.model, layout)
    per_device = config.batch.per_device_batch
    global_batch = config.batch.global_batch or (per_device or 0) * layout.batch_shards
    split = BatchSplit(
        global_batch=global_batch, layout=layout, microbatches=config.batch.microbatches
    )
    require_petastorm_batch(config.data, config.batch, global_batch)
    if config.train.noise_scale is not None:
        keeps = config.model.has_batch_norm
        require_noise_scale_parts(split, mode=wanted.mode, has_batch_norm=keeps)
    if config.train.sharpness is not None:
        shards = layout.batch_shards
        require_sharpness_samples(config.train.sharpness, shards, facts.train_examples)
    dataset = _with_model_pixels(facts, config.model)
    if per_device is not None and per_device <= dataset.train_examples < global_batch:
        shards, most = layout.batch_shards, dataset.train_examples // per_device
        axes = layout.batch_axes
        accepted = (
            f"{per_device} samples x {axes}={shards} are {global_batch} a step, more "
            f"than the {dataset.train_examples} training examples (at most {axes}={most})"
        )
        raise ConfigError(refusal("devices", layout.device_count, accepted))
    config.schedule.scaled_optimizer(config.optimizer, global_batch)  # refuses invalid scaling
    require_learnable(config.schedule, global_batch)
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
        steps_per_epoch=metrics.steps_per_epoch(
            dataset.train_examples, global_batch, is_filled=config.input.remainder == "pad"
        ),
    )
    if run.is_mixed:
        require_mixup_pairs(split)
    require_power_of_two_devices(config.gradient_sync, layout.data)
    if config.train.metric_average == "devices":
        require_evaluated_devices(split, dataset)
    require_int32_steps(
        config.schedule,
        epochs=config.train.epochs,
        steps_per_epoch=run.steps_per_epoch,
        global_batch=global_batch,
    )
    for phase in run.phases[1:]:  # refuses invalid BatchNorm groups
        _bn_groups(wanted, phase.split)
    return run


def _with_model_pixels(dataset: DatasetFacts, model: ModelConfig) -> DatasetFacts:
    """`dataset` with the mean and deviation of pixels that pretrained weights of `model` expect."""
    if model.pretrained_pixels is None:
        return dataset
    mean, std = model.pretrained_pixels
    return replace(dataset, pixel_mean=mean, pixel_std=std)


def in_phase(run: ResolvedRun, phase: Phase) -> ResolvedRun:
    """`run` with the batch of `phase`, for which its step is built."""
    groups = _bn_groups(run.config.layout, phase.split)
    return replace(run, split=phase.split, bn_groups=groups, steps_per_epoch=phase.steps_per_epoch)


def _bn_groups(layout: LayoutConfig, split: BatchSplit) -> int:
    return bn_group_count(
        split, is_local=layout.bn_scope == "local", group_size=layout.bn_group_size
    )


def load_config(path: Path, overrides: Mapping[str, JsonValue] | None = None) -> RunConfig:
    """The config in a `run.toml`, with fields replaced.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> config = load_config(path, {"train.epochs": 3})
        >>> config.model.name, config.train.epochs
        ('mlp', 3)

    `model.name` may name a preset, such as "gpt3-175b" (`scalejax.config.presets`).

    Args:
        path: the file.
        overrides: values by dotted field name, such as {"train.epochs": 3}. Either of
            batch.global_batch and batch.per_device_batch also replaces the other one in the file.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        return _built(_tables(path, overrides))
    except ConfigError as error:
        if hints := _hints_of_kind(path, overrides or {}, str(error)):
            raise ConfigError("\n".join([str(error), *hints])) from error
        raise


def load_kept_config(path: Path) -> RunConfig:
    """The config in the `run.toml` kept in a run folder; refusals name the file.

    Raises:
        ConfigError: one line per problem, each naming the file.
    """
    with prefixed(f"{path}: "):
        return load_config(path)


def _hints_of_kind(path: Path, overrides: Mapping[str, JsonValue], refused: str) -> list[str]:
    """Hints for fields of the file that are refused because a flag replaces their table's
    `name`."""
    hints = []
    for dotted, kind in current_fields(overrides).items():
        table, _, last = dotted.rpartition(".")
        given = load_run_file(path).get(table)
        if last != "name" or not isinstance(given, dict):
            continue
        kept = [name for name in given if f"{table}.{name}" not in overrides]
        if fields := [name for name in kept if f"{table}.{name} is not a field" in refused]:
            hints.append(
                f"{path} gives {', '.join(fields)} of [{table}], for another name than {kind!r}: "
                f"--{table}='{{name = {json.dumps(kind)}}}' replaces the whole table."
            )
    return hints


def require_decoder(name: str, hint: str = "") -> None:
    """Refuse names that are not published decoders.

    Args:
        name: name of a network.
        hint: what else is accepted, appended to the refusal.

    Raises:
        ConfigError: with the accepted names.
    """
    decoders = [each for each, preset in PRESETS.items() if preset.is_decoder]
    if name not in decoders:
        raise ConfigError(f"{unknown_name('model', name, decoders)}{hint}")


def published_run(name: str, overrides: Mapping[str, JsonValue] | None = None) -> RunConfig:
    """The config of a pretraining run of the published network `name` (`scalejax.config.presets`).

    It has tokens of the published vocabulary and pretraining context, the published global batch if
    known, bfloat16 and AdamW; fields are replaced as by `load_config`. It is meant for costs: its
    learning rate does not come from the publication.

    Raises:
        ConfigError: if there is no such decoder, or one line per problem.
    """
    require_decoder(name)
    preset = PRESETS[name]
    batch = preset.published_batch
    if batch is None and (overrides or {}).get("batch.global_batch") is None:
        accepted = f"give the samples per update, as none are known for {name}: --global-batch"
        raise ConfigError(refusal("batch.global_batch", None, accepted))
    tables: dict[str, JsonValue] = {
        "model": {"name": name, "compute_dtype": "bfloat16"},
        "data": {
            "name": "synthetic_tokens",
            "tokens": preset.pretraining_tokens,
            "vocabulary": preset.vocabulary,
        },
        "batch": {"global_batch": batch},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 1e-4},
    }
    return _built(_replaced(tables, overrides))


def given_name(
    path: Path, overrides: Mapping[str, JsonValue] | None = None, *, table: str = "model"
) -> str | None:
    """The `model.name` of a `run.toml` as given, before a preset is expanded.

    Args:
        path: the file.
        overrides: values by dotted field name, as for `load_config`.
        table: the table whose `name` is returned.

    Raises:
        ConfigError: if the file does not exist, or is not TOML.
    """
    given = _tables(path, overrides).get(table)
    name = given.get("name") if isinstance(given, dict) else None
    return name if isinstance(name, str) else None


def _tables(path: Path, overrides: Mapping[str, JsonValue] | None) -> dict[str, JsonValue]:
    if str(path) in PRESETS and not path.exists():
        raise ConfigError(
            f"{str(path)!r} is a published network, not a file: name it in a run.toml "
            f'(model.name = "{path}") beside data, batch, optimizer and schedule.'
        )
    return _replaced(load_run_file(path), overrides)


def _replaced(
    tables: dict[str, JsonValue], overrides: Mapping[str, JsonValue] | None
) -> dict[str, JsonValue]:
    """The tables of a run with fields replaced."""
    replaced = current_fields(overrides or {})
    given = [name for name in _BATCHES if replaced.get(name) is not None]
    if len(given) == 1:
        replaced = dict.fromkeys(_BATCHES) | replaced
    for name, value in replaced.items():
        _replace(tables, name.split("."), value)
    return current_tables(tables)


def with_fields(config: RunConfig, overrides: Mapping[str, JsonValue]) -> RunConfig:
    """A copy of `config` with fields replaced by dotted name, checked again.

    Raises:
        ConfigError: one line per problem.
    """
    tables = plain(config)
    assert isinstance(tables, dict)  # noqa: S101  a dataclass is a table
    for name, value in current_fields(overrides).items():
        _replace(tables, name.split("."), value)
    return _built(current_tables(tables))


def _built(tables: dict[str, JsonValue]) -> RunConfig:
    """The config in `tables`, whose model may be a preset."""
    return build(RunConfig, with_preset(tables))


def _replace(tables: dict[str, JsonValue], path: list[str], value: JsonValue) -> None:
    table = tables
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[path[-1]] = value


def condition_shares(run: ResolvedRun) -> dict[str, float]:
    """Share of the steps of `run`, 0..1, in which each conditional collective and each conditional
    part of the optimizer runs, by scope."""
    config, of_optimizer = run.config.gradient_sync, run.config.optimizer.shares
    return of_optimizer | ({} if config is None else config.shares(run.config.train.epochs))
