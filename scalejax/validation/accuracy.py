"""Accuracy of predictions by quantity, family, framework and chip, and changes of it.

Small enough to be kept for every release (`docs/accuracy/`), so that two can be compared.
Arithmetic on predicted rows; errors are (predicted - measured) / measured.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.serialization import document
from scalejax.validation.summary import MEMORY, RowResult

Key = tuple[str, str, str, str]
"""(what is measured, family, framework, chip)."""

_DIGITS = 4
"""Decimals of a share that are kept: a hundredth of a per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prediction and its measurement."""

    key: Key
    """Key of its cell."""
    row: RowResult
    """The row."""
    measured: float
    """What was measured: seconds, bytes, or samples."""
    predicted: float
    """What was predicted."""
    band: tuple[float, float] | None
    """(p10, p90) of the prediction; None if unknown."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1


def comparisons(rows: Iterable[RowResult]) -> list[Comparison]:
    """Every comparison that the rows allow, in order; for a step, its time and its peak memory."""
    found = []
    for row in rows:
        of = (row.family, row.framework, row.chip)
        if row.measured is not None and row.predicted is not None:
            found.append(
                Comparison(
                    key=(row.quantity, *of),
                    row=row,
                    measured=row.measured,
                    predicted=row.predicted,
                    band=row.band,
                )
            )
        if row.measured_memory_bytes is not None and row.predicted_memory_bytes is not None:
            found.append(
                Comparison(
                    key=(MEMORY, *of),
                    row=row,
                    measured=row.measured_memory_bytes,
                    predicted=row.predicted_memory_bytes,
                    band=None,
                )
            )
    return found


def by_cell(compared: Iterable[Comparison]) -> dict[Key, list[Comparison]]:
    """Comparisons of each cell, cells in order of appearance."""
    cells: dict[Key, list[Comparison]] = {}
    for each in compared:
        cells.setdefault(each.key, []).append(each)
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyCell:
    """Errors of the rows of one family, framework and chip."""

    quantity: str
    """What is measured."""
    family: str
    """Family of the rows."""
    framework: str
    """Framework or library; "" where there is none."""
    chip: str
    """Chip; "" where there is none."""
    rows: int
    """Rows that are predicted and measured."""
    median_error: float
    """Median absolute error."""
    mean_error: float
    """Mean absolute error."""
    bias: float
    """Mean signed error: above 0 where predictions are too large."""
    coverage: float | None
    """Fraction of measurements between p10 and p90, 0..1; None without a band."""

    def __post_init__(self) -> None:
        require_at_least("rows", self.rows, 1)
        for name in ("median_error", "mean_error"):
            require_at_least(name, getattr(self, name), 0)
        require_at_least("bias", self.bias, -1)
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise ConfigError(refusal("coverage", self.coverage, "it must be from 0 to 1"))

    @property
    def key(self) -> Key:
        """What identifies it."""
        return self.quantity, self.family, self.framework, self.chip


@document("accuracy")
@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of one release, cell by cell."""

    release: str
    """Version of scalejax."""
    cells: tuple[AccuracyCell, ...]
    """The cells, in order of appearance."""


def accuracy_of(rows: Iterable[RowResult], release: str) -> Accuracy:
    """Errors of predicted rows, cell by cell."""
    cells = by_cell(comparisons(rows))
    return Accuracy(release=release, cells=tuple(_cell(*each) for each in cells.items()))


def _cell(key: Key, members: Sequence[Comparison]) -> AccuracyCell:
    quantity, family, framework, chip = key
    errors = [each.error for each in members]
    hits = [each.band[0] <= each.measured <= each.band[1] for each in members if each.band]
    return AccuracyCell(
        quantity=quantity,
        family=family,
        framework=framework,
        chip=chip,
        rows=len(members),
        median_error=round(statistics.median(map(abs, errors)), _DIGITS),
        mean_error=round(statistics.fmean(map(abs, errors)), _DIGITS),
        bias=round(statistics.fmean(errors), _DIGITS),
        coverage=round(statistics.fmean(hits), _DIGITS) if hits else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A cell in two releases; None for a release without it."""

    before: AccuracyCell | None
    """The cell in the earlier release."""
    after: AccuracyCell | None
    """The cell in the later release."""

    @property
    def cell(self) -> AccuracyCell:
        """The cell, from the later release if it is there."""
        cell = self.after or self.before
        assert cell is not None  # noqa: S101  at least one release has the cell
        return cell

    @property
    def points(self) -> float | None:
        """Change of the mean error, as a share: below 0 if it improved; None for a cell of only
        one release."""
        if self.before is None or self.after is None:
            return None
        return self.after.mean_error - self.before.mean_error


def common(before: Accuracy, after: Accuracy) -> tuple[Accuracy, Accuracy]:
    """Both, with only the cells that they share, so that their sums can be compared."""
    kept = {cell.key for cell in before.cells} & {cell.key for cell in after.cells}
    first, second = (
        replace(each, cells=tuple(cell for cell in each.cells if cell.key in kept))
        for each in (before, after)
    )
    return first, second


def changes(before: Accuracy, after: Accuracy) -> list[Change]:
    """The cells that differ: the largest increase of the error first, cells of one release last."""
    old = {cell.key: cell for cell in before.cells}
    new = {cell.key: cell for cell in after.cells}
    found = [
        Change(before=old.get(key), after=new.get(key))
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key)
    ]
    return sorted(found, key=lambda each: (each.points is None, -(each.points or 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantitySummary:
    """Errors of one quantity over families, which count equally however many rows they have."""

    quantity: str
    """What is measured."""
    families: int
    """Families."""
    rows: int
    """Rows."""
    mean_error: float
    """Mean over families of their mean error."""
    coverage: float | None
    """Mean coverage of the families that have a band."""


def quantity_summaries(accuracy: Accuracy) -> list[QuantitySummary]:
    """One summary for each quantity, in order of appearance."""
    quantities = dict.fromkeys(cell.quantity for cell in accuracy.cells)
    return [_quantity(accuracy, name) for name in quantities]


def _quantity(accuracy: Accuracy, quantity: str) -> QuantitySummary:
    families: dict[str, list[AccuracyCell]] = {}
    for cell in accuracy.cells:
        if cell.quantity == quantity:
            families.setdefault(cell.family, []).append(cell)
    errors, coverages = [], []
    for cells in families.values():
        errors.append(_mean([(cell.mean_error, cell.rows) for cell in cells]))
        known = [(cell.coverage, cell.rows) for cell in cells if cell.coverage is not None]
        coverages += [_mean(known)] if known else []
    return QuantitySummary(
        quantity=quantity,
        families=len(families),
        rows=sum(cell.rows for cells in families.values() for cell in cells),
        mean_error=statistics.fmean(errors),
        coverage=statistics.fmean(coverages) if coverages else None,
    )


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    """Mean of (value, rows)."""
    return sum(value * rows for value, rows in weighted) / sum(rows for _, rows in weighted)
