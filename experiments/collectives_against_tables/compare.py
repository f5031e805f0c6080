"""Collectives as predicted beside published measurements, sizes and device counts held out.

Two comparisons. "Sizes": every other payload of each series is left out of the tables and of
the fit, and predicted; then the others. "Devices": all rows of a group size are left out, 16
together with 18, 32 with 36, 64 with 72 and so on, and predicted from the other sizes. The
constants fitted without them are kept in `held_out_constants.json`; `--refit` fits them again,
which takes some minutes.

    python experiments/collectives_against_tables/compare.py
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, pstdev

from cases import CLUSTERS, adapted, family_of, gradient_sync_of
from fit import (
    LIBRARY,
    LINKS,
    NETWORKS,
    Constants,
    catalogue_constants,
    catalogued,
    fit_all,
    with_constants,
)
from ledger import Point, all_reduce_points, nvlink_points

from scalejax.core.units import MIB
from scalejax.hardware import MeasuredTimes
from scalejax.simulator.collectives import MODELS
from scalejax.simulator.collectives.measured import Curve, curve_of, model_on
from scalejax.simulator.collectives.placement import group_route

HELD_OUT = Path(__file__).parent / "held_out_constants.json"
TABLED = ("h100_sxm_80gb", "b200_sxm", "gb200", "gb300", "vtrain_ar_a100", "cw_gb200")
"""Families whose links have a table of measured times."""
DEVICE_FOLDS = ((2,), (3, 5, 7), (4,), (8,), (16, 18), (32, 36), (64, 72), (24, 144, 1440))
UNFITTED = {"attainable_fraction": 0.85, "message_seconds": 1e-7, "ramp_seconds": 1e-8}
"""A network's constants before anything was measured on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """What is left out of tables and fit."""

    name: str
    """Key of its constants."""
    held_out: frozenset[Point]
    """The points that are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One point, predicted without itself."""

    point: Point
    """What was measured."""
    predicted: float
    """Logarithm of predicted over measured time: the table where it has the group, else the
    model."""
    modelled: float
    """The same of the model alone."""


def folds(points: list[Point]) -> dict[str, list[Fold]]:
    """The folds of both comparisons, by its name."""
    series: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for point in points:
        series[point.hardware, point.operation, point.devices].add(point.payload_bytes)
    parity = {
        (key, payload): index % 2
        for key, payloads in series.items()
        for index, payload in enumerate(sorted(payloads))
    }

    def half(which: int) -> frozenset[Point]:
        return frozenset(
            p
            for p in points
            if parity[(p.hardware, p.operation, p.devices), p.payload_bytes] == which
        )

    return {
        "sizes": [Fold(name=f"sizes {i}", held_out=half(i)) for i in (0, 1)],
        "devices": [
            Fold(
                name=f"devices {' '.join(map(str, counts))}",
                held_out=frozenset(p for p in points if p.devices in counts),
            )
            for counts in DEVICE_FOLDS
        ],
    }  # fmt: skip


def outcomes(points: list[Point], fold: Fold, constants: Constants) -> list[Outcome]:
    """Every held-out point, predicted with `constants` and with tables that lack them all."""
    kept = [point for point in points if point not in fold.held_out]
    found = []
    for family, name in CLUSTERS.items():
        cluster = adapted(with_constants(catalogued(name), constants), family)
        model = model_on(with_constants(catalogued(name), constants))
        times = table_of(kept, "gb200" if family == "cw_gb200" else family)
        curves: dict[tuple[str, int], Curve | None] = {}
        for point in fold.held_out:
            if family_of(point.hardware) != family:
                continue
            way = group_route(gradient_sync_of(point).group.extents, cluster)
            modelled = MODELS[point.operation](point.payload_bytes, way, cluster.library.methods)
            key = (point.operation, way.members_per_node)
            if key not in curves:
                curves[key] = curve_of(times, model, *key) if way.members_per_node > 1 else None
            curve = curves[key]
            inside = 0.0 if curve is None else curve.at(point.payload_bytes)
            predicted = inside if way.nodes == 1 and inside else max(inside, modelled)
            found.append(
                Outcome(
                    point=point,
                    predicted=math.log(predicted / point.seconds),
                    modelled=math.log(modelled / point.seconds),
                )
            )
    return found


