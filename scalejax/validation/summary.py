"""Errors of predictions against measurements, by family of rows.

Arithmetic on predicted rows. Every error is relative: (predicted - measured) / measured.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalejax.validation.ledger import LedgerRow, RowKind

NOT_COMPILED = "not compiled"
"""Status of a row that could be expressed as a run, if nothing was to be compiled."""

STEP_TIMES = "step times"
MEMORY = "memory"
"""Peak memory of steps, which rows of step times may state too."""

Quantity = Literal[
    "step times",
    "collectives",
    "products",
    "grouped products",
    "attention",
    "dispatch",
    "samples to target",
    "loss",
]
"""What a ledger measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Prediction and measurement of one row of a ledger."""

    case_id: str
    """Name of the row."""
    series: str
    """Rows of one series differ in the number of devices."""
    device_count: int
    """Devices in the run."""
    measured_seconds: float | None
    """Published time of one step; None where it is not stated."""
    predicted_seconds: float | None
    """Predicted time of one step; None if the row is skipped."""
    p10_seconds: float | None
    """10th percentile of the predicted step time; None if unknown."""
    p90_seconds: float | None
    """90th percentile of the predicted step time; None if unknown."""
    status: str
    """"ok", "not compiled", or "skipped: " and the reason."""
    kind: RowKind | None = "dense"
    """What was trained; None for rows that are not steps."""
    states_layout: bool = False
    """Whether the row states what a prediction needs."""
    is_mapped: bool = False
    """Whether it could be expressed as a run."""
    nearest: tuple[str, ...] = ()
    """Which parts of the row were only approximated, as scalejax lacks them."""
    is_closed_form: bool = False
    """Whether its step was predicted in closed form, not compiled."""
    quantity: Quantity = STEP_TIMES
    """What the row measures."""
    ledger: str = ""
    """Name of the ledger."""
    family: str = ""
    """Short name of the source, by which results are grouped."""
    framework: str = ""
    """Framework that the row is predicted with, or library that ran the operation."""
    chip: str = ""
    """Chip, by its name in the catalogue if it is there."""
    source: str = ""
    """Publication, and the place in it."""
    measured_memory_bytes: float | None = None
    """Published peak memory of a device; None where it is not stated."""
    predicted_memory_bytes: float | None = None
    """Predicted peak memory of a device: if known, what the framework's allocator reserves, which
    its runs print; else the program's, including the runtime's own reserve."""
    p10_memory_bytes: float | None = None
    """10th percentile of the predicted peak memory; None if unknown."""
    p90_memory_bytes: float | None = None
    """90th percentile of the predicted peak memory; None if unknown."""
    has_died: bool = False
    """Whether the source says that the run crashed or ran out of memory."""
    fits: bool | None = None
    """Whether it is predicted to fit into the memory of a device; None for other rows."""
    measured_loss: float | None = None
    """Published final loss; None for other rows."""
    predicted_loss: float | None = None
    """Predicted final loss; None if the row is skipped."""
    p10_loss: float | None = None
    """10th percentile of the predicted loss; None if unknown."""
    p90_loss: float | None = None
    """90th percentile of the predicted loss; None if unknown."""
    measured_samples: float | None = None
    """Published work until the target was reached, in `samples_unit`; None for other rows."""
    predicted_samples: float | None = None
    """Predicted work until the target is reached, in `samples_unit`."""
    p10_samples: float | None = None
    """10th percentile of the predicted work; None if unknown."""
    p90_samples: float | None = None
    """90th percentile of the predicted work; None if unknown."""
    samples_unit: str | None = None
    """Unit of the work to the target as published: "samples", "epochs" or "tokens"."""

    @property
    def is_predicted(self) -> bool:
        """Whether there is a prediction."""
        return self.status == "ok"

    @property
    def skip_reason(self) -> str | None:
        """Why it was skipped; None if it was not."""
        prefix = "skipped: "
        is_skipped = self.status.startswith(prefix)
        return self.status.removeprefix(prefix) if is_skipped else None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of what the row measures; None if either is missing."""
        return _relative(self.predicted, self.measured)

    @property
    def memory_error(self) -> float | None:
        """The same for its peak memory."""
        return _relative(self.predicted_memory_bytes, self.measured_memory_bytes)

    @property
    def measured(self) -> float | None:
        """What was measured: seconds, or samples, or the loss."""
        if self.quantity == "samples to target":
            return self.measured_samples
        return self.measured_loss if self.quantity == "loss" else self.measured_seconds

    @property
    def predicted(self) -> float | None:
        """The prediction for `measured`."""
        if self.quantity == "samples to target":
            return self.predicted_samples
        return self.predicted_loss if self.quantity == "loss" else self.predicted_seconds

    @property
    def band(self) -> tuple[float, float] | None:
        """(p10, p90) of the prediction; None if unknown."""
        bands = {
            "samples to target": (self.p10_samples, self.p90_samples),
            "loss": (self.p10_loss, self.p90_loss),
        }
        low, high = bands.get(self.quantity, (self.p10_seconds, self.p90_seconds))
        return None if low is None or high is None else (low, high)


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """How many rows of a kind are predicted, and why the rest are not."""

    kind: RowKind
    """What was trained."""
    rows: int
    """Number of rows."""
    stating: int
    """Rows that state their layout (`LedgerRow.states_layout`)."""
    mapped: int
    """Of these, those that could be expressed as a run."""
    predicted: int
    """Of these, those that were predicted."""
    in_closed_form: int
    """Of these, those whose step was predicted in closed form."""
    nearest: int
    """Of those that are mapped, those that only approximate the row (`RowResult`)."""
    skipped: tuple[tuple[str, int, int], ...]
    """(reason, rows, those of them that state their layout), the commonest first."""


