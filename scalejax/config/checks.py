"""Checks of the tables of a `run.toml` against each other, for incompatible values.

Knows the fields of every table, but not how a file is read, and no devices: what depends on their
number is checked when a run is resolved.
"""

import math

from scalejax.config.data import DataConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.gradient_sync import GradientSyncConfig, LocalSgdConfig
from scalejax.config.input import AugmentationConfig, InputConfig
from scalejax.config.model import DecoderConfig, ModelConfig, VitConfig, float8_type
from scalejax.config.optimizer import OptimizerConfig, SophiaConfig
from scalejax.config.parallelism import BatchSplit, Layout
from scalejax.config.schedule import LearningRateConfig
from scalejax.config.training import (
    MOST_STEPS,
    AveragingConfig,
    BatchConfig,
    DropoutConfig,
    FineTuningConfig,
    LayoutConfig,
    LossConfig,
    SharpnessConfig,
    TrainConfig,
)
from scalejax.core.errors import (
    ConfigError,
    nearest_multiples,
    refusal,
    require_multiple,
    unknown_name,
)

# Model, data and layout.


def require_divisible_heads(model: ModelConfig, layout: LayoutConfig) -> None:
    """Refuse numbers of heads that the tensor axis does not divide."""
    for name, count in model.head_counts.items():
        require_multiple(f"model.{name}", count, layout.tensor, "layout.tensor")


def require_supported_convolutions(model: ModelConfig, layout: Layout) -> None:
    """Refuse a convolutional network over data, fsdp and tensor at once.

    There XLA partitions the filter gradients of convolutions wrongly (jax 0.10.2, on CPU, with both
    Shardy and GSPMD): the loss is right, but the first update of `cnn` is off by 139 %.

    Raises:
        ConfigError: naming the layouts that work.
    """
    axes = {"data": layout.data, "fsdp": layout.fsdp, "tensor": layout.tensor}
    if model.is_convolutional and min(axes.values()) > 1:
        accepted = (
            f"over data={layout.data} and fsdp={layout.fsdp} too, the compiler makes wrong "
            "gradients of convolutions; use two of the three axes"
        )
        raise ConfigError(refusal("layout.tensor", layout.tensor, accepted))


def require_compatible_data(model: ModelConfig, data: DataConfig, dataset: DatasetFacts) -> None:
    """Refuse a network that does not read the examples of `data`."""
    wanted = model.wanted_examples(dataset)
    if wanted is None:
        return
    has = {
        "images": f"images of {' x '.join(map(str, dataset.input_shape[:2]))}",
        "rows of numbers": f"rows of {dataset.input_shape[0]} numbers",
    }.get(dataset.kind, dataset.kind)
    wanted = "none (an mlp does)" if dataset.is_table else wanted
    accepted = f"it reads {wanted}, but data.name={data.name!r} holds {has}"
    raise ConfigError(refusal("model.name", model.name, accepted))


def require_packable(model: ModelConfig, train: TrainConfig, dataset: DatasetFacts) -> None:
    """Refuse examples of several documents if the network, or what is measured, cannot distinguish
    them."""
    if not dataset.is_packed:
        return
    told = "documents of an example do not see each other (data.document_mask, document_tokens)"
    if not isinstance(model, DecoderConfig):
        accepted = f"{told} in gpt and llama alone"
        raise ConfigError(refusal("model.name", model.name, accepted))
    if getattr(model, "mtp", None) is not None:
        accepted = f"where {told}, the token after the next may be of another; leave it out"
        raise ConfigError(f"model.mtp is refused: {accepted}.")
    if train.noise_scale is not None:
        accepted = f"where {told}, parts of a batch have different numbers of targets; leave it out"
        raise ConfigError(f"train.noise_scale is refused: {accepted}.")


