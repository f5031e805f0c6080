"""Seconds of an operation by rates that were measured on the very chip, shape by shape."""

from scalejax.hardware import Chip, MeasuredRates
from scalejax.program import Operation

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
