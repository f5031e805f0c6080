"""Speedup and efficiency over device counts, as DLBS computes them.

Rows are groups of benchmarks that differ only in devices, columns device counts.

Source: HPE dlcookbook-dlbs, `bench_data.py`, 2022, which also clamps efficiencies to 100.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalejax.core.errors import ConfigError, refusal

Scaling = Literal["weak", "strong"]
"""What stays fixed as devices are added: per-device batch (weak) or global batch (strong)."""
Cells = tuple[tuple[float | None, ...], ...]
"""Cells of a table: rows of columns; missing cells are None."""

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
    """Whether efficiencies above 100 are shown as 100, as DLBS's `bench_data.py` does and its
    `summary_builder.py` does not."""

    @property
    def speedups(self) -> np.ndarray:
        """Throughput over that of the baseline, [row, column]; NaN where either is missing."""
        rates = np.array(self.samples_per_second, dtype=float)
        return rates / rates[:, [self.baseline]]

    @property
    def efficiencies(self) -> np.ndarray:
        """Efficiency in per cent of ideal scaling, [row, column], truncated to two decimals; 100 in
        the baseline, NaN where a time is missing.

        Weak: 100 t_baseline / t_N. Strong: 100 t_baseline / (N t_N), where N counts all devices
        for any baseline: with a baseline of n devices, ideal strong scaling reads 100 / n.
        """
        times = np.array(self.milliseconds, dtype=float)
        shared = np.array(self.device_counts) if self.scaling == "strong" else 1
        percent = np.trunc(10000.0 * times[:, [self.baseline]] / (shared * times)) / 100.0
        percent[np.isfinite(times[:, self.baseline]), self.baseline] = _MOST
        return np.minimum(percent, _MOST) if self.clamps else percent

    @property
    def above_most(self) -> list[tuple[str, int, float]]:
        """(row, devices, per cent) of the efficiencies above 100, before clamping."""
        percent = replace(self, clamps=False).efficiencies
        return [
            (self.labels[row], self.device_counts[column], float(percent[row, column]))
            for row, column in np.argwhere(percent > _MOST)
        ]


def column_of(baseline: int | None, device_counts: Sequence[int]) -> int:
    """Index of the column of `baseline` devices; 0 if None.

    Raises:
        ConfigError: if there is no such column.
    """
    if baseline is None:
        return 0
    if baseline not in device_counts:
        counts = ", ".join(map(str, device_counts))
        accepted = f"it must be one of the numbers of devices measured: {counts}"
        raise ConfigError(refusal("baseline", baseline, accepted))
    return list(device_counts).index(baseline)
