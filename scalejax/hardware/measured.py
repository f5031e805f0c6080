"""Measured rates of a chip, operation by operation.

If a chip has measured rates, they replace the fractions of `Attainable`. `scalejax calibrate`
writes them; they are those of a device while all others are busy too. Knows no program.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least

_NEIGHBOURS = 4  # measured points that an unmeasured shape is interpolated from
_SAME = 1e-9  # distance, in powers of two, below which a shape is a measured one


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Measured rates of a chip; rows are (sizes..., rate) or (bytes, rate or time)."""

    matmul: dict[str, tuple[tuple[int, int, int, int, float], ...]]
    """(batch, m, n, k, FLOP/s) of matrix products by type of operands."""
    convolution: dict[str, tuple[tuple[int, int, int, int, int, float], ...]]
    """(samples, output positions, input channels, output channels, window positions, FLOP/s) of f32
    convolutions by pass: forward, input_gradient, filter_gradient; for other types by pass and
    type: forward_bf16."""
    stream: tuple[tuple[int, float], ...]
    """(bytes, bytes/s) of operations that read and write this many bytes: small ones hit caches."""
    first_touch: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of allocating this many bytes of temporary memory, whose pages some systems
    map again at each step; () if it costs nothing."""

    compute_scale: float = 1.0
    """Factor on the times of compute-bound operations, as fitted to whole steps."""
    memory_scale: float = 1.0
    """Factor on the times of memory-bound operations, as fitted to whole steps."""

    def __post_init__(self) -> None:
        require_above("measured.compute_scale", self.compute_scale, 0)
        require_above("measured.memory_scale", self.memory_scale, 0)
        if not self.matmul.get("f32"):
            accepted = "it must hold rows for f32, the rate of types that were not measured"
            raise ConfigError(refusal("measured.matmul", list(self.matmul), accepted))
        if not self.stream:
            raise ConfigError(refusal("measured.stream", self.stream, "it must hold a row"))
        for rows in (*self.matmul.values(), *self.convolution.values(), self.stream):
            for row in rows:
                for number in row:
                    require_above("measured", number, 0)
        for size, seconds in self.first_touch:
            require_above("measured.first_touch", size, 0)
            require_at_least("measured.first_touch", seconds, 0)

    def matmul_rate(self, shape: Sequence[int], rate_type: str) -> float:
        """FLOP/s of a matrix product of shape (batch, m, n, k); 0s and () count as 1."""
        rows = self.matmul.get(rate_type) or self.matmul["f32"]
        return nearby(rows, shape)

    def convolution_rate(
        self, shape: Sequence[int], convolution_pass: str, rate_type: str = "f32"
    ) -> float | None:
        """FLOP/s of a convolution, in f32 if its type was not measured; None if none was."""
        own = f"_{rate_type}"
        names = (f"{convolution_pass}{own}", f"forward{own}", convolution_pass, "forward")
        rows = next((found for name in names if (found := self.convolution.get(name))), None)
        return nearby(rows, shape) if rows else None

    def stream_rate(self, moved_bytes: float) -> float:
        """Bytes/s of an operation that moves `moved_bytes`."""
        return _interpolated(self.stream, moved_bytes)

    def first_touch_seconds(self, size_bytes: float) -> float:
        """Time to allocate `size_bytes`; proportional beyond the largest measured size."""
        if not self.first_touch or not size_bytes:
            return 0.0
        largest, seconds = self.first_touch[-1]
        if size_bytes > largest:
            return seconds * size_bytes / largest
        points = ((0, 0.0), *self.first_touch)
        for (low, before), (high, after) in pairwise(points):
            if size_bytes <= high:
                return before + (after - before) * (size_bytes - low) / (high - low)
        return seconds


def nearby(rows: Sequence[Sequence[float]], shape: Sequence[int]) -> float:
    """The rate at `shape`: geometric mean of nearby rates, weighted by inverse square distance.

    Distances are between the logarithms of sizes; the result is exact at measured shapes, and
    within the range of the neighbours elsewhere (Shepard 1968).
    """
    sizes = tuple(shape) or (1,) * (len(rows[0]) - 1)
    point = [math.log2(max(1, size)) for size in sizes]
    distances = sorted(
        (
            sum((math.log2(size) - at) ** 2 for size, at in zip(row[:-1], point, strict=True)),
            row[-1],
        )
        for row in rows
    )[:_NEIGHBOURS]
    if distances[0][0] < _SAME:
        return distances[0][1]
    weights = [1 / distance for distance, _ in distances]
    logs = [math.log(rate) for _, rate in distances]
    return math.exp(
        sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
    )


def _interpolated(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at `x`, interpolated log-log between points and constant beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if x <= high:
            share = math.log(x / low) / math.log(high / low)
            return math.exp(math.log(before) * (1 - share) + math.log(after) * share)
    return points[-1][1]
