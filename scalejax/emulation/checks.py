"""Checks whether a run can be emulated: makes every refusal before anything is computed.

Knows configs; nothing of how a run is emulated.
"""

import math

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.emulation import EmulationConfig
from scalejax.config.optimizer import SophiaConfig
from scalejax.config.parallelism import MODEL_AXES
from scalejax.config.run import ResolvedRun, RunConfig, with_fields
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.facts import resolve
from scalejax.emulation.virtual_cluster import Durations, are_returning

_MOST_TRIES = 10_000
"""Largest accepted mean number of tries of a round; each recomputes its gradients."""


def emulated_run(
    config: RunConfig, facts: DatasetFacts | None = None
) -> tuple[ResolvedRun, EmulationConfig]:
    """The run of each worker, on its own device, and the emulation config.

    `batch.per_device_batch` is the batch of a worker: the global batch of synchronous workers is
    that times the number of workers whose gradients count.

    Args:
        config: the run, with an [emulation].
        facts: counts and shapes of the data; if None, they are read.

    Raises:
        ConfigError: if the run cannot be emulated, naming the field.
    """
    emulation = config.emulation
    if emulation is None:
        raise ConfigError(
            "emulation.algorithm is missing: give --algorithm NAME (downpour, synchronous, ...), "
            "or an [emulation] table."
        )
    _require_plain(config)
    counted = emulation.sharing_workers
    if counted < 1:
        accepted = f"it must leave one of emulation.workers={emulation.workers}"
        backup = emulation.workers - counted
        raise ConfigError(refusal("emulation.algorithm.backup_workers", backup, accepted))
    if config.batch.per_device_batch is not None:
        samples = config.batch.per_device_batch * counted
        config = with_fields(
            config, {"batch.per_device_batch": None, "batch.global_batch": samples}
        )
    run = resolve(config, 1, facts)
    if run.split.global_batch % counted:
        accepted = (
            f"it must be a multiple of {counted}, the workers whose gradients an update is of"
        )
        raise ConfigError(refusal("batch.global_batch", run.split.global_batch, accepted))
    if emulation.core.divides_examples:
        require_enough(
            emulation.workers, run.split.global_batch // counted, run.dataset.train_examples
        )
    _require_parts(config, emulation)
    _require_loss_alone(config, emulation)
    _require_returning(emulation)
    return run, emulation


def require_enough(workers: int, minibatch: int, examples: int) -> None:
    """Refuse so many workers that some have less than a minibatch of the examples.

    Raises:
        ConfigError: naming the largest number of workers with enough examples.
    """
    if workers * minibatch > examples:
        most = max(1, examples // minibatch)
        accepted = (
            f"each has a part of the {examples} training examples for itself, and takes "
            f"{minibatch} of it at a time (nearest: {most})"
        )
        raise ConfigError(refusal("emulation.workers", workers, accepted))


def _require_plain(config: RunConfig) -> None:
    """Refuse features of training that emulated workers with servers do not have."""
    layout, model = config.layout, config.model
    for axis in ("data", *MODEL_AXES):
        if getattr(layout, axis) not in (None, 1):
            accepted = "each worker of an emulation has one device; say how many by --workers"
            raise ConfigError(refusal(f"layout.{axis}", getattr(layout, axis), accepted))
    if model.has_batch_norm:
        accepted = (
            "its BatchNorm has running statistics that no server holds; networks without are "
            "mlp, alexnet, vgg, gpt, llama, bert, vit"
        )
        raise ConfigError(refusal("model.name", model.name, accepted))
    if model.expert_count:
        accepted = "losses and loads of its experts are of whole batches; leave it out"
        raise ConfigError(refusal("model.moe.experts", model.expert_count, accepted))
    if model.compute_dtype == "float16":
        accepted = 'its loss scale is of one optimizer; take "bfloat16" or "float32"'
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))
    if config.gradient_sync is not None:
        accepted = (
            "it is of devices that train here; an emulation has --algorithm, and its compression"
        )
        raise ConfigError(refusal("gradient_sync.name", config.gradient_sync.name, accepted))
    if config.dropout is not None:
        raise ConfigError("[dropout] is refused: emulate numbers no rows; leave it out.")
    for name in ("averaging", "fine_tuning"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"[{name}] is refused: emulate trains all parameters, and keeps none."
            )
    if config.batch.microbatches != 1 or config.batch.ramp_epochs:
        field = "microbatches" if config.batch.microbatches != 1 else "ramp_epochs"
        accepted = "a worker of an emulation takes its minibatch at once, and always as large"
        raise ConfigError(refusal(f"batch.{field}", getattr(config.batch, field), accepted))
    if config.input.remainder == "pad" or config.input.unreadable == "skip":
        field = "remainder" if config.input.remainder == "pad" else "unreadable"
        accepted = "all samples of a minibatch count in an emulation; leave it out"
        raise ConfigError(refusal(f"input.{field}", getattr(config.input, field), accepted))
    _require_plain_training(config)
    if config.optimizer.averages_iterates:
        accepted = "servers hold no average; take sgd, adagrad or adamw"
        raise ConfigError(refusal("optimizer.name", config.optimizer.name, accepted))


