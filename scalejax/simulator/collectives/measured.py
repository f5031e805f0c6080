"""Seconds of collectives within a node and over nodes, from tables of measured times.

Between measured payloads, log time is linear in log payload; below the smallest and above the
largest, time is the model's, scaled to meet the table at its ends. For a group size that was not
measured, the ratio of measured to modelled time is linear in the log of the size, and constant
beyond the largest and the smallest. Links faster or slower than those measured scale only the
time in excess of the smallest message's.

If collectives of a cluster were measured over several nodes, their time beyond the model is added
or multiplied (`seconds_over_nodes`); between counts of nodes its logarithm is linear in that of the
count.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from statistics import fmean

from scalejax.hardware import Cluster, MeasuredTimes, load_cluster, load_measured_times
from scalejax.simulator.collectives.all_reduce import all_reduce_seconds
from scalejax.simulator.collectives.point_to_point import (
    all_to_all_seconds,
    gather_seconds,
    permute_seconds,
)
from scalejax.simulator.collectives.route import Route, find_route

LOW_LATENCY_BYTES = 1 << 20
"""Payload from which a network's additional time for a collective counts in full; assumed: below it
NCCL uses its low-latency protocols."""
_LEAST_SECONDS = 1e-7
"""Lower bound of the time beyond the model, as its logarithm is taken."""
_LARGEST_BIT = 38
"""Payloads up to 256 GiB are modelled beyond a table; time is proportional above."""
_SAME = 1e-9
"""Difference of logarithms below which payloads are equal."""
_Z_OF_P95 = 1.6448536269514722
"""Standard deviations from the median of a normal distribution to its 95th percentile."""
Model = Callable[[str, int, float], float]
"""Modelled seconds of (operation, devices, payload bytes) on the cluster that was measured."""

Factors = dict[int, tuple[tuple[float, float], ...]]
"""(log payload, log of measured over modelled time), ascending, by nodes."""
MODELS = {
    "all_reduce": all_reduce_seconds,
    "all_gather": gather_seconds,
    "reduce_scatter": gather_seconds,
    "all_to_all": all_to_all_seconds,
    "collective_permute": permute_seconds,
}
"""The model of each operation."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against payload for one operation and group size, non-decreasing.

    Measured, and modelled beyond what was measured."""

    log_bytes: tuple[float, ...]
    """Natural logarithms of the payloads, ascending."""
    log_seconds: tuple[float, ...]
    """Natural logarithms of the times, non-decreasing."""

    def at(self, payload_bytes: float) -> float:
        """Seconds for a payload: constant below the smallest, proportional above the largest."""
        x = math.log(max(payload_bytes, 1))
        index = bisect_right(self.log_bytes, x)
        if index == 0:
            return math.exp(self.log_seconds[0])
        x0, y0 = self.log_bytes[index - 1], self.log_seconds[index - 1]
        if index == len(self.log_bytes):
            return math.exp(y0 + x - x0)
        x1, y1 = self.log_bytes[index], self.log_seconds[index]
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))

    @property
    def least_seconds(self) -> float:
        """Time of the smallest message."""
        return math.exp(self.log_seconds[0])


def measured_seconds(
    operation: str, payload_bytes: int, route: Route, cluster: Cluster
) -> float | None:
    """Seconds of a collective within one node, from the table of the cluster's link.

    None for operations that were not measured, and for libraries other than the measured one.

    Raises:
        UnknownHardware: if the cluster names a table that does not exist.
    """
    name = cluster.link.measured
    if name is None or route.members_per_node == 1:
        return None
    found = _measured_curve(name, operation, route.members_per_node)
    if found is None or found[2] != cluster.library.name:
        return None
    curve, measured_rate, _ = found
    seconds = curve.at(payload_bytes)
    if route.link_bytes_per_second == measured_rate:
        return seconds
    latency = curve.least_seconds
    g = route.members_per_node
    transfer = (g - 1) / g * payload_bytes / route.link_bytes_per_second
    slower = measured_rate / route.link_bytes_per_second
    return max(transfer, latency + (seconds - latency) * slower)


def curve_of(times: MeasuredTimes, model: Model, operation: str, devices: int) -> Curve | None:
    """Seconds against payload for `devices`, measured at that group size or interpolated."""
    measured = times.curves.get(operation)
    if not measured:
        return None
    if devices in measured:
        return _extended(_never_falling(measured[devices]), model, operation, devices)
    below = max((size for size in measured if size < devices), default=None)
    above = min((size for size in measured if size > devices), default=None)
    near = [size for size in (below, above) if size is not None]
    weights = [1.0]
    if below is not None and above is not None:
        share = math.log(devices / below) / math.log(above / below)
        weights = [1 - share, share]
    curves = {
        size: _extended(_never_falling(measured[size]), model, operation, size) for size in near
    }
    payloads = sorted({payload for size in near for payload, _ in measured[size]})
    log_seconds = [
        math.log(model(operation, devices, payload))
        + sum(
            weight * math.log(curves[size].at(payload) / model(operation, size, payload))
            for size, weight in zip(near, weights, strict=True)
        )
        for payload in payloads
    ]
    curve = Curve(tuple(map(math.log, payloads)), tuple(accumulate(log_seconds, max)))
    return _extended(curve, model, operation, devices)


def model_on(cluster: Cluster) -> Model:
    """Function that models the seconds of a collective in one node of `cluster`."""

    def seconds(operation: str, devices: int, payload_bytes: float) -> float:
        route = find_route(cluster, members=devices, members_per_node=devices, nodes=1)
        return MODELS[operation](int(payload_bytes), route, cluster.library.methods)

    return seconds


@cache
def _measured_curve(name: str, operation: str, devices: int) -> tuple[Curve, float, str] | None:
    """(curve, rate of the measured members' links, library that was used) of a vendored table."""
    times = load_measured_times(name)
    reference = load_cluster(times.cluster)
    curve = curve_of(times, model_on(reference), operation, devices)
    if curve is None:
        return None
    route = find_route(reference, members=devices, members_per_node=devices, nodes=1)
    return curve, route.link_bytes_per_second, reference.library.name


def seconds_over_nodes(
    operation: str, payload_bytes: int, modelled_seconds: float, nodes: int, cluster: Cluster
) -> float | None:
    """Seconds of a collective over several nodes, from the table of the cluster's network.

    If the table has several payloads, the modelled time is scaled by the ratio of measured to
    modelled time of all devices of that many nodes: its logarithm is linear in that of the payload,
    and constant beyond the table. If it has one payload, latency and rate cannot be distinguished:
    for smaller payloads the excess over the model counts as latency and is added, in proportion to
    payloads below `LOW_LATENCY_BYTES`; for larger ones it is a rate, as beyond a table of several.
    Both were tried on nanotron's published steps (`experiments/collectives_against_tables`).
    All-to-alls and reduce-scatters that were not measured count as all-gathers.

    None for an operation, or a library, that was not measured.

    Raises:
        UnknownHardware: if the cluster names a table that does not exist.
    """
    if cluster.network is None or cluster.network.measured is None or nodes == 1:
        return None
    name = cluster.network.measured
    times = load_measured_times(name)
    if _library_of(name) != cluster.library.name:
        return None
    if operation not in times.curves and operation in ("all_to_all", "reduce_scatter"):
        operation = "all_gather"
    excesses, factors = _over_nodes(name, operation)
    if factors:
        return modelled_seconds * factor_over_nodes(factors, payload_bytes, nodes)
    if not excesses:
        return None
    # Beyond the most nodes measured, in proportion: a ring has as many more messages.
    excess = _interpolated(excesses, nodes) * max(1.0, nodes / max(excesses))
    [(measured_bytes, _)] = next(iter(times.curves[operation].values()))
    excess *= max(min(1.0, payload_bytes / LOW_LATENCY_BYTES), payload_bytes / measured_bytes)
    return modelled_seconds + excess


@cache
def _library_of(name: str) -> str:
    """Name of the library that a vendored table was measured with."""
    return load_cluster(load_measured_times(name).cluster).library.name


def factor_over_nodes(factors: Factors, payload_bytes: int, nodes: int) -> float:
    """Measured over modelled time of a payload over that many nodes."""
    x = math.log(max(payload_bytes, 1))
    return _interpolated({each: _between(row, x) for each, row in factors.items()}, nodes)


def measured_deviation(nodes: int, cluster: Cluster) -> float:
    """Standard deviation of the log time over that many nodes, from one choice of nodes to another;
    0 for one node, and if it was not measured."""
    if cluster.network is None or cluster.network.measured is None or nodes == 1:
        return 0.0
    times = load_measured_times(cluster.network.measured)
    by_nodes: dict[int, list[float]] = {}
    for sizes in times.ranges.values():
        for devices, (low, high) in sizes.items():
            spread = math.log(high / low) / (2 * _Z_OF_P95)
            by_nodes.setdefault(devices // cluster.devices_per_node, []).append(spread)
    if not by_nodes:
        return 0.0
    means = {each: math.log(fmean(spreads)) for each, spreads in by_nodes.items()}
    return _interpolated(means, nodes)


@cache
def _over_nodes(name: str, operation: str) -> tuple[dict[int, float], Factors]:
    """`over_nodes` of a vendored table."""
    times = load_measured_times(name)
    return over_nodes(times, load_cluster(times.cluster), operation)


def over_nodes(
    times: MeasuredTimes, reference: Cluster, operation: str
) -> tuple[dict[int, float], Factors]:
    """By nodes: log of the seconds beyond the model if there is one payload; (log payload, log of
    measured over modelled time) if there are several.

    Args:
        times: measured on all devices of the nodes.
        reference: the cluster that was measured.
        operation: "all_reduce".
    """
    g, methods = reference.devices_per_node, reference.library.methods
    excesses: dict[int, float] = {}
    factors: Factors = {}
    for devices, points in times.curves.get(operation, {}).items():
        if (nodes := devices // g) == 1:
            continue
        route = find_route(reference, members=devices, members_per_node=g, nodes=nodes)
        curve = _never_falling(points)
        modelled = [MODELS[operation](payload, route, methods) for payload, _ in points]
        if len(points) == 1:
            beyond = math.exp(curve.log_seconds[0]) - modelled[0]
            excesses[nodes] = math.log(max(beyond, _LEAST_SECONDS))
        else:
            factors[nodes] = tuple(
                (x, y - math.log(seconds))
                for x, y, seconds in zip(curve.log_bytes, curve.log_seconds, modelled, strict=True)
            )
    return excesses, factors


def _interpolated(logs: Mapping[int, float], count: int) -> float:
    """Value at `count` from logarithms by count: linear in the log count, constant beyond them."""
    below = max((each for each in logs if each <= count), default=min(logs))
    above = min((each for each in logs if each >= count), default=max(logs))
    share = 0.0 if below >= above else math.log(count / below) / math.log(above / below)
    return math.exp(logs[below] * (1 - share) + logs[above] * share)


def _between(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Value at `x` on straight lines between points of ascending x, constant beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def _extended(curve: Curve, model: Model, operation: str, devices: int) -> Curve:
    """`curve` with the model's times below and above it, scaled so that both meet at its ends."""

    def scaled(payloads: list[int], end: int) -> list[float]:
        measured = math.log(model(operation, devices, math.exp(curve.log_bytes[end])))
        offset = curve.log_seconds[end] - measured
        return [math.log(model(operation, devices, payload)) + offset for payload in payloads]

    powers = [1 << bit for bit in range(_LARGEST_BIT + 1)]
    below = [payload for payload in powers if math.log(payload) < curve.log_bytes[0] - _SAME]
    above = [payload for payload in powers if math.log(payload) > curve.log_bytes[-1] + _SAME]
    return Curve(
        (*map(math.log, below), *curve.log_bytes, *map(math.log, above)),
        (*scaled(below, 0), *curve.log_seconds, *scaled(above, -1)),
    )


def _never_falling(points: tuple[tuple[int, float], ...]) -> Curve:
    """Non-decreasing curve nearest to the points in log seconds (isotonic regression).

    Decreasing neighbours are replaced by their mean: small messages take equal time up to noise.
    """
    pools: list[tuple[float, int]] = []
    for _, seconds in points:
        mean, count = math.log(seconds), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    log_seconds = [mean for mean, count in pools for _ in range(count)]
    return Curve(tuple(math.log(payload) for payload, _ in points), tuple(log_seconds))
