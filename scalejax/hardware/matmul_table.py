"""Measured rates of matrix products: tables of the catalogue.

Knows no program; `simulator.operations.matmul` interpolates between the shapes of a table.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scalejax.core.errors import ConfigError, UnknownHardware, refusal, require_above, unknown_name
from scalejax.core.serialization import build, load_toml
from scalejax.hardware.chip import RateType

_FOLDER = Path(__file__).parent / "matmul_rates"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulForm:
    """Roofline that the measurements of a table are interpolated against.

    seconds = fixed + max(FLOP / (peak matmul_fraction), bytes / (bandwidth memory_fraction))
    """

    name: str
    """Name of the table, and of its file of rates: "h100"."""
    source: str
    """Source of the rates."""
    peak_flop_per_second: dict[RateType, float]
    """Dense peak of the chip that was measured."""
    memory_bytes_per_second: float
    """Peak bandwidth of its memory."""
    matmul_fraction: float
    """Share of peak FLOP/s that large compute-bound products reached."""
    memory_fraction: float
    """Share of peak bandwidth that memory-bound products reached."""
    fixed_seconds: float
    """Least measured time of a product."""
    aside_seconds: float
    """Part of `fixed_seconds` that is overhead of the measurement, absent in running programs."""
    sources: dict[str, str]
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes_per_second", "fixed_seconds"):
            require_above(name, getattr(self, name), 0)
        for name in ("matmul_fraction", "memory_fraction"):
            fraction = getattr(self, name)
            if not 0 < fraction <= 1:
                raise ConfigError(refusal(name, fraction, "it must be above 0 and at most 1"))
        if not 0 <= self.aside_seconds <= self.fixed_seconds:
            accepted = f"it must be at least 0 and at most fixed_seconds={self.fixed_seconds}"
            raise ConfigError(refusal("aside_seconds", self.aside_seconds, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable:
    """Rates of matrix products on one chip."""

    form: MatmulForm
    """Roofline that the rates are interpolated against."""
    shapes: tuple[tuple[int, int, int, int], ...]
    """(batch, m, n, k) of each product."""
    flop_per_second: dict[RateType, tuple[float, ...]]
    """FLOP/s of each product, by type of operands."""


def matmul_table_names() -> tuple[str, ...]:
    """Names of the tables in the catalogue, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def load_matmul_table(name: str) -> MatmulTable:
    """The table of that name in the catalogue.

    Raises:
        UnknownHardware: if there is none; names the closest that is.
    """
    if name not in matmul_table_names():
        raise UnknownHardware(unknown_name("matmul_table", name, matmul_table_names()))
    form = build(MatmulForm, load_toml(_FOLDER / f"{name}.toml"), where="matmul_table")
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return MatmulTable(
        form=form,
        shapes=tuple(
            (int(row["batch"]), int(row["m"]), int(row["n"]), int(row["k"])) for row in rows
        ),
        flop_per_second={
            kind: tuple(float(row[kind]) for row in rows) for kind in form.peak_flop_per_second
        },
    )
