"""Collectives as predicted beside published measurements: sizes, device counts, systems held out.

Three comparisons. "Sizes": every other payload of each series is left out of the tables and of
the fit, and predicted; then the others. "Devices": all rows of a group size are left out, 16
together with 18, 32 with 36, 64 with 72 and so on, and predicted from the other sizes. "Systems":
all rows of a machine of `all_reduce_times.csv` are left out, and predicted from what is published
of it and from the other machines (`with_constants_of_others`). The constants fitted without them
are kept in `held_out_constants.json`; `--refit` fits them again, which takes some minutes.

    python experiments/collectives_against_tables/compare.py
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median, pstdev
from typing import TypeVar

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
from ledger import Point, all_reduce_points, elsewhere_points, nccl_points, nvlink_points

from scalejax.core.units import MIB
from scalejax.hardware import Cluster, MeasuredTimes
from scalejax.simulator.collectives import MODELS
from scalejax.simulator.collectives.measured import (
    Curve,
    Factors,
    curve_of,
    factor_over_nodes,
    model_on,
    over_nodes,
)
from scalejax.simulator.collectives.placement import group_route

Table = TypeVar("Table", MeasuredTimes, Factors)
"""What was measured within a node, or over nodes."""
HELD_OUT = Path(__file__).parent / "held_out_constants.json"
TABLE_OF = {
    "cw_gb200": ("gb200",),
    "vtrain_ar_a100": ("vtrain_ar_a100", "elsewhere_a100", "nccl_a100_sxm"),
    "aws_p4de": ("nccl_a100_sxm",),
    "aws_p5": ("nccl_h100_sxm",),
    "dgxh100": ("nccl_h100_sxm",),
    "issue232": (),
    "a800": (),
}
"""Families of whose points within a node the table of a family's links is made, the first that has
any; of others, their own."""
NETWORK_OF = {
    "aws_p4de": ("aws_p4de", "elsewhere_p4de"),
    "aws_p5": ("aws_p5", "elsewhere_p5"),
}
"""Families of whose points over nodes the table of a family's network is made, as `TABLE_OF`."""
OVER_NODES = ("aws_p4de", "aws_p5_16gpu", "cw_gb200", "elsewhere_p")
"""Cases of which the catalogue has a table over nodes."""
XLA = ("h100_sxm_80gb", "b200_sxm", "gb200", "gb300")
"""Families of `nvlink_collective_rates.csv`."""
SYSTEMS = (
    "vtrain_ar_a100",
    "vtrain_ar_v100",
    "cw_gb200",
    "aws_p4de",
    "aws_p5",
    "dgxh100",
    "issue232",
    "a800",
)
"""Machines of `all_reduce_times.csv`."""
OTHER_NETWORK = {"aws_p4de": ("aws-p4de", "aws-p5"), "aws_p5": ("aws-p5", "aws-p4de")}
"""(cluster whose network is left out, that whose network it is predicted from), both EFA."""
POINT_TO_POINT = {"vtrain_ar_v100": ("dgx1-v100", 0.958)}
"""(cluster whose links are left out, share of their rate that a copy from device to device was
published to reach). V100: 47.9 of 50 GB/s over two wires (Dell, HPC solution for deep learning,
table 3, p2pBandwidthLatencyTest). Rings of NCCL reach what copies do: on H100 0.829 of the rate,
and copies 0.83 (NVIDIA/nccl#1264)."""
DEVICE_FOLDS = ((2,), (3, 5, 7), (4,), (8,), (16, 18), (32, 36), (64, 72), (24, 144, 1440))
UNFITTED = {"attainable_fraction": 0.9, "message_seconds": 2e-5, "ramp_seconds": 1e-5}
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
        "systems": [
            Fold(
                name=f"system {system}",
                held_out=frozenset(p for p in points if family_of(p.hardware) == system),
            )
            for system in SYSTEMS
        ],
    }  # fmt: skip


