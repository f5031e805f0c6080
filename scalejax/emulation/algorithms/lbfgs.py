"""L-BFGS by operations on vectors that lie in parts on servers; only numbers come back.

Source: Nocedal & Wright 2006, "Numerical optimization", 2nd edition, algorithms 7.4 (two loops)
and 3.1 (backtracking); Dean et al. 2012, section 4.2, for who does what. Knows vectors by name
alone; a `Vectors` does the operations.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from scalejax.emulation.instructions import Shards

Turn = Generator[Any, Any, float]
"""What yields until a number is known."""
SUFFICIENT_DECREASE = 1e-4
"""Part of the decrease that the slope promises which a step must bring (page 33)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """What a coordinator can have the servers do."""

    dot: Callable[[Shards, Shards], Turn]
    """The inner product of two vectors."""
    combine: Callable[[Sequence[float], Sequence[Shards]], Shards]
    """The sum of vectors, each times its number."""


@dataclass(frozen=True, slots=True)
class _Pair:
    step: Shards
    change: Shards
    curvature: float


class History:
    """The last steps and the changes of gradient along them, as the direction needs them."""

    def __init__(self, vectors: Vectors, memory_size: int) -> None:
        self._vectors = vectors
        self._pairs: deque[_Pair] = deque(maxlen=memory_size)
        self._scale = 1.0

    def __len__(self) -> int:
        """Pairs."""
        return len(self._pairs)

    def clear(self) -> None:
        """Forget all of them."""
        self._pairs.clear()

    def add(self, step: Shards, change: Shards) -> Generator[Any, Any, None]:
        """Remember a step, unless the loss is not convex along it: then the direction that is made
        of it might not descend (page 537)."""
        curvature = yield from self._vectors.dot(change, step)
        if curvature > 0:
            squared = yield from self._vectors.dot(change, change)
            self._pairs.append(_Pair(step, change, curvature))
            self._scale = curvature / squared

    def direction(self, gradient: Shards) -> Generator[Any, Any, Shards]:
        """Where to step: minus the gradient times an estimate of the inverse Hessian.

        Without a history, as long as the gradient, or 1 if that is less, as in Optax's `lbfgs`.
        """
        dot, combine = self._vectors.dot, self._vectors.combine
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
