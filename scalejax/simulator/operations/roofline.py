"""Seconds of one operation on one device: a roofline with attainable rates, plus launch.

What multiplies is costed by shape and type: matrix products in `matmul`, convolutions in
`convolution`; a chip with rates measured here, in `measured`.
"""

from dataclasses import dataclass
from typing import Literal

from scalejax.hardware import Chip, MeasuredRates
from scalejax.simulator.operations.convolution import convolution_time
from scalejax.simulator.operations.matmul import (
    Product,
    ProductTime,
    Shape,
    compulsory_bytes,
    is_unaligned,
    product_time,
)
from scalejax.simulator.program import Operation

# Seconds of an operation by rates that were measured on the very chip, shape by shape.

_UNKNOWN_SHAPE = (1, 1024, 1024, 1024)  # several products in one operation count as a large one


def measured_seconds(
    operation: Operation, measured: MeasuredRates, chip: Chip
) -> tuple[float, float]:
    """(arithmetic, memory): the time that either alone would take, launch not counted.

    Args:
        operation: what runs.
        measured: the rates.
        chip: says in which arithmetic it multiplies the operation's type.
    """
    moved_bytes = operation.read_bytes + operation.write_bytes
    compute = memory = 0.0
    if moved_bytes:
        memory = measured.memory_scale * moved_bytes / measured.stream_rate(moved_bytes)
    if operation.flop:
        compute = measured.compute_scale * operation.flop / _rate(operation, measured, chip)
    return compute, memory


def _rate(operation: Operation, measured: MeasuredRates, chip: Chip) -> float:
    if operation.kind == "convolution" and operation.shape:
        rate = measured.convolution_rate(operation.shape, operation.convolution_pass or "forward")
        if rate is not None:
            return rate
    shape = operation.shape if operation.kind == "matmul" else ()
    return measured.matmul_rate(shape or _UNKNOWN_SHAPE, chip.rate_type(operation.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """Time of one operation, by what it waits for; operations run one after the other."""

    bound: Literal["compute", "memory"]
    """Which of the two the operation is limited by."""
    busy_seconds: float
    """Time from its first instruction to its last."""
    launch_seconds: float
    """Time before it starts, after the one before has ended."""

    @property
    def seconds(self) -> float:
        """Time from the end of the operation before to the end of this one."""
        return self.busy_seconds + self.launch_seconds


def operation_time(operation: Operation, chip: Chip) -> OperationTime:
    """The time that `operation` takes on `chip` in the mean of all steps; not for collectives and
    waits.

    seconds = launch + ramp + max(flop / attainable FLOP/s, bytes / attainable bandwidth),
    where ramp is the time to fill and drain the chip: with it rates saturate with size,
    u(flop) = u flop / (flop + peak u ramp). The share u depends on kind, type and shape.

    Left out: caches (an operand just written and still in the second-level cache is read from
    memory), and element-wise arithmetic (bound by bytes). A chip with measured rates has both in
    them, and they stand in place of the formula.
    """
    if chip.measured is not None:
        compute, memory = measured_seconds(operation, chip.measured, chip)
        busy = max(compute, memory)
    else:
        time = _modelled(operation, chip)
        compute, memory, busy = time.compute_seconds, time.memory_seconds, time.busy_seconds
    return OperationTime(
        bound="compute" if compute > memory else "memory",
        busy_seconds=busy * operation.share,
        launch_seconds=chip.attainable.launch_seconds * operation.share,
    )


def _modelled(operation: Operation, chip: Chip) -> ProductTime:
    attainable = chip.attainable
    moved_bytes = operation.read_bytes + operation.write_bytes
    if not operation.flop:
        memory = moved_bytes / (chip.memory_bytes_per_second * attainable.memory_fraction)
        busy = attainable.memory_ramp_seconds + memory
        return ProductTime(compute_seconds=0.0, memory_seconds=memory, busy_seconds=busy)
    if operation.kind == "convolution":
        return convolution_time(operation, chip)
    shape, fraction = None, None
    if operation.kind == "attention":
        fraction = attainable.attention_fraction
    elif operation.kind == "matmul":
        shape = _product_shape(operation.shape)
        fraction = attainable.matmul_fraction * attainable.sustained_fraction
        if attainable.unaligned_fraction is not None and is_unaligned(shape, operation.dtype):
            rate = chip.peak_flop_per_second["f32"] * attainable.unaligned_fraction
            fraction = rate / chip.peak(operation.dtype)
    if shape is not None:
        moved_bytes = max(moved_bytes, compulsory_bytes(shape, chip.rate_type(operation.dtype)))
    product = Product(
        shape=shape, flop=operation.flop, moved_bytes=moved_bytes, dtype=operation.dtype
    )
    return product_time(product, chip, fraction=fraction)


def _product_shape(shape: tuple[int, ...]) -> Shape | None:
    """(batch, m, n, k) if the product says it, and multiplies anything."""
    if len(shape) != 4 or 0 in shape:
        return None
    batch, m, n, k = shape
    return batch, m, n, k
