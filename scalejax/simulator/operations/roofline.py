"""Seconds of one operation on one device: a roofline with attainable rates, plus launch.

Matrix products are costed by shape and type in `matmul`, grouped ones in `grouped_matmul`,
convolutions in `convolution`. A chip with measured rates uses those instead of the roofline.
Depends on one operation and one chip, not on the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalejax.hardware import Attainable, Chip, MeasuredRates, load_attention_rates
from scalejax.simulator.operations.convolution import convolution_time
from scalejax.simulator.operations.grouped_matmul import GroupedProduct, grouped_product_time
from scalejax.simulator.operations.matmul import (
    Product,
    ProductTime,
    Shape,
    compulsory_bytes,
    is_unaligned,
    product_time,
)
from scalejax.simulator.program import Operation

# Rates measured on this chip, by shape.

_UNKNOWN_SHAPE = (1, 1024, 1024, 1024)  # several products in one operation count as a large one


def measured_seconds(
    operation: Operation, measured: MeasuredRates, chip: Chip
) -> tuple[float, float]:
    """(compute, memory) seconds of an operation at measured rates, excluding launch.

    Args:
        operation: the operation.
        measured: the rates.
        chip: maps the operation's type to a type of arithmetic.
    """
    moved_bytes = operation.read_bytes + operation.write_bytes
    compute = memory = 0.0
    if moved_bytes:
        memory = measured.memory_scale * moved_bytes / measured.stream_rate(moved_bytes)
    if operation.flop:
        compute = measured.compute_scale * operation.flop / _rate(operation, measured, chip)
    return compute, memory


def _rate(operation: Operation, measured: MeasuredRates, chip: Chip) -> float:
    rate_type = chip.rate_type(operation.dtype)
    if operation.kind == "convolution" and operation.shape:
        convolution_pass = operation.convolution_pass or "forward"
        rate = measured.convolution_rate(operation.shape, convolution_pass, rate_type)
        if rate is not None:
            return rate
    if operation.kind == "attention":
        return chip.peak(operation.dtype) * attention_share(operation.shape, chip.attainable)
    shape = operation.shape if operation.kind == "matmul" else ()
    return measured.matmul_rate(shape or _UNKNOWN_SHAPE, rate_type)


def attention_share(shape: Sequence[int], attainable: Attainable) -> float:
    """Share of peak FLOP/s of fused attention over (samples x heads, queries, keys, head size):
    the share measured for its keys and head size, if there is one."""
    if attainable.attention_rates is None or len(shape) != 4 or 0 in shape:
        share = attainable.attention_share(shape)
    else:
        share = load_attention_rates(attainable.attention_rates).share(shape[2], shape[3])
    return min(1.0, share * attainable.attention_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """Time of one operation; operations run one after another."""

    bound: Literal["compute", "memory"]
    """Limiting resource."""
    busy_seconds: float
    """Time from the first instruction to the last."""
    launch_seconds: float
    """Gap between the end of the previous operation and the first instruction."""

    @property
    def seconds(self) -> float:
        """Time from the end of the previous operation to the end of this one."""
        return self.busy_seconds + self.launch_seconds


def operation_time(operation: Operation, chip: Chip) -> OperationTime:
    """Time of a compute operation on `chip` per step, averaged over all steps.

    seconds = launch + ramp + max(flop / attainable FLOP/s, bytes / attainable bandwidth),
    where ramp is the time to fill and drain the chip, which makes rates saturate with size:
    u(flop) = u flop / (flop + peak u ramp). The fraction u depends on kind, type and shape.

    Left out: caches (an operand just written and still in the second-level cache is read from
    memory), and element-wise arithmetic (bound by bytes). Measured rates include both, and replace
    the formula on a chip that has them. Not for collectives and waits.
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
    if (
        operation.grouped_pass is not None
        and len(operation.shape) == 4
        and 0 not in operation.shape
    ):
        groups, _, outer, inner = operation.shape
        grouped = GroupedProduct(
            groups=groups,
            rows=operation.flop / (2 * outer * inner),
            outer=outer,
            inner=inner,
            dtype=operation.dtype,
            grouped_pass=operation.grouped_pass,
        )
        return grouped_product_time(grouped, chip, moved_bytes=moved_bytes)
    shape, fraction = None, None
    if operation.kind == "attention":
        fraction = attention_share(operation.shape, attainable)
        if chip.tpu is not None and len(operation.shape) == 4 and operation.shape[3]:
            fraction *= chip.tpu.filled(operation.shape[3])
    elif operation.kind == "matmul":
        shape = _product_shape(operation.shape)
        fraction = attainable.matmul_fraction * attainable.sustained_fraction
        if chip.tpu is not None and shape is not None:
            fraction *= chip.tpu.filled(shape[2]) * chip.tpu.filled(shape[3])
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
    """(batch, m, n, k) of a product; None if unknown or empty."""
    if len(shape) != 4 or 0 in shape:
        return None
    batch, m, n, k = shape
    return batch, m, n, k
