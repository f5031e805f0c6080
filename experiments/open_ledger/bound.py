"""How far off scaling ratios must be, where one prediction serves every framework.

Run from the root of the repository, with the open ledger beside it:
    python experiments/open_ledger/bound.py

Frameworks that ran one setting (network, device, precision, batch, exchange, number of devices)
scaled differently on the same machine. A model without a constant per framework predicts one
ratio for all of them. Printed are the errors of a model that knew the median measured ratio of
each setting, and the share of rows that the best single ratio of each setting could bring within
12 %.
"""

import statistics
from collections import defaultdict

from summarize import LEDGER, SCALING_FAMILIES

from scalejax.validation import LedgerRow, read_ledger

WANTED = 0.12


def main() -> None:
    """Print the bound."""
    settings = ratios([row for row in read_ledger(LEDGER) if row.family in SCALING_FAMILIES])
    errors = [
        abs(statistics.median(known) / ratio - 1) for known in settings.values() for ratio in known
    ]
    p90 = statistics.quantiles(errors, n=10, method="inclusive")[8]
    print(f"{len(errors)} ratios of {len(settings)} settings")
    print(f"median of each setting known: median {statistics.median(errors):.1%}, p90 {p90:.1%}")
    within = sum(most_within(known) for known in settings.values())
    print(f"at most {within / len(errors):.1%} of them within {WANTED:.0%}, whatever is predicted")


def ratios(rows: list[LedgerRow]) -> dict[tuple[object, ...], list[float]]:
    """Measured step time over that on fewest devices of its series, by setting."""
    series: dict[tuple[object, ...], list[LedgerRow]] = defaultdict(list)
    for row in rows:
        if row.step_seconds is not None:
            alike = row.series, row.framework, row.source_locator, *setting(row)
            series[alike].append(row)
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for members in series.values():
        base, *others = sorted(members, key=lambda row: row.device_count)
        for row in others:
            if row.device_count > base.device_count and base.step_seconds and row.step_seconds:
                key = *setting(row), base.device_count, row.device_count
                found[key].append(row.step_seconds / base.step_seconds)
    return found


def setting(row: LedgerRow) -> tuple[object, ...]:
    """All that a prediction depends on, but for the number of devices."""
    work = row.work
    collective = row.spread.gradient_exchange
    return row.model, row.machine, work.precision, work.per_device_batch, collective


def most_within(known: list[float]) -> int:
    """The most of some ratios that one prediction comes within `WANTED` of."""
    edges = (ratio * (1 + sign * WANTED) for ratio in known for sign in (-1, 1))
    return max(sum(abs(edge / ratio - 1) <= WANTED + 1e-9 for ratio in known) for edge in edges)


if __name__ == "__main__":
    main()
