"""The texts of tf_cnn_benchmarks' `all_reduce_spec`, as its own parser reads them."""

import pytest

from scalejax.config.all_reduce_spec import ALGORITHMS, ReduceRange, parse_all_reduce_spec
from scalejax.core.errors import ConfigError


def of(algorithm: str, shards: int = 1, most: int | None = None) -> ReduceRange:
    """A range."""
    return ReduceRange(algorithm=algorithm, shards=shards, most_elements=most)


@pytest.mark.parametrize(
    ("spec", "ranges"),
    [
        ("collective#2", [of("collective", 2)]),
        ("nccl/xring", [of("nccl/xring")]),
        ("psgpu#4", [of("psgpu", 4)]),
        ("pscpu:32k:xring", [of("pscpu", most=32768), of("xring")]),
        (
            "pscpu:2k:pscpu#2:64K:xring",
            [of("pscpu", most=2048), of("pscpu", 2, 65536), of("xring")],
        ),
        ("nccl:3M:pscpu/pscpu#2", [of("nccl", most=3 * 2**20), of("pscpu/pscpu", 2)]),
        ("nccl:1G:xring:1T:pscpu", [of("nccl", most=2**30), of("xring", most=2**40), of("pscpu")]),
        *((name, [of(name)]) for name in ALGORITHMS),
    ],
)
def test_specs_are_read_as_there(spec: str, ranges: list[ReduceRange]):
    """Ranges, shards, and limits in powers of 1024."""
    assert parse_all_reduce_spec(spec) == tuple(ranges)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pscpu:32k", "it must be RANGE or RANGE:LIMIT:RANGE"),
        ("", "must be one of collective, nccl"),
        ("xrings", "did you mean 'xring'"),
        ("xring/nccl", "must be one of"),
        ("pscpu:32q:xring", "'32q' is not a limit"),
        ("pscpu:-1:xring", "'-1' is not a limit"),
        ("pscpu:64k:xring:2k:nccl", "its limits must rise"),
        ("psgpu#", "shards are a whole number"),
        ("psgpu#two", "shards are a whole number"),
        ("psgpu#0", "at least 1 shard"),
        ("psgpu#1#2", "shards are a whole number"),
        ("collective#3", "1 or 2 shards"),
        ("psgpu#\u0664", "shards are a whole number"),
    ],
)
def test_what_is_not_well_formed_is_refused(spec: str, words: str):
    """By field, with what is accepted."""
    with pytest.raises(ConfigError, match=words):
        parse_all_reduce_spec(spec)
