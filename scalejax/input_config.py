"""What a `run.toml` says of the way from a data set to the devices, whatever the data set."""

from dataclasses import dataclass
from typing import Literal

from scalejax.errors import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """How batches are made; `data` says of what."""

    read_ahead_batches: int = 4
    """Batches made before they are asked for."""
    remainder: Literal["drop", "pad"] = "drop"
    """What becomes of the last examples of an epoch, too few for a batch: they are left out, or
    the batch is filled up with rows that count for nothing, so that an epoch sees every example."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What an example does that is damaged, or holds what it must not: it ends the run; or it
    counts for nothing, and the record says how many did and why. A file damaged as a whole always
    ends the run."""

    def __post_init__(self) -> None:
        require_at_least("input.read_ahead_batches", self.read_ahead_batches, 1)