def require_compatible_augmentation(
    augmentation: AugmentationConfig | None, data: DataConfig, dataset: DatasetFacts
) -> None:
    """Refuse augmentation of data without images or of colours of grey images, and shifts as large
    as an image."""
    if augmentation is None:
        return
    if dataset.is_text or dataset.is_table:
        has = "rows of numbers" if dataset.is_table else "text"
        accepted = f"it changes images, but data.name={data.name!r} holds {has}; leave it out"
        raise ConfigError(f"input.augmentation is refused: {accepted}.")
    for name in ("saturation", "hue"):
        if dataset.input_shape[2] != 3 and (value := getattr(augmentation, name)):
            accepted = "the images are grey, of which brightness and contrast alone change"
            raise ConfigError(refusal(f"input.augmentation.{name}", value, accepted))
    if augmentation.operations and dataset.input_shape[2] not in (1, 3):
        name = "trivial_augment" if augmentation.trivial_augment else "rand_augment"
        accepted = (
            f"its operations are of grey images and of red, green and blue, and these have "
            f"{dataset.input_shape[2]} channels; leave it out"
        )
        raise ConfigError(f"input.augmentation.{name} is refused: {accepted}.")
    if augmentation.evaluation_crop != 1 and not data.decodes_images:
        accepted = (
            "it must be 1, or left out: images are cropped where they are decoded, and those of "
            f"data.name={data.name!r} are not encoded"
        )
        name = "input.augmentation.evaluation_crop"
        raise ConfigError(refusal(name, augmentation.evaluation_crop, accepted))
    side = min(dataset.input_shape[:2])
    if augmentation.shift_pixels >= side:
        accepted = f"it must be below the {side} pixels of a side"
        raise ConfigError(
            refusal("input.augmentation.shift_pixels", augmentation.shift_pixels, accepted)
        )


def require_mixup_pairs(split: BatchSplit) -> None:
    """Refuse an odd number of samples per device, which cannot be mixed in pairs."""
    if split.microbatch % 2:
        divisor = 2 * split.layout.batch_shards * split.microbatches
        accepted = (
            f"input.augmentation mixes pairs, and a device sees {split.microbatch} "
            f"samples at a time; it must be a multiple of "
            f"2*{split.layout.batch_axes}*microbatches={divisor} "
            f"(nearest: {nearest_multiples(split.global_batch, divisor)})"
        )
        raise ConfigError(refusal("batch.global_batch", split.global_batch, accepted))


def require_divisible_blocks(model: ModelConfig, batch: BatchConfig, layout: LayoutConfig) -> None:
    """Refuse context, pipeline and sequence parallelism for networks other than transformers with
    stacked blocks, and axes that do not divide their blocks.

    Raises:
        ConfigError: naming the axis and the nearest value that divides.
    """
    if not isinstance(model, DecoderConfig):
        used = [name for name in ("context", "pipeline") if getattr(layout, name) > 1]
        used += ["sequence_parallel"] if layout.sequence_parallel else []
        for name in used:
            accepted = (
                "it splits transformers with stacked blocks (gpt, llama), not "
                f"model.name={model.name!r}"
            )
            raise ConfigError(refusal(f"layout.{name}", getattr(layout, name), accepted))
        return
    strategy = layout.context_strategy
    is_gathered = layout.context > 1 and strategy == "all_gather"
    if is_gathered and model.attention == "fused" and (lacks := model.lacks_for_context("ring")):
        accepted = f'over gathered keys attention {lacks} is computed unfused; use "auto"'
        raise ConfigError(refusal("model.attention", model.attention, accepted))
    if layout.context > 1 and (lacks := model.lacks_for_context(strategy)):
        accepted = f'attention {lacks} cannot be split that way; use "all_gather"'
        raise ConfigError(refusal("layout.context_strategy", strategy, accepted))
    if layout.context_strategy == "all_to_all":
        _require_heads_over_context(model, layout)
    if layout.pipeline > 1 and model.offloads_activations:
        accepted = (
            "XLA's compiler for GPUs refuses copies to the host in a loop over ticks (jax 0.10.2), "
            "and the stages of timetables keep microbatches on the device; leave model.remat's "
            '"offload" out'
        )
        raise ConfigError(refusal("layout.pipeline", layout.pipeline, accepted))
    stages, chunks = layout.pipeline, layout.pipeline_chunks
    # Dense layers before those with experts are in no stage, or added to the share of the first.
    dense = 0 if (moe := getattr(model, "moe", None)) is None else moe.dense_layers
    layers, field = (
        model.layers - dense,
        "model.layers-moe.dense_layers" if dense else "model.layers",
    )
    if layers < stages:
        accepted = f"each of layout.pipeline={stages} stages needs a layer; at least {stages}"
        raise ConfigError(refusal(field, layers, accepted))
    if stages > 1 and model.period > 1:
        parts, named = stages * chunks * model.period, "layout.pipeline*chunks*global_every"
        require_multiple(field, layers, parts, named)
    if layout.pipeline_schedule == "dualpipe":
        count = batch.microbatches or 1
        if count % 2 or count < 2 * stages:
            accepted = (
                f'in "dualpipe" half of them go each way, and there must be at least twice '
                f"layout.pipeline={stages}; use {max(2 * stages, count + count % 2)}"
            )
            raise ConfigError(refusal("batch.microbatches", count, accepted))
    if chunks > 1:
        if layout.pipeline_counts_ends:
            layers, field = layers + layout.pipeline_ends, f"{field}+2"
        require_multiple(field, layers, stages * chunks, "layout.pipeline*chunks")
        require_multiple("batch.microbatches", batch.microbatches, stages, "layout.pipeline")


