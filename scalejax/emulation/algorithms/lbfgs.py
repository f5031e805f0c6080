"""L-BFGS with operations on vectors sharded over servers; only scalars are returned.

Source: Nocedal & Wright 2006, "Numerical optimization", 2nd edition, algorithms 7.4 (two loops)
and 3.1 (backtracking); Dean et al. 2012, section 4.2, for the division of work. Never sees vector
contents.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from scalejax.emulation.instructions import Shards

Turn = Generator[Any, Any, float]
"""Generator that yields events until a number is known."""
SUFFICIENT_DECREASE = 1e-4
"""Fraction of the decrease predicted by the slope that a step must achieve (page 33)."""


@dataclass(frozen=True, slots=True)
class _Pair:
    step: Shards
    change: Shards
    curvature: float


class History:
    """The last steps and their gradient changes, for the search direction."""

    def __init__(
        self,
        dot: Callable[[Shards, Shards], Turn],
        combine: Callable[[Sequence[float], Sequence[Shards]], Shards],
        memory_size: int,
    ) -> None:
        """Start without pairs; `dot` and `combine` have the servers operate on vectors."""
        self._dot, self._combine = dot, combine
        self._pairs: deque[_Pair] = deque(maxlen=memory_size)
        self._scale = 1.0

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._pairs)

    def clear(self) -> None:
        """Drop all pairs."""
        self._pairs.clear()

    def add(self, step: Shards, change: Shards) -> Generator[Any, Any, None]:
        """Store a step, unless the loss is not convex along it: the direction might then not be a
        descent direction (page 537)."""
        curvature = yield from self._dot(change, step)
        if curvature > 0:
            squared = yield from self._dot(change, change)
            self._pairs.append(_Pair(step, change, curvature))
            self._scale = curvature / squared

    def direction(self, gradient: Shards) -> Generator[Any, Any, Shards]:
        """The search direction: minus an estimate of the inverse Hessian times the gradient.

        Without a history, its length is that of the gradient, at most 1, as in Optax's `lbfgs`.
        """
        dot, combine = self._dot, self._combine
        if not self._pairs:
            squared = yield from dot(gradient, gradient)
            return combine([-1 / max(1.0, math.sqrt(squared))], [gradient])
        found, shares = gradient, []
        for pair in reversed(self._pairs):
            share = (yield from dot(pair.step, found)) / pair.curvature
            found = combine([1.0, -share], [found, pair.change])
            shares.append(share)
        found = combine([self._scale], [found])
        for pair, share in zip(self._pairs, reversed(shares), strict=True):
            other = (yield from dot(pair.change, found)) / pair.curvature
            found = combine([1.0, share - other], [found, pair.step])
        return combine([-1.0], [found])