def outcomes(points: list[Point], fold: Fold, constants: Constants) -> list[Outcome]:
    """Every held-out point, predicted with `constants` and with tables that lack them all."""
    kept = [point for point in points if point not in fold.held_out]
    found = []
    for family, name in CLUSTERS.items():
        cluster = adapted(with_constants(catalogued(name), constants), family)
        model = model_on(with_constants(catalogued(name), constants))
        sources = TABLE_OF.get(family, (family,))
        tables = likest([table_of(kept, source) for source in sources], lambda each: each.curves)
        networks = [factors_of(kept, s, cluster) for s in NETWORK_OF.get(family, (family,))]
        networks = likest(networks, bool)
        curves: dict[tuple[str, int], list[Curve]] = {}
        for point in fold.held_out:
            if family_of(point.hardware) != family:
                continue
            way = group_route(gradient_sync_of(point).group.extents, cluster)
            modelled = MODELS[point.operation](point.payload_bytes, way, cluster.library.methods)
            key = (point.operation, way.members_per_node)
            if key not in curves:
                possible = (curve_of(times, model, *key) for times in tables)
                inside_node = way.members_per_node > 1
                curves[key] = [each for each in possible if each is not None and inside_node]
            inside = mean_of(curve.at(point.payload_bytes) for curve in curves[key])
            predicted = inside if way.nodes == 1 and inside else max(inside, modelled)
            if networks and way.nodes > 1:
                predicted = modelled * mean_of(
                    factor_over_nodes(factors, point.payload_bytes, way.nodes)
                    for factors in networks
                )
            found.append(
                Outcome(
                    point=point,
                    predicted=math.log(predicted / point.seconds),
                    modelled=math.log(modelled / point.seconds),
                )
            )
    return found


def likest(tables: list[Table], is_known: Callable[[Table], object]) -> list[Table]:
    """The first if it is known; else all others that are: a machine's own table, or those of the
    machines like it."""
    known = [each for each in tables if is_known(each)]
    return tables[:1] if known[:1] == tables[:1] else known


def mean_of(values: Iterable[float]) -> float:
    """Geometric mean, 0 of none."""
    known = list(values)
    return geometric_mean(known) if known else 0.0


def factors_of(points: Iterable[Point], family: str, cluster: Cluster) -> Factors:
    """Measured over modelled times over nodes of the family's all-reduces."""
    chosen = [
        point
        for point in points
        if family_of(point.hardware) == family
        and point.hardware.startswith(OVER_NODES)
        and not point.hardware.endswith("_eks")
    ]
    return over_nodes(_table(chosen, family), cluster, "all_reduce")[1]


def table_of(points: Iterable[Point], family: str) -> MeasuredTimes:
    """The table that the points of a family within a node make."""
    per_node = catalogued(CLUSTERS[family]).devices_per_node
    return _table(
        [p for p in points if family_of(p.hardware) == family and p.devices <= per_node], family
    )


def _table(points: Iterable[Point], family: str) -> MeasuredTimes:
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for point in points:
        sizes = curves.setdefault(point.operation, {})
        sizes.setdefault(point.devices, []).append((point.payload_bytes, point.seconds))
    return MeasuredTimes(
        name=family,
        cluster=CLUSTERS[family],
        source="the ledger",
        curves={o: {n: tuple(sorted(rows)) for n, rows in s.items()} for o, s in curves.items()},
    )