def require_divisible_experts(model: ModelConfig, batch: BatchConfig, layout: LayoutConfig) -> None:
    """Refuse an expert axis for networks without experts, an axis that does not divide the experts,
    and layouts that networks with experts do not support.

    Raises:
        ConfigError: naming the nearest number of devices that divides.
    """
    if model.expert_count and layout.mode != "jit":
        accepted = 'loads of experts are counted over all devices; use "jit"'
        raise ConfigError(refusal("layout.mode", layout.mode, accepted))
    if layout.overlap_expert_exchange and (batch.microbatches or 1) < 2:
        accepted = (
            "another microbatch computes meanwhile: it needs batch.microbatches of at least 2"
        )
        raise ConfigError(refusal("layout.overlap_expert_exchange", True, accepted))
    if layout.spreads_experts and model.expert_count:
        spread, named = layout.expert * layout.tensor, "layout.expert*layout.tensor"
        require_multiple("model.moe.experts", model.expert_count, spread, named)
    for name in ("expert_tensor", "overlap_expert_exchange"):
        if (value := getattr(layout, name)) and not model.expert_count:
            accepted = f"it is for experts, and model.name={model.name!r} has none; leave it out"
            raise ConfigError(refusal(f"layout.{name}", value, accepted))
    if layout.expert == 1:
        return
    if not model.expert_count:
        accepted = (
            f"it splits the experts of a network, and model.name={model.name!r} has none; use 1"
        )
        raise ConfigError(refusal("layout.expert", layout.expert, accepted))
    require_multiple("model.moe.experts", model.expert_count, layout.expert, "layout.expert")


def _require_heads_over_context(model: DecoderConfig, layout: LayoutConfig) -> None:
    """Refuse heads that context and tensor do not divide, and key heads per device that context
    neither divides nor is a multiple of."""
    context, tensor = layout.context, layout.tensor
    name = "layout.tensor*layout.context" if tensor > 1 else "layout.context"
    for field, count in model.head_counts.items():
        of_device = count // tensor
        if field != "heads" and context % of_device == 0:
            continue  # each is sent to several devices
        require_multiple(f"model.{field}", count, tensor * context, name)


def require_divisible_tokens(
    dataset: DatasetFacts, model: ModelConfig, layout: LayoutConfig
) -> None:
    """Refuse context and sequence parallelism that do not divide the tokens of an example, into two
    chunks per context shard if attention runs in blocks.

    Raises:
        ConfigError: naming the nearest numbers of tokens that do.
    """
    (tokens, *_) = dataset.input_shape
    shared = layout.tensor if layout.sequence_parallel else 1
    is_fused = isinstance(model, DecoderConfig) and model.attention == "fused"
    is_by_blocks = layout.context_strategy == "ring" or (
        layout.context_strategy == "all_gather" and is_fused
    )
    if layout.context > 1 and is_by_blocks and shared % 2:
        require_multiple("data.tokens", tokens, 2 * layout.context, "2*layout.context")
    dividing = {"layout.context": layout.context, "layout.tensor": shared}
    axes = [name for name, size in dividing.items() if size > 1]
    require_multiple("data.tokens", tokens, math.prod(dividing.values()), "*".join(axes))


def require_shardable_gradients(model: ModelConfig, layout: LayoutConfig) -> None:
    """Refuse ZeRO 2 with BatchNorm, with which the compiler all-reduces whole gradients."""
    if layout.zero_stage == 2 and model.has_batch_norm:
        accepted = "with BatchNorm the compiler sums gradients, and keeps them whole; use 1"
        raise ConfigError(refusal("layout.zero_stage", 2, accepted))


def require_evaluated_devices(split: BatchSplit, dataset: DatasetFacts) -> None:
    """Refuse metrics averaged over devices if some device has no test or validation example."""
    shards, rows = split.layout.batch_shards, split.per_device_batch
    least = (shards - 1) * rows + 1
    for part, examples in (
        ("test", dataset.test_examples),
        ("validation", dataset.validation_examples or least),
    ):
        if examples < least:
            accepted = (
                f"of {shards} devices that divide the batch, {rows} rows each, "
                f"{-(-examples // rows)} have {part} examples ({examples}; all from {least} "
                'on); use "examples", or a smaller batch'
            )
            raise ConfigError(refusal("train.metric_average", "devices", accepted))