def kind_summaries(results: Iterable[RowResult]) -> list[KindSummary]:
    """One summary for each kind among the rows."""
    members: dict[RowKind, list[RowResult]] = {"dense": [], "expert": [], "lora": []}
    for result in results:
        if result.kind is not None:
            members[result.kind].append(result)
    return [_of_kind(kind, rows) for kind, rows in members.items() if rows]


def _of_kind(kind: RowKind, results: Sequence[RowResult]) -> KindSummary:
    stating = [result for result in results if result.states_layout]
    skipped = [result for result in results if result.skip_reason is not None]
    reasons = Counter(result.skip_reason or "" for result in skipped)
    of_stating = Counter(result.skip_reason for result in skipped if result.states_layout)
    return KindSummary(
        kind=kind,
        rows=len(results),
        stating=len(stating),
        mapped=sum(result.is_mapped for result in stating),
        predicted=sum(result.is_predicted for result in stating),
        in_closed_form=sum(result.is_closed_form for result in stating),
        nearest=sum(result.is_mapped and bool(result.nearest) for result in stating),
        skipped=tuple((name, n, of_stating[name]) for name, n in reasons.most_common()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of the predictions of a family of rows; None if nothing can be compared."""

    name: str
    """Family of the rows."""
    rows: int
    """Number of rows."""
    predicted: int
    """Number of rows that were predicted."""
    median_error: float | None
    """Median absolute error of the step time."""
    mean_error: float | None
    """Mean absolute error of the step time."""
    bias: float | None
    """Mean signed error of the step time: above 0 where predictions are too slow."""
    ratios: int
    """Number of scaling ratios: pairs of a row and the one on the fewest devices of its series."""
    median_ratio_error: float | None
    """Median absolute error of the scaling ratios: step time over that on the fewest devices."""
    p90_ratio_error: float | None
    """90th percentile of the absolute error of the scaling ratios."""
    settings: int
    """Number of settings: network, device, precision, per-device batch and device count."""
    median_fastest_error: float | None
    """Median absolute error against the fastest row of each setting."""
    coverage: float | None
    """Fraction of measured times between p10 and p90, 0..1: 0.8 if the band is calibrated."""


def plain_summary(name: str, results: Sequence[RowResult]) -> Summary:
    """Summary of rows that are not steps, and have no scaling ratios and no settings."""
    errors = [result.error for result in results if result.error is not None]
    return Summary(
        name=name,
        rows=len(results),
        predicted=sum(result.is_predicted for result in results),
        median_error=_quantile([abs(error) for error in errors], 0.5),
        mean_error=statistics.fmean(map(abs, errors)) if errors else None,
        bias=statistics.fmean(errors) if errors else None,
        ratios=0,
        median_ratio_error=None,
        p90_ratio_error=None,
        settings=0,
        median_fastest_error=None,
        coverage=coverage(results),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Errors of the peak memory of a family of rows, and whether steps that ran would fit."""

    name: str
    """Family of the rows."""
    stated: int
    """Predicted rows that state their peak memory."""
    median_error: float | None
    """Median absolute error of the peak memory."""
    mean_error: float | None
    """Mean absolute error of the peak memory."""
    bias: float | None
    """Mean signed error of the peak memory: above 0 where predictions are too large."""
    ran: int
    """Predicted rows that ran: they state a time or a peak."""
    ran_without_fitting: int
    """Of these, those that are predicted not to fit."""
    died: int
    """Predicted rows of runs that died, for whatever reason."""
    died_fitting: int
    """Of these, those that are predicted to fit."""


def memory_summaries(results: Iterable[RowResult]) -> list[MemorySummary]:
    """One summary for each family in which some row states a peak, or died."""
    families: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        if result.fits is not None:
            families[result.family].append(result)
    found = [_of_memory(name, members) for name, members in families.items()]
    return [each for each in found if each.stated or each.died]


def _of_memory(name: str, results: Sequence[RowResult]) -> MemorySummary:
    errors = [result.memory_error for result in results if result.memory_error is not None]
    ran, died = [], []
    for result in results:
        is_stated = result.measured_seconds is not None or result.measured_memory_bytes is not None
        if result.has_died or is_stated:
            (died if result.has_died else ran).append(result)
    return MemorySummary(
        name=name,
        stated=len(errors),
        median_error=_quantile([abs(error) for error in errors], 0.5),
        mean_error=statistics.fmean(map(abs, errors)) if errors else None,
        bias=statistics.fmean(errors) if errors else None,
        ran=len(ran),
        ran_without_fitting=sum(not result.fits for result in ran),
        died=len(died),
        died_fitting=sum(bool(result.fits) for result in died),
    )


def grouped(
    results: Iterable[RowResult], key: Callable[[RowResult], str]
) -> dict[str, list[RowResult]]:
    """Results by `key`, in order of appearance."""
    found: dict[str, list[RowResult]] = defaultdict(list)
    for result in results:
        found[key(result)].append(result)
    return dict(found)


Scored = tuple[LedgerRow, RowResult]
"""A row with its result."""


def summaries(scored: Sequence[Scored]) -> list[Summary]:
    """One summary per family, in order of appearance, and one of all rows if there are several."""
    families: dict[str, list[Scored]] = defaultdict(list)
    for row, result in scored:
        families[row.family].append((row, result))
    found = [summarize(name, members) for name, members in families.items()]
    return [*found, summarize("all", scored)] if len(found) > 1 else found


def summarize(name: str, scored: Sequence[Scored]) -> Summary:
    """Summary of the errors of these rows."""
    errors = [result.error for _, result in scored if result.error is not None]
    ratios = [abs(error) for error in ratio_errors(scored)]
    fastest = [abs(error) for error in fastest_errors(scored)]
    return Summary(
        name=name,
        rows=len(scored),
        predicted=sum(result.is_predicted for _, result in scored),
        median_error=_quantile([abs(error) for error in errors], 0.5),
        mean_error=statistics.fmean(map(abs, errors)) if errors else None,
        bias=statistics.fmean(errors) if errors else None,
        ratios=len(ratios),
        median_ratio_error=_quantile(ratios, 0.5),
        p90_ratio_error=_quantile(ratios, 0.9),
        settings=len(fastest),
        median_fastest_error=_quantile(fastest, 0.5),
        coverage=coverage(result for _, result in scored),
    )


def ratio_errors(scored: Iterable[Scored]) -> list[float]:
    """Error of the scaling ratio of every row that has a counterpart on fewer devices.

    The ratio is the step time over that on the fewest devices of its series; the framework's
    efficiency on one device cancels. Series that also mix networks or batches are split first, so
    that compared rows differ only in the number of devices.
    """
    return [
        (1 + large.error) / (1 + small.error) - 1  # error of a ratio: the ratio of both
        for large, small in scaling_pairs(scored)
        if large.error is not None and small.error is not None
    ]


def scaling_pairs(scored: Iterable[Scored]) -> list[tuple[RowResult, RowResult]]:
    """Pairs of a row and the row on the fewest devices of its series."""
    pairs = []
    for members in _comparable(scored):
        ordered = sorted(members, key=lambda item: item[0].device_count)
        (first, base), *others = ordered
        pairs += [(result, base) for row, result in others if row.device_count > first.device_count]
    return pairs


def fastest_errors(scored: Iterable[Scored]) -> list[float]:
    """Error against the fastest row of each setting, whatever its framework."""
    settings: dict[tuple[object, ...], tuple[float, float]] = {}
    for row, result in scored:
        if result.error is not None and result.measured_seconds is not None:
            candidate = result.measured_seconds, result.error
            best = settings.setdefault(_setting(row), candidate)
            settings[_setting(row)] = min(best, candidate, key=lambda each: each[0])
    return [error for _, error in settings.values()]


def _comparable(scored: Iterable[Scored]) -> list[list[Scored]]:
    """Groups of rows that differ only in the number of devices."""
    series: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for row, result in scored:
        if result.error is not None:
            series[_alike(row)].append((row, result))
    groups = []
    for members in series.values():
        counts = [row.device_count for row, _ in members]
        if len(set(counts)) == len(counts):
            groups.append(members)
            continue
        # Several measurements of one series: split by their place of publication.
        parts: dict[str | None, list[Scored]] = defaultdict(list)
        for row, result in members:
            parts[row.source_locator].append((row, result))
        groups.extend(parts.values())
    return groups


def _alike(row: LedgerRow) -> tuple[object, ...]:
    """Key of a scaling series: all fields except the axes that divide the batch, and the global
    batch if the per-device batch is stated."""
    work, spread = row.work, row.spread
    if work.per_device_batch is not None:
        work = replace(work, global_batch=None)
    return row.series, row.model, row.machine.hardware, work, spread.tensor, spread.pipeline


def _setting(row: LedgerRow) -> tuple[object, ...]:
    work = row.work
    batch = work.per_device_batch or work.global_batch
    return row.model, row.machine.hardware, work.precision, batch, row.device_count


def coverage(results: Iterable[RowResult]) -> float | None:
    """Fraction of measurements within their band, of those that have one."""
    hits = [
        result.band[0] <= result.measured <= result.band[1]
        for result in results
        if result.band is not None and result.measured is not None
    ]
    return statistics.fmean(hits) if hits else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The quantile, interpolated between the values on either side."""
    return float(np.quantile(values, share)) if values else None
