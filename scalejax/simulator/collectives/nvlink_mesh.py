"""Rings that fit on a mesh of direct wires between the devices of a node.

Knows wires and positions in the node, nothing of their speed.
"""

from functools import cache
from itertools import pairwise

Wires = tuple[tuple[int, ...], ...]
"""Wires between each two devices of a node, a symmetric matrix."""


@cache
def mesh_rings(wires: Wires, positions: tuple[int, ...]) -> tuple[int, int]:
    """(rings, chains) over the devices at `positions` that can run at once at a wire's full rate.

    A wire carries messages both ways at once, so each closed path without a common wire makes
    two rings, one each way. A chain (a path up and down, for a tree) takes both directions of
    its wires. As NCCL does, where no ring closes one chain is run, if there is one.

    The hybrid cube mesh of a DGX-1 with V100 has 1, 2, 4, 0, 2, 4, 6 rings over its first
    2 to 8 devices.
    """
    count = len(positions)
    left = {(a, b): wires[a][b] for a in positions for b in positions if a < b and wires[a][b] > 0}
    if count == 2:
        rings = next(iter(left.values()), 0)
        return rings, min(1, rings)
    rings = 2 * _most_disjoint(_cycles(left, positions), left)
    return rings, max(rings // 2, int(_has_path(left, positions)))


def links_by_number(wires: Wires, positions: tuple[int, ...]) -> int:
    """Fewest wires between neighbours in the one ring over `positions` in the order of numbers; 0
    where some have none."""
    ring = sorted(positions)
    return min(wires[a][b] for a, b in pairwise([*ring, ring[0]]))


Edge = tuple[int, int]


def _edge(a: int, b: int) -> Edge:
    return (a, b) if a < b else (b, a)


def _cycles(left: dict[Edge, int], positions: tuple[int, ...]) -> list[tuple[Edge, ...]]:
    """Closed paths through all positions, each once and in one direction."""
    first = positions[0]
    found: list[tuple[Edge, ...]] = []

    def extend(path: list[int]) -> None:
        if len(path) == len(positions):
            # Of the two directions, the one whose second device has the lower number.
            if _edge(path[-1], first) in left and path[1] < path[-1]:
                closed = [*path, first]
                found.append(tuple(_edge(a, b) for a, b in pairwise(closed)))
            return
        for after in positions:
            if after not in path and _edge(path[-1], after) in left:
                extend([*path, after])

    extend([first])
    return found


def _most_disjoint(cycles: list[tuple[Edge, ...]], left: dict[Edge, int], start: int = 0) -> int:
    """Most cycles, the same one again included, that share no wire."""
    if not cycles:
        return 0
    size = len(cycles[0])
    bound = sum(left.values()) // size
    best = 0
    for index in range(start, len(cycles)):
        if best == bound:
            break
        cycle = cycles[index]
        if all(left[edge] > 0 for edge in cycle):
            rest = dict(left)
            for edge in cycle:
                rest[edge] -= 1
            best = max(best, 1 + _most_disjoint(cycles, rest, index))
    return best


def _has_path(left: dict[Edge, int], positions: tuple[int, ...]) -> bool:
    """Whether some path of wires visits every position once."""

    def extend(path: tuple[int, ...]) -> bool:
        if len(path) == len(positions):
            return True
        return any(
            extend((*path, after))
            for after in positions
            if after not in path and _edge(path[-1], after) in left
        )

    return any(extend((first,)) for first in positions)
