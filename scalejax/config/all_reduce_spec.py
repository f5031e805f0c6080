"""The all_reduce_spec of tf_cnn_benchmarks, such as `pscpu:32k:nccl/xring#2`.

It is parsed, and refused, as in that program.
"""

import re
from dataclasses import dataclass

from scalejax.core.errors import ConfigError, refusal, unknown_name

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
    """One of `ALGORITHMS`; what precedes a "/" applies within hosts, what follows it between
    them."""
    shards: int
    """Parts of a tensor that are reduced in parallel."""
    most_elements: int | None
    """Largest tensor of the range, in elements; None for no limit."""


def parse_all_reduce_spec(spec: str, field: str = "all_reduce_spec") -> tuple[ReduceRange, ...]:
    """The ranges of an all_reduce_spec, in order.

    Raises:
        ConfigError: if it is malformed, or names an unknown algorithm; the message names `field`
            and what is accepted.
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
        accepted = f"{part!r} is not a limit: digits, and K, k, M, G or T for powers of 1024"
        raise ConfigError(refusal(field, spec, accepted))
    return int(found.group(1)) * _FACTORS[found.group(2)]