def with_constants_of_others(system: str, constants: Constants) -> Constants:
    """`constants` of a fit without `system`, with its own by those of others.

    A network gets the message and the share of the other, and its ramp in proportion to the time of
    a byte: what fills a pipeline are chunks of so many bytes. A link gets the published share of a
    copy, and the mean ramp of all other links.
    """
    found = dict(constants)
    if (networks := OTHER_NETWORK.get(system)) is not None:
        rates = [network.bytes_per_second for n in networks if (network := catalogued(n).network)]
        owner, other = networks
        for field in UNFITTED:
            found["network", owner, field] = constants["network", other, field]
        found["network", owner, "ramp_seconds"] *= rates[1] / rates[0]
    if (link := POINT_TO_POINT.get(system)) is not None:
        owner, share = link
        ramps = [
            value
            for (kind, name, field), value in constants.items()
            if kind == "link" and field == "ramp_seconds" and name != owner
        ]
        found["link", owner, "attainable_fraction"] = share
        found["link", owner, "ramp_seconds"] = geometric_mean(ramps)
    return found


def refit(points: list[Point], all_folds: dict[str, list[Fold]]) -> dict[str, Constants]:
    """The constants of each fold, fitted without what it holds out."""
    start = catalogue_constants(LIBRARY + LINKS + NETWORKS)
    start |= {name: UNFITTED[name[2]] for name in NETWORKS if name[0] == "network"}
    found = {}
    for fold in (fold for some in all_folds.values() for fold in some):
        kept = [point for point in points if point not in fold.held_out]
        constants = fit_all(kept, start, rounds=12)
        constants = with_constants_of_others(fold.name.removeprefix("system "), constants)
        found[fold.name] = constants
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
    systems = found.pop("systems")
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
    for file in ("nvlink_collective_rates.csv", "nccl_times.csv", "all_reduce_times.csv"):
        for name, some in found.items():
            chosen = [
                o
                for o in some
                if file_of(o.point) == file
                and not (name == "devices" and o.point.operation == "collective_permute")
            ]
            if not chosen:
                print(f"{file} is not there: the published times are not part of the repository")
                continue
            large = [o.predicted for o in chosen if o.point.payload_bytes >= MIB]
            print(
                f"{file}, {name} held out: {len(chosen)} rows, median error "
                f"{percent([o.predicted for o in chosen])}; model alone "
                f"{percent([o.modelled for o in chosen])}; from 1 MiB, standard deviation of "
                f"the logarithm {pstdev(large):.2f}"
            )

    print()
    print("| system held out | rows | median | mean |")
    print("|---|---|---|---|")
    means = []
    for system in SYSTEMS:
        errors = [
            abs(math.expm1(o.predicted)) for o in systems if family_of(o.point.hardware) == system
        ]
        means.append(fmean(errors))
        print(f"| {system} | {len(errors)} | {median(errors):.1%} | {means[-1]:.1%} |")
    every = fmean(abs(math.expm1(o.predicted)) for o in systems)
    print(f"mean over systems {fmean(means):.1%}, over rows {every:.1%}")
    equal: dict[tuple[str, int, int], list[Outcome]] = defaultdict(list)
    for o in systems:
        equal[family_of(o.point.hardware), o.point.devices, o.point.payload_bytes].append(o)
    once = [
        math.exp(same[0].predicted) * same[0].point.seconds
        / median(o.point.seconds for o in same) - 1
        for same in equal.values()
    ]  # fmt: skip
    repeats = [
        abs(o.point.seconds / median(other.point.seconds for other in same) - 1)
        for same in equal.values()
        if len(same) > 1
        for o in same
    ]
    print(
        f"equal settings once, by their median: {len(once)}, mean {fmean(map(abs, once)):.1%}; "
        f"{len(repeats)} rows of equal settings are off their median by {fmean(repeats):.1%}"
    )


def file_of(point: Point) -> str:
    """The file of the ledger that a point is from."""
    if point.hardware.startswith("nccl_"):
        return "nccl_times.csv"
    if point.hardware.startswith("elsewhere_"):
        return "measured_elsewhere.csv"
    is_of_xla = family_of(point.hardware) in XLA
    return "nvlink_collective_rates.csv" if is_of_xla else "all_reduce_times.csv"


def main() -> None:
    """Print the comparisons."""
    points = nvlink_points() + all_reduce_points() + nccl_points() + elsewhere_points()
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
