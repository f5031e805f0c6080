"""Seconds of a matrix product: a roofline form, corrected by the chip's table of measured products.

The form is a ramp plus arithmetic or memory traffic, whichever is longer. A chip with a table
multiplies it by exp(residual), where the residual is a smooth function of (batch, m, n, k) and
type that was fitted to log(measured / form). It interpolates between the shapes of the table; above
them it is constant, as rates have saturated; below them it decays to about the mean of its type.
The residual depends on shapes alone, so what-if chips and siblings of the measured one scale with
their own peaks, bandwidth and ramp, and better hardware is never slower.

The fit is a Gaussian process (a sum of kernels, weights by least squares) with Student's t noise,
since the table jumps by up to a factor of 2 between neighbours, presumably where the library
changes kernels or the profiler saw two: see `hardware/matmul_rates/README.md`. Its length scales
are round numbers, set by hand while watching the cross-validation over shapes that
`experiments/gemm_rates` prints. Depends on chips and shapes, not on programs.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from scalejax.hardware import Chip, MatmulForm, MatmulTable, RateType, load_matmul_table

Floats = NDArray[np.float64]
Shape = tuple[int, int, int, int]
"""(batch, m, n, k) of a product."""

OPERAND_BYTES: dict[RateType, tuple[float, int]] = {
    "fp4": (0.5 + 1 / 16, 2),  # blocks of 16 share a scale of a byte (NVFP4)
    "fp8": (1, 2),
    "int8": (1, 2),
    "bf16": (2, 2),
    "f16": (2, 2),
    "tf32": (4, 4),
    "f32": (4, 4),
}
"""Bytes of an element of the operands and of the result."""

# Variances of the logarithm of time, and distances in doublings over which they decay.
_TYPE_VARIANCE = 0.1
_SMOOTH_VARIANCE = 0.05
_SMOOTH_DOUBLINGS = (7.0, 5.0, 5.0, 6.0)  # of batch, m, n, k
_ROUGH_VARIANCE = 0.02
_ROUGH_DOUBLINGS = (2.5, 2.5, 32.0, 6.0)  # of batch m n, k, max(m / n, n / m), batch
_NOISE_VARIANCE = 0.001
_STUDENT_FREEDOM = 4
_REWEIGHTINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Work of one matrix product, or of several that one operation fuses."""

    shape: Shape | None
    """Shape of the largest product; None if unknown."""
    flop: int
    """FLOP of all products."""
    moved_bytes: int
    """Bytes read and written."""
    dtype: str
    """Type of the operands, as `Operation.dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Time of a product, and of its arithmetic and its memory traffic alone."""

    compute_seconds: float
    """Time of the arithmetic at the attainable rate."""
    memory_seconds: float
    """Time of the memory traffic at the attainable bandwidth."""
    busy_seconds: float
    """Time from the first instruction to the last."""


def product_time(product: Product, chip: Chip, *, fraction: float | None = None) -> ProductTime:
    """Time of `product` on `chip`, excluding launch.

    busy = (aside + ramp + max(FLOP / (peak fraction), bytes / attainable bandwidth))
    exp(residual) - aside, and never below FLOP / peak nor bytes / bandwidth. `aside` is the
    overhead of the measurement behind the table. The residual is 0 if the chip has no table, or
    the shape is unknown.

    Args:
        product: the work.
        chip: where it runs.
        fraction: fraction of the peak that large products reach; the chip's own if None.
    """
    attainable = chip.attainable
    if attainable.matmul_table is None or product.shape is None:
        return _time(product, chip, fraction, residual=0.0, aside_seconds=0.0)
    return _time(
        product,
        chip,
        fraction,
        residual=log_residual(
            attainable.matmul_table, chip.rate_type(product.dtype), product.shape
        ),
        aside_seconds=load_matmul_table(attainable.matmul_table).form.aside_seconds,
    )


def _time(
    product: Product,
    chip: Chip,
    fraction: float | None,
    *,
    residual: float,
    aside_seconds: float,
) -> ProductTime:
    attainable, peak = chip.attainable, chip.peak(product.dtype)
    bandwidth = chip.memory_bytes_per_second
    compute = product.flop / (peak * (fraction or attainable.matmul_fraction))
    memory = product.moved_bytes / (bandwidth * attainable.memory_fraction)
    form = attainable.matmul_ramp_seconds + max(compute, memory)
    return ProductTime(
        compute_seconds=compute,
        memory_seconds=memory,
        busy_seconds=max(
            (aside_seconds + form) * math.exp(residual) - aside_seconds,
            product.flop / peak,
            product.moved_bytes / bandwidth,
        ),
    )


def compulsory_bytes(shape: Shape, kind: RateType) -> int:
    """Bytes of the operands and the result of a product, each moved once."""
    batch, m, n, k = shape
    operand, result = OPERAND_BYTES[kind]
    return math.ceil(batch * ((m + n) * k * operand + m * n * result))


_ALIGNED_ELEMENTS = 8  # 16 bytes of two-byte elements


def is_unaligned(shape: Shape | None, dtype: str) -> bool:
    """Whether a half-precision product is not aligned for matrix units.

    Matrix units load 16 bytes at once. A product in which any side of any operand is not a multiple
    of that runs without them.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide", section 2.2.
    """
    if shape is None or dtype not in ("bf16", "f16"):
        return False
    return any(size % _ALIGNED_ELEMENTS for size in shape[1:])