def require_validation(data: DataConfig, train: TrainConfig) -> None:
    """Refuse a share of held-out training examples that is not between 0 and 1, or is given in
    addition to validation data or Petastorm's order; and early stopping without validation data.

    Raises:
        ConfigError: naming the field.
    """
    fraction, name = data.validation_fraction, "data.validation_fraction"
    if fraction is not None:
        if not 0 < fraction < 1:
            raise ConfigError(refusal(name, fraction, "it must be between 0 and 1"))
        if "validation" in data.parts:
            accepted = "data.validation names examples to choose by; leave one of them out"
            raise ConfigError(refusal(name, fraction, accepted))
        if data.petastorm is not None:
            accepted = (
                "data.reading.petastorm reads whole row groups in its order; name files of their "
                "own in data.validation"
            )
            raise ConfigError(refusal(name, fraction, accepted))
    if not 0 <= data.validation_seed < 2**32:
        accepted = "it must be from 0 to 4294967295"
        raise ConfigError(refusal("data.validation_seed", data.validation_seed, accepted))
    if train.early_stopping is not None and not data.has_validation:
        own = ', or data.validation = "FILES"' if hasattr(data, "validation") else ""
        raise ConfigError(
            "train.early_stopping is refused: it chooses by validation data, and there are none; "
            f"hold some out with data.validation_fraction = 0.1{own}."
        )


def require_petastorm_batch(data: DataConfig, batch: BatchConfig, global_batch: int) -> None:
    """Refuse batches that Petastorm's shards do not divide, and batches that grow."""
    if (order := data.petastorm) is None:
        return
    shards = "data.reading.petastorm.shard_count"
    require_multiple("batch.global_batch", global_batch, order.shard_count or 1, shards)
    if batch.ramp_epochs:
        accepted = "data.reading.petastorm has an order for one batch; leave one of them out"
        raise ConfigError(refusal("batch.ramp_epochs", batch.ramp_epochs, accepted))


# Batch and averages against the epochs, the optimizer and the network.


def require_ramp_within_run(
    batch: BatchConfig, averaging: AveragingConfig | None, train: TrainConfig
) -> None:
    """Refuse a batch ramp beyond the last epoch, and a ramp together with SWA, whose steps are
    counted at the first batch size."""
    epochs = batch.ramp_epochs
    if epochs and epochs[-1] >= train.epochs:
        accepted = f"they must be below train.epochs={train.epochs}"
        raise ConfigError(refusal("batch.ramp_epochs", epochs, accepted))
    if epochs and averaging is not None and averaging.samples_run:
        accepted = 'its steps are those of one batch; use "ema", or leave batch.ramp_epochs out'
        raise ConfigError(refusal("averaging.name", averaging.name, accepted))


def require_single_average(
    optimizer: OptimizerConfig, schedule: LearningRateConfig, averaging: AveragingConfig | None
) -> None:
    """Refuse a learning rate decay or another average with a schedule-free optimizer."""
    if not optimizer.averages_iterates:
        return
    if not schedule.is_constant:
        accepted = 'it averages instead of decaying the rate; use schedule.decay="constant"'
        raise ConfigError(refusal("optimizer.name", optimizer.name, accepted))
    if averaging is not None:
        accepted = f"optimizer.name={optimizer.name!r} averages already; leave it out"
        raise ConfigError(refusal("averaging.name", averaging.name, accepted))


def require_cacheable_features(fine_tuning: FineTuningConfig | None, given: InputConfig) -> None:
    """Refuse cached features if examples differ from epoch to epoch, or worker processes would make
    them."""
    if fine_tuning is None or not fine_tuning.cache_features:
        return
    usual = InputConfig()
    for name in ("augmentation", "unreadable", "workers"):
        if getattr(given, name) != getattr(usual, name):
            accepted = f"features are computed once, before training: leave input.{name} out"
            raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))


