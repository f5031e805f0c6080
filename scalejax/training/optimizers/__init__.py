"""Optimizers: Optax chains from a gradient to an update, with masks by parameter path.

Knows paths and which parameters are stacked over layers; nothing of networks.
"""

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path
from optax import GradientTransformation

from scalejax.config.optimizer import (
    AdafactorConfig,
    AdagradConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    LambConfig,
    LarsConfig,
    LionConfig,
    MarsConfig,
    MatrixOptimizerConfig,
    MomentType,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeConfig,
    SgdConfig,
    ShampooConfig,
    SoapConfig,
    SophiaConfig,
)
from scalejax.models import parameter_path
from scalejax.models.lora import ADAPTERS
from scalejax.training.optimizers.eight_bits import kept_in_8_bits
from scalejax.training.optimizers.loss_scale import LossScaled
from scalejax.training.optimizers.matrices import HiddenMatrices, MatrixAxes
from scalejax.training.optimizers.own import own_optimizer
from scalejax.training.optimizers.parametrization import Parametrization, parametrized
from scalejax.training.optimizers.preconditioned import scale_by_shampoo, scale_by_soap
from scalejax.training.optimizers.sophia import scale_by_sophia
from scalejax.training.optimizers.transformations import cautious, corrected_by_the_last
from scalejax.training.optimizers.trust_ratio import Ratio, scale_by_layer
from scalejax.training.schedules import Schedule

DECAYED = ("kernel", "embedding", "router", *ADAPTERS)
"""Last parts of the paths of weights; all other parameters are biases and normalisation."""

Mask = Callable[[Any], Any]
"""Function from a tree of parameters to a tree of booleans that select them."""


@singledispatch
def build_optimizer(
    config: OptimizerConfig,
    schedule: Schedule,
    *,
    hidden: HiddenMatrices,
    parametrization: Parametrization | None = None,
) -> GradientTransformation:
    """The Optax transformation that `config` names; its updates are added to the parameters.

    Each optimizer registers its own, by the class of its config.

    Args:
        config: which optimizer, and its numbers.
        schedule: the learning rate by step.
        hidden: the hidden matrices of the network, which Muon, SOAP and Shampoo treat as such; and
            which parameters are stacked, so that each of their layers has its own ratio in LARS and
            LAMB.
        parametrization: how rates of AdamW and Lion follow from the network's size; None if they
            do not.
    """
    raise NotImplementedError(f"build_optimizer is not registered for {type(config).__name__}")


@singledispatch
def evaluated_params(config: OptimizerConfig, opt_state: Any, params: Any) -> Any:
    """The parameters to evaluate: the trained ones, unless `config.averages_iterates`."""
    return params


@build_optimizer.register
def _sgd(config: SgdConfig, schedule: Schedule, **_: object) -> GradientTransformation:
    decayed = optax.add_decayed_weights(config.weight_decay, _mask(config))
    if not config.momentum:
        return optax.chain(decayed, optax.identity(), optax.scale_by_learning_rate(schedule))
    return optax.chain(decayed, *_momentum(config, schedule))


@build_optimizer.register
def _adamw(
    config: AdamWConfig,
    schedule: Schedule,
    *,
    hidden: HiddenMatrices,
    parametrization: Parametrization | None = None,
) -> GradientTransformation:
    mu_dtype, nu_dtype = (_type_of(each) for each in (config.mu_dtype, config.nu_dtype))
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=mu_dtype)
    adam = _with_second_moment_in(nu_dtype, adam)
    if config.has_blocks:
        signs = {"mu": (config.mu_dtype, True), "nu": (config.nu_dtype, False)}
        in_blocks = {name: sign for name, (kind, sign) in signs.items() if kind == "blockwise8"}
        adam = kept_in_8_bits(adam, in_blocks)
    adam = cautious(adam, hidden.stacked) if config.cautious else adam
    return optax.chain(
        parametrized(parametrization, adam, hidden),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )


def _type_of(kind: MomentType) -> str:
    """The element type of a moment outside of blocks."""
    return "float32" if kind == "blockwise8" else kind


def _with_second_moment_in(dtype: str, adam: GradientTransformation) -> GradientTransformation:
    """`adam` in float32 whatever the type of the parameters, with its second moment kept in `dtype`
    (Optax has such an option for the first only)."""

    def kept(state: Any, dtype: Any) -> Any:
        return state._replace(nu=jax.tree.map(lambda leaf: leaf.astype(dtype), state.nu))

    def init(params: Any) -> Any:
        return kept(adam.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), updates)
        updates, state = adam.update(updates, kept(state, jnp.float32), params)
        return updates, kept(state, dtype)

    return GradientTransformation(init, update)


