"""Training that is emulated: which algorithm, by how many workers, in what weather.

Descriptions only; each class checks its own fields when built.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from scalejax.config.emulation_modes import KvStoreConfig, VariableUpdateConfig
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least

# Algorithms that can be emulated beside Downpour and synchronous SGD. Descriptions only.


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


Distribution = Literal["normal", "lognormal", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourConfig:
    """Downpour SGD: replicas that fetch and push by themselves (Dean et al. 2012, section 4.1).

    An update is made of one push, so that `batch.global_batch` is the minibatch of a replica.
    """

    name: Literal["downpour"] = "downpour"
    """Selects this algorithm."""
    n_fetch: int = 1
    """Minibatches from one fetch of the parameters to the next."""
    n_push: int = 1
    """Minibatches whose gradients are added up for one push."""
    waits_for_fetch: bool = True
    """Whether a replica waits for the parameters that it has asked for; else it goes on with
    those that it has, as algorithm 7.1 of the paper's appendix reads."""
    local_learning_rate: float = 0.0
    """Of the plain SGD that a replica applies to its own copy between fetches."""
    warmstart_updates: int = 0
    """Updates that are made by one replica at a time, the next going on when it fails, before the
    others begin."""

    def __post_init__(self) -> None:
        for name in ("n_fetch", "n_push"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 1)
        for name in ("warmstart_updates", "local_learning_rate"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousConfig:
    """Synchronous SGD: every update is of the gradients of all workers, or of the first of them.

    An update is of `batch.global_batch` samples, of which each worker that counts has its part.
    """

    name: Literal["synchronous"] = "synchronous"
    """Selects this algorithm."""
    gradient_sync: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """How gradients meet: a collective, costed as the compiled step has it, or servers."""
    backup_workers: int = 0
    """Of the workers, those whose gradients are not waited for (Chen et al. 2016, arXiv
    1604.00981, section 3): an update is of the first that arrive."""

    reduction: Literal["mean", "adasum"] = "mean"
    """What an update is of: the mean of gradients, or their Adasum, which adds orthogonal ones up
    and averages parallel ones (Maleki et al. 2020, arXiv 2006.02924)."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.backup_workers", self.backup_workers, 0)
        if self.backup_workers and self.gradient_sync == "all_reduce":
            accepted = 'a collective waits for all; it needs gradient_sync = "parameter_server"'
            raise ConfigError(
                refusal("emulation.algorithm.backup_workers", self.backup_workers, accepted)
            )


CoreConfig = (
    DownpourConfig
    | SynchronousConfig
    | StaleSynchronousConfig
    | EasgdConfig
    | HogwildConfig
    | LocalSgdConfig
    | DelayedConfig
    | IndependentConfig
    | SandblasterConfig
)
"""Any of the algorithms by the name of what it does."""
AlgorithmConfig = Annotated[
    CoreConfig | VariableUpdateConfig | KvStoreConfig, Field(discriminator="name")
]
"""Any of the algorithms, told apart by `name`; some by what other programs call them."""


def core_of(algorithm: AlgorithmConfig) -> CoreConfig:
    """What `algorithm` does, whatever another program calls it."""
    match algorithm:
        case KvStoreConfig(type="dist_async"):
            return DownpourConfig()
        case KvStoreConfig(type="dist_sync" | "dist_device_sync"):
            return SynchronousConfig(gradient_sync="parameter_server")
        case VariableUpdateConfig(variable_update="independent"):
            return IndependentConfig()
        case VariableUpdateConfig(cross_replica_sync=False):
            return DownpourConfig()
        case VariableUpdateConfig(staged_vars=True):
            return DelayedConfig(delayed="reads")
        case VariableUpdateConfig(variable_consistency="relaxed"):
            return DelayedConfig(delayed="gradients")
        case VariableUpdateConfig(variable_update="parameter_server" | "distributed_replicated"):
            return SynchronousConfig(gradient_sync="parameter_server")
        case VariableUpdateConfig() | KvStoreConfig():
            return SynchronousConfig()
        case _:
            return algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """What the clock of the emulation goes by; what is None follows from the cluster."""

    gradient_seconds: float | None = None
    """Mean time of one worker's gradient."""
    collective_seconds: float | None = None
    """Time of an all-reduce that no worker's arithmetic hides."""
    update_seconds: float = 0.0
    """Time in which one server applies a gradient of all parameters, or of its part of them that
    share of it."""
    latency_seconds: float | None = None
    """Time of a message between a worker and a server, however small."""
    worker_bytes_per_second: float | None = None
    """Rate of what joins one host of workers to the servers, each way."""
    server_bytes_per_second: float | None = None
    """Rate of what joins one server to the workers, each way."""
    workers_per_host: int | None = None
    """Workers that share it."""

    def __post_init__(self) -> None:
        if self.gradient_seconds is not None:
            require_above("emulation.timing.gradient_seconds", self.gradient_seconds, 0)
        for name in ("collective_seconds", "update_seconds", "latency_seconds"):
            value = getattr(self, name)
            if value is not None:
                require_at_least(f"emulation.timing.{name}", value, 0)
        for name in ("worker_bytes_per_second", "server_bytes_per_second"):
            value = getattr(self, name)
            if value is not None:
                require_above(f"emulation.timing.{name}", value, 0)
        if self.workers_per_host is not None:
            require_at_least("emulation.timing.workers_per_host", self.workers_per_host, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglersConfig:
    """How the time of a gradient varies."""

    distribution: Distribution = "normal"
    """Of the time of one gradient, each by itself: about its mean; exponential is of cv 1."""
    cv: float | None = None
    """Standard deviation over mean; None: that of the cluster's conditions or chip, or 0."""
    slow_share: float = 0.0
    """Part of the workers that is slow all the time, 0..1."""
    slow_factor: float = 1.0
    """By which their mean is longer."""

    def __post_init__(self) -> None:
        if self.cv is not None:
            require_at_least("emulation.stragglers.cv", self.cv, 0)
            if self.distribution == "exponential" and self.cv != 1:
                accepted = "an exponential distribution has 1; leave it out"
                raise ConfigError(refusal("emulation.stragglers.cv", self.cv, accepted))
        if not 0 <= self.slow_share <= 1:
            accepted = "it must be from 0 to 1"
            raise ConfigError(refusal("emulation.stragglers.slow_share", self.slow_share, accepted))
        require_above("emulation.stragglers.slow_factor", self.slow_factor, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresConfig:
    """How workers and servers fail; the times between failures are exponential."""

    worker_mtbf_seconds: float | None = None
    """Mean time between failures of one worker; None: it has none."""
    worker_restart_seconds: float | None = None
    """Time until it is back; None: it never is."""
    server_mtbf_seconds: float | None = None
    """Mean time between failures of one server; None: it has none."""
    server_restart_seconds: float = 0.0
    """Time for which what is sent to it waits; its state is kept by replicas of it."""

    def __post_init__(self) -> None:
        for name in ("worker_mtbf_seconds", "server_mtbf_seconds"):
            value = getattr(self, name)
            if value is not None:
                require_above(f"emulation.failures.{name}", value, 0)
        for name in ("worker_restart_seconds", "server_restart_seconds"):
            value = getattr(self, name)
            if value is not None:
                require_at_least(f"emulation.failures.{name}", value, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationConfig:
    """A run that is emulated in virtual time."""

    algorithm: AlgorithmConfig
    """How workers train together."""
    cluster: str | None = None
    """Whose times it goes by: a name in the catalogue, or a TOML file; if absent, `timing` alone
    says them."""
    workers: int = 1
    """Replicas of the model, each on a device of its own."""
    server_shards: int = 1
    """Parameter servers, each of which holds a part of every parameter."""
    compression: CompressionConfig | None = None
    """What workers do to the gradients that they push to servers."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    """How long things take."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """How much that varies."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    """What breaks."""

    def __post_init__(self) -> None:
        require_at_least("emulation.workers", self.workers, 1)
        require_at_least("emulation.server_shards", self.server_shards, 1)
        core = self.core
        if isinstance(core, SynchronousConfig) and core.reduction == "adasum":
            self._require_pairs()
        pushing = isinstance(core, DownpourConfig | StaleSynchronousConfig | SynchronousConfig)
        if self.compression is not None and (not pushing or self.is_all_reduced):
            accepted = (
                "it is of gradients that are pushed to servers: of downpour, stale_synchronous, "
                'and synchronous with gradient_sync = "parameter_server"'
            )
            field = "emulation.compression.method"
            raise ConfigError(refusal(field, self.compression.method, accepted))

    def _require_pairs(self) -> None:
        """Refuse workers whose gradients cannot be taken in pairs, and pairs of pairs."""
        counted = self.sharing_workers
        if counted & (counted - 1):
            below = 1 << (counted.bit_length() - 1)
            accepted = (
                'reduction = "adasum" takes gradients in pairs: those that count must be a power '
                f"of two (nearest: {below} or {2 * below})"
            )
            raise ConfigError(refusal("emulation.workers", self.workers, accepted))
        if self.server_shards > 1:
            accepted = 'reduction = "adasum" looks at whole layers; it must be 1'
            raise ConfigError(refusal("emulation.server_shards", self.server_shards, accepted))

    @property
    def core(self) -> CoreConfig:
        """What the algorithm does, whatever another program calls it."""
        return core_of(self.algorithm)

    @property
    def sharing_workers(self) -> int:
        """Workers among whom the samples of a step are divided; 1 where each has as many."""
        match self.core:
            case SynchronousConfig(backup_workers=backup_workers):
                return self.workers - backup_workers
            case LocalSgdConfig() | DelayedConfig() | IndependentConfig():
                return self.workers
            case _:
                return 1

    @property
    def divides_examples(self) -> bool:
        """Whether each worker has a part of the training examples for itself."""
        core = self.core
        if isinstance(core, SynchronousConfig):
            return core.backup_workers > 0
        own = DownpourConfig | StaleSynchronousConfig | EasgdConfig | HogwildConfig
        return isinstance(core, own)

    @property
    def is_all_reduced(self) -> bool:
        """Whether workers exchange by a collective, which no server takes part in."""
        core = self.core
        if isinstance(core, SynchronousConfig):
            return core.gradient_sync == "all_reduce"
        return isinstance(core, LocalSgdConfig | DelayedConfig)

    @property
    def waits_for_all(self) -> bool:
        """Whether the run cannot go on for long without one of its workers."""
        waiting = SynchronousConfig | LocalSgdConfig | StaleSynchronousConfig | DelayedConfig
        return isinstance(self.core, waiting | IndependentConfig)
