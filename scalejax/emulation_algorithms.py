"""Algorithms that can be emulated beside Downpour and synchronous SGD. Descriptions only.

Each class checks its own fields when built.
"""

from dataclasses import dataclass
from typing import Literal

from scalejax.errors import ConfigError, refusal, require_above, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """What workers do to a gradient before they push it; what they leave out of it is added to
    their next one, but for fp16."""

    method: Literal["fp16", "two_bit", "top_k"]
    """fp16: half of the bytes (Horovod). two_bit: threshold, 0 or -threshold in two bits (MXNet).
    top_k: the largest entries of each layer, with their places; of several servers, the largest of
    what each holds of a parameter, whose blocks' layers are one then."""
    threshold: float = 0.5
    """Of two_bit: from which size on an entry is sent, and as what; of gradients summed over their
    samples, as MXNet's are."""
    fraction: float = 0.001
    """Of top_k: part of the entries that is sent; of each layer at least one, of several servers to
    each that holds some of a parameter."""

    def __post_init__(self) -> None:
        require_above("emulation.compression.threshold", self.threshold, 0)
        if not 0 < self.fraction <= 1:
            accepted = "it must be above 0, and at most 1"
            raise ConfigError(refusal("emulation.compression.fraction", self.fraction, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSynchronousConfig:
    """Stale synchronous parallel: workers at their own pace, within a bound (Ho et al. 2013).

    An update is of one worker's minibatch of `batch.global_batch`, as of Downpour: a bound of 0
    is bulk synchronous, each clock one update after the other of the same parameters.
    """

    name: Literal["stale_synchronous"] = "stale_synchronous"
    """Selects this algorithm."""
    staleness_bound: int = 0
    """Clocks (minibatches) by which the fastest worker may be ahead of the slowest."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.staleness_bound", self.staleness_bound, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EasgdConfig:
    """Asynchronous elastic averaging SGD (Zhang, Choromanska & LeCun 2015, algorithm 1).

    Every worker trains parameters of its own, in minibatches of `batch.global_batch`; a centre
    draws them together, and is evaluated.
    """

    name: Literal["easgd"] = "easgd"
    """Selects this algorithm."""
    period_steps: int = 1
    """Minibatches from one meeting of a worker with the centre to the next (tau)."""
    moving_rate: float = 0.9
    """Part of their difference that all workers together move by when each has met the centre
    once: a worker moves by `moving_rate / workers` (beta = p alpha; 0.9 in the paper)."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.period_steps", self.period_steps, 1)
        if not 0 < self.moving_rate <= 1:
            accepted = "it must be above 0, and at most 1"
            raise ConfigError(
                refusal("emulation.algorithm.moving_rate", self.moving_rate, accepted)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HogwildConfig:
    """Hogwild: workers on one memory without locks (Niu, Recht, Re & Wright 2011).

    The memory is read and written block by block, of which there are `server_shards`, at
    `timing.worker_bytes_per_second`; meanwhile others write. An update is of one worker's
    minibatch of `batch.global_batch`.
    """

    name: Literal["hogwild"] = "hogwild"
    """Selects this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdConfig:
    """Local SGD: workers train by themselves, and are averaged now and then (Stich 2018).

    A step is of `batch.global_batch` samples, of which each worker has its part. Every worker
    keeps the state of its own optimizer, which is not averaged.
    """

    name: Literal["local_sgd"] = "local_sgd"
    """Selects this algorithm."""
    every_steps: int | None = None
    """Steps from one average to the next (H); None: one average, at the end (Zinkevich et al.
    2010)."""
    begin_step: int = 0
    """Steps before, which are synchronous SGD (post-local SGD, Lin et al. 2018)."""
    outer_learning_rate: float = 1.0
    """Part by which parameters move towards the average (DiLoCo: 0.7)."""
    outer_momentum: float = 0.0
    """Of Nesterov's kind, of that move (DiLoCo, Douillard et al. 2023: 0.9)."""

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            require_at_least("emulation.algorithm.every_steps", self.every_steps, 1)
        require_at_least("emulation.algorithm.begin_step", self.begin_step, 0)
        require_above("emulation.algorithm.outer_learning_rate", self.outer_learning_rate, 0)
        if not 0 <= self.outer_momentum < 1:
            accepted = "it must be at least 0, and below 1"
            raise ConfigError(
                refusal("emulation.algorithm.outer_momentum", self.outer_momentum, accepted)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedConfig:
    """Synchronous SGD that does not wait for its exchange: something is a step old."""

    name: Literal["delayed"] = "delayed"
    """Selects this algorithm."""
    delayed: Literal["gradients", "reads"] = "gradients"
    """What is: gradients, each applied an update later (tf_cnn_benchmarks' relaxed consistency; the
    first update is of zeros); or the parameters that gradients are taken by (its staged_vars)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentConfig:
    """Workers that exchange nothing: an upper bound of speed, whose result is the first's."""

    name: Literal["independent"] = "independent"
    """Selects this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandblasterConfig:
    """Sandblaster L-BFGS: one large batch in portions (Dean et al. 2012, section 4.2).

    A portion is of `batch.global_batch` samples; the batch, the same every time, is all training
    examples but those that fill no portion, and `train.epochs` counts how often its loss and
    gradient are computed. No learning rate: a step is what the line search finds.
    """

    name: Literal["sandblaster"] = "sandblaster"
    """Selects this algorithm."""
    memory_size: int = 10
    """Steps that the direction of the next is made of, and the changes of gradient along them."""
    line_search_trials: int = 20
    """Steps that are tried in one direction, each half of the one before."""
    backup_copies: int = 1
    """Further replicas that get a portion which is not done when all are handed out."""

    def __post_init__(self) -> None:
        for name in ("memory_size", "line_search_trials"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 1)
        require_at_least("emulation.algorithm.backup_copies", self.backup_copies, 0)
