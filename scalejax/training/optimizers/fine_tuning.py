"""Fine-tuning: which parameters of a network are trainable, and learning-rate factors of parts.

Knows paths of parameters; nothing of gradients, meshes and optimizers. A frozen parameter is None
in the trees here, which JAX treats as an empty subtree: its gradient is not computed, reduced or
stored.
"""

from typing import Any

import jax
import optax
from flax import nnx
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from scalejax.config.model import ModelConfig
from scalejax.config.training import FineTuningConfig
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.models import BatchNorm, is_cast, parameter_path
from scalejax.models.lora import ADAPTERS


def trainable(config: FineTuningConfig | None, params: Any) -> Any:
    """`params`, or a tree of the same structure, with None in place of frozen parameters."""
    if config is None or not config.freezes:
        return params
    return tree_map_with_path(
        lambda path, leaf: leaf if _learns(config, parameter_path(path)) else None, params
    )


def with_base_type(config: FineTuningConfig | None, model: ModelConfig, params: Any) -> Any:
    """`params` with frozen matrices and embeddings, which are used in the compute type alone, cast
    to the type in which the base is kept."""
    if config is None or config.base_dtype == "float32":
        return params

    def kept(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = parameter_path(path)
        is_base = is_cast(model, name) and not _learns(config, name)
        return leaf.astype(config.base_dtype) if is_base else leaf

    return tree_map_with_path(kept, params)


def updated(params: Any, learned: Any) -> Any:
    """`params` with the leaves of `learned` that are not None replacing its own."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, learned, params, is_leaf=lambda x: x is None
    )


def freeze_norms(config: FineTuningConfig | None, network: nnx.Module) -> None:
    """Make every BatchNorm of `network` with a frozen scale use its running statistics."""
    if config is None or not config.freezes:
        return
    for path, module in nnx.iter_modules(network):
        if isinstance(module, BatchNorm):
            module.is_frozen = not _learns(config, "/".join(map(str, (*path, "scale"))))


def with_rate_factors(
    config: FineTuningConfig | None, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`optimizer` with updates multiplied by the learning-rate factors of `config`.

    Every update is proportional to the learning rate, so that this trains each part with its own
    rate.
    """
    if config is None or not config.rate_factors:
        return optimizer
    factors = config.rate_factors

    def scaled(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        fitting = [part for part in factors if _is_within(parameter_path(path), part)]
        return update * factors[max(fitting, key=len)] if fitting else update

    return optax.chain(optimizer, optax.stateless(lambda tree, _: tree_map_with_path(scaled, tree)))


def require_known_parts(config: FineTuningConfig | None, params: Any) -> None:
    """Refuse names of parts that the network does not have.

    Raises:
        ConfigError: naming the parts that it has.
    """
    if config is None:
        return
    leaves, _ = tree_flatten_with_path(params)
    paths = [parameter_path(path) for path, _ in leaves]
    for field, parts in (
        ("fine_tuning.trainable", config.trainable),
        ("fine_tuning.rate_factors", tuple(config.rate_factors)),
    ):
        for part in parts:
            if any(_is_within(path, part) for path in paths):
                continue
            if "/" in part:
                beneath = part.split("/")[0]
                found = [path for path in paths if _is_within(path, beneath)]
                raise ConfigError(unknown_name(field, part, found or paths))
            raise ConfigError(unknown_name(field, part, {path.split("/")[0] for path in paths}))
    for part in config.rate_factors:
        if not any(_learns(config, path) for path in paths if _is_within(path, part)):
            accepted = f"all of it is frozen; fine_tuning.trainable={list(config.trainable)}"
            raise ConfigError(refusal("fine_tuning.rate_factors", part, accepted))


def _learns(config: FineTuningConfig, path: str) -> bool:
    is_adapter = path.rpartition("/")[2] in ADAPTERS
    return not config.freezes or is_adapter or any(_is_within(path, p) for p in config.trainable)


def _is_within(path: str, part: str) -> bool:
    """Whether `path` is `part` or lies below it."""
    return path == part or path.startswith(f"{part}/")