@lru_cache(maxsize=65536)
def log_residual(table: str, kind: RateType, shape: Shape) -> float:
    """Log of the time of a product over the form's; 0 for a type without a table.

    If a table has rates above the chip's peak, it is not extrapolated beyond its shapes to rates
    above the form's: such rates do not exist, and most products are larger.
    """
    measured: RateType = "bf16" if kind == "f16" else kind
    surface = _surface(table, measured)
    if surface is None:
        return 0.0
    residual = surface.at(shape)
    if residual < 0 and surface.is_exceeded_by(shape) and not _is_below_peak(table, measured):
        return 0.0
    return residual


@cache
def _is_below_peak(name: str, kind: RateType) -> bool:
    table = load_matmul_table(name)
    return max(table.flop_per_second[kind]) <= table.form.peak_flop_per_second[kind]


@cache
def _surface(table: str, kind: RateType) -> "Surface | None":
    measured = load_matmul_table(table)
    if kind not in measured.flop_per_second:
        return None
    return fit_surface(measured.shapes[kind], log_ratios(measured, kind))


def log_ratios(table: MatmulTable, kind: RateType) -> Floats:
    """log(measured / form) of each product of a table, for operands of one type."""
    rates = table.flop_per_second[kind]
    return np.array(
        [
            math.log(product_flop(shape) / rate / form_seconds(table.form, kind, shape))
            for shape, rate in zip(table.shapes[kind], rates, strict=True)
        ]
    )


def product_flop(shape: Shape) -> int:
    """FLOP of a product: two per multiply-add."""
    return 2 * math.prod(shape)


def form_seconds(form: MatmulForm, kind: RateType, shape: Shape) -> float:
    """Seconds of a product by the form of its table, on the measured chip."""
    rate = form.peak_flop_per_second[kind] * form.matmul_fraction
    bandwidth = form.memory_bytes_per_second * form.memory_fraction
    return form.fixed_seconds + max(
        product_flop(shape) / rate, compulsory_bytes(shape, kind) / bandwidth
    )


@dataclass(frozen=True, slots=True)
class Surface:
    """A smooth function of the shape of a product (posterior mean of the Gaussian process)."""

    places: Floats
    """log2 (batch, m, n, k) of the fitted products, [shapes, 4]."""
    weights: Floats
    """Weight of each fitted product, [shapes]."""

    def at(self, shape: Shape) -> float:
        """Value of the function at `shape`."""
        # Rates have saturated above the fitted shapes: no extrapolation.
        point = np.minimum(_log2_sizes((shape,)), self.places.max(axis=0))
        return float((_covariance(point, self.places) @ self.weights)[0])

    def is_exceeded_by(self, shape: Shape) -> bool:
        """Whether the shape is larger, in any dimension, than all fitted shapes."""
        return bool((_log2_sizes((shape,)) > self.places.max(axis=0)).any())


def fit_surface(shapes: tuple[Shape, ...], values: Floats) -> Surface:
    """Surface fitted to `values` at `shapes`, robust to outliers.

    Source: Rasmussen & Williams 2006, "Gaussian Processes for Machine Learning", eq. 2.25;
    Student's t noise by iterated reweighting (Lange, Little & Taylor 1989, JASA 84(408)).
    """
    places = _log2_sizes(shapes)
    covariance = _covariance(places, places)
    outlier_weights: Floats = np.ones(len(values))
    weights: Floats = np.zeros(len(values))
    for _ in range(_REWEIGHTINGS):
        noise = _NOISE_VARIANCE / outlier_weights
        weights = np.asarray(np.linalg.solve(covariance + np.diag(noise), values), np.float64)
        squares = (noise * weights) ** 2 / _NOISE_VARIANCE  # squared misfits
        outlier_weights = (_STUDENT_FREEDOM + 1) / (_STUDENT_FREEDOM + squares)
    return Surface(places, weights)


def _log2_sizes(shapes: tuple[Shape, ...]) -> Floats:
    return np.array([[math.log2(size) for size in shape] for shape in shapes])


def _covariance(first: Floats, second: Floats) -> Floats:
    """Covariance of the residuals at two sets of points: constant, smooth in each axis, and rough
    in the size of the result, which decides the kernel and how its tiles fill the chip."""
    smooth = math.sqrt(3) * _distance(first, second, _SMOOTH_DOUBLINGS)
    rough = _distance(_sizes(first), _sizes(second), _ROUGH_DOUBLINGS)
    return (
        _TYPE_VARIANCE
        + _SMOOTH_VARIANCE * (1 + smooth) * np.exp(-smooth)
        + _ROUGH_VARIANCE * np.exp(-rough)
    )


def _sizes(places: Floats) -> Floats:
    batch, m, n, k = places.T
    return np.stack([batch + m + n, k, np.abs(m - n), batch], axis=1)


def _distance(first: Floats, second: Floats, scales: tuple[float, ...]) -> Floats:
    gaps = (first[:, None, :] - second[None, :, :]) / np.array(scales)
    return np.sqrt((gaps**2).sum(axis=2))