def require_adaptable_model(fine_tuning: FineTuningConfig | None, model: ModelConfig) -> None:
    """Refuse adapters for networks or layers that have none, and for one half of a matrix."""
    if fine_tuning is None or fine_tuning.lora is None:
        return
    targets = fine_tuning.lora.targets
    if not isinstance(model, DecoderConfig):
        accepted = f"adapters are for decoders (gpt, llama), not for model.name={model.name!r}"
        raise ConfigError(refusal("fine_tuning.lora.targets", list(targets), accepted))
    if model.expert_count:
        accepted = "experts have no adapters; leave model.moe or fine_tuning.lora out"
        raise ConfigError(refusal("fine_tuning.lora.targets", list(targets), accepted))
    if model.is_gated and ("up_proj" in targets) != ("gate_proj" in targets):
        accepted = "gate and up are one matrix here: name both gate_proj and up_proj"
        raise ConfigError(refusal("fine_tuning.lora.targets", list(targets), accepted))
    for target, layers in fine_tuning.lora.layers.items():
        if layers and not set(layers).intersection(model.linear_layers):
            names = model.linear_layers
            raise ConfigError(unknown_name("fine_tuning.lora.targets", target, names))


def require_parametrized_update(
    model: ModelConfig, optimizer: OptimizerConfig, fine_tuning: FineTuningConfig | None
) -> None:
    """Refuse muP and CompleteP with optimizers and adapters for which they give no rates."""
    parametrization = model.parametrization if isinstance(model, DecoderConfig) else None
    if parametrization is None:
        return
    name = parametrization.name
    if not optimizer.normalises_entries:
        accepted = (
            f"its rates are those of adamw and lion, not of optimizer.name={optimizer.name!r}; use "
            "one of these, or leave it out"
        )
        raise ConfigError(refusal("model.parametrization", name, accepted))
    if fine_tuning is not None and fine_tuning.lora is not None:
        accepted = "it gives no rates of adapters; leave it or fine_tuning.lora out"
        raise ConfigError(refusal("model.parametrization", name, accepted))


def require_single_rate(optimizer: OptimizerConfig, fine_tuning: FineTuningConfig | None) -> None:
    """Refuse rate factors with a schedule-free optimizer, whose average is weighted by one rate."""
    if not optimizer.averages_iterates:
        return
    if fine_tuning is not None and fine_tuning.rate_factors:
        accepted = f"optimizer.name={optimizer.name!r} averages by one rate; use another"
        raise ConfigError(refusal("fine_tuning.rate_factors", fine_tuning.rate_factors, accepted))


def require_single_main_params(
    optimizer: OptimizerConfig,
    fine_tuning: FineTuningConfig | None,
    averaging: AveragingConfig | None,
    gradient_sync: GradientSyncConfig | None,
) -> None:
    """Refuse 16-bit parameters if their frozen base or their mean would need its own type."""
    dtype = getattr(optimizer, "main_params_dtype", "float32")
    is_averaged = averaging is not None or (
        gradient_sync is not None and gradient_sync.averages_parameters
    )
    if dtype != "float32" and (is_averaged or fine_tuning is not None):
        accepted = (
            "averages of parameters and fine_tuning keep float32 ones (a frozen base: "
            'fine_tuning.base_dtype); use "float32"'
        )
        raise ConfigError(refusal("optimizer.main_params_dtype", dtype, accepted))
    if gradient_sync is not None and gradient_sync.averages_parameters:
        for name in ("mu_dtype", "nu_dtype"):
            if (kind := getattr(optimizer, name, "float32")) == "blockwise8":
                accepted = (
                    f"each worker of gradient_sync.name={gradient_sync.name!r} has an optimizer of "
                    'its own, which was not tried in blocks; use "float32" or "bfloat16"'
                )
                raise ConfigError(refusal(f"optimizer.{name}", kind, accepted))


def require_offloadable_state(
    layout: LayoutConfig, optimizer: OptimizerConfig, gradient_sync: GradientSyncConfig | None
) -> None:
    """Refuse to offload optimizer state that does not exist, that evaluation reads, or that is
    different on each device."""
    if not layout.optimizer_memory_host_offload:
        return
    accepted = None
    if not optimizer.moments:
        accepted = f"optimizer.name={optimizer.name!r} without momentum has no state"
    elif optimizer.averages_iterates:
        accepted = f"evaluation reads the state of optimizer.name={optimizer.name!r}"
    elif gradient_sync is not None and gradient_sync.averages_parameters:
        accepted = "with local SGD each device has optimizer state of its own"
    if accepted is not None:
        raise ConfigError(refusal("layout.optimizer_memory_host_offload", True, accepted))


def require_droppable(
    dropout: DropoutConfig | None, model: ModelConfig, layout: LayoutConfig
) -> None:
    """Refuse dropout in networks without pre-norm blocks, and in stages, which do not know their
    rows."""
    if dropout is None:
        return
    if not isinstance(model, DecoderConfig | VitConfig):
        accepted = "[dropout] is for the residual stream of gpt, llama and vit; leave it out"
        raise ConfigError(refusal("model.name", model.name, accepted))
    if layout.pipeline > 1:
        accepted = "with [dropout] it must be 1: stages are not told which rows they compute"
        raise ConfigError(refusal("layout.pipeline", layout.pipeline, accepted))


