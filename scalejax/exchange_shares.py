"""In which part of the steps of a run its devices exchange what, where it is not in all of them.

Knows what local SGD says of its steps; nothing of how it is done. Needs no JAX.
"""

from scalejax.config import ResolvedRun
from scalejax.exchange_config import LocalSgdConfig

AVERAGE, SYNCHRONOUS = "average_of_parameters", "mean_of_gradients"
"""Scopes of a step under conditions: of local SGD, and of what comes before it begins."""


def begin_step(run: ResolvedRun, config: LocalSgdConfig) -> int:
    """Updates that are made in step with all devices before local SGD begins."""
    return round(config.begin_epoch * run.steps_per_epoch)


def exchange_shares(run: ResolvedRun) -> dict[str, float]:
    """In which part of the steps of `run` each scope runs, 0..1; none if it is not local SGD."""
    config = run.config.exchange
    if not isinstance(config, LocalSgdConfig):
        return {}
    before = config.begin_epoch / run.config.train.epochs
    return {SYNCHRONOUS: before, AVERAGE: (1 - before) / config.every_steps}
