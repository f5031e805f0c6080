"""What a `run.toml` says of the way from a data set to the devices, whatever the data set."""

from dataclasses import dataclass

from scalejax.errors import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """How batches are made; `data` says of what."""

    read_ahead_batches: int = 4
    """Batches made before they are asked for."""

    def __post_init__(self) -> None:
        require_at_least("input.read_ahead_batches", self.read_ahead_batches, 1)
