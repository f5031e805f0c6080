"""What a run must be like for its devices to bring their results together in another way than by
the mean of gradients.

Knows each exchange and which parts of a run do not go with it; nothing of how it is done.
"""

from scalejax.errors import ConfigError, refusal
from scalejax.exchange_config import (
    AdasumConfig,
    ExchangeConfig,
    LocalSgdConfig,
    TopKConfig,
    TwoBitConfig,
    keeps_state,
)
from scalejax.model_config import ModelConfig
from scalejax.optimizer_config import OptimizerConfig, ScheduleFreeConfig
from scalejax.run_checks import has_batch_norm
from scalejax.training_config import AveragingConfig, BatchConfig, LayoutConfig, TrainConfig


def require_exchangeable(
    exchange: ExchangeConfig | None,
    model: ModelConfig,
    batch: BatchConfig,
    optimizer: OptimizerConfig,
    averaging: AveragingConfig | None,
    layout: LayoutConfig,
    train: TrainConfig,
) -> None:
    """Refuse what does not go with `exchange`.

    Raises:
        ConfigError: naming the field of the other part, and what it may be.
    """
    if exchange is None:
        return
    name = f"exchange.name={exchange.name!r}"
    if layout.mode != "shard_map":
        accepted = (
            f'with {name} the step itself places the collectives; use "shard_map" '
            "(--layout.mode shard_map)"
        )
        raise ConfigError(refusal("layout.mode", layout.mode, accepted))
    if train.noise_scale is not None:
        accepted = (
            "train.noise_scale compares gradients with their mean, which is not made; leave one "
            "of the two out"
        )
        raise ConfigError(refusal("exchange.name", exchange.name, accepted))
    # What is left of a gradient for the next one would be of another scale, or not finite.
    is_hiding = isinstance(exchange, TwoBitConfig | TopKConfig)
    if model.compute_dtype == "float16" and (keeps_state(exchange) or is_hiding):
        accepted = f'with {name} a gradient that overflows is not seen everywhere; use "bfloat16"'
        raise ConfigError(refusal("model.compute_dtype", "float16", accepted))
    if isinstance(exchange, LocalSgdConfig):
        _require_averaged(exchange, model, optimizer, averaging, layout)
        _require_begun(exchange, batch, train)


def _require_averaged(
    exchange: LocalSgdConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    averaging: AveragingConfig | None,
    layout: LayoutConfig,
) -> None:
    """Refuse what needs the average of the devices in every step."""
    if has_batch_norm(model):
        require_own_batch_norm(layout)
    if averaging is not None:
        accepted = 'exchange.name="local_sgd" evaluates an average of its own; leave it out'
        raise ConfigError(refusal("averaging.name", averaging.name, accepted))
    if isinstance(optimizer, ScheduleFreeConfig):
        accepted = 'it evaluates an average of its own, as exchange.name="local_sgd"; use another'
        raise ConfigError(refusal("optimizer.name", optimizer.name, accepted))


def require_own_batch_norm(layout: LayoutConfig) -> None:
    """Refuse BatchNorm over all devices, where they exchange nothing within a step.

    Raises:
        ConfigError: saying what to use.
    """
    if layout.bn_scope != "local":
        accepted = 'exchange.name="local_sgd" exchanges nothing within a step; use "local"'
        raise ConfigError(refusal("layout.bn_scope", layout.bn_scope, accepted))


def _require_begun(exchange: LocalSgdConfig, batch: BatchConfig, train: TrainConfig) -> None:
    """Refuse a beginning when the run is over, and one that is counted in steps of one batch."""
    if exchange.begin_epoch >= train.epochs:
        accepted = f"it must be below train.epochs={train.epochs}"
        raise ConfigError(refusal("exchange.begin_epoch", exchange.begin_epoch, accepted))
    if exchange.begin_epoch and batch.ramp_epochs:
        accepted = "its steps are those of one batch; leave batch.ramp_epochs out"
        raise ConfigError(refusal("exchange.begin_epoch", exchange.begin_epoch, accepted))


def require_paired_devices(exchange: ExchangeConfig | None, devices: int) -> None:
    """Refuse a number of devices along data that cannot be halved down to one, where their
    gradients are taken in pairs.

    Raises:
        ConfigError: naming the nearest that can.
    """
    if isinstance(exchange, AdasumConfig) and devices & (devices - 1):
        below = 1 << (devices.bit_length() - 1)
        accepted = (
            'exchange.name="adasum" takes devices in pairs, and pairs of pairs: their number must '
            f"be a power of two (nearest: {below} or {2 * below})"
        )
        raise ConfigError(refusal("layout.data", devices, accepted))
