"""What may well be meant in a run and often is not: said, and not refused.

Knows runs as they are resolved; needs no JAX.
"""

from scalejax.config import ResolvedRun
from scalejax.scaling import warmup_epochs


def notes_of(run: ResolvedRun) -> tuple[str, ...]:
    """What a reader should know of `run` before it begins: sentences without full stops."""
    epochs = run.config.train.epochs
    warmup = warmup_epochs(run.config.schedule, run.split.global_batch)
    if warmup <= epochs:
        return ()
    return (
        f"the warmup of {warmup:g} epochs is longer than the run of {epochs}: the learning rate "
        "never gets to its peak",
    )
