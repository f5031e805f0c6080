"""Speedup and efficiency over device counts, as DLBS computes them.

Rows are groups of benchmarks that differ only in devices, columns device counts. Plain
arithmetic; a missing measurement is None.

Source: HPE dlcookbook-dlbs, `bench_data.py`, 2022, which also clamps efficiencies to 100.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import ConfigError, refusal

Scaling = Literal["weak", "strong"]
"""Fixed as devices are added: the per-device batch (weak) or the global batch (strong)."""
Cells = tuple[tuple[float | None, ...], ...]
"""Cells of a table: rows of columns."""

_MOST = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTable:
    """Step time and throughput of benchmarks over device counts."""

    scaling: Scaling
    """Weak or strong."""
    device_counts: tuple[int, ...]
    """Device counts of the columns, ascending."""
    labels: tuple[str, ...]
    """Labels of the rows."""
    milliseconds: Cells
    """Step times."""
    samples_per_second: Cells
    """Throughput."""
    baseline: int
    """Index of the column that the others are compared with."""
    clamps: bool = False
    """Whether efficiencies above 100 are shown as 100."""

    @property
    def speedups(self) -> Cells:
        """Throughput over that of the baseline."""
        return speedups(self.samples_per_second, self.baseline)

    @property
    def efficiencies(self) -> Cells:
        """Per cent, as DLBS computes them."""
        return efficiencies(
            self.milliseconds,
            self.device_counts,
            self.scaling,
            baseline=self.baseline,
            clamps=self.clamps,
        )

    @property
    def above_most(self) -> list[tuple[str, int, float]]:
        """(row, devices, per cent) of the efficiencies above 100, before clamping."""
        unclamped = efficiencies(
            self.milliseconds, self.device_counts, self.scaling, baseline=self.baseline
        )
        return [
            (label, count, cell)
            for label, row in zip(self.labels, unclamped, strict=True)
            for count, cell in zip(self.device_counts, row, strict=True)
            if cell is not None and cell > _MOST
        ]


def speedups(throughputs: Cells, baseline: int = 0) -> Cells:
    """Each throughput over that of the baseline column; None where either is missing."""
    return tuple(
        tuple(
            None if cell is None or base is None else 1.0 if column == baseline else cell / base
            for column, cell in enumerate(row)
        )
        for row in throughputs
        for base in (row[baseline],)
    )


def efficiencies(
    times: Cells,
    device_counts: Sequence[int],
    scaling: Scaling,
    *,
    baseline: int = 0,
    clamps: bool = False,
) -> Cells:
    """Efficiency in per cent of ideal scaling, truncated to two decimals; 100 in the baseline.

    Weak: 100 t_baseline / t_N. Strong: 100 t_baseline / (N t_N), where N counts all devices for
    any baseline: with a baseline of n devices, ideal strong scaling reads 100 / n.

    Args:
        times: step times, in any unit.
        device_counts: of the columns.
        scaling: selects the formula.
        baseline: index of the column to compare with; the first in DLBS.
        clamps: return 100 for more, as DLBS's `bench_data.py` does and `summary_builder.py`
            does not.
    """

    def cell(column: int, time: float | None, base: float | None) -> float | None:
        if time is None or base is None:
            return None
        if column == baseline:
            return _MOST
        shared = device_counts[column] if scaling == "strong" else 1
        percent = int(10000.0 * base / (shared * time)) / 100.0
        return min(percent, _MOST) if clamps else percent

    return tuple(
        tuple(cell(column, time, row[baseline]) for column, time in enumerate(row)) for row in times
    )


def column_of(baseline: int | None, device_counts: Sequence[int]) -> int:
    """Index of the column of `baseline` devices; 0 if None.

    Raises:
        ConfigError: if there is none.
    """
    if baseline is None:
        return 0
    if baseline not in device_counts:
        counts = ", ".join(map(str, device_counts))
        accepted = f"it must be one of the numbers of devices measured: {counts}"
        raise ConfigError(refusal("baseline", baseline, accepted))
    return list(device_counts).index(baseline)