def require_sampled_labels(
    optimizer: OptimizerConfig,
    model: ModelConfig,
    layout: LayoutConfig,
    loss: LossConfig,
    gradient_sync: GradientSyncConfig | None,
) -> None:
    """Refuse Sophia where labels cannot be sampled for its estimate of curvature, or where it is
    untried."""
    if not isinstance(optimizer, SophiaConfig):
        return
    which, other = 'with optimizer.name="sophia"', "or another optimizer"
    if loss.is_own:
        accepted = f"{which} labels are sampled of a softmax cross-entropy; leave it out, {other}"
        raise ConfigError(refusal("loss.kind", loss.kind, accepted))
    for name in ("pipeline", "context"):
        if (size := getattr(layout, name)) > 1:
            accepted = (
                f"{which} it must be 1: labels are sampled of the logits of whole samples, by rows "
                f"that its shards are not told; use data, fsdp and tensor, {other}"
            )
            raise ConfigError(refusal(f"layout.{name}", size, accepted))
    for name in ("moe", "mtp"):
        if getattr(model, name, None) is not None:
            accepted = (
                f"{which} it must be absent: its losses have no labels that could be sampled; "
                f"leave it out, {other}"
            )
            raise ConfigError(f"model.{name} is refused: {accepted}.")
    if model.compute_dtype not in ("float32", "bfloat16"):
        accepted = (
            f'{which} gradients of sampled labels have no scale of their own; use "float32" or '
            f'"bfloat16", {other}'
        )
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))
    if gradient_sync is not None:
        accepted = (
            f"{which} gradients are combined by their mean over all rows; leave it out, {other}"
        )
        raise ConfigError(refusal("gradient_sync.name", gradient_sync.name, accepted))


def require_unmasked_rows(given: InputConfig, train: TrainConfig) -> None:
    """Refuse the noise scale if rows of a batch may have weight 0: it compares gradients of parts
    with a known number of samples."""
    for name, value, other in (
        ("remainder", given.remainder, "drop"),
        ("unreadable", given.unreadable, "refuse"),
    ):
        if train.noise_scale is not None and value != other:
            accepted = (
                "rows of a batch may then have weight 0, and train.noise_scale compares parts of "
                f'equal weight; use "{other}", or leave train.noise_scale out'
            )
            raise ConfigError(refusal(f"input.{name}", value, accepted))


def require_sharpness_defined(
    model: ModelConfig,
    data: DataConfig,
    layout: LayoutConfig,
    fine_tuning: FineTuningConfig | None,
    *,
    has_local_weights: bool,
) -> None:
    """Refuse the sharpness if second derivatives do not exist, or would be those of another loss.

    Raises:
        ConfigError: naming the field and what it may be.
    """
    measured = "train.sharpness differentiates the loss twice"
    for name, value, accepted in (
        (
            "layout.pipeline",
            layout.pipeline,
            f"{measured}, and stages have one backward pass; use 1",
        ),
        (
            "layout.context",
            layout.context,
            f"{measured}, and keys that travel between devices have one backward pass; use 1",
        ),
    ):
        if value > 1:
            raise ConfigError(refusal(name, value, accepted))
    if model.expert_count > 0:
        accepted = f"{measured}, and routers choose experts by steps; leave train.sharpness out"
        raise ConfigError(refusal("model.moe.experts", model.expert_count, accepted))
    if float8_type(model) is not None or model.compute_dtype == "float4":
        accepted = (
            f"{measured}, in float32, and scales of 8 bits belong to a network of their own; use "
            '"bfloat16" or "float32", or leave train.sharpness out'
        )
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))
    if fine_tuning is not None and fine_tuning.cache_features:
        accepted = "train.sharpness reads samples, not features; leave one of the two out"
        raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))
    if has_local_weights:
        accepted = "every device has weights, and a sharpness, of its own; leave one of the two out"
        raise ConfigError(f"train.sharpness is refused with local_sgd: {accepted}.")
    if data.name == "mixture":  # type: ignore[attr-defined]  each data set has one
        accepted = (
            "train.sharpness is over samples of equal weight, and its sources have others; leave "
            "one of the two out"
        )
        raise ConfigError(refusal("data.name", "mixture", accepted))
    if data.petastorm is not None:
        accepted = "train.sharpness reads the same samples again, and these readers have no index"
        raise ConfigError(f"data.reading.petastorm is refused: {accepted}.")