def table_of(points: Iterable[Point], family: str) -> MeasuredTimes:
    """The table that the points of a family make; of a family without one, an empty table."""
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for point in points:
        if family in TABLED and family_of(point.hardware) == family:
            sizes = curves.setdefault(point.operation, {})
            sizes.setdefault(point.devices, []).append((point.payload_bytes, point.seconds))
    return MeasuredTimes(
        name=family,
        cluster=CLUSTERS[family],
        source="the ledger",
        curves={o: {n: tuple(sorted(rows)) for n, rows in s.items()} for o, s in curves.items()},
    )


def refit(points: list[Point], all_folds: dict[str, list[Fold]]) -> dict[str, Constants]:
    """The constants of each fold, fitted without what it holds out."""
    start = catalogue_constants(LIBRARY + LINKS + NETWORKS)
    start |= {name: UNFITTED[name[2]] for name in NETWORKS}
    found = {}
    for fold in (fold for some in all_folds.values() for fold in some):
        kept = [point for point in points if point not in fold.held_out]
        found[fold.name] = fit_all(kept, start, rounds=12)
        print(f"fitted without {fold.name}", file=sys.stderr)
    rounded = {
        fold: {"/".join(name): float(f"{value:.3g}") for name, value in constants.items()}
        for fold, constants in found.items()
    }
    HELD_OUT.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    return found


def held_out_constants() -> dict[str, Constants]:
    """The constants of each fold, as they were fitted last."""
    kept = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    return {
        fold: {tuple(name.split("/")): value for name, value in constants.items()}
        for fold, constants in kept.items()
    }


def percent(values: list[float]) -> str:
    """Median absolute error of logarithms, in per cent."""
    return f"{median(abs(math.expm1(value)) for value in values):.1%}"


def report(found: dict[str, list[Outcome]]) -> None:
    """Print both comparisons by hardware, operation and group size, then over each file."""
    print("| measured | operation | devices | rows | sizes | devices | model alone |")
    print("|---|---|---|---|---|---|---|")
    keys = {
        (family_of(o.point.hardware), o.point.operation, o.point.devices)
        for o in found["sizes"]
    }  # fmt: skip
    for key in sorted(keys):
        cells = {
            name: [
                o for o in some
                if (family_of(o.point.hardware), o.point.operation, o.point.devices) == key
            ]
            for name, some in found.items()
        }  # fmt: skip
        sizes = percent([o.predicted for o in cells["sizes"]])
        devices = percent([o.predicted for o in cells["devices"]])
        alone = percent([o.modelled for o in cells["devices"]])
        family, operation, count = key
        if operation == "collective_permute":  # the ledger states no number of devices
            devices = alone = "n/a"
        print(
            f"| {family} | {operation} | {count} | {len(cells['sizes'])} "
            f"| {sizes} | {devices} | {alone} |"
        )
    print()
    for file, is_tabled in (("nvlink_collective_rates.csv", True), ("all_reduce_times.csv", False)):
        for name, some in found.items():
            chosen = [
                o
                for o in some
                if (family_of(o.point.hardware) in TABLED[:4]) == is_tabled
                and not (name == "devices" and o.point.operation == "collective_permute")
            ]
            large = [o.predicted for o in chosen if o.point.payload_bytes >= MIB]
            print(
                f"{file}, {name} held out: {len(chosen)} rows, median error "
                f"{percent([o.predicted for o in chosen])}; model alone "
                f"{percent([o.modelled for o in chosen])}; from 1 MiB, standard deviation of "
                f"the logarithm {pstdev(large):.2f}"
            )


def main() -> None:
    """Print the comparisons."""
    points = nvlink_points() + all_reduce_points()
    points = [replace(point) for point in dict.fromkeys(points)]
    all_folds = folds(points)
    constants = refit(points, all_folds) if "--refit" in sys.argv else held_out_constants()
    report(
        {
            name: [o for fold in some for o in outcomes(points, fold, constants[fold.name])]
            for name, some in all_folds.items()
        }
    )


if __name__ == "__main__":
    main()