@build_optimizer.register
def _custom(
    config: CustomOptimizerConfig, schedule: Schedule, **_: object
) -> GradientTransformation:
    return own_optimizer(config, schedule)


@build_optimizer.register
def _lion(
    config: LionConfig,
    schedule: Schedule,
    *,
    hidden: HiddenMatrices,
    parametrization: Parametrization | None = None,
) -> GradientTransformation:
    lion = optax.scale_by_lion(config.beta1, config.beta2, mu_dtype=_type_of(config.mu_dtype))
    lion = kept_in_8_bits(lion, {"mu": True}) if config.has_blocks else lion
    lion = cautious(lion, hidden.stacked) if config.cautious else lion
    return optax.chain(
        parametrized(parametrization, lion, hidden),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )


@build_optimizer.register
def _mars(config: MarsConfig, schedule: Schedule, **_: object) -> GradientTransformation:
    return optax.chain(
        corrected_by_the_last(config.gamma * config.beta1 / (1 - config.beta1)),
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )


@build_optimizer.register
def _sophia(config: SophiaConfig, schedule: Schedule, **_: object) -> GradientTransformation:
    return optax.chain(
        scale_by_sophia(config),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )


@build_optimizer.register
def _adafactor(config: AdafactorConfig, schedule: Schedule, **_: object) -> GradientTransformation:
    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=config.decay_exponent, min_dim_size_to_factor=config.smallest_factored
        ),
        optax.clip_by_block_rms(config.clipping_threshold),
        optax.scale_by_param_block_rms() if config.scales_by_parameter else optax.identity(),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )


# --- optimizers of matrices, with AdamW for all else ---


@build_optimizer.register
def _muon(
    config: MuonConfig, schedule: Schedule, *, hidden: HiddenMatrices, **_: object
) -> GradientTransformation:

    def numbers(axes: MatrixAxes | None, _: Any) -> Any:
        assert axes is not None  # noqa: S101  masked otherwise
        return optax.contrib.MuonDimensionNumbers(axes.rows, axes.columns)

    def scaled(axes: MatrixAxes | None, update: jax.Array) -> jax.Array:
        assert axes is not None  # noqa: S101  likewise
        rows, columns = axes.sides(update.shape)
        is_rms = config.scale == "rms"
        return update * (
            0.2 * max(rows, columns) ** 0.5 if is_rms else max(1.0, columns / rows) ** 0.5
        )

    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=config.newton_schulz_steps,
        beta=config.momentum,
        nesterov=config.nesterov,
        weight_dimension_numbers=lambda updates: hidden.mapped(numbers, updates),
    )
    sized = optax.stateless(lambda updates, _: hidden.mapped(scaled, updates))
    return _with_adamw(config, hidden, optax.chain(orthogonal, sized), schedule)


@build_optimizer.register
def _soap(
    config: SoapConfig, schedule: Schedule, *, hidden: HiddenMatrices, **_: object
) -> GradientTransformation:
    return _with_adamw(config, hidden, scale_by_soap(config, hidden), schedule)


@build_optimizer.register
def _shampoo(
    config: ShampooConfig, schedule: Schedule, *, hidden: HiddenMatrices, **_: object
) -> GradientTransformation:
    return _with_adamw(config, hidden, scale_by_shampoo(config, hidden), schedule)


def _with_adamw(
    config: MatrixOptimizerConfig,
    hidden: HiddenMatrices,
    of_matrices: GradientTransformation,
    schedule: Schedule,
) -> GradientTransformation:
    """`of_matrices` for hidden matrices, and AdamW for all other parameters."""
    decayed = optax.add_decayed_weights(config.weight_decay, _mask(config))
    adam = optax.scale_by_adam(config.adamw_beta1, config.adamw_beta2, config.epsilon)
    others = optax.chain(adam, decayed, optax.scale(config.adamw_rate_factor))
    return optax.chain(
        optax.masked(optax.chain(of_matrices, decayed), hidden.is_matrix),
        optax.masked(others, hidden.is_other),
        optax.scale_by_learning_rate(schedule),
    )


@build_optimizer.register
def _adagrad(config: AdagradConfig, schedule: Schedule, **_: object) -> GradientTransformation:
    return optax.adagrad(schedule, config.initial_accumulator, config.epsilon)


