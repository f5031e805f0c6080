"""Seconds of one operation on one device: a roofline with attainable rates, plus launch.

`attainable_flop_per_second` is the one place that says how fast a chip multiplies; a measured
surface over shapes would replace it there.
"""

from dataclasses import dataclass
from typing import Literal

from scalejax.cost.matmul import Product, product_time
from scalejax.cost.measured import measured_seconds
from scalejax.hardware import Chip
from scalejax.program import Operation

VECTOR_BYTES = 16
"""Widest load of one GPU thread (CUDA C++ Programming Guide, device memory accesses): channels
are padded to a multiple of it, so three bf16 channels cost as much as eight."""


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
    """The time that `operation` takes on `chip`; not for collectives and waits.

    seconds = launch + ramp + max(flop / attainable FLOP/s, bytes / attainable bandwidth),
    where ramp, the time to fill and drain the chip, is charged to operations that multiply:
    with it their rate saturates with size, u(flop) = u flop / (flop + peak u ramp).

    Left out: caches (an operand just written and still in the second-level cache is read from
    memory), and element-wise arithmetic (bound by bytes). A chip with measured rates has both in
    them, and they stand in place of the formula.
    """
    attainable = chip.attainable
    moved_bytes = operation.read_bytes + operation.write_bytes
    if chip.measured is not None:
        compute, memory = measured_seconds(operation, chip.measured, chip)
        return OperationTime(
            bound="compute" if compute > memory else "memory",
            busy_seconds=max(compute, memory),
            launch_seconds=attainable.launch_seconds,
        )
    if operation.kind == "matmul":
        product = Product(
            shape=_product_shape(operation.shape),
            flop=operation.flop,
            moved_bytes=moved_bytes,
            dtype=operation.dtype,
        )
        time = product_time(product, chip)
        return OperationTime(
            bound="compute" if time.compute_seconds > time.memory_seconds else "memory",
            busy_seconds=time.busy_seconds,
            launch_seconds=attainable.launch_seconds,
        )
    memory = moved_bytes / (chip.memory_bytes_per_second * attainable.memory_fraction)
    compute = ramp = 0.0
    if operation.flop:
        compute = operation.flop / attainable_flop_per_second(operation, chip)
        ramp = attainable.matmul_ramp_seconds
    return OperationTime(
        bound="compute" if compute > memory else "memory",
        busy_seconds=ramp + max(compute, memory),
        launch_seconds=attainable.launch_seconds,
    )


def _product_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) if the product says it, and multiplies anything."""
    if len(shape) != 4 or 0 in shape:
        return None
    batch, m, n, k = shape
    return batch, m, n, k


def attainable_flop_per_second(operation: Operation, chip: Chip) -> float:
    """The rate that a large operation of this kind, type and shape reaches on `chip`."""
    peak = chip.peak(operation.dtype)
    if operation.kind == "convolution":
        padding = channel_use(operation.shape, operation.dtype)
        return peak * chip.attainable.convolution_fraction * padding
    if operation.kind == "attention":
        return peak * chip.attainable.attention_fraction
    return peak * chip.attainable.matmul_fraction


def channel_use(shape: tuple[int, ...], dtype: str) -> float:
    """Share of a convolution's multiplications that are of use, 0..1.

    A convolution runs as a matrix product whose rows are gathered pixel by pixel, each in
    whole vectors of channels. Channels are padded to `VECTOR_BYTES`; the padding multiplies
    zeros. So 3 input channels of bf16 use 3/8, of f32 3/4, and 64 all of it; a depthwise
    convolution, with one, uses 1/8 or 1/4.

    Args:
        shape: as of `Operation.shape` for a convolution; () if unknown, then all is of use.
        dtype: element type of the operands.
    """
    if not shape:
        return 1.0
    _, _, input_channels, output_channels, _ = shape
    vector = max(1, VECTOR_BYTES * 8 // _bits(dtype))
    return _filled(input_channels, vector) * _filled(output_channels, vector)


def _filled(count: int, multiple: int) -> float:
    return count / (-(-count // multiple) * multiple)


def _bits(dtype: str) -> int:
    """Width of an element type by XLA's name for it: 16 of "bf16", 8 of "f8e4m3fn"."""
    digits = dtype.lstrip("bfsuc")
    width = ""
    for character in digits:
        if not character.isdigit():
            break
        width += character
    return int(width) if width else 8
