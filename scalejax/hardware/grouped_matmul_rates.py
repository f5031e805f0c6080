"""Fitted rates of grouped matrix products, those of experts: data of the catalogue.

Knows no program; `simulator.operations.grouped_matmul` makes seconds of them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scalejax.core.errors import (
    ConfigError,
    UnknownHardware,
    refusal,
    require_at_least,
    unknown_name,
)
from scalejax.core.serialization import build, load_toml
from scalejax.hardware.chip import RateType

_FOLDER = Path(__file__).parent / "grouped_matmul_rates"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulRates:
    """Attainable rates of grouped products on one chip, fitted to measured layers of experts."""

    name: str
    """Name of the rates, and of their file: "h100"."""
    source: str
    """What was measured, and under which licence it was published."""
    tile_rows: int
    """Rows of a tile: the rows of each group are rounded up to a multiple of it."""
    matmul_fraction: dict[RateType, float]
    """Share of peak FLOP/s that full tiles reach, by type of operands."""
    memory_fraction: float
    """Share of peak memory bandwidth that products of few rows reach."""
    group_seconds: float
    """Time of a product for each of its groups, beyond arithmetic and memory traffic."""
    sources: dict[str, str]
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        require_at_least("tile_rows", self.tile_rows, 1)
        require_at_least("group_seconds", self.group_seconds, 0)
        fractions = {f"matmul_fraction.{kind}": u for kind, u in self.matmul_fraction.items()}
        for name, fraction in {**fractions, "memory_fraction": self.memory_fraction}.items():
            if not 0 < fraction <= 1:
                raise ConfigError(refusal(name, fraction, "it must be above 0 and at most 1"))


def grouped_matmul_names() -> tuple[str, ...]:
    """Names of the rates in the catalogue, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def load_grouped_matmul_rates(name: str) -> GroupedMatmulRates:
    """The rates of that name in the catalogue.

    Raises:
        UnknownHardware: if there are none; names the closest that are.
    """
    names = grouped_matmul_names()
    if name not in names:
        raise UnknownHardware(unknown_name("grouped_matmul_rates", name, names))
    tables = load_toml(_FOLDER / f"{name}.toml")
    return build(GroupedMatmulRates, tables, where="grouped_matmul_rates")
