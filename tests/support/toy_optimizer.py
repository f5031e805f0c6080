"""An optimizer in one module: signSGD (Bernstein et al. 2018, arXiv 1802.04434, algorithm 1)."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from scalejax.config.optimizer import OptimizerConfig
from scalejax.training.optimizers import build_optimizer
from scalejax.training.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSgdConfig(OptimizerConfig):
    """Steps along the signs of the gradient."""

    is_layer_wise = True
    name: Literal["sign_sgd"] = "sign_sgd"
    """Selects this optimizer."""
    stretch: float = 1.0
    """Factor on every step."""

    @property
    def moments(self) -> Literal[0]:
        """None."""
        return 0


@build_optimizer.register
def _sign_sgd(
    config: SignSgdConfig, schedule: Schedule, **_: object
) -> optax.GradientTransformation:
    signs = optax.stateless(
        lambda updates, _: jax.tree.map(lambda leaf: config.stretch * jnp.sign(leaf), updates)
    )
    return optax.chain(signs, optax.scale_by_learning_rate(schedule))
