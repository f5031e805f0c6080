"""How the devices along the data axis bring together what each has computed. Descriptions only.

Each class checks its own fields when built; what a run must be like for it is checked in
`run_checks`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class AdasumConfig:
    """Adasum of the gradients, layer by layer: orthogonal ones add up, parallel ones average
    (Maleki et al. 2020, arXiv 2006.02924).

    Of gradients, as Horovod's `allreduce(op=Adasum)` has it; its DistributedOptimizer takes the
    updates of local optimizers in their place.
    """

    name: Literal["adasum"]
    """Selects this exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config:
    """Gradients cast to float16, and added up in it, as Horovod's `Compression.fp16`."""

    name: Literal["fp16"]
    """Selects this exchange."""
    error_feedback: bool = False
    """Whether each device adds what the cast took off to its next gradient; Horovod does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBitConfig:
    """Gradients of three values, threshold, 0 and -threshold, in two bits each (MXNet's "2bit").

    Each device receives the bits of all others: from 32 devices on, more than an all-reduce of
    float32 would send.
    """

    name: Literal["two_bit"]
    """Selects this exchange."""
    threshold: float = 0.5
    """From which size on a value is sent, and the size that is sent: of gradients summed over the
    samples of a device, as MXNet's are, so that a mean gradient's is threshold / samples."""
    error_feedback: bool = True
    """Whether each device adds what was not sent to its next gradient, as MXNet does."""

    def __post_init__(self) -> None:
        require_above("gradient_sync.threshold", self.threshold, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKConfig:
    """The largest entries of each layer's gradient, with their places (Lin et al. 2017, arXiv
    1712.01887, section 3; with the memory of Stich et al. 2018, arXiv 1809.07599, algorithm 1).

    Each device receives the entries of all others, 8 bytes each.
    """

    name: Literal["top_k"]
    """Selects this exchange."""
    fraction: float = 0.001
    """Part of the entries that is sent, of each layer at least one; 0.001 as in Lin et al."""
    error_feedback: bool = True
    """Whether each device adds what was not sent to its next gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                refusal("gradient_sync.fraction", self.fraction, "it must be above 0, to 1")
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdConfig:
    """Updates of each device by itself, and now and then an average of the parameters (Stich 2018,
    arXiv 1805.09767).

    Each device has optimizer state and BatchNorm statistics of its own; these statistics are
    averaged with the parameters, the state is not. Evaluated, and kept in the end, is the average.
    With the outer rate 0.7 and momentum 0.9 this is DiLoCo (Douillard et al. 2023, arXiv
    2311.08105, algorithm 1).
    """

    name: Literal["local_sgd"]
    """Selects this exchange."""
    every_steps: int
    """Updates of each device from one average to the next."""
    begin_epoch: float = 0.0
    """Epoch until which gradients are averaged in every step, as without an exchange (post-local
    SGD; Lin et al. 2018, arXiv 1808.07217)."""
    outer_learning_rate: float = 1.0
    """What part of the way from the last average to the new one is gone."""
    outer_momentum: float = 0.0
    """Nesterov momentum of these ways; 0 for none."""

    def __post_init__(self) -> None:
        require_at_least("gradient_sync.every_steps", self.every_steps, 1)
        require_at_least("gradient_sync.begin_epoch", self.begin_epoch, 0)
        require_above("gradient_sync.outer_learning_rate", self.outer_learning_rate, 0)
        if not 0 <= self.outer_momentum < 1:
            accepted = "it must be from 0 to below 1"
            raise ConfigError(
                refusal("gradient_sync.outer_momentum", self.outer_momentum, accepted)
            )

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether an average is more than the mean of the devices' parameters."""
        return self.outer_learning_rate != 1 or self.outer_momentum != 0


GradientSyncConfig = Annotated[
    AdasumConfig | Fp16Config | TwoBitConfig | TopKConfig | LocalSgdConfig,
    Field(discriminator="name"),
]
"""One of the exchanges, told apart by `name`."""


def keeps_state(gradient_sync: GradientSyncConfig | None) -> bool:
    """Whether each device keeps something of its own from one step to the next."""
    return isinstance(gradient_sync, LocalSgdConfig) or getattr(
        gradient_sync, "error_feedback", False
    )