@build_optimizer.register
def _lars(
    config: LarsConfig, schedule: Schedule, *, hidden: HiddenMatrices, **_: object
) -> GradientTransformation:
    mask = _mask(config)
    decayed = optax.add_decayed_weights(config.weight_decay, mask)
    ratio = Ratio(coefficient=config.trust_coefficient)
    if config.variant == "optax":
        scaled = (decayed, optax.masked(scale_by_layer(ratio, hidden.stacked), mask))
    else:
        # The ratio uses the gradient alone, and also scales the weight decay added here.
        ratio = Ratio(coefficient=config.trust_coefficient, decay=config.weight_decay)
        scaled = (optax.masked(scale_by_layer(ratio, hidden.stacked), mask),)
    return optax.chain(*scaled, *_momentum(config, schedule))


@build_optimizer.register
def _lamb(
    config: LambConfig, schedule: Schedule, *, hidden: HiddenMatrices, **_: object
) -> GradientTransformation:
    is_nvidias, mask = config.variant == "nvlamb", _mask(config)
    bound = config.weight_norm_bound if config.variant == "paper" else None
    ratio = scale_by_layer(Ratio(weight_norm_bound=bound, clip=config.trust_clip), hidden.stacked)
    return optax.chain(
        *([optax.clip_by_global_norm(1.0)] if is_nvidias else []),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask),
        optax.masked(ratio, _everything if is_nvidias else mask),
        optax.scale_by_learning_rate(schedule),
    )


@build_optimizer.register
def _schedule_free(
    config: ScheduleFreeConfig, schedule: Schedule, **_: object
) -> GradientTransformation:
    adapted = optax.scale_by_rms(
        config.beta2, config.epsilon, eps_in_sqrt=False, bias_correction=True
    )
    base = optax.chain(  # without momentum: averaging replaces it
        adapted if config.base == "adamw" else optax.identity(),
        optax.add_decayed_weights(config.weight_decay, _mask(config)),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.contrib.schedule_free(base, schedule, b1=config.interpolation)


@evaluated_params.register
def _averaged(config: ScheduleFreeConfig, opt_state: Any, params: Any) -> Any:
    inner = opt_state.inner if isinstance(opt_state, LossScaled) else opt_state
    return optax.contrib.schedule_free_eval_params(inner, params)


# --- momentum, and where the learning rate enters it ---


def _momentum(
    config: SgdConfig | LarsConfig, schedule: Schedule
) -> tuple[GradientTransformation, GradientTransformation]:
    """The momentum buffer and the learning rate, in the order of the config's form."""
    buffer = optax.trace(config.momentum, config.nesterov)
    rate = optax.scale_by_learning_rate(schedule)
    match config.momentum_form:
        case "rate_outside":
            return buffer, rate
        case "rate_inside":
            return rate, buffer
        case "rate_inside_corrected":
            return rate, _corrected(buffer, schedule)


class _CorrectedState(NamedTuple):
    updates_made: jax.Array
    buffer: optax.OptState


def _corrected(buffer: GradientTransformation, schedule: Schedule) -> GradientTransformation:
    """`buffer`, an `optax.trace`, with momentum correction for a changed learning rate.

    The buffer is multiplied by r / r_before, so that equation 10 of Goyal et al. 2017 (section 3,
    remark 2, arXiv 1706.02677) equals equation 9. After a rate of 0 the buffer is 0 anyway.
    """

    def init(params: Any) -> _CorrectedState:
        return _CorrectedState(jnp.zeros((), jnp.int32), buffer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        before = schedule(jnp.maximum(state.updates_made - 1, 0))
        ratio = jnp.where(
            before == 0, 1.0, schedule(state.updates_made) / jnp.where(before, before, 1)
        )
        corrected = jax.tree.map(lambda leaf: leaf * ratio, state.buffer)
        updates, new_buffer = buffer.update(updates, corrected, params)
        return updates, _CorrectedState(state.updates_made + 1, new_buffer)

    return GradientTransformation(init, update)


# --- masks ---


def _mask(config: Any) -> Mask:
    return _everything if config.decays_norm_and_bias else _weights


def _weights(params: Any) -> Any:
    """True for kernels and embeddings, by the last part of the path."""
    return tree_map_with_path(
        lambda path, _: parameter_path(path).rpartition("/")[2] in DECAYED, params
    )


def _everything(params: Any) -> Any:
    return jax.tree.map(lambda _: True, params)