def _require_plain_training(config: RunConfig) -> None:
    """Refuse training options that need all minibatches or evaluations on one device."""
    augmentation, train = config.input.augmentation, config.train
    for name in ("mixup_alpha", "cutmix_alpha"):
        if augmentation is not None and (alpha := getattr(augmentation, name)):
            accepted = "it mixes neighbours of a batch, which workers divide; leave it 0"
            raise ConfigError(refusal(f"input.augmentation.{name}", alpha, accepted))
    if config.tracking is not None:
        raise ConfigError("[tracking] is refused: emulate has no trackers; leave it out.")
    if train.layer_gradient_norms:
        accepted = "emulate does not measure them; leave it out"
        raise ConfigError(refusal("train.layer_gradient_norms", True, accepted))
    if train.noise_scale is not None:
        raise ConfigError("[train.noise_scale] is refused: emulate does not measure it.")
    if train.sharpness is not None:
        raise ConfigError("[train.sharpness] is refused: emulate does not measure it.")
    if train.early_stopping is not None:
        raise ConfigError(
            "[train.early_stopping] is refused: an emulation makes all of train.epochs; leave it "
            "out, and read the curve for where it would stop."
        )
    if train.metric_average == "devices":
        accepted = 'an emulation evaluates on one device; take "examples"'
        raise ConfigError(refusal("train.metric_average", "devices", accepted))


def _require_parts(config: RunConfig, emulation: EmulationConfig) -> None:
    """Refuse a layer-wise optimizer, clipping and rates by layer, if servers hold parts of layers;
    and an optimizer that needs more than gradients."""
    if isinstance(config.optimizer, SophiaConfig):
        accepted = (
            "workers send gradients of targets alone, and none of sampled labels; use another"
        )
        raise ConfigError(refusal("optimizer.name", config.optimizer.name, accepted))
    parametrization = getattr(config.model, "parametrization", None)
    if emulation.server_shards > 1 and parametrization is not None:
        accepted = f"{parametrization.name} has a rate for each layer; it must be 1"
        raise ConfigError(refusal("emulation.server_shards", emulation.server_shards, accepted))
    if emulation.server_shards > 1 and config.clipping is not None:
        accepted = "[clipping] takes the norm of whole gradients; it must be 1"
        raise ConfigError(refusal("emulation.server_shards", emulation.server_shards, accepted))
    if emulation.server_shards > 1 and config.optimizer.is_layer_wise:
        accepted = f"{config.optimizer.name} takes norms of whole layers; it must be 1"
        raise ConfigError(refusal("emulation.server_shards", emulation.server_shards, accepted))


def _require_loss_alone(config: RunConfig, emulation: EmulationConfig) -> None:
    """Refuse weight decay if it would be ignored: L-BFGS has no optimizer."""
    decay = getattr(config.optimizer, "weight_decay", 0.0)
    if decay and not emulation.core.has_optimizer:
        accepted = "sandblaster steps by the gradient of the loss, and has no optimizer; leave it 0"
        raise ConfigError(refusal("optimizer.weight_decay", decay, accepted))


def _require_returning(emulation: EmulationConfig) -> None:
    """Refuse workers that never restart if others wait for them."""
    if emulation.core.waits_for_all and not are_returning(emulation.failures):
        raise ConfigError(
            "emulation.failures.worker_restart_seconds is missing: others wait for a worker that "
            "fails, and it must come back."
        )


def require_progress(run: ResolvedRun, emulation: EmulationConfig, times: Durations) -> None:
    """Refuse workers that fail so often that a round would hardly ever complete.

    One worker that fails every M seconds on average repeats a round of L seconds until it
    survives one, exp(L / M) times (times to failure are exponential). A collective needs all N
    workers at once, each of which is available for M of M + R + L seconds, with R for its restart:
    ((M + R + L) / M)^N tries.

    Raises:
        ConfigError: if that is more than 10,000, naming the shortest mean time between failures.
    """
    failures = emulation.failures
    if failures.worker_mtbf_seconds is None:
        return
    stragglers = emulation.stragglers
    slowest = max(1.0, stragglers.slow_factor) if stragglers.slow_share else 1.0
    round_seconds = emulation.core.round_steps(run.total_steps) * times.gradient_seconds * slowest
    least = round_seconds / math.log(_MOST_TRIES)
    if emulation.core.is_all_reduced:
        away = (failures.worker_restart_seconds or 0.0) + round_seconds
        least = max(least, away / math.expm1(math.log(_MOST_TRIES) / emulation.workers))
    if failures.worker_mtbf_seconds < least:
        accepted = (
            f"a round of {round_seconds:.4g} s would be tried more than {_MOST_TRIES} times before "
            f"workers live through it (at least {least:.4g} s)"
        )
        field = "emulation.failures.worker_mtbf_seconds"
        raise ConfigError(refusal(field, failures.worker_mtbf_seconds, accepted))
