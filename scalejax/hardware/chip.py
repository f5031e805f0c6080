"""One accelerator: how fast it computes, how much it holds, and what a compiler must know of it.

Knows no other device and no program.
"""

from dataclasses import dataclass, field
from typing import Literal

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.hardware.measured import MeasuredRates

RateType = Literal["fp8", "bf16", "f16", "tf32", "f32"]
"""Arithmetic of the matrix units, by the name of its operands."""

_RATE_TYPES: dict[str, tuple[RateType, ...]] = {
    "bf16": ("bf16", "f16", "f32"),
    "f16": ("f16", "f32"),
    "f32": ("tf32", "f32"),
}


_LARGEST_WINOGRAD_SHARE = 2.4
"""(4 - 1) / (2.25 - 1): tiles of 4 x 4 results of a 3 x 3 window (Lavin & Gray 2015, arXiv
1509.09308, section 4.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaArchitecture:
    """What a compiler for NVIDIA GPUs must know of a chip, beyond its rates."""

    compute_capability: tuple[int, int]
    """(major, minor) version of the instruction set: (9, 0) for H100."""
    sm_count: int
    """Streaming multiprocessors."""
    clock_hz: float
    """Highest clock of the multiprocessors."""
    l2_bytes: int
    """Second-level cache."""
    shared_memory_per_sm_bytes: int
    """On-chip memory of one multiprocessor that its blocks share."""
    shared_memory_per_block_optin_bytes: int
    """Most of it that one block may ask for."""
    fpus_per_sm: int
    """f32 units of one multiprocessor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuArchitecture:
    """What a compiler for TPUs must know of a chip, beyond its rates."""

    generation: str
    """Name of the chip for the compiler: "v5e"."""
    torus_dimensions: Literal[2, 3]
    """Dimensions in which chips are joined to their neighbours."""
    devices_per_chip: Literal[1, 2] = 1
    """Devices that one chip is: two where programs see its cores one by one."""
    cores: Literal["default", "megacore"] = "default"
    """How its cores are used; megacore: two as one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainable:
    """How much of a chip's peaks programs reach; uncalibrated until fitted to measurements."""

    matmul_fraction: float
    """Share of peak FLOP/s that large matrix products reach."""
    matmul_ramp_seconds: float
    """Time a matrix product takes beyond its launch to fill and drain the chip."""
    convolution_fraction: float
    """Share of peak FLOP/s that forward convolutions of many channels reach."""
    memory_fraction: float
    """Share of peak memory bandwidth that streaming reaches."""
    launch_seconds: float
    """Time from the end of one operation of a program to the start of the next."""
    convolution_f32_fraction: float | None = None
    """The same of f32 operands, on tf32 or f32 units; None if as of narrower ones."""
    input_gradient_share: float = 1.0
    """Rate of the gradient of a convolution's input over that of the forward convolution."""
    filter_gradient_share: float = 1.0
    """Rate of the gradient of its filter over that of the forward convolution."""
    depthwise_fraction: float = 0.25
    """Share of peak f32 FLOP/s that depthwise convolutions reach, which matrix units cannot run."""
    winograd_share: float = 0.0
    """How much of the multiplications that Winograd's algorithm saves with tiles of 2 x 2 in f32
    convolutions is saved in time: 0 is none, or no use of it, 1 is all, and up to 2.4 tells of
    tiles of 4 x 4, which save 4 times instead of 2.25."""
    memory_ramp_seconds: float = 0.0
    """The same as `matmul_ramp_seconds`, of operations that only move bytes."""
    matmul_table: str | None = None
    """Table of the catalogue that says how products depart from these numbers by their shape:
    the chip's own, or that of a sibling with the same multiprocessors; None for none."""
    sustained_fraction: float = 1.0
    """Share of the rate of single products that those of a long step reach: clocks fall under
    load, which benchmarks of microseconds do not see."""
    unaligned_fraction: float | None = None
    """Share of peak f32 FLOP/s that products of half precision reach whose sides are no multiples
    of 16 bytes, which matrix units cannot load; None if they are as fast as others."""
    attention_fraction: float = 0.4
    """Share of peak FLOP/s that fused attention over long sequences reaches, forward and
    backward, what a causal mask skips not counted."""
    contention_fraction: float = 0.0
    """Share of its speed that compute loses while a collective runs beside it: both use the
    multiprocessors and the memory."""
    step_cv: float | None = None
    """Standard deviation of one device's step time over its mean, as seen on such chips; a cluster
    that knows its own says so in its conditions. None if unknown."""
    step_dispersion_seconds: float = 0.0
    """Variance of one device's step time over its mean, beside that of `step_cv`: disturbances of
    m seconds that come at random r times a second make r m^2, however long the step. Not where
    conditions say how much steps vary."""
    dispersed_from_seconds: float = 0.0
    """The shortest step in which that was seen: of shorter ones it is the same share of the step,
    for nobody knows whether disturbances are as long."""
    dispatch_seconds: float = 0.0
    """Time in which the host sets off one operation. It runs ahead of the devices, which wait for
    it only in steps whose operations together take less."""
    step_overhead_seconds: float = 0.0
    """Time of a step that is in none of its operations: the host's work that devices wait for."""

    def __post_init__(self) -> None:
        for name in (
            "matmul_fraction",
            "convolution_fraction",
            "convolution_f32_fraction",
            "input_gradient_share",
            "filter_gradient_share",
            "depthwise_fraction",
            "sustained_fraction",
            "unaligned_fraction",
            "attention_fraction",
            "memory_fraction",
        ):
            fraction = getattr(self, name)
            if fraction is not None and not 0 < fraction <= 1:
                raise ConfigError(refusal(name, fraction, "it must be above 0 and at most 1"))
        require_at_least("matmul_ramp_seconds", self.matmul_ramp_seconds, 0)
        require_at_least("memory_ramp_seconds", self.memory_ramp_seconds, 0)
        require_at_least("launch_seconds", self.launch_seconds, 0)
        require_at_least("dispatch_seconds", self.dispatch_seconds, 0)
        require_at_least("step_overhead_seconds", self.step_overhead_seconds, 0)
        require_at_least("step_dispersion_seconds", self.step_dispersion_seconds, 0)
        require_at_least("dispersed_from_seconds", self.dispersed_from_seconds, 0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """How far measured times lie from those of the fits: standard deviations of their logarithms,
    so that 0.1 is about 10 %."""

    compute: float
    """Of operations that arithmetic limits."""
    memory: float
    """Of operations that memory bandwidth limits."""
    launch: float
    """Of the time between operations and around the step."""
    step: float = 0.0
    """Of whole steps, beyond what the other three explain."""

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "launch", "step"):
            require_at_least(f"residuals.{name}", getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator, as the system numbers devices (one die where a card holds two)."""

    name: str
    """Name in the catalogue: "h100"."""
    title: str
    """Name for people: "NVIDIA H100 SXM5 80 GB"."""
    peak_flop_per_second: dict[RateType, float]
    """Dense peak rate by type of operands; a type the chip lacks is left out."""
    memory_bytes: int
    """Device memory."""
    memory_bytes_per_second: float
    """Peak bandwidth of device memory."""
    attainable: Attainable
    """How much of the peaks programs reach."""
    runtime_reserve_bytes: int
    """Device memory that driver, communication library and allocator keep for themselves."""
    cuda: CudaArchitecture | None = None
    """What a compiler must know; None if it is no NVIDIA GPU."""
    tpu: TpuArchitecture | None = None
    """What a compiler must know; None if it is no TPU."""
    residuals: Residuals | None = None
    """How far off the attainable rates are; None if they were fitted to nothing."""
    measured: MeasuredRates | None = None
    """Rates measured operation by operation, in place of those of `attainable`; None if there
    are none."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each number above comes from, by its dotted name."""

    def __post_init__(self) -> None:
        if "f32" not in self.peak_flop_per_second:
            accepted = "it must hold f32, the rate of types that the chip has no unit for"
            raise ConfigError(
                refusal("peak_flop_per_second", list(self.peak_flop_per_second), accepted)
            )
        for dtype, rate in self.peak_flop_per_second.items():
            require_above(f"peak_flop_per_second.{dtype}", rate, 0)
        require_above("memory_bytes", self.memory_bytes, 0)
        require_above("memory_bytes_per_second", self.memory_bytes_per_second, 0)
        require_at_least("runtime_reserve_bytes", self.runtime_reserve_bytes, 0)

    def rate_type(self, dtype: str) -> RateType:
        """The arithmetic in which this chip multiplies matrices of `dtype`.

        f32 products run as tf32 where the chip has it, XLA's default. bf16 on a chip without it
        stands for f16, of the same width: whoever trains there in half precision uses that. Any
        other type without units of its own is converted to f32, as compilers do; so are
        integers and f64, which training steps do not multiply (too fast by 2x or more for f64).
        """
        if dtype.startswith("f8"):
            wanted: tuple[RateType, ...] = ("fp8", "bf16", "f32")
        else:
            wanted = _RATE_TYPES.get(dtype, ("f32",))
        return next(name for name in wanted if name in self.peak_flop_per_second)

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for matrix products of `dtype` operands."""
        return self.peak_flop_per_second[self.rate_type(dtype)]
