"""Rings that fit on a mesh of direct links (NVLink) between the devices of a node.

Depends on links and positions in the node, not on link speed.
"""

from functools import cache
from itertools import pairwise

LinkMatrix = tuple[tuple[int, ...], ...]
"""Number of links between every two devices of a node, a symmetric matrix."""


@cache
def mesh_rings(links: LinkMatrix, positions: tuple[int, ...]) -> tuple[int, int]:
    """(rings, chains) over the devices at `positions` that can run at once at a link's full rate.

    A link is full duplex, so each closed path that shares no link makes two rings, one in each
    direction. A chain (a path up and down, for a tree) takes both directions of its links. As in
    NCCL, if no ring closes, one chain is used, if there is one.

    The hybrid cube mesh of a DGX-1 with V100 has 1, 2, 4, 0, 2, 4, 6 rings over its first
    2 to 8 devices.
    """
    count = len(positions)
    remaining = {
        (a, b): links[a][b] for a in positions for b in positions if a < b and links[a][b] > 0
    }
    if count == 2:
        rings = next(iter(remaining.values()), 0)
        return rings, min(1, rings)
    rings = 2 * _most_disjoint(_cycles(remaining, positions), remaining)
    return rings, max(rings // 2, int(_has_path(remaining, positions)))


def fewest_links_by_number(links: LinkMatrix, positions: tuple[int, ...]) -> int:
    """Fewest links between neighbours of the ring over `positions` in device order; 0 if two
    neighbours have none."""
    ring = sorted(positions)
    return min(links[a][b] for a, b in pairwise([*ring, ring[0]]))


Edge = tuple[int, int]


def _edge(a: int, b: int) -> Edge:
    return (a, b) if a < b else (b, a)


def _cycles(remaining: dict[Edge, int], positions: tuple[int, ...]) -> list[tuple[Edge, ...]]:
    """Closed paths through all positions, each once and in one direction."""
    first = positions[0]
    found: list[tuple[Edge, ...]] = []

    def extend(path: list[int]) -> None:
        if len(path) == len(positions):
            # Of the two directions, keep the one whose second device has the lower number.
            if _edge(path[-1], first) in remaining and path[1] < path[-1]:
                closed = [*path, first]
                found.append(tuple(_edge(a, b) for a, b in pairwise(closed)))
            return
        for after in positions:
            if after not in path and _edge(path[-1], after) in remaining:
                extend([*path, after])

    extend([first])
    return found


def _most_disjoint(
    cycles: list[tuple[Edge, ...]], remaining: dict[Edge, int], start: int = 0
) -> int:
    """Largest number of cycles, repetitions included, that share no link."""
    if not cycles:
        return 0
    size = len(cycles[0])
    bound = sum(remaining.values()) // size
    best = 0
    for index in range(start, len(cycles)):
        if best == bound:
            break
        cycle = cycles[index]
        if all(remaining[edge] > 0 for edge in cycle):
            rest = dict(remaining)
            for edge in cycle:
                rest[edge] -= 1
            best = max(best, 1 + _most_disjoint(cycles, rest, index))
    return best


def _has_path(remaining: dict[Edge, int], positions: tuple[int, ...]) -> bool:
    """Whether some path of links visits every position once."""

    def extend(path: tuple[int, ...]) -> bool:
        if len(path) == len(positions):
            return True
        return any(
            extend((*path, after))
            for after in positions
            if after not in path and _edge(path[-1], after) in remaining
        )

    return any(extend((first,)) for first in positions)
