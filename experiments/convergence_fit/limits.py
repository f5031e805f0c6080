"""Up to which batch each rule for the learning rate reaches the target, from Goyal et al. 2017.

python experiments/convergence_fit/limits.py ../shared/ledger/goyal2017_accuracy.csv
"""

import csv
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalejax.core.errors import ConfigError, refusal, require_at_least

RULES = {
    "linear scaling, gradual warmup": ("Table 1 baseline", "Table 1 gradual", "batch sweep 16k"),
    "linear scaling, constant warmup": ("Table 1 baseline", "Table 1 constant"),
    "linear scaling, no warmup": ("Table 1 baseline", "Table 1 no warmup"),
    "square root, gradual warmup": ("Table 1 baseline", "Table 2 sqrt"),
    "no scaling": ("Table 1 baseline", "Table 2 eta=.10 no scaling"),
    "linear, gradual, gamma = 1": ("BN gamma=1 (256)", "BN gamma=1 (8k)"),
}
"""Beginnings of the rows of each rule, in the file's column `locator`; with a batch of 256 all
rules are one."""
TOLERANCE = 0.5
"""Points of top-1 error above the baseline that still count as trained: the spread of its five
runs is 0.12."""
_WIDEST = 4
"""Ratio of two batches above which their errors are not interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Runs with one batch under one rule, and the error that they ended with."""

    global_batch: int
    """Samples per update over all devices."""
    error: float
    """Error at the end of training, in the units of the target; inf for runs that diverged."""
    standard_error: float = 0.0
    """Standard error of its mean over runs."""

    def __post_init__(self) -> None:
        require_at_least("trials.global_batch", self.global_batch, 1)
        require_at_least("trials.standard_error", self.standard_error, 0)
        if math.isnan(self.error):
            raise ConfigError(refusal("trials.error", self.error, "inf says that it diverged"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimit:
    """Batch at which a learning-rate rule breaks down."""

    reached: int | None
    """Largest batch up to which every batch tried reached the target; None if the smallest did
    not."""
    failed: int | None
    """Next larger batch tried, which did not reach it; None if all did."""
    breaking_batch: float | None
    """Batch at which the error crosses the target, on a straight line in ln(batch) between the two;
    None if nothing failed, nothing was reached, a run diverged, or they are too far apart, so that
    there is no line."""
    breaking_factor: float | None
    """Factor by which one standard deviation of the two errors moves `breaking_batch`; None
    where that is None."""


def batch_limit(trials: Sequence[Trial], *, target_error: float) -> BatchLimit:
    """Limit of the batch up to which `trials` of one rule end with at most `target_error`.

    Batches above the first that failed are ignored: one that succeeds there by luck of its
    hyperparameters does not imply the batches between.

    Raises:
        ConfigError: if there is no trial, or two have one batch.
    """
    ordered = sorted(trials, key=lambda trial: trial.global_batch)
    batches = [trial.global_batch for trial in ordered]
    if not batches or len(set(batches)) < len(batches):
        raise ConfigError(refusal("trials", batches, "one for each of at least one batch"))
    good: Trial | None = None
    for trial in ordered:
        if trial.error > target_error:
            crossing = _crossing(good, trial, target_error)
            return BatchLimit(
                reached=good and good.global_batch,
                failed=trial.global_batch,
                breaking_batch=crossing and crossing[0],
                breaking_factor=crossing and crossing[1],
            )
        good = trial
    return BatchLimit(reached=batches[-1], failed=None, breaking_batch=None, breaking_factor=None)


def _crossing(good: Trial | None, bad: Trial, target: float) -> tuple[float, float] | None:
    """(batch, factor of one standard deviation) at which the line through both meets `target`."""
    if good is None or math.isinf(bad.error):
        return None
    if bad.global_batch > _WIDEST * good.global_batch:
        return None
    width = math.log(bad.global_batch / good.global_batch)
    rise = bad.error - good.error
    part = (target - good.error) / rise
    batch = good.global_batch * math.exp(part * width)
    deviation = math.hypot((1 - part) * good.standard_error, part * bad.standard_error)
    return batch, math.exp(deviation * width / rise)


def trial(row: dict[str, str]) -> Trial:
    """A row, with the standard error of its mean of five runs."""
    spread = re.search(r"std ([0-9.]+) over ([0-9]+) runs", row["notes"])
    return Trial(
        global_batch=int(row["global_batch"]),
        error=float(row["top1_error_percent"]),
        standard_error=float(spread[1]) / float(spread[2]) ** 0.5 if spread else 0.0,
    )


def cells(found: BatchLimit) -> str:
    """A limit as cells of a Markdown table."""
    if found.breaking_batch is None or found.breaking_factor is None:
        return f"{found.reached} | {found.failed} | n/a"
    low, high = (found.breaking_batch * found.breaking_factor**sign for sign in (-1, 1))
    return (
        f"{found.reached} | {found.failed} | {found.breaking_batch:.0f} ({low:.0f} to {high:.0f})"
    )


def main() -> None:
    """Print a row for each rule."""
    with Path(sys.argv[1]).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "ResNet-50"]
    baseline = next(row for row in rows if row["locator"] == "Table 1 baseline")
    target = float(baseline["top1_error_percent"]) + TOLERANCE
    print(f"Target: top-1 error of at most {target:.2f} %\n")
    print("| rule | reached | failed | breaks at (one standard deviation) |")
    print("|---|---|---|---|")
    for rule, locators in RULES.items():
        trials = [trial(row) for row in rows if row["locator"].startswith(locators)]
        print(f"| {rule} | {cells(batch_limit(trials, target_error=target))} |")


if __name__ == "__main__":
    main()