def require_sharpness_samples(wanted: SharpnessConfig, shards: int, examples: int) -> None:
    """Refuse numbers of samples that devices cannot share equally, or that the data do not have.

    Raises:
        ConfigError: naming the nearest accepted numbers.
    """
    name, samples = "train.sharpness.samples", wanted.samples
    if samples > examples:
        most = examples - examples % shards
        accepted = f"there are {examples:,} training examples; use at most {most:,}"
        raise ConfigError(refusal(name, samples, accepted))
    require_multiple(name, samples, shards, "devices that share a batch")


def require_correction_in_every_step(
    gradient_sync: GradientSyncConfig | None, optimizer: OptimizerConfig, given: InputConfig
) -> None:
    """Refuse momentum correction with local SGD if a device may have no row that counts: it then
    makes no update, and the correction would miss the learning rate of that step."""
    form = getattr(optimizer, "momentum_form", "rate_outside")
    may_be_idle = given.remainder == "pad" or given.unreadable == "skip"
    is_local = gradient_sync is not None and gradient_sync.averages_parameters
    if is_local and may_be_idle and form == "rate_inside_corrected":
        accepted = (
            'with gradient_sync.name="local_sgd" and rows of weight 0 (input.remainder="pad", '
            'input.unreadable="skip") a device may make no update, and its correction would miss '
            'the rate of that step; use "rate_outside", which trains the same'
        )
        raise ConfigError(refusal("optimizer.momentum_form", form, accepted))


def require_finite_epochs(given: InputConfig, data: DataConfig) -> None:
    """Refuse padding of the last batch with Petastorm's readers, whose epochs have no end."""
    if data.petastorm is not None and given.remainder == "pad":
        accepted = 'readers of data.reading.petastorm begin again where they end; use "drop"'
        raise ConfigError(refusal("input.remainder", given.remainder, accepted))


# Gradient synchronisation other than the mean of gradients.


def require_compatible_gradient_sync(
    gradient_sync: GradientSyncConfig | None,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    averaging: AveragingConfig | None,
    layout: LayoutConfig,
    train: TrainConfig,
) -> None:
    """Refuse fields that are incompatible with `gradient_sync`.

    Raises:
        ConfigError: naming the field and what it may be.
    """
    if gradient_sync is None:
        return
    name = f"gradient_sync.name={gradient_sync.name!r}"
    if layout.mode != "shard_map":
        accepted = (
            f'with {name} the step itself places the collectives; use "shard_map" '
            "(--layout.mode shard_map)"
        )
        raise ConfigError(refusal("layout.mode", layout.mode, accepted))
    gradient_sync.require_optimizer(optimizer)
    if train.noise_scale is not None:
        accepted = (
            "train.noise_scale compares gradients with their mean, which is not made; leave one "
            "of the two out"
        )
        raise ConfigError(refusal("gradient_sync.name", gradient_sync.name, accepted))
    if train.layer_gradient_norms and gradient_sync.averages_parameters:
        accepted = "every device has a gradient of its own; leave train.layer_gradient_norms out"
        raise ConfigError(refusal("gradient_sync.name", gradient_sync.name, accepted))
    # With loss scaling, error feedback would have another scale, or not be finite.
    hides_overflow = gradient_sync.keeps_state or gradient_sync.is_lossy
    if model.compute_dtype == "float16" and hides_overflow:
        accepted = f'with {name} a gradient that overflows is not seen everywhere; use "bfloat16"'
        raise ConfigError(refusal("model.compute_dtype", "float16", accepted))
    if gradient_sync.averages_parameters:
        if model.has_batch_norm:
            require_local_batch_norm(layout)
        if averaging is not None:
            accepted = (
                f'gradient_sync.name="{gradient_sync.name}" evaluates an average of its own; '
                "leave it out"
            )
            raise ConfigError(refusal("averaging.name", averaging.name, accepted))


def require_local_batch_norm(layout: LayoutConfig) -> None:
    """Refuse BatchNorm over all devices with local SGD, whose steps have no communication.

    Raises:
        ConfigError: naming the accepted value.
    """
    if layout.bn_scope != "local":
        accepted = 'steps of gradient_sync.name="local_sgd" do not communicate; use "local"'
        raise ConfigError(refusal("layout.bn_scope", layout.bn_scope, accepted))


