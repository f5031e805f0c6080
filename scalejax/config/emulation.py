"""Config of an emulation in virtual time: algorithm, workers, timing, stragglers, failures.

Each class checks its own fields when built; emulates nothing.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from scalejax.config.emulation_modes import KvStoreConfig, VariableUpdateConfig
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least

# Gradient compression, and the algorithms beside Downpour and synchronous SGD.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """Compression of the gradients that workers push, with error feedback except for fp16."""

    method: Literal["fp16", "two_bit", "top_k"]
    """fp16: half of the bytes (Horovod). two_bit: threshold, 0 or -threshold in two bits (MXNet).
    top_k: the largest entries of each layer, with their indices; with several servers, the largest
    of the shard of a parameter that each holds, all stacked blocks counting as one layer."""
    threshold: float = 0.5
    """two_bit: least magnitude of an entry that is sent, and the magnitude that is sent; of
    gradients summed over their samples, as MXNet's."""
    fraction: float = 0.001
    """top_k: share of the entries that is sent; at least one of each layer, and with several
    servers at least one to each that holds a shard of a parameter."""

    def __post_init__(self) -> None:
        require_above("emulation.compression.threshold", self.threshold, 0)
        if not 0 < self.fraction <= 1:
            accepted = "it must be above 0, and at most 1"
            raise ConfigError(refusal("emulation.compression.fraction", self.fraction, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSynchronousConfig:
    """Stale synchronous parallel: asynchronous workers with bounded staleness (Ho et al. 2013).

    As with Downpour, an update is of one worker's minibatch of `batch.global_batch` samples: with a
    bound of 0 (bulk synchronous) every gradient of a clock is taken at the same parameters, and
    they are applied one after another.
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

    Every worker trains its own parameters, in minibatches of `batch.global_batch`; an elastic force
    draws them towards a centre variable, which is the one evaluated.
    """

    name: Literal["easgd"] = "easgd"
    """Selects this algorithm."""
    period_steps: int = 1
    """Communication period: minibatches of a worker between its updates of the centre (tau)."""
    moving_rate: float = 0.9
    """Moving rate of all workers together: at each communication worker and centre move by
    `moving_rate / workers` of their difference (beta = p alpha; 0.9 in the paper)."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.period_steps", self.period_steps, 1)
        if not 0 < self.moving_rate <= 1:
            accepted = "it must be above 0, and at most 1"
            raise ConfigError(
                refusal("emulation.algorithm.moving_rate", self.moving_rate, accepted)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HogwildConfig:
    """Hogwild: workers update one shared memory without locks (Niu, Recht, Re & Wright 2011).

    The memory is read and written in `server_shards` blocks, at `timing.worker_bytes_per_second`;
    other workers may write in between. An update is of one worker's minibatch of
    `batch.global_batch`.
    """

    name: Literal["hogwild"] = "hogwild"
    """Selects this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdConfig:
    """Local SGD: workers train independently, and their parameters are averaged every few steps
    (Stich 2018).

    The `batch.global_batch` samples of a step are divided among the workers. Every worker keeps its
    own optimizer state, which is not averaged.
    """

    name: Literal["local_sgd"] = "local_sgd"
    """Selects this algorithm."""
    every_steps: int | None = None
    """Steps from one average to the next (H); if absent, one average, at the end (Zinkevich et al.
    2010)."""
    begin_step: int = 0
    """Steps of synchronous SGD before local SGD begins (post-local SGD, Lin et al. 2018)."""
    outer_learning_rate: float = 1.0
    """Learning rate of the outer step towards the average (DiLoCo: 0.7)."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step (DiLoCo, Douillard et al. 2023: 0.9)."""

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
    """Synchronous SGD that overlaps its communication with the next step, at a staleness of 1."""

    name: Literal["delayed"] = "delayed"
    """Selects this algorithm."""
    delayed: Literal["gradients", "reads"] = "gradients"
    """What is one step old. gradients: each is applied one update later (tf_cnn_benchmarks' relaxed
    consistency; the first update is of zeros). reads: the parameters at which gradients are taken
    (its staged_vars)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentConfig:
    """Workers that do not communicate: an upper bound of speed; the result is that of the first."""

    name: Literal["independent"] = "independent"
    """Selects this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandblasterConfig:
    """Sandblaster L-BFGS: one large batch as a queue of work items (Dean et al. 2012, section 4.2).

    A work item is of `batch.global_batch` samples; the batch is always all training examples, less
    those that fill no work item, and `train.epochs` counts evaluations of its loss and gradient.
    There is no learning rate: the line search determines the step.
    """

    name: Literal["sandblaster"] = "sandblaster"
    """Selects this algorithm."""
    memory_size: int = 10
    """History size of L-BFGS: pairs of a step and its change of gradient that are kept."""
    line_search_trials: int = 20
    """Most step sizes that are tried in one direction, each half of the one before."""
    backup_copies: int = 1
    """Further replicas that are given an unfinished work item once the queue is empty."""

    def __post_init__(self) -> None:
        for name in ("memory_size", "line_search_trials"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 1)
        require_at_least("emulation.algorithm.backup_copies", self.backup_copies, 0)


Distribution = Literal["normal", "lognormal", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourConfig:
    """Downpour SGD: replicas fetch and push asynchronously (Dean et al. 2012, section 4.1).

    Each push is one update, so that `batch.global_batch` is the minibatch of a replica.
    """

    name: Literal["downpour"] = "downpour"
    """Selects this algorithm."""
    n_fetch: int = 1
    """Minibatches from one fetch of the parameters to the next."""
    n_push: int = 1
    """Minibatches whose gradients are summed for one push."""
    waits_for_fetch: bool = True
    """Whether a replica waits for the parameters that it fetches; else it continues with the ones
    it has, as algorithm 7.1 of the paper's appendix."""
    local_learning_rate: float = 0.0
    """Learning rate of the plain SGD that a replica applies to its own copy between fetches."""
    warmstart_updates: int = 0
    """Updates made by a single replica before the others begin; if it fails, the next one takes
    over."""

    def __post_init__(self) -> None:
        for name in ("n_fetch", "n_push"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 1)
        for name in ("warmstart_updates", "local_learning_rate"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousConfig:
    """Synchronous SGD: every update uses the gradients of all workers, or of the first to arrive.

    The `batch.global_batch` samples of an update are divided among the workers, less
    `backup_workers`.
    """

    name: Literal["synchronous"] = "synchronous"
    """Selects this algorithm."""
    gradient_sync: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """How gradients are reduced: by the all-reduce of the compiled step, or by parameter
    servers."""
    backup_workers: int = 0
    """How many of the workers are backups (Chen et al. 2016, arXiv 1604.00981, section 3): an
    update uses the first gradients that arrive, and does not wait for that many of the last."""

    reduction: Literal["mean", "adasum"] = "mean"
    """Reduction of the gradients: their mean, or Adasum, which sums orthogonal ones and averages
    parallel ones (Maleki et al. 2020, arXiv 2006.02924)."""

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
"""Any of the algorithms by its own name."""
AlgorithmConfig = Annotated[
    CoreConfig | VariableUpdateConfig | KvStoreConfig, Field(discriminator="name")
]
"""Any of the algorithms, selected by `name`; variable_update and kvstore are modes of
tf_cnn_benchmarks and MXNet."""


def core_of(algorithm: AlgorithmConfig) -> CoreConfig:
    """The algorithm that is emulated, for modes of tf_cnn_benchmarks and MXNet too."""
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
    """Durations of the emulation's virtual clock; absent ones are predicted for the cluster."""

    gradient_seconds: float | None = None
    """Mean time in which one worker computes a gradient."""
    collective_seconds: float | None = None
    """Exposed time of an all-reduce, not overlapped with compute."""
    update_seconds: float = 0.0
    """Time in which one server applies a gradient of all parameters; for a server that holds a
    share of them, that share of the time."""
    latency_seconds: float | None = None
    """Latency of a message between a worker and a server."""
    worker_bytes_per_second: float | None = None
    """Bandwidth between a host of workers and the servers, each way."""
    server_bytes_per_second: float | None = None
    """Bandwidth between a server and the workers, each way."""
    workers_per_host: int | None = None
    """Workers that share the bandwidth of a host."""

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
    """Variation of the time of a gradient, from one to the next and between workers."""

    distribution: Distribution = "normal"
    """Distribution of the time of a gradient about its mean, drawn independently for each;
    exponential has a cv of 1."""
    cv: float | None = None
    """Coefficient of variation: standard deviation over mean; if absent, that of the cluster's
    conditions or chip, or 0."""
    slow_share: float = 0.0
    """Share of the workers, 0..1, that are slow all the time."""
    slow_factor: float = 1.0
    """Factor on the mean time of the slow workers."""

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
    """Failures of workers and servers, with exponentially distributed times between them."""

    worker_mtbf_seconds: float | None = None
    """Mean time between failures of one worker; if absent, none fails."""
    worker_restart_seconds: float | None = None
    """Time until a failed worker restarts; if absent, it never does."""
    server_mtbf_seconds: float | None = None
    """Mean time between failures of one server; if absent, none fails."""
    server_restart_seconds: float = 0.0
    """Time until a failed server restarts, for which messages to it wait; its state survives in
    replicas."""

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
    """An emulation of training in virtual time."""

    algorithm: AlgorithmConfig
    """Algorithm by which the workers train together."""
    cluster: str | None = None
    """Cluster whose times are predicted: a name in the catalogue, or a TOML file; if absent, all
    times are those of `timing`."""
    workers: int = 1
    """Replicas of the model, each on a device of its own."""
    server_shards: int = 1
    """Parameter servers, each of which holds a shard of every parameter."""
    compression: CompressionConfig | None = None
    """Compression of the gradients that workers push to servers; if absent, none."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    """Durations of compute and communication."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Variation of the time of a gradient."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    """Failures of workers and servers."""

    def __post_init__(self) -> None:
        require_at_least("emulation.workers", self.workers, 1)
        require_at_least("emulation.server_shards", self.server_shards, 1)
        core = self.core
        if isinstance(core, SynchronousConfig) and core.reduction == "adasum":
            self._require_adasum_workers()
        pushing = isinstance(core, DownpourConfig | StaleSynchronousConfig | SynchronousConfig)
        if self.compression is not None and (not pushing or self.is_all_reduced):
            accepted = (
                "it is of gradients that are pushed to servers: of downpour, stale_synchronous, "
                'and synchronous with gradient_sync = "parameter_server"'
            )
            field = "emulation.compression.method"
            raise ConfigError(refusal(field, self.compression.method, accepted))

    def _require_adasum_workers(self) -> None:
        """Refuse a number of workers that is no power of two, which Adasum combines in pairs."""
        reduced = self.sharing_workers
        if reduced & (reduced - 1):
            below = 1 << (reduced.bit_length() - 1)
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
        """The algorithm that is emulated, for modes of tf_cnn_benchmarks and MXNet too."""
        return core_of(self.algorithm)

    @property
    def sharing_workers(self) -> int:
        """Workers among whom the samples of a step are divided; 1 where each has all of them."""
        match self.core:
            case SynchronousConfig(backup_workers=backup_workers):
                return self.workers - backup_workers
            case LocalSgdConfig() | DelayedConfig() | IndependentConfig():
                return self.workers
            case _:
                return 1

    @property
    def divides_examples(self) -> bool:
        """Whether the training examples are partitioned among the workers."""
        core = self.core
        if isinstance(core, SynchronousConfig):
            return core.backup_workers > 0
        own = DownpourConfig | StaleSynchronousConfig | EasgdConfig | HogwildConfig
        return isinstance(core, own)

    @property
    def is_all_reduced(self) -> bool:
        """Whether workers communicate by a collective, without servers."""
        core = self.core
        if isinstance(core, SynchronousConfig):
            return core.gradient_sync == "all_reduce"
        return isinstance(core, LocalSgdConfig | DelayedConfig)

    @property
    def waits_for_all(self) -> bool:
        """Whether a lost worker stalls the others."""
        waiting = SynchronousConfig | LocalSgdConfig | StaleSynchronousConfig | DelayedConfig
        return isinstance(self.core, waiting | IndependentConfig)
