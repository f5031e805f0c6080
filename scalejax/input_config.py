"""What a `run.toml` says of the way from a data set to the devices, whatever the data set."""

from dataclasses import dataclass
from typing import Literal

from scalejax.augmentation_config import AugmentationConfig
from scalejax.errors import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """How batches are made; `data` says of what."""

    workers: int | Literal["auto"] = 0
    """Processes of each host that make batches to train on, a core for each; 0 for threads of the
    one that trains, "auto" for as many as a measurement at the start says. Batches are the same
    bit by bit. Evaluations, and runs of a sweep that train together, use threads."""
    read_ahead_batches: int = 4
    """Batches made before they are asked for; each process makes two or more."""
    memory_bytes: int = 2**32
    """Most that batches made ahead take; where they need more, fewer are. What a data set keeps in
    memory is said with it, and shared by its processes."""
    remainder: Literal["drop", "pad"] = "drop"
    """What becomes of the last examples of an epoch, too few for a batch: they are left out, or
    the batch is filled up with rows that count for nothing, so that an epoch sees every example."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What an example does that is damaged, or holds what it must not: it ends the run; or it
    counts for nothing (in its place is the row beside it, or zeros if that is damaged too), and the
    record says how many did and why. A file damaged as a whole, or that the system cannot read,
    always ends the run."""
    augmentation: AugmentationConfig | None = None
    """How images are changed at random; if absent, not at all."""

    def __post_init__(self) -> None:
        if self.workers != "auto":
            require_at_least("input.workers", self.workers, 0)
        for name in ("read_ahead_batches", "memory_bytes"):
            require_at_least(f"input.{name}", getattr(self, name), 1)
