"""Seconds of collectives within a node, interpolated in tables of measured times.

Between measured payloads, log time is linear in log payload. For a group size that was not
measured, the ratio of measured to modelled time is linear in the log of the size, and constant
beyond the largest and the smallest. Links faster or slower than those measured scale only the
time in excess of the smallest message's.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from scalejax.hardware import Cluster, MeasuredTimes, load_cluster, load_measured_times
from scalejax.simulator.collectives.all_reduce import all_reduce_seconds
from scalejax.simulator.collectives.point_to_point import (
    all_to_all_seconds,
    gather_seconds,
    permute_seconds,
)
from scalejax.simulator.collectives.route import Route, find_route

Model = Callable[[str, int, float], float]
"""Modelled seconds of (operation, devices, payload bytes) on the cluster that was measured."""

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
    """Seconds against payload for one operation and group size, non-decreasing."""

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

    None for operations that were not measured, and for a library other than the measured one.

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
        return _never_falling(measured[devices])
    below = max((size for size in measured if size < devices), default=None)
    above = min((size for size in measured if size > devices), default=None)
    near = [size for size in (below, above) if size is not None]
    weights = [1.0]
    if below is not None and above is not None:
        share = math.log(devices / below) / math.log(above / below)
        weights = [1 - share, share]
    curves = {size: _never_falling(measured[size]) for size in near}
    payloads = sorted({payload for size in near for payload, _ in measured[size]})
    log_seconds = [
        math.log(model(operation, devices, payload))
        + sum(
            weight * math.log(curves[size].at(payload) / model(operation, size, payload))
            for size, weight in zip(near, weights, strict=True)
        )
        for payload in payloads
    ]
    return Curve(tuple(map(math.log, payloads)), tuple(accumulate(log_seconds, max)))


def model_on(cluster: Cluster) -> Model:
    """Function that models the seconds of a collective in one node of `cluster`."""

    def seconds(operation: str, devices: int, payload_bytes: float) -> float:
        route = find_route(cluster, members=devices, members_per_node=devices, nodes=1)
        return MODELS[operation](int(payload_bytes), route, cluster.library.methods)

    return seconds


@cache
def _measured_curve(name: str, operation: str, devices: int) -> tuple[Curve, float, str] | None:
    """(curve, rate of the link that was measured, library that ran) of a vendored table."""
    times = load_measured_times(name)
    reference = load_cluster(times.cluster)
    curve = curve_of(times, model_on(reference), operation, devices)
    if curve is None:
        return None
    link = reference.link
    return curve, link.bytes_per_second * link.attainable_fraction, reference.library.name


def _never_falling(points: tuple[tuple[int, float], ...]) -> Curve:
    """Non-decreasing curve nearest to the points in log seconds (isotonic regression).

    Decreasing neighbours are replaced by their mean: small messages take equal time but for noise.
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
