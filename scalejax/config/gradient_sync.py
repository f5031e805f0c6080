"""Config of gradient synchronisation over the data axis: compression, Adasum, local SGD.

Each class checks its own fields when built, and derives what follows from them; `checks` compares
them with the rest of the run, and `training/gradient_sync/` builds what they name.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from scalejax.config.optimizer import OptimizerConfig
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_fraction,
)
from scalejax.core.serialization import Family

AVERAGE, SYNCHRONOUS = "average_of_parameters", "mean_of_gradients"
"""Scopes of the conditional collectives: averages of local SGD, and synchronous steps before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSyncConfig(Family):
    """One of the methods, selected by `name`."""

    name: str
    averages_parameters: ClassVar[bool] = False
    """Whether devices train their own parameters, which are averaged instead of gradients."""
    is_lossy: ClassVar[bool] = False
    """Whether what a device sends may hide that its gradient overflowed."""

    @property
    def compresses(self) -> bool:
        """Whether it sends gradients in fewer bytes."""
        return hasattr(self, "error_feedback")

    @property
    def keeps_state(self) -> bool:
        """Whether each device keeps its own state from one step to the next."""
        return self.averages_parameters or getattr(self, "error_feedback", False)

    @property
    def paired_by(self) -> str | None:
        """The setting that pairs devices, whose number must then be a power of two; None if there
        is none."""
        return None

    def shares(self, epochs: int) -> dict[str, float]:
        """Share of the steps of a run, 0..1, in which each conditional collective runs, by its
        named scope."""
        return {}

    def require_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Refuse optimizers that this method does not work with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdasumConfig(GradientSyncConfig):
    """Adasum of the gradients, layer by layer: orthogonal gradients are summed, parallel ones
    averaged (Maleki et al. 2020, arXiv 2006.02924).

    It combines gradients, like Horovod's `allreduce(op=Adasum)`, for the optimizer "sgd", whose
    momentum then accumulates combined gradients. Horovod's `DistributedOptimizer(op=Adasum)`
    combines the updates of each device's own optimizer, including momentum and weight decay:
    without these two, the results are the same. For that, with any optimizer, use local_sgd with
    `every_steps = 1` and `reduction = "adasum"`.
    """

    name: Literal["adasum"]
    """Selects this method."""

    @property
    def paired_by(self) -> str:
        """The method itself."""
        return 'gradient_sync.name="adasum"'

    def require_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Refuse all but "sgd"."""
        if optimizer.name != "sgd":
            accepted = (
                f"gradient_sync.name={self.name!r} combines gradients, where Horovod combines the "
                "updates of an optimizer like this; use gradient_sync = "
                '{ name = "local_sgd", every_steps = 1, reduction = "adasum" }, which does too, '
                'or the optimizer "sgd"'
            )
            raise ConfigError(refusal("optimizer.name", optimizer.name, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config(GradientSyncConfig):
    """Gradients cast to float16 and summed in it, like Horovod's `Compression.fp16`."""

    name: Literal["fp16"]
    """Selects this method."""
    error_feedback: bool = False
    """Whether each device adds the error of the cast to its next gradient; Horovod does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBitConfig(GradientSyncConfig):
    """Gradients quantised to threshold, 0 or -threshold, in two bits each (MXNet's "2bit").

    An all-gather: each device receives the bits of all others, which from 32 devices on is more
    than an all-reduce of float32 would send.
    """

    is_lossy = True
    name: Literal["two_bit"]
    """Selects this method."""
    threshold: float = 0.5
    """Least magnitude of an entry that is sent, and the magnitude that is sent, for gradients
    summed over the samples of a device, as in MXNet: for their mean it is threshold / samples,
    where samples are those that count, averaged over the devices."""
    error_feedback: bool = True
    """Whether each device adds the quantisation error to its next gradient, as MXNet does."""

    def __post_init__(self) -> None:
        require_above("gradient_sync.threshold", self.threshold, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKConfig(GradientSyncConfig):
    """The largest entries of each layer's gradient, with their indices (Lin et al. 2017, arXiv
    1712.01887, section 3; error feedback of Stich et al. 2018, arXiv 1809.07599, algorithm 1).

    An all-gather: each device receives the entries of all others, 8 bytes each.
    """

    is_lossy = True
    name: Literal["top_k"]
    """Selects this method."""
    fraction: float = 0.001
    """Share of the entries that is sent, at least one per layer; 0.001 as in Lin et al."""
    error_feedback: bool = True
    """Whether each device adds the entries that were not sent to its next gradient."""

    def __post_init__(self) -> None:
        require_fraction("gradient_sync.fraction", self.fraction)


@dataclass(frozen=True, kw_only=True)  # no slots: they conflict with those of a family's base
class LocalSgdRounds:
    """Averages of local SGD, trained or emulated, and the outer step towards them."""

    outer_learning_rate: float = 1.0
    """Learning rate of the outer step, from the last average towards the new one (DiLoCo: 0.7)."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step (DiLoCo, Douillard et al. 2023: 0.9); 0 for none."""

    def require_rounds(self, table: str, every_steps: int | None) -> None:
        """Refuse impossible values, with the names of the fields in `table`."""
        require_at_least(f"{table}.every_steps", 1 if every_steps is None else every_steps, 1)
        require_above(f"{table}.outer_learning_rate", self.outer_learning_rate, 0)
        if not 0 <= self.outer_momentum < 1:
            accepted = "it must be from 0 to below 1"
            raise ConfigError(refusal(f"{table}.outer_momentum", self.outer_momentum, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdConfig(LocalSgdRounds, GradientSyncConfig):
    """Local SGD: each device updates its own parameters, which are averaged every few steps (Stich
    2018, arXiv 1805.09767).

    Each device has its own optimizer state and BatchNorm statistics; the statistics are averaged
    with the parameters, the optimizer state is not. A device without a row that counts makes no
    update; averages weight all devices equally. Evaluation and the final weights use the average.
    With outer rate 0.7 and momentum 0.9 this is DiLoCo (Douillard et al. 2023, arXiv 2311.08105,
    algorithm 1).
    """

    averages_parameters = True
    name: Literal["local_sgd"]
    """Selects this method."""
    every_steps: int
    """Local updates from one average of the parameters to the next."""
    begin_epoch: float = 0.0
    """Epoch until which gradients are averaged in every step (post-local SGD; Lin et al. 2018,
    arXiv 1808.07217)."""
    reduction: Literal["mean", "adasum"] = "mean"
    """What devices continue from: the mean of their parameters; or the last average plus Adasum of
    each device's move away from it, which with `every_steps = 1` is Horovod's
    `DistributedOptimizer(op=Adasum)`."""

    def __post_init__(self) -> None:
        require_at_least("gradient_sync.begin_epoch", self.begin_epoch, 0)
        self.require_rounds("gradient_sync", self.every_steps)

    @property
    def keeps_last_average(self) -> bool:
        """Whether the last average is kept: for an outer optimizer, or for moves away from it."""
        has_outer_optimizer = self.outer_learning_rate != 1 or self.outer_momentum != 0
        return has_outer_optimizer or self.reduction == "adasum"

    @property
    def paired_by(self) -> str | None:
        """Its reduction, if that is Adasum."""
        return 'gradient_sync.reduction="adasum"' if self.reduction == "adasum" else None

    def shares(self, epochs: int) -> dict[str, float]:
        """Shares of the synchronous steps, and of the averages."""
        before = self.begin_epoch / epochs
        return {SYNCHRONOUS: before, AVERAGE: (1 - before) / self.every_steps}

    def require_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Refuse optimizers that average their iterates."""
        if optimizer.averages_iterates:
            accepted = (
                'it evaluates an average of its own, as gradient_sync.name="local_sgd"; use another'
            )
            raise ConfigError(refusal("optimizer.name", optimizer.name, accepted))
