"""Specification of one accelerator: peak and attainable rates, memory, compiler target.

Knows no other device, and no program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
    require_attained,
    require_byte_rates,
    require_physical,
)
from scalejax.hardware.measured import MeasuredRates, nearby

RateType = Literal["fp4", "fp8", "int8", "bf16", "f16", "tf32", "f32"]
"""Operand type of the matrix units."""

_RATE_TYPES: dict[str, tuple[RateType, ...]] = {
    "bf16": ("bf16", "f16", "f32"),
    "f16": ("f16", "f32"),
    "f32": ("tf32", "f32"),
}


_LARGEST_WINOGRAD_SHARE = 2.4
"""(4 - 1) / (2.25 - 1): tiles of 4 x 4 results of a 3 x 3 window (Lavin & Gray 2015, arXiv
1509.09308, section 4.3)."""


SLOWEST_UNIT = 1e6
"""FLOP per second that any processor exceeds: a smaller number has another unit of measure."""


LARGEST_RESIDUAL = 2.0
"""Largest standard deviation of logarithms: times that are off by a factor of seven."""


def require_residual(field: str, value: float | None) -> None:
    """Refuse a residual that is negative, not finite or absurd; None is accepted.

    Raises:
        ConfigError: naming the field.
    """
    if value is not None and not 0 <= value <= LARGEST_RESIDUAL:
        accepted = f"it must be from 0 to {LARGEST_RESIDUAL}: 0.1 is about 10 %"
        raise ConfigError(refusal(field, value, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaArchitecture:
    """Description of a chip as a target of the compiler for NVIDIA GPUs."""

    compute_capability: tuple[int, int]
    """(major, minor) version of the instruction set: (9, 0) for H100."""
    sm_count: int
    """Streaming multiprocessors."""
    clock_hz: float
    """Highest clock of the multiprocessors."""
    l2_bytes: int
    """Size of the L2 cache."""
    shared_memory_per_sm_bytes: int
    """Shared memory of one multiprocessor."""
    shared_memory_per_block_optin_bytes: int
    """Largest shared memory of one block, by opt-in."""
    fpus_per_sm: int
    """f32 units of one multiprocessor."""
    stands_in: bool = False
    """Whether the chip is not an NVIDIA GPU (AMD's): programs are compiled for this target instead
    of the chip, whose compiler is not used here, and costed at the chip's own rates."""

    def __post_init__(self) -> None:
        require_physical("cuda.", self)
        for name in ("sm_count", "clock_hz", "fpus_per_sm"):
            require_above(f"cuda.{name}", getattr(self, name), 0)
        if not 0 <= min(self.compute_capability) <= max(self.compute_capability) < 100:
            accepted = "both must be from 0 to 99, as (9, 0) of an H100"
            raise ConfigError(refusal("cuda.compute_capability", self.compute_capability, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuArchitecture:
    """Description of a chip as a target of the compiler for TPUs."""

    generation: str
    """The compiler's name for the chip: "v5e"."""
    torus_dimensions: Literal[2, 3]
    """Dimensions of the torus of chips."""
    devices_per_chip: Literal[1, 2] = 1
    """Devices per chip: two if each core is a separate device."""
    cores: Literal["default", "megacore"] = "default"
    """How its cores are used; megacore: two as one device."""
    matrix_unit_side: Literal[128, 256] = 128
    """Rows and columns of a matrix unit; sides of operands are padded to multiples of it."""

    def filled(self, size: int) -> float:
        """Share of the rows or columns of matrix units that a side of `size` elements fills."""
        return size / (-(-size // self.matrix_unit_side) * self.matrix_unit_side)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainable:
    """Attainable fractions of a chip's peak rates, and overheads; fitted to measurements where
    `sources` says so, otherwise uncalibrated."""

    matmul_fraction: float
    """Share of peak FLOP/s that large matrix products reach."""
    matmul_ramp_seconds: float
    """Time of a matrix product, beyond its launch, in which the chip fills and drains."""
    convolution_fraction: float
    """Share of peak FLOP/s that forward convolutions with many channels reach."""
    memory_fraction: float
    """Share of peak memory bandwidth that streaming reaches."""
    launch_seconds: float
    """Time from the end of one operation of a program to the start of the next."""
    convolution_f32_fraction: float | None = None
    """Share of peak FLOP/s that forward convolutions of f32 operands reach, on tf32 or f32 units;
    None: `convolution_fraction`."""
    input_gradient_share: float = 1.0
    """Rate of the gradient of a convolution's input over that of the forward convolution."""
    filter_gradient_share: float = 1.0
    """Rate of the gradient of a convolution's filter over that of the forward convolution."""
    depthwise_fraction: float = 0.25
    """Share of peak f32 FLOP/s for depthwise convolutions, which matrix units cannot run."""
    winograd_share: float = 0.0
    """Share of the multiplications saved by Winograd's algorithm with 2 x 2 tiles in f32
    convolutions that becomes saved time: 0 if none, or if it is not used, 1 if all; values up to
    2.4 mean 4 x 4 tiles, which save a factor of 4 instead of 2.25."""
    memory_ramp_seconds: float = 0.0
    """Time of a memory-bound operation, beyond its launch, in which the chip fills and drains."""
    matmul_table: str | None = None
    """The catalogue's table of measured matrix products by shape: the chip's own, or that of a
    sibling with the same multiprocessors; None for none."""
    grouped_matmul_rates: str | None = None
    """The catalogue's rates that were fitted to grouped products of experts: the chip's own, or
    those of a sibling with the same multiprocessors; None for the rates of plain products."""
    sustained_fraction: float = 1.0
    """Rate of matrix products in a long step over that of single ones: clocks fall under load,
    which microbenchmarks do not see."""
    unaligned_fraction: float | None = None
    """Share of peak f32 FLOP/s that half-precision products reach if their sides are not multiples
    of 16 bytes, which matrix units cannot load; None if they are as fast as others."""
    attention_fraction: float = 0.4
    """Share of peak FLOP/s that fused attention over long sequences reaches, forward and backward,
    not counting what a causal mask skips."""
    attention_by_shape: tuple[tuple[int, int, float], ...] = ()
    """(tokens, head size, share of peak FLOP/s) of fused attention as measured, instead of
    `attention_fraction`; () if not measured."""
    attention_rates: str | None = None
    """The catalogue's rates that were fitted to measured attention by head size and tokens, instead
    of `attention_fraction`; None for none."""
    attention_scale: float = 1.0
    """Rate of fused attention with other software's kernels over the rate with the measured
    ones."""
    grouped_scale: float = 1.0
    """Rate of grouped products of experts over that of the measured kernels, likewise."""
    token_exchange_scale: float = 1.0
    """Rate of the all-to-alls that send tokens to experts over that of the cluster's library,
    likewise; above 1 if they overlap with other work."""
    contention_fraction: float = 0.0
    """Share of its speed that compute loses while a collective runs concurrently: both use the
    multiprocessors and the memory. Over nodes it is multiplied by the share of a node's positions
    that the group has (`simulator/collectives/placement.py`)."""
    collective_seconds: float = 0.0
    """Additional time of each collective, because host and streams wait for each other; collectives
    in a graph have none."""
    step_cv: float | None = None
    """Coefficient of variation of one device's step time (standard deviation over mean), measured
    on such chips; the conditions of a cluster override it. None if unknown."""
    step_dispersion_seconds: float = 0.0
    """Variance of one device's step time over its mean, in addition to that of `step_cv`:
    disturbances of m seconds at random times, r per second, add r m^2 for any length of step. Not
    used if conditions give `step_cv`."""
    dispersed_from_seconds: float = 0.0
    """Shortest step for which that dispersion was measured: for shorter steps it is scaled with the
    step, since the length of disturbances is unknown."""
    dispatch_seconds: float = 0.0
    """Time in which the host dispatches one operation. Dispatch is asynchronous: devices wait for
    it only in steps whose operations together take less time."""
    collective_dispatch_seconds: float = 0.0
    """Additional time in which the host dispatches one collective, compared with an operation."""
    member_dispatch_seconds: float = 0.0
    """Additional dispatch time per device of a collective over tensor, while a pipeline sends over
    the network."""
    routed_dispatch_seconds: float = 0.0
    """`dispatch_seconds` of a step that sends tokens to experts, if longer: only the device knows
    how many tokens arrive, so the host launches what follows one by one, after reading that
    number."""
    step_overhead_seconds: float = 0.0
    """Time of a step outside its operations: host work that devices wait for."""

    def __post_init__(self) -> None:
        require_physical("attainable.", self)
        for name in (each.name for each in fields(self)):
            if name.endswith("_seconds"):
                require_at_least(name, getattr(self, name), 0)
            elif name.endswith(("_fraction", "_gradient_share")) and name != "contention_fraction":
                require_attained(name, getattr(self, name))
        for name in ("attention_scale", "grouped_scale", "token_exchange_scale"):
            require_above(name, getattr(self, name), 0)
            require_at_most(name, getattr(self, name), 1e3)
        for tokens, head_size, fraction in self.attention_by_shape:
            require_above("attention_by_shape", min(tokens, head_size), 0)
            require_attained("attention_by_shape", fraction)
        if self.step_cv is None and self.step_dispersion_seconds > 0:
            accepted = "it adds to step_cv, which is missing; 0 says that it is all there is"
            raise ConfigError(
                refusal("step_dispersion_seconds", self.step_dispersion_seconds, accepted)
            )
        if self.step_cv is not None and not 0 <= self.step_cv < 1:
            accepted = "it must be at least 0 and below 1: it is a share of the step"
            raise ConfigError(refusal("step_cv", self.step_cv, accepted))
        if not 0 <= self.winograd_share <= _LARGEST_WINOGRAD_SHARE:
            accepted = f"it must be at least 0 and at most {_LARGEST_WINOGRAD_SHARE}"
            raise ConfigError(refusal("winograd_share", self.winograd_share, accepted))
        if not 0 <= self.contention_fraction < 1:
            accepted = "it must be at least 0 and below 1"
            raise ConfigError(refusal("contention_fraction", self.contention_fraction, accepted))

    def attention_share(self, shape: Sequence[int]) -> float:
        """Share of peak FLOP/s of fused attention over (samples x heads, queries, keys, head size),
        not considering `attention_rates`."""
        if not self.attention_by_shape or len(shape) != 4 or 0 in shape:
            return self.attention_fraction
        return nearby(self.attention_by_shape, shape[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Residuals of the fitted rates: standard deviations of the logarithm of measured over
    predicted time, so that 0.1 is about 10 %."""

    compute: float
    """Residual of compute-bound operations."""
    memory: float
    """Residual of memory-bound operations."""
    launch: float
    """Residual of the time between operations and around the step."""
    step: float = 0.0
    """Residual of whole steps that the other three do not explain."""

    def __post_init__(self) -> None:
        for each in fields(self):
            require_residual(f"residuals.{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Specification of one device: an accelerator, or one die of a card that holds two.

    Example:
        >>> from dataclasses import replace
        >>> from scalejax import load_cluster
        >>> chip = load_cluster("dgx-h100").chip
        >>> larger = replace(chip, name="h100-160gb", memory_bytes=2 * chip.memory_bytes)
        >>> larger.memory_bytes // chip.memory_bytes, "bf16" in larger.peak_flop_per_second
        (2, True)
    """

    name: str
    """Name in the catalogue: "h100"."""
    title: str
    """Name for people: "NVIDIA H100 SXM5 80 GB"."""
    peak_flop_per_second: dict[RateType, float]
    """Dense peak rate by operand type; types that the chip lacks are left out."""
    memory_bytes: int
    """Device memory."""
    memory_bytes_per_second: float
    """Peak bandwidth of device memory."""
    attainable: Attainable
    """Attainable fractions of the peak rates; where measured, those of XLA's kernels and
    launches."""
    runtime_reserve_bytes: int
    """Device memory reserved by driver, communication library and allocator."""
    cuda: CudaArchitecture | None = None
    """Compiler target; None if programs are not compiled for a GPU."""
    tpu: TpuArchitecture | None = None
    """Compiler target; None if the chip is not a TPU."""
    rates_of: str = "xla-2026"
    """Framework whose kernels and launches `attainable` describes; another's are inferred from
    XLA's by what is known of its software (`simulator.frameworks`)."""
    residuals: Residuals | None = None
    """Residuals of the attainable rates; None if they were not fitted."""
    measured: MeasuredRates | None = None
    """Rates measured operation by operation, instead of those of `attainable`; None if not
    measured."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each number above, by its dotted name."""

    def __post_init__(self) -> None:
        if "f32" not in self.peak_flop_per_second:
            accepted = "it must hold f32, the rate of types that the chip has no unit for"
            raise ConfigError(
                refusal("peak_flop_per_second", list(self.peak_flop_per_second), accepted)
            )
        for dtype, rate in self.peak_flop_per_second.items():
            require_at_least(f"peak_flop_per_second.{dtype}", rate, SLOWEST_UNIT)
            require_at_most(f"peak_flop_per_second.{dtype}", rate, 1e20)
        require_physical("", self)
        require_above("memory_bytes", self.memory_bytes, 0)
        require_byte_rates("", self)
        require_at_least("runtime_reserve_bytes", self.runtime_reserve_bytes, 0)

    def rate_type(self, dtype: str) -> RateType:
        """The operand type in which this chip multiplies matrices of `dtype`.

        f32 products run as tf32 if the chip has it, XLA's default. bf16 on a chip without it is
        costed as f16, of equal width, which half-precision training uses there. Any other type
        without its own units is converted to f32, as compilers do; so are integers and f64, which
        training steps do not multiply (too fast by 2x or more for f64).
        """
        if dtype.startswith("f4"):
            wanted: tuple[RateType, ...] = ("fp4", "fp8", "bf16", "f32")
        elif dtype.startswith("f8"):
            wanted = ("fp8", "bf16", "f32")
        else:
            wanted = _RATE_TYPES.get(dtype, ("f32",))
        return next(name for name in wanted if name in self.peak_flop_per_second)

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for matrix products of `dtype` operands."""
        return self.peak_flop_per_second[self.rate_type(dtype)]
