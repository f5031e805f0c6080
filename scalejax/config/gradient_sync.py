"""Config of gradient synchronisation over the data axis: compression, Adasum, local SGD.

Each class checks its own fields when built; `checks` compares them with the rest of the run.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class AdasumConfig:
    """Adasum of the gradients, layer by layer: orthogonal gradients are summed, parallel ones
    averaged (Maleki et al. 2020, arXiv 2006.02924).

    It combines gradients, as Horovod's `allreduce(op=Adasum)`, for the optimizer "sgd", whose
    momentum is then of combined gradients. Horovod's `DistributedOptimizer(op=Adasum)` combines the
    updates that each device's own optimizer makes, momentum and weight decay included: the same
    without these two. That, with any optimizer, is local_sgd with `every_steps = 1` and
    `reduction = "adasum"`.
    """

    name: Literal["adasum"]
    """Selects this method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config:
    """Gradients cast to float16 and summed in it, as Horovod's `Compression.fp16`."""

    name: Literal["fp16"]
    """Selects this method."""
    error_feedback: bool = False
    """Whether each device adds the error of the cast to its next gradient; Horovod does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBitConfig:
    """Gradients quantised to threshold, 0 or -threshold, in two bits each (MXNet's "2bit").

    An all-gather: each device receives the bits of all others, from 32 devices on more than an
    all-reduce of float32 would send.
    """

    name: Literal["two_bit"]
    """Selects this method."""
    threshold: float = 0.5
    """Least magnitude of an entry that is sent, and the magnitude that is sent; of gradients summed
    over the samples of a device, as MXNet's, so that for their mean it is threshold / samples; of
    those that count, the mean over the devices."""
    error_feedback: bool = True
    """Whether each device adds the quantisation error to its next gradient, as MXNet does."""

    def __post_init__(self) -> None:
        require_above("gradient_sync.threshold", self.threshold, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKConfig:
    """The largest entries of each layer's gradient, with their indices (Lin et al. 2017, arXiv
    1712.01887, section 3; error feedback of Stich et al. 2018, arXiv 1809.07599, algorithm 1).

    An all-gather: each device receives the entries of all others, 8 bytes each.
    """

    name: Literal["top_k"]
    """Selects this method."""
    fraction: float = 0.001
    """Share of the entries that is sent, at least one of each layer; 0.001 as in Lin et al."""
    error_feedback: bool = True
    """Whether each device adds the entries that were not sent to its next gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                refusal("gradient_sync.fraction", self.fraction, "it must be above 0, to 1")
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdConfig:
    """Local SGD: each device updates its own parameters, which are averaged every few steps (Stich
    2018, arXiv 1805.09767).

    Each device has its own optimizer state and BatchNorm statistics; the statistics are averaged
    with the parameters, the optimizer state is not. A device without a row that counts makes no
    update; averages are over all devices alike. Evaluation and the final weights use the average.
    With outer rate 0.7 and momentum 0.9 this is DiLoCo (Douillard et al. 2023, arXiv 2311.08105,
    algorithm 1).
    """

    name: Literal["local_sgd"]
    """Selects this method."""
    every_steps: int
    """Local updates from one average of the parameters to the next."""
    begin_epoch: float = 0.0
    """Epoch until which gradients are averaged in every step (post-local SGD; Lin et al. 2018,
    arXiv 1808.07217)."""
    outer_learning_rate: float = 1.0
    """Learning rate of the outer step, from the last average towards the new one."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step; 0 for none."""
    reduction: Literal["mean", "adasum"] = "mean"
    """What devices go on from: the mean of their parameters; or the last average plus Adasum of how
    far each has moved from it, which with `every_steps = 1` is Horovod's
    `DistributedOptimizer(op=Adasum)`."""

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
    def keeps_last_average(self) -> bool:
        """Whether the last average is kept: for an outer optimizer, or for moves away from it."""
        has_outer_optimizer = self.outer_learning_rate != 1 or self.outer_momentum != 0
        return has_outer_optimizer or self.reduction == "adasum"


GradientSyncConfig = Annotated[
    AdasumConfig | Fp16Config | TwoBitConfig | TopKConfig | LocalSgdConfig,
    Field(discriminator="name"),
]
"""One of the methods, selected by `name`."""


def keeps_state(gradient_sync: GradientSyncConfig | None) -> bool:
    """Whether each device keeps state of its own from one step to the next."""
    return isinstance(gradient_sync, LocalSgdConfig) or getattr(
        gradient_sync, "error_feedback", False
    )
