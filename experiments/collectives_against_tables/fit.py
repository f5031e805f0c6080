"""Fit the constants of the model of collectives to the ledger: one set per library and link.

Latencies of NCCL's methods are common to all hardware; each link has its attainable share, the
cost of a device's own part and its ramps; each network its share, latency and ramp. Prints the
constants that stand in the catalogue.

    python experiments/collectives_against_tables/fit.py
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from cases import CLUSTERS, adapted, family_of
from ledger import Point, all_reduce_points, elsewhere_points, nccl_points, nvlink_points
from scipy.optimize import least_squares

from scalejax.hardware import Cluster, CommunicationLibrary, load_cluster, load_library
from scalejax.simulator.collectives import MODELS, Route
from scalejax.simulator.collectives.placement import group_route

Name = tuple[str, ...]
Constants = dict[Name, float]
BOUNDS = {
    "attainable_fraction": (0.3, 1.0),
    "in_switch_fraction": (0.3, 1.0),
    "own_share": (1e-3, 2.0),
    "ramp_seconds": (1e-8, 3e-4),
    "in_switch_ramp_seconds": (1e-8, 6e-5),
    "bandwidth_fraction": (0.1, 0.96),
    "base_seconds": (1e-6, 1e-4),
    "link_hop_seconds": (1e-7, 6e-5),
    "message_seconds": (1e-7, 2e-4),
    "latency_fraction": (0.4, 2.0),
    "network_base_seconds": (1e-7, 1e-4),
    "network_payload_bytes_per_second": (5e8, 1e11),
}
catalogued = cache(load_cluster)
"""A cluster of the catalogue, read once."""
LIBRARY: tuple[Name, ...] = (
    ("ring", "ll128", "bandwidth_fraction"),
    ("ring", "ll128", "base_seconds"),
    ("ring", "ll128", "link_hop_seconds"),
    ("ring", "simple", "base_seconds"),
    ("ring", "simple", "link_hop_seconds"),
    ("tree", "ll128", "base_seconds"),
    ("tree", "ll128", "link_hop_seconds"),
    ("nvls", "simple", "base_seconds"),
    ("pairwise", "simple", "base_seconds"),
    ("pairwise", "simple", "link_hop_seconds"),
)
SWITCH = ("attainable_fraction", "own_share", "ramp_seconds")
NVLS = ("in_switch_fraction", "in_switch_ramp_seconds")
LINKS: tuple[Name, ...] = (
    *(
        ("link", name, field)
        for name in ("dgx-h100", "dgx-b200", "gb200-nvl72")
        for field in (*SWITCH, *NVLS, "latency_fraction")
    ),
    *(("link", "dgx-a100-80gb", field) for field in SWITCH),
    ("link", "dgx1-v100", "attainable_fraction"),
    ("link", "dgx1-v100", "ramp_seconds"),
)
NETWORKS: tuple[Name, ...] = (
    ("tree", "ll", "network_payload_bytes_per_second"),
    ("tree", "ll128", "network_base_seconds"),
    ("tree", "simple", "network_base_seconds"),
    ("nvls", "simple", "network_base_seconds"),
    ("network", "aws-p5", "attainable_fraction"),
    ("network", "aws-p4de", "attainable_fraction"),
    ("network", "aws-p5", "message_seconds"),
    ("network", "aws-p4de", "message_seconds"),
    ("network", "aws-p5", "ramp_seconds"),
    ("network", "aws-p4de", "ramp_seconds"),
    ("network", "dgx-h100", "ramp_seconds"),
)


STARTS: tuple[Constants, ...] = tuple(
    {
        ("tree", "ll", "network_payload_bytes_per_second"): 4e9,
        ("tree", "ll128", "network_base_seconds"): ll128,
        ("tree", "simple", "network_base_seconds"): simple,
        ("nvls", "simple", "network_base_seconds"): nvls,
    }
    for ll128, simple, nvls in ((2e-5, 2e-5, 2e-5), (3e-5, 5e-6, 6e-5))
)
"""Where fits of what NCCL's source does not tell start; the nearest of them is taken."""


SAME_LINK = {
    "aws-p5": "dgx-h100",
    "dgx-h200": "dgx-h100",
    "aws-p4de": "dgx-a100-80gb",
    "dgx-b300": "dgx-b200",
    "gb300-nvl72": "gb200-nvl72",
}
"""The cluster whose link's constants another shares."""
AS_TREES = ("network_base_seconds", "network_payload_bytes_per_second")
"""What rings have as trees of their protocol do: hosts start and post them alike."""


def catalogue_constants(names: Iterable[Name]) -> Constants:
    """The values that the catalogue has now, within the bounds of the fit."""
    nccl = load_library("nccl")
    values: Constants = {}
    for name in names:
        kind, owner, field = name
        if name in STARTS[0]:
            values[name] = STARTS[0][name]
            continue
        if kind in ("link", "network"):
            value = getattr(getattr(catalogued(owner), kind), field)
        else:
            value = next(
                getattr(method, field)
                for method in nccl.methods
                if (method.algorithm, method.protocol) == (kind, owner)
            )
        low, high = BOUNDS[field]
        values[name] = min(max(value, low), high)
    return values


