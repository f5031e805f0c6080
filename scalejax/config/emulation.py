"""Config of an emulation in virtual time: algorithm, workers, timing, stragglers, failures.

Each class checks its own fields when built, and derives what follows from them.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scalejax.config.all_reduce_spec import ReduceRange, parse_all_reduce_spec
from scalejax.config.gradient_sync import GradientSyncConfig, LocalSgdRounds
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_fraction,
)
from scalejax.core.serialization import Family

# The algorithms.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Family):
    """One of the algorithms, selected by `name`."""

    name: str
    divides: ClassVar[Literal["examples", "batch", "work"]] = "examples"
    """What is divided among the workers: all training examples, of which each worker has its own
    part; the batch of each step; or a queue of work items."""
    all_reduces: ClassVar[bool] = False
    """Whether workers communicate by a collective, without servers."""
    pushes_gradients: ClassVar[bool] = False
    """Whether servers apply gradients that workers push to them."""
    waits_for_all: ClassVar[bool] = False
    """Whether a lost worker stalls the others."""
    has_optimizer: ClassVar[bool] = True
    """Whether the optimizer of the run makes the updates."""

    @property
    def core(self) -> "AlgorithmConfig":
        """The algorithm that is emulated: another one for modes of tf_cnn_benchmarks and MXNet."""
        return self

    @property
    def is_all_reduced(self) -> bool:
        """Whether it `all_reduces` with these fields."""
        return self.all_reduces

    @property
    def divides_examples(self) -> bool:
        """Whether the training examples are partitioned among the workers."""
        return self.divides == "examples"

    @property
    def one_machine(self) -> tuple[str, str, str] | None:
        """Field and value that limit it to one machine, and the alternative; else None."""
        return None

    @property
    def all_reduce_ranges(self) -> tuple[ReduceRange, ...] | None:
        """Reduction that gives the cost of another program's mode, without emulated servers."""
        return None

    @property
    def link_rate(self) -> float | None:
        """Bandwidth between the workers of one host, bytes per second, if it has such a field."""
        return getattr(self, "host_bytes_per_second", None)

    def sharing_workers(self, workers: int) -> int:
        """Workers among which the samples of a step are divided; 1 if each has all of them."""
        return workers if self.divides == "batch" else 1

    def round_steps(self, total_steps: int) -> int:
        """Steps that are lost when a worker fails."""
        return 1

    def steps_per_update(self, workers: int) -> int:
        """Steps of the run per update of one optimizer, which the learning rate depends on."""
        return 1

    def require_workers(self, workers: int, server_shards: int) -> None:
        """Refuse numbers of workers and shards that it cannot have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourConfig(AlgorithmConfig):
    """Downpour SGD: replicas fetch and push asynchronously (Dean et al. 2012, section 4.1).

    Each push is one update, so that `batch.global_batch` is the minibatch of a replica.
    """

    pushes_gradients = True
    name: Literal["downpour"] = "downpour"
    """Selects this algorithm."""
    n_fetch: int = 1
    """Minibatches from one fetch of the parameters to the next."""
    n_push: int = 1
    """Minibatches whose gradients are summed for one push."""
    waits_for_fetch: bool = True
    """Whether a replica waits for the parameters that it fetches; else it continues with the ones
    it has, as in algorithm 7.1 of the paper's appendix."""
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

    def steps_per_update(self, workers: int) -> int:
        """A push is one update."""
        return self.n_push


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousConfig(AlgorithmConfig):
    """Synchronous SGD: every update uses the gradients of all workers, or of the first to arrive.

    The `batch.global_batch` samples of an update are divided among the workers, less
    `backup_workers`.
    """

    divides = "batch"
    pushes_gradients = True
    waits_for_all = True
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

    @property
    def is_all_reduced(self) -> bool:
        """Whether there are no servers."""
        return self.gradient_sync == "all_reduce"

    @property
    def divides_examples(self) -> bool:
        """Whether workers have their own samples, since the fastest are not known beforehand."""
        return self.backup_workers > 0

    def sharing_workers(self, workers: int) -> int:
        """All but the backup workers."""
        return workers - self.backup_workers

    def require_workers(self, workers: int, server_shards: int) -> None:
        """Refuse numbers of workers and shards that Adasum cannot reduce."""
        reduced = self.sharing_workers(workers)
        if self.reduction == "mean":
            return
        if reduced & (reduced - 1):
            below = 1 << (reduced.bit_length() - 1)
            accepted = (
                'reduction = "adasum" takes gradients in pairs: those that count must be a power '
                f"of two (nearest: {below} or {2 * below})"
            )
            raise ConfigError(refusal("emulation.workers", workers, accepted))
        if server_shards > 1:
            accepted = 'reduction = "adasum" looks at whole layers; it must be 1'
            raise ConfigError(refusal("emulation.server_shards", server_shards, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSynchronousConfig(AlgorithmConfig):
    """Stale synchronous parallel: asynchronous workers with bounded staleness (Ho et al. 2013).

    As with Downpour, an update is from one worker's minibatch of `batch.global_batch` samples: with
    a bound of 0 (bulk synchronous), all gradients of a clock are computed at the same parameters,
    and applied one after another.
    """

    pushes_gradients = True
    waits_for_all = True
    name: Literal["stale_synchronous"] = "stale_synchronous"
    """Selects this algorithm."""
    staleness_bound: int = 0
    """Clocks (minibatches) by which the fastest worker may be ahead of the slowest."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.staleness_bound", self.staleness_bound, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EasgdConfig(AlgorithmConfig):
    """Asynchronous elastic averaging SGD (Zhang, Choromanska & LeCun 2015, algorithm 1).

    Every worker trains its own parameters, in minibatches of `batch.global_batch`; an elastic force
    draws them towards a centre variable, which is evaluated.
    """

    name: Literal["easgd"] = "easgd"
    """Selects this algorithm."""
    period_steps: int = 1
    """Communication period: minibatches of a worker between its updates of the centre (tau)."""
    moving_rate: float = 0.9
    """Moving rate of all workers together: at each communication, worker and centre move by
    `moving_rate / workers` of their difference (beta = p alpha; 0.9 in the paper)."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.period_steps", self.period_steps, 1)
        require_fraction("emulation.algorithm.moving_rate", self.moving_rate)

    def steps_per_update(self, workers: int) -> int:
        """Every worker has an optimizer, for its share of all steps."""
        return workers


@dataclass(frozen=True, slots=True, kw_only=True)
class HogwildConfig(AlgorithmConfig):
    """Hogwild: workers update one shared memory without locks (Niu, Recht, Re & Wright 2011).

    The memory is read and written in `server_shards` blocks, at `timing.worker_bytes_per_second`;
    other workers may write in between. An update is from one worker's minibatch of
    `batch.global_batch`.
    """

    name: Literal["hogwild"] = "hogwild"
    """Selects this algorithm."""

    @property
    def one_machine(self) -> tuple[str, str, str]:
        """The algorithm itself."""
        return "name", "hogwild", '"downpour"'


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLocalSgdConfig(LocalSgdRounds, AlgorithmConfig):
    """Local SGD: workers train independently, and their parameters are averaged every few steps
    (Stich 2018).

    The `batch.global_batch` samples of a step are divided among the workers. Every worker keeps its
    own optimizer state, which is not averaged.
    """

    divides = "batch"
    all_reduces = True
    waits_for_all = True
    name: Literal["local_sgd"] = "local_sgd"
    """Selects this algorithm."""
    every_steps: int | None = None
    """Steps from one average to the next (H); if absent, one average, at the end (Zinkevich et al.
    2010)."""
    begin_step: int = 0
    """Steps of synchronous SGD before local SGD begins (post-local SGD, Lin et al. 2018)."""

    def __post_init__(self) -> None:
        require_at_least("emulation.algorithm.begin_step", self.begin_step, 0)
        self.require_rounds("emulation.algorithm", self.every_steps)

    def round_steps(self, total_steps: int) -> int:
        """Steps from one average to the next."""
        return min(self.every_steps or total_steps, total_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedConfig(AlgorithmConfig):
    """Synchronous SGD that overlaps its communication with the next step, at a staleness of 1."""

    divides = "batch"
    all_reduces = True
    waits_for_all = True
    name: Literal["delayed"] = "delayed"
    """Selects this algorithm."""
    delayed: Literal["gradients", "reads"] = "gradients"
    """What is one step old. gradients: each is applied one update later (tf_cnn_benchmarks' relaxed
    consistency; the first update applies zeros). reads: the parameters at which gradients are
    computed (its staged_vars)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentConfig(AlgorithmConfig):
    """Workers that do not communicate: an upper bound on speed; the first one gives the result."""

    divides = "batch"
    waits_for_all = True
    name: Literal["independent"] = "independent"
    """Selects this algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandblasterConfig(AlgorithmConfig):
    """Sandblaster L-BFGS: one large batch as a queue of work items (Dean et al. 2012, section 4.2).

    A work item has `batch.global_batch` samples; the batch is always all training examples, except
    those that do not fill a work item, and `train.epochs` counts evaluations of its loss and
    gradient. There is no learning rate: the line search determines the step.
    """

    divides = "work"
    has_optimizer = False
    name: Literal["sandblaster"] = "sandblaster"
    """Selects this algorithm."""
    memory_size: int = 10
    """History size of L-BFGS: pairs of a step and its change of gradient that are kept."""
    line_search_trials: int = 20
    """Most step sizes tried in one direction, each half the previous one."""
    backup_copies: int = 1
    """Additional replicas that get an unfinished work item once the queue is empty."""

    def __post_init__(self) -> None:
        for name in ("memory_size", "line_search_trials"):
            require_at_least(f"emulation.algorithm.{name}", getattr(self, name), 1)
        require_at_least("emulation.algorithm.backup_copies", self.backup_copies, 0)


# The `variable_update` modes of tf_cnn_benchmarks and the types of MXNet's kvstore. Those that are
# synchronous SGD differ only in the cost of their gradient synchronisation.


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableUpdateConfig(AlgorithmConfig):
    """A `variable_update` mode of tf_cnn_benchmarks (2023-10-05), with its flags."""

    name: Literal["variable_update"] = "variable_update"
    """Selects this algorithm."""
    variable_update: Literal[
        "parameter_server",
        "replicated",
        "independent",
        "distributed_replicated",
        "distributed_all_reduce",
        "collective_all_reduce",
        "horovod",
    ] = "parameter_server"
    """Where variables are stored, and how gradients are reduced."""
    all_reduce_spec: str | None = None
    """Reduction of gradients by replicated, distributed_all_reduce and collective_all_reduce, such
    as "pscpu:32k:xring"; if absent, the default of the mode: tensors assigned to the devices round
    robin, or a ring."""
    staged_vars: bool = False
    """Whether parameters are read a step ahead (parameter_server)."""
    variable_consistency: Literal["strong", "relaxed"] = "strong"
    """relaxed: gradients are those of the previous step (replicated)."""
    cross_replica_sync: bool = True
    """Whether workers are synchronous (parameter_server); else each updates asynchronously, with a
    minibatch of `batch.global_batch`."""
    host_bytes_per_second: float | None = None
    """Bandwidth between the workers of one host; if absent, that of the cluster."""

    def __post_init__(self) -> None:
        mode, at = self.variable_update, "emulation.algorithm"
        require_above(f"{at}.host_bytes_per_second", self.host_bytes_per_second, 0)
        if mode != "parameter_server":
            accepted = 'only variable_update="parameter_server" has it'
            if self.staged_vars:
                raise ConfigError(refusal(f"{at}.staged_vars", True, accepted))
            if not self.cross_replica_sync:
                raise ConfigError(refusal(f"{at}.cross_replica_sync", False, accepted))
        if self.staged_vars and not self.cross_replica_sync:
            accepted = "asynchronous workers read the latest parameters; use one of the two"
            raise ConfigError(refusal(f"{at}.staged_vars", True, accepted))
        if self.variable_consistency == "relaxed" and mode != "replicated":
            accepted = 'only variable_update="replicated" has it'
            raise ConfigError(refusal(f"{at}.variable_consistency", "relaxed", accepted))
        self._check_spec(f"{at}.all_reduce_spec")

    def _check_spec(self, field: str) -> None:
        mode, spec = self.variable_update, self.all_reduce_spec
        if spec is None:
            if mode == "distributed_all_reduce":
                raise ConfigError(f"{field} is missing: distributed_all_reduce needs one.")
            return
        if mode not in ("replicated", "distributed_all_reduce", "collective_all_reduce"):
            accepted = f"{mode} reduces in its own way; leave it out"
            raise ConfigError(refusal(field, spec, accepted))
        ranges = parse_all_reduce_spec(spec, field)
        if mode == "replicated" and len(ranges) > 1:
            raise ConfigError(refusal(field, spec, "replicated takes one range for all tensors"))
        if mode != "collective_all_reduce" and any(
            each.algorithm == "collective" for each in ranges
        ):
            accepted = 'it needs variable_update="collective_all_reduce" for "collective"'
            raise ConfigError(refusal(field, spec, accepted))

    @property
    def all_reduce_ranges(self) -> tuple[ReduceRange, ...]:
        """Reduction that gives the cost of gradient synchronisation without emulated servers."""
        if self.all_reduce_spec is not None:
            return parse_all_reduce_spec(self.all_reduce_spec)
        usual = {"replicated": "psgpu", "parameter_server": "pscpu"}
        return parse_all_reduce_spec(usual.get(self.variable_update, "xring"))

    @property
    def core(self) -> AlgorithmConfig:
        """The algorithm that the flags amount to."""
        mode = self.variable_update
        if mode == "independent":
            return IndependentConfig()
        if not self.cross_replica_sync:
            return DownpourConfig()
        if self.staged_vars:
            return DelayedConfig(delayed="reads")
        if self.variable_consistency == "relaxed":
            return DelayedConfig(delayed="gradients")
        has_servers = mode in ("parameter_server", "distributed_replicated")
        return SynchronousConfig(gradient_sync="parameter_server" if has_servers else "all_reduce")

    @property
    def one_machine(self) -> tuple[str, str, str] | None:
        """The mode "replicated"."""
        if self.variable_update != "replicated":
            return None
        return "variable_update", "replicated", '"distributed_all_reduce" or "horovod"'


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreConfig(AlgorithmConfig):
    """A type of MXNet's kvstore (MXNet 1.x)."""

    name: Literal["kvstore"] = "kvstore"
    """Selects this algorithm."""
    type: Literal["local", "device", "nccl", "dist_sync", "dist_device_sync", "dist_async"] = (
        "local"
    )
    """Where gradients are summed. local: on the host. device: on the devices, key by key. nccl: by
    rings. dist_sync, dist_device_sync: on servers that wait for all workers. dist_async: on servers
    that update at each push of a minibatch of `batch.global_batch`."""
    host_bytes_per_second: float | None = None
    """Bandwidth between the workers of one host; if absent, that of the cluster."""

    def __post_init__(self) -> None:
        require_above("emulation.algorithm.host_bytes_per_second", self.host_bytes_per_second, 0)

    @property
    def all_reduce_ranges(self) -> tuple[ReduceRange, ...]:
        """Reduction that gives the cost of gradient synchronisation without emulated servers."""
        return parse_all_reduce_spec({"device": "psgpu", "nccl": "nccl"}.get(self.type, "pscpu"))

    @property
    def core(self) -> AlgorithmConfig:
        """The algorithm of the type."""
        if self.type == "dist_async":
            return DownpourConfig()
        has_servers = self.type in ("dist_sync", "dist_device_sync")
        return SynchronousConfig(gradient_sync="parameter_server" if has_servers else "all_reduce")

    @property
    def one_machine(self) -> tuple[str, str, str] | None:
        """The types without servers."""
        if self.type.startswith("dist_"):
            return None
        return "type", self.type, '"dist_sync"' if self.type == "local" else '"dist_device_sync"'


# What the algorithms run on.


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """Durations of the emulation's virtual clock; absent ones are predicted for the cluster."""

    gradient_seconds: float | None = None
    """Mean time in which one worker computes a gradient."""
    collective_seconds: float | None = None
    """Exposed time of an all-reduce, not overlapped with compute."""
    update_seconds: float = 0.0
    """Time in which one server applies a gradient of all parameters; a server that holds a share of
    them takes that share of the time."""
    latency_seconds: float | None = None
    """Latency of a message between a worker and a server."""
    worker_bytes_per_second: float | None = None
    """Bandwidth between a host of workers and the servers, each way."""
    server_bytes_per_second: float | None = None
    """Bandwidth between a server and the workers, each way."""
    workers_per_host: int | None = None
    """Workers that share the bandwidth of a host."""

    def __post_init__(self) -> None:
        require_above("emulation.timing.gradient_seconds", self.gradient_seconds, 0)
        for name in ("collective_seconds", "update_seconds", "latency_seconds"):
            require_at_least(f"emulation.timing.{name}", getattr(self, name), 0)
        for name in ("worker_bytes_per_second", "server_bytes_per_second"):
            require_above(f"emulation.timing.{name}", getattr(self, name), 0)
        require_at_least("emulation.timing.workers_per_host", self.workers_per_host, 1)


Distribution = Literal["normal", "lognormal", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglersConfig:
    """Variation of the time of a gradient, from one to the next and between workers."""

    distribution: Distribution = "normal"
    """Distribution of the time of a gradient about its mean, drawn independently for each;
    exponential has a cv of 1."""
    cv: float | None = None
    """Coefficient of variation: standard deviation over mean; if absent, that of the cluster's
    conditions or chip, else 0."""
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
    """Time until a failed server restarts, during which messages to it wait; its state survives in
    replicas."""

    def __post_init__(self) -> None:
        for name in ("worker_mtbf_seconds", "server_mtbf_seconds"):
            require_above(f"emulation.failures.{name}", getattr(self, name), 0)
        for name in ("worker_restart_seconds", "server_restart_seconds"):
            require_at_least(f"emulation.failures.{name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationConfig:
    """An emulation of training in virtual time."""

    algorithm: AlgorithmConfig
    """Algorithm by which the workers train together."""
    cluster: str | None = None
    """Cluster whose times are predicted: a name in the catalogue, or a TOML file; if absent, all
    times are those of `timing`."""
    workers: int = 1
    """Replicas of the model, each on its own device."""
    server_shards: int = 1
    """Parameter servers, each of which holds a shard of every parameter."""
    compression: GradientSyncConfig | None = None
    """Compression of the gradients that workers push to servers: fp16, two_bit or top_k, applied to
    the shard of a parameter that each server holds (with several servers, all stacked blocks count
    as one layer); if absent, none."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    """Durations of compute and communication."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Variation of the time of a gradient."""
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    """Failures of workers and servers."""

    def __post_init__(self) -> None:
        require_at_least("emulation.workers", self.workers, 1)
        require_at_least("emulation.server_shards", self.server_shards, 1)
        self.core.require_workers(self.workers, self.server_shards)
        pushing = self.core.pushes_gradients and not self.core.is_all_reduced
        if self.compression is not None and not (pushing and self.compression.compresses):
            accepted = (
                "fp16, two_bit and top_k are of gradients that are pushed to servers: of downpour, "
                'stale_synchronous, and synchronous with gradient_sync = "parameter_server"'
            )
            raise ConfigError(
                refusal("emulation.compression.name", self.compression.name, accepted)
            )

    @property
    def core(self) -> AlgorithmConfig:
        """The algorithm that is emulated, also for modes of tf_cnn_benchmarks and MXNet."""
        return self.algorithm.core

    @property
    def sharing_workers(self) -> int:
        """Workers among which the samples of a step are divided; 1 if each has all of them."""
        return self.core.sharing_workers(self.workers)
