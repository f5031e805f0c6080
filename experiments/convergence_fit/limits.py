"""Up to which batch each rule for the learning rate reaches the target, from Goyal et al. 2017.

python experiments/convergence_fit/limits.py ../shared/ledger/goyal2017_accuracy.csv
"""

import csv
import re
import sys
from pathlib import Path

from scalejax.planning.convergence import BatchLimit, Trial, batch_limit

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