def with_constants(cluster: Cluster, constants: Constants) -> Cluster:
    """`cluster` with the constants that concern it, and without its table of measured times."""

    def of(kind: str, owner: str) -> dict[str, float]:
        return {f: value for (k, o, f), value in constants.items() if (k, o) == (kind, owner)}

    link_owner = SAME_LINK.get(cluster.name, cluster.name)
    network = cluster.network
    if network is not None:
        network = replace(network, **of("network", cluster.name))
    return replace(
        cluster,
        link=replace(cluster.link, measured=None, **of("link", link_owner)),
        network=network,
        library=_library(cluster.library, constants),
    )


def _library(library: CommunicationLibrary, constants: Constants) -> CommunicationLibrary:
    rings = {
        ("ring", protocol, field): value
        for (kind, protocol, field), value in constants.items()
        if kind == "tree" and field in AS_TREES
    }
    constants = constants | rings
    methods = tuple(
        replace(
            method,
            **{
                field: value
                for (algorithm, protocol, field), value in constants.items()
                if (algorithm, protocol) == (method.algorithm, method.protocol)
            },
        )
        for method in library.methods
    )
    return replace(library, methods=methods)


def log_errors(points: list[Point], constants: Constants) -> list[float]:
    """Logarithm of modelled over measured time of each point."""
    clusters = {
        family: adapted(with_constants(catalogued(name), constants), family)
        for family, name in CLUSTERS.items()
    }
    ways: dict[tuple[str, int], Route] = {}
    errors = []
    for point in points:
        family = family_of(point.hardware)
        way = ways.get((family, point.devices))
        if way is None:
            way = group_route(((point.devices, 1),), clusters[family])
            ways[family, point.devices] = way
        model: Callable = MODELS[point.operation]
        seconds = model(point.payload_bytes, way, clusters[family].library.methods)
        errors.append(math.log(seconds / point.seconds))
    return errors


def fit(
    points: list[Point], starts: Sequence[Constants], names: Iterable[Name], rounds: int
) -> Constants:
    """The constants of `names` that fit `points` best, each hardware and operation counting alike,
    from the best of several starts.

    Errors are logarithms, beyond about 10 % they count in proportion, not squared: small
    messages are noisy.
    """
    free = tuple(names)
    counts = Counter((family_of(point.hardware), point.operation) for point in points)
    weights = np.array([counts[family_of(p.hardware), p.operation] ** -0.5 for p in points])
    bounds = np.log([BOUNDS[name[2]] for name in free]).T

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = starts[0] | dict(zip(free, np.exp(logs).tolist(), strict=True))
        return np.array(log_errors(points, constants)) * weights

    found = []
    for start in starts:
        first = np.clip(np.log([start[name] for name in free]), bounds[0] + 1e-9, bounds[1] - 1e-9)
        # A point of a case of 60 has weight 0.13, so that 10 % is 0.013.
        found.append(
            least_squares(
                residuals, first, bounds=bounds, loss="soft_l1", f_scale=0.013, max_nfev=rounds
            )
        )
    best = min(found, key=lambda each: each.cost)
    return starts[0] | dict(zip(free, np.exp(best.x).tolist(), strict=True))


def is_within_node(point: Point) -> bool:
    """Whether the latencies and the links alone explain it: a model's point, no network's."""
    family = family_of(point.hardware)
    if family == "gb200":  # what NCCL's own log has not: groups of more than 8
        return point.devices > 8
    return family in (
        "nccl_a100_sxm",
        "nccl_h100_sxm",
        "nccl_h200_sxm",
        "nccl_b200_sxm",
        "nccl_gb200",
        "vtrain_ar_a100",
        "vtrain_ar_v100",
    )


def crosses_network(point: Point) -> bool:
    """Whether the network's constants are fitted to it."""
    return family_of(point.hardware) in (
        "aws_p4de",
        "aws_p5",
        "dgxh100",
        "issue232",
        "elsewhere_p4de",
        "elsewhere_p5",
    )


def fit_all(points: list[Point], start: Constants, rounds: int) -> Constants:
    """Latencies and links first, from groups within a node; then the networks."""
    inside = [p for p in points if is_within_node(p) and p.operation != "collective_permute"]
    found = fit(inside, (start,), LIBRARY + LINKS, rounds)
    return fit_networks(points, found, 3 * rounds)


def fit_networks(points: list[Point], constants: Constants, rounds: int) -> Constants:
    """`constants` with those of networks that fit what crosses one best."""
    crossing = [point for point in points if crosses_network(point)]
    return fit(crossing, [constants | start for start in STARTS], NETWORKS, rounds)


def main() -> None:
    """Print the constants that fit the whole ledger best."""
    points = nvlink_points() + all_reduce_points() + nccl_points() + elsewhere_points()
    found = fit_all(points, catalogue_constants(LIBRARY + LINKS + NETWORKS), rounds=60)
    for name, value in found.items():
        print(f"{'.'.join(name):45} {value:.3g}")
    errors = np.abs(np.expm1(log_errors(points, found)))
    for family in CLUSTERS:
        chosen = [e for p, e in zip(points, errors, strict=True) if family_of(p.hardware) == family]
        print(f"{family:20} {len(chosen):5} median {np.median(chosen):.1%}")


if __name__ == "__main__":
    main()
