"""Seconds that a collective takes in a group of devices, by algorithm (alpha-beta model).

Every time is latency plus bytes over bandwidth plus the time to fill the pipeline: hops of small
messages, then the payload through the narrowest link of its route. A table of measured times, if
there is one, is used instead (`measured`). Uses hardware and the `Route` of a group on it;
`placement` finds the route of a program's collective.

Left out: time lost to waiting for the slowest member, and congestion beyond the
oversubscription that a network states.
"""

from scalejax.simulator.collectives.all_reduce import (
    all_reduce_seconds,
    halving_doubling_all_reduce_seconds,
    hierarchical_all_reduce_seconds,
    in_network_all_reduce_seconds,
    in_switch_all_reduce_seconds,
    parameter_server_all_reduce_seconds,
    ring_all_reduce_seconds,
    tree_all_reduce_seconds,
)
from scalejax.simulator.collectives.measured import (
    MODELS,
    measured_deviation,
    measured_seconds,
    seconds_over_nodes,
)
from scalejax.simulator.collectives.nvlink_mesh import mesh_rings
from scalejax.simulator.collectives.point_to_point import (
    all_to_all_seconds,
    gather_seconds,
    permute_seconds,
)
from scalejax.simulator.collectives.route import Route, find_route

__all__ = [
    "MODELS",
    "Route",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "find_route",
    "gather_seconds",
    "halving_doubling_all_reduce_seconds",
    "hierarchical_all_reduce_seconds",
    "in_network_all_reduce_seconds",
    "in_switch_all_reduce_seconds",
    "measured_deviation",
    "measured_seconds",
    "mesh_rings",
    "parameter_server_all_reduce_seconds",
    "permute_seconds",
    "ring_all_reduce_seconds",
    "seconds_over_nodes",
    "tree_all_reduce_seconds",
]
