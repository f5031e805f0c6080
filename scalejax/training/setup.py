"""The train setup of a run: network, optimizer and learning-rate schedule built from its config.

Knows no state and no gradient, and of a mesh only the kind of its devices.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike

from scalejax.config.model import (
    DecoderConfig,
    ModelConfig,
    float8_type,
    with_activation_type,
)
from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.models import (
    BatchNormScope,
    NetworkWithFeatures,
    attention,
    build_network,
    network_class,
)
from scalejax.models.attention_blocks import has_fused_blocks
from scalejax.models.fsdp import in_float8
from scalejax.models.lora import add_adapters
from scalejax.training.losses import require_loss
from scalejax.training.optimizers import build_optimizer
from scalejax.training.optimizers.fine_tuning import freeze_norms, with_rate_factors
from scalejax.training.optimizers.loss_scale import with_loss_scale
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.optimizers.parametrization import Parametrization
from scalejax.training.optimizers.transformations import with_clipping
from scalejax.training.schedules import Schedule, learning_rate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """Network, optimizer and schedule of a run's training step."""

    run: ResolvedRun
    """The run, with its attention implementation resolved."""
    optimizer: optax.GradientTransformation
    """Optimizer of the trainable parameters; in float16 it takes gradients of a scaled loss."""
    schedule: optax.Schedule
    """Learning rate by updates made."""


def train_setup(
    run: ResolvedRun, mesh: Mesh | None = None, schedule: Schedule | None = None
) -> TrainSetup:
    """The train setup of `run` for the devices of `mesh`; if None, with plain JAX operations only.

    `schedule`, if given, replaces the learning rate of the config.

    Raises:
        ConfigError: if fused attention is required but the devices or this JAX lack it; if the
            user's own loss or optimizer is not a valid one.
    """
    _require_trained(run.config)
    require_loss(run.config.loss, run.dataset)
    device = None if mesh is None else mesh.devices.flat[0]
    if device is not None and lacks_fused_blocks(run):
        # Other reasons are refused with the layout; this one does not depend on the run.
        if getattr(run.config.model, "attention", None) == "fused":
            accepted = 'this JAX has no fused kernel of a block of keys; use "auto" or "unfused"'
            raise ConfigError(refusal("model.attention", "fused", accepted))
        device = None
    model = attention.with_resolved_attention(run.config.model, device)
    run = replace(run, config=replace(run.config, model=model))
    schedule = schedule or schedule_of(run)
    network = network_class(run.config.model)
    hidden = HiddenMatrices(network.stacked, network.fused, network.output_layers(model))
    described = run.config.schedule.scaled_optimizer(run.config.optimizer, run.split.global_batch)
    size = None
    if isinstance(model, DecoderConfig) and model.parametrization is not None:
        size = Parametrization(width=model.width_ratio, depth=model.depth_ratio)
    optimizer = build_optimizer(described, schedule, hidden=hidden, parametrization=size)
    optimizer = with_clipping(run.config.clipping, optimizer, hidden.stacked)
    optimizer = with_rate_factors(run.config.fine_tuning, optimizer)
    if model.compute_dtype == "float16":
        optimizer = with_loss_scale(optimizer)
    return TrainSetup(run=run, optimizer=optimizer, schedule=schedule)


def lacks_fused_blocks(run: ResolvedRun) -> bool:
    """Whether context-parallel attention goes by blocks that cannot be fused: blocks have no
    windows, a shard of gathered keys does not split into two chunks, or this JAX lacks the
    kernel."""
    layout, model = run.config.layout, run.config.model
    if layout.context == 1 or not attention.goes_by_blocks(layout.context_strategy, "fused"):
        return False
    if isinstance(model, DecoderConfig) and model.lacks_for_context("ring"):
        return True
    return run.dataset.input_shape[0] % (2 * layout.context) > 0 or not has_fused_blocks()


