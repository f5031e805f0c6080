"""Config of the `variable_update` modes of tf_cnn_benchmarks and the types of MXNet's kvstore, as
algorithms to emulate.

Each gives the reduction by which its gradient synchronisation is costed; `emulation.core_of` maps
it to the algorithm that is emulated. Modes that are synchronous SGD differ in that cost alone.
"""

import re
from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_above, unknown_name

# The all_reduce_spec of tf_cnn_benchmarks, such as `pscpu:32k:nccl/xring#2`: parsed as that program
# does, and refused where it would be.

ALGORITHMS = (
    "nccl",
    "nccl/xring",
    "nccl/rechd",
    "nccl/pscpu",
    "xring",
    "pscpu",
    "psgpu",
    "pscpu/pscpu",
    "collective",
)
_FACTORS = {"": 1, "k": 1024, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRange:
    """The reduction of tensors within a range of sizes."""

    algorithm: str
    """One of `ALGORITHMS`; before a "/" within hosts, after it between them."""
    shards: int
    """Parts of a tensor that are reduced in parallel."""
    most_elements: int | None
    """Largest tensor of the range, in elements; None for no limit."""


def parse_all_reduce_spec(spec: str, field: str = "all_reduce_spec") -> tuple[ReduceRange, ...]:
    """The ranges of an all_reduce_spec, in order.

    Raises:
        ConfigError: if it is not well formed, or names an unknown algorithm; names `field`, and
            what is accepted.
    """
    parts = spec.split(":")
    if len(parts) % 2 == 0:
        accepted = 'it must be RANGE or RANGE:LIMIT:RANGE, as in "pscpu:32k:xring"'
        raise ConfigError(refusal(field, spec, accepted))
    limits = [_limit(part, spec, field) for part in parts[1::2]]
    if limits != sorted(limits):
        raise ConfigError(refusal(field, spec, "its limits must rise from range to range"))
    ranges = zip(parts[::2], [*limits, None], strict=True)
    return tuple(_range(part, most, spec, field) for part, most in ranges)


def _range(part: str, most_elements: int | None, spec: str, field: str) -> ReduceRange:
    algorithm, *counts = part.split("#")
    if algorithm not in ALGORITHMS:
        raise ConfigError(unknown_name(field, algorithm, ALGORITHMS))
    if len(counts) > 1 or not all(re.fullmatch("[0-9]{1,6}", count) for count in counts):
        accepted = 'shards are a whole number after "#", as in "psgpu#4"'
        raise ConfigError(refusal(field, spec, accepted))
    shards = int(counts[0]) if counts else 1
    if shards < 1:
        raise ConfigError(refusal(field, spec, "there must be at least 1 shard"))
    if algorithm == "collective" and shards > 2:
        raise ConfigError(refusal(field, spec, "collective has 1 or 2 shards"))
    return ReduceRange(algorithm=algorithm, shards=shards, most_elements=most_elements)


def _limit(part: str, spec: str, field: str) -> int:
    found = re.fullmatch("([0-9]{1,15})([KkMGT]?)", part)
    if found is None:
        accepted = f"{part!r} is no limit: digits, and K, k, M, G or T for powers of 1024"
        raise ConfigError(refusal(field, spec, accepted))
    return int(found.group(1)) * _FACTORS[found.group(2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableUpdateConfig:
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
    """relaxed: gradients are those of the step before (replicated)."""
    cross_replica_sync: bool = True
    """Whether workers are synchronous (parameter_server); else each updates asynchronously, with a
    minibatch of `batch.global_batch`."""
    host_bytes_per_second: float | None = None
    """Bandwidth between the workers of one host; if absent, that of the cluster."""

    def __post_init__(self) -> None:
        mode, at = self.variable_update, "emulation.algorithm"
        if self.host_bytes_per_second is not None:
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
    def reduction(self) -> tuple[ReduceRange, ...]:
        """Reduction by which gradient synchronisation without emulated servers is costed."""
        if self.all_reduce_spec is not None:
            return parse_all_reduce_spec(self.all_reduce_spec)
        usual = {"replicated": "psgpu", "parameter_server": "pscpu"}
        return parse_all_reduce_spec(usual.get(self.variable_update, "xring"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreConfig:
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
        if self.host_bytes_per_second is not None:
            field = "emulation.algorithm.host_bytes_per_second"
            require_above(field, self.host_bytes_per_second, 0)

    @property
    def reduction(self) -> tuple[ReduceRange, ...]:
        """Reduction by which gradient synchronisation without emulated servers is costed."""
        return parse_all_reduce_spec({"device": "psgpu", "nccl": "nccl"}.get(self.type, "pscpu"))