def require_local_sgd_within_run(
    gradient_sync: LocalSgdConfig | None, batch: BatchConfig, train: TrainConfig
) -> None:
    """Refuse local SGD that begins after the last epoch, or together with a ramp of the batch."""
    if gradient_sync is None:
        return
    if gradient_sync.begin_epoch >= train.epochs:
        accepted = f"it must be below train.epochs={train.epochs}"
        raise ConfigError(refusal("gradient_sync.begin_epoch", gradient_sync.begin_epoch, accepted))
    if gradient_sync.begin_epoch and batch.ramp_epochs:
        accepted = "its steps are those of one batch; leave batch.ramp_epochs out"
        raise ConfigError(refusal("gradient_sync.begin_epoch", gradient_sync.begin_epoch, accepted))


def require_power_of_two_devices(gradient_sync: GradientSyncConfig | None, devices: int) -> None:
    """Refuse Adasum over a number of devices that is not a power of two.

    Raises:
        ConfigError: naming the nearest powers of two.
    """
    if gradient_sync is not None and gradient_sync.paired_by and devices & (devices - 1):
        below = 1 << (devices.bit_length() - 1)
        accepted = (
            f"{gradient_sync.paired_by} takes devices in pairs, and pairs of pairs: their number "
            f"must be a power of two (nearest: {below} or {2 * below})"
        )
        raise ConfigError(refusal("layout.data", devices, accepted))


# Limits on the number of steps: devices count updates in int32.

MOST_RATES = 2**22
"""Most steps whose learning rates are listed one by one, which takes some seconds and 0.1 GB of
Python numbers; 90 epochs of ImageNet, 32 images at a time, are 3.6 million."""


def require_int32_steps(
    schedule: LearningRateConfig, *, epochs: int, steps_per_epoch: int, global_batch: int
) -> None:
    """Refuse epochs, of the run or in its schedule, that amount to more than `MOST_STEPS` steps.

    Args:
        schedule: schedule of the learning rate.
        epochs: epochs of the run.
        steps_per_epoch: updates in one pass over the data.
        global_batch: samples per update.

    Raises:
        ConfigError: naming the field and its largest value.
    """
    _require_within("train.epochs", epochs, epochs, steps_per_epoch, MOST_STEPS, "counted")
    warmup, (_, warmup_epochs) = schedule.scaled(None)[1], schedule.scaled(global_batch)
    given = (("warmup_epochs", warmup, warmup_epochs), *schedule.last_epochs())
    for name, value, last in given:
        _require_within(f"schedule.{name}", value, last, steps_per_epoch, MOST_STEPS, "counted")


def require_listable_steps(epochs: int, steps_per_epoch: int) -> None:
    """Refuse a run too long for the learning rates of all its steps to be listed.

    Raises:
        ConfigError: naming the most epochs that can be listed.
    """
    _require_within("train.epochs", epochs, epochs, steps_per_epoch, MOST_RATES, "shown")


def _require_within(
    field: str, value: object, epochs: float, steps_per_epoch: int, most: int, what: str
) -> None:
    if epochs * steps_per_epoch > most:
        accepted = (
            f"at most {most:,} steps are {what}, which are {most // steps_per_epoch:,} epochs "
            f"of {steps_per_epoch:,} steps, as data and batch make them"
        )
        raise ConfigError(refusal(field, value, accepted))


def part_count(split: BatchSplit, *, mode: str, has_batch_norm: bool) -> int:
    """Number of parts of a global batch whose gradients the step holds separately before their sum.

    Microbatches count, except in a pipeline, whose stages differentiate all of them at once; so do
    devices along the data axis, except with BatchNorm in mode "jit", where the compiler all-reduces
    gradients. Gradients along the fsdp axis are reduced where they are computed.
    """
    is_summed_by_compiler = mode == "jit" and has_batch_norm
    microbatches = 1 if split.layout.pipeline > 1 else split.microbatches
    return microbatches * (1 if is_summed_by_compiler else split.layout.data)


def require_noise_scale_parts(split: BatchSplit, *, mode: str, has_batch_norm: bool) -> int:
    """The `part_count`, refused unless it is at least 2, as the noise scale needs.

    Raises:
        ConfigError: if there is only one part.
    """
    count = part_count(split, mode=mode, has_batch_norm=has_batch_norm)
    if count == 1:
        accepted = (
            "train.noise_scale compares gradients of parts of a batch, and this layout has one "
            "part; it needs batch.microbatches above 1 (not in a pipeline) or layout.data above 1"
        )
        if has_batch_norm:
            accepted += ' (with BatchNorm in layout.mode="shard_map")'
        raise ConfigError(refusal("batch.microbatches", split.microbatches, accepted))
    return count