def schedule_of(run: ResolvedRun) -> Schedule:
    """The learning rate by updates made; if the batch grows, by the samples seen so far."""
    schedule = learning_rate_schedule(
        run.config.schedule,
        global_batch=run.split.global_batch,
        steps_per_epoch=run.steps_per_epoch,
        total_steps=run.steps_per_epoch * run.config.train.epochs,
    )
    phases = run.phases
    if len(phases) == 1:
        return schedule
    exponent = {"none": 0.0, "linear": 1.0, "root": 0.5}[run.config.batch.ramp_scaling]

    def by_samples(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        epoch, factor = jnp.zeros(step.shape, jnp.float32), jnp.ones(step.shape, jnp.float32)
        for phase in phases:
            within = (step - phase.first_step) / phase.steps_per_epoch
            is_later = step >= phase.first_step
            epoch = jnp.where(is_later, phase.first_epoch + within, epoch)
            growth = phase.split.global_batch / run.split.global_batch
            factor = jnp.where(is_later, growth**exponent, factor)
        return factor * schedule(epoch * run.steps_per_epoch)  # exact where an epoch begins

    return by_samples


def _require_trained(config: RunConfig) -> None:
    """Refuse compute types and schedules that can be costed but not trained, or not in this run."""
    model, schedule = config.model, config.layout.pipeline_schedule
    if schedule == "dualpipe":
        accepted = (
            "it is for costing only: predict and explain can cost it, but nothing trains two "
            'stages per device; use "1f1b"'
        )
        raise ConfigError(refusal("layout.pipeline_schedule", schedule, accepted))
    for name, is_asked in (
        ("expert_tensor", config.layout.spreads_experts),
        ("overlap_expert_exchange", config.layout.overlap_expert_exchange),
        ("pipeline_counts_ends", config.layout.pipeline_counts_ends),
    ):
        if is_asked:
            accepted = (
                "it is for costing only: predict and explain can cost it in frameworks that "
                "have it (--framework megatron-core-2026), but scalejax cannot train with it; "
                "leave it out"
            )
            raise ConfigError(refusal(f"layout.{name}", getattr(config.layout, name), accepted))
    if model.compute_dtype == "float4":
        accepted = (
            "it is for costing only: predict, explain and search can cost linear layers in "
            'it, but scalejax cannot train in it; use "bfloat16" or "mxfp8"'
        )
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))
    for name in ("moe", "mtp"):
        if float8_type(model) is not None and getattr(model, name, None) is not None:
            accepted = (
                f"with model.{name} it is for costing only: the products of its layers would train "
                f'in bfloat16; use "bfloat16", or leave model.{name} out'
            )
            raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))
    if float8_type(model) != "float8_delayed":
        return
    if config.layout.pipeline > 1 and schedule == "gpipe":
        accepted = (
            "with model.compute_dtype='float8_delayed' a pipeline keeps the largest values of each "
            'microbatch in "1f1b" and "zb_h1"; use one of these, or another compute_dtype'
        )
        raise ConfigError(refusal("layout.pipeline_schedule", "gpipe", accepted))
    for name in ("local_sgd", "emulation"):
        if getattr(config, name) is not None:
            accepted = (
                f"with {name} workers would each have a history of largest values of their own; "
                'use "float8", "mxfp8" or "bfloat16"'
            )
            raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))


def has_batch_norm(model: ModelConfig, model_state: Any) -> bool:
    """Whether these statistics are those of BatchNorm, which a user's own network may have. Those
    of experts and of fp8 are sums and largest values, which cover all devices from the start.
    """
    is_other = model.expert_count > 0 or float8_type(model) == "float8_delayed"
    return bool(jax.tree.leaves(model_state)) and not is_other


def reads_features(config: RunConfig) -> bool:
    """Whether the step takes precomputed features in place of images."""
    return config.fine_tuning is not None and config.fine_tuning.cache_features


def with_features(network: nnx.Module) -> NetworkWithFeatures:
    """`network` as one whose backbone and last layer can be called separately.

    Raises:
        ConfigError: if they cannot.
    """
    if not isinstance(network, NetworkWithFeatures):
        accepted = (
            f"{type(network).__name__} has no methods features and classified, which are its parts "
            "before and after them; efficientnet_lite0 has"
        )
        raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))
    return network


def feature_width(setup: TrainSetup) -> int:
    """Number of features per example that the last layer of the network reads.

    Raises:
        ConfigError: if the network's last layer cannot be called separately.
    """
    if setup.run.dataset.is_text:
        accepted = "texts have a target at every position, and no features of the whole text"
        raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))
    images = jax.ShapeDtypeStruct((1, *setup.run.dataset.input_shape), jnp.float32)

    def features(images: jax.Array) -> jax.Array:
        network = with_features(network_of(setup, BatchNormScope()))
        return network.features(images, is_training=False)

    return jax.eval_shape(features, images).shape[-1]


def network_with(
    setup: TrainSetup, bn: BatchNormScope, params: Any, model_state: Any
) -> nnx.Module:
    """The network with these parameters and running statistics."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: network_of(setup, bn)))
    return nnx.merge(graph, nnx.State(params), nnx.State(model_state))


def network_of(setup: TrainSetup, bn: BatchNormScope) -> nnx.Module:
    """The network initialised from the run's seed."""
    run = setup.run
    rngs, model = nnx.Rngs(run.config.seed), run.config.model
    network = build_network(with_activation_type(model), run.dataset, bn=bn, rngs=rngs)
    if (recipe := float8_type(model)) is not None and isinstance(model, DecoderConfig):
        in_float8(network, recipe, model.amax_history_length)
    tuning = run.config.fine_tuning
    freeze_norms(tuning, network)
    if tuning is not None and tuning.lora is not None:
        add_adapters(tuning.lora, network, rngs)  # last: the base is drawn as if there were none
    return network
