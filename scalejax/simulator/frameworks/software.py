"""Effects of software on a chip: the rates that a framework's kernels reach, gaps and host work.

A chip's file states what its silicon reaches (`hardware.Attainable`: measured operators, as XLA
calls them). Other frameworks call other kernels, launch them one by one from a host, and let
compute wait during collectives. `software.toml` holds the effects of each framework, fitted by
`experiments/left_out`: one set for all chips, and the differences on chips where it was measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from scalejax.core.errors import require_above, require_at_least
from scalejax.core.serialization import JsonValue, build, load_toml
from scalejax.hardware import Attainable, Chip

_FILE = Path(__file__).with_name("software.toml")
_LARGEST_FRACTION = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a framework relative to those of a chip's file, and times that it adds."""

    matmul_share: float = 1.0
    """Rate of matrix products."""
    attention_share: float = 1.0
    """Rate of fused attention."""
    attention_fraction: float | None = None
    """Share of peak FLOP/s of its own attention kernel, for any shape; None for the chip's."""
    grouped_share: float = 1.0
    """Rate of grouped products of experts."""
    token_exchange_share: float = 1.0
    """Rate of the all-to-alls that send tokens to experts, over that of the cluster's library;
    above 1 if they overlap with other work."""
    convolution_share: float = 1.0
    """Rate of convolutions."""
    memory_share: float = 1.0
    """Bandwidth of element-wise operations; below 1 if they are fused less than XLA's."""
    gap_seconds: float = 0.0
    """Time between two operations, beyond that of the chip."""
    dispatch_seconds: float = 0.0
    """Time in which the host dispatches one operation; devices wait for it if their own work
    takes less."""
    collective_dispatch_seconds: float = 0.0
    """Time in which the host dispatches one collective, beyond that of an operation: a call of
    torch.distributed creates events, stream waits and an autograd function."""
    member_dispatch_seconds: float = 0.0
    """Additional dispatch time for each device of a collective over tensor, in a step that sends
    between stages over the network. Seen in nanotron's sweep (`experiments/search_scored`); the
    cause is unknown."""
    routed_dispatch_seconds: float = 0.0
    """`dispatch_seconds` of a step that sends tokens to experts, if that is longer: no CUDA graph
    can hold a step in which only the device knows the numbers of rows."""
    collective_seconds: float = 0.0
    """Additional time of each collective, from the host and from streams that wait for each
    other."""
    step_overhead_seconds: float = 0.0
    """Time of a step outside its operations."""
    contention_fraction: float | None = None
    """Share of its speed that compute loses during a collective; None for the chip's."""
    step_cv: float | None = None
    """Coefficient of variation of a device's step; None for the chip's."""
    step_dispersion_seconds: float | None = None
    """Variance of a step over its mean, as caused by random disturbances; None for the chip's."""
    dispersed_from_seconds: float | None = None
    """Shortest step in which the dispersion was measured; None for the chip's."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(Rates)):
            value = getattr(self, name)
            if name.endswith("_share"):
                require_above(name, value, 0)
            elif value is not None:
                require_at_least(name, value, 0)

    def on(self, attainable: Attainable) -> Attainable:
        """A chip's rates under this software."""

        def part(fraction: float, share: float) -> float:
            return min(_LARGEST_FRACTION, fraction * share)

        changed: dict[str, float] = {}
        for name in ("contention_fraction", "step_cv", "step_dispersion_seconds"):
            if (value := getattr(self, name)) is not None:
                changed[name] = value
        if self.dispersed_from_seconds is not None:
            changed["dispersed_from_seconds"] = self.dispersed_from_seconds
        if self.attention_fraction is not None:
            attainable = replace(
                attainable,
                attention_fraction=self.attention_fraction,
                attention_by_shape=(),
                attention_rates=None,
            )
        f32 = attainable.convolution_f32_fraction
        return replace(
            attainable,
            sustained_fraction=part(attainable.sustained_fraction, self.matmul_share),
            grouped_scale=attainable.grouped_scale * self.grouped_share,
            token_exchange_scale=attainable.token_exchange_scale * self.token_exchange_share,
            attention_scale=attainable.attention_scale * self.attention_share,
            convolution_fraction=part(attainable.convolution_fraction, self.convolution_share),
            convolution_f32_fraction=None if f32 is None else part(f32, self.convolution_share),
            memory_fraction=part(attainable.memory_fraction, self.memory_share),
            launch_seconds=attainable.launch_seconds + self.gap_seconds,
            dispatch_seconds=attainable.dispatch_seconds + self.dispatch_seconds,
            collective_dispatch_seconds=(
                attainable.collective_dispatch_seconds + self.collective_dispatch_seconds
            ),
            member_dispatch_seconds=(
                attainable.member_dispatch_seconds + self.member_dispatch_seconds
            ),
            routed_dispatch_seconds=(
                attainable.routed_dispatch_seconds + self.routed_dispatch_seconds
            ),
            collective_seconds=attainable.collective_seconds + self.collective_seconds,
            step_overhead_seconds=attainable.step_overhead_seconds + self.step_overhead_seconds,
            **changed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Software(Rates):
    """Rates of a framework, on any chip and on those where it was measured."""

    residual: float | None = None
    """Log standard deviation of measured over predicted steps on chips that it was fitted on; None
    if it was not fitted."""
    expert_residual: float | None = None
    """`residual` for networks with experts; None if it was fitted to none, or to nothing else."""
    chip_residual: float = 0.0
    """Additional deviation on other chips."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Number of published steps that it was fitted to, by chip."""
    on_chip: Mapping[str, Rates] = field(default_factory=dict)
    """Rates that replace these on chips of the catalogue."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from."""

    def deviation_on(self, chip_name: str, *, has_experts: bool = False) -> float | None:
        """Log standard deviation of measured over predicted steps on a chip; None if it was not
        fitted to any chip."""
        residual = self.residual
        if has_experts and self.expert_residual is not None:
            residual = self.expert_residual
        if residual is None or chip_name in self.rows:
            return residual
        return math.hypot(residual, self.chip_residual)

    def rates_on(self, chip_name: str) -> Rates:
        """Rates on that chip of the catalogue if it has its own, otherwise on any chip."""
        return self.on_chip.get(chip_name, self)

    def applied(self, chip: Chip) -> Chip:
        """`chip` with its rates under this software."""
        return replace(chip, attainable=self.rates_on(chip.name).on(chip.attainable))


@cache
def software_by_name() -> Mapping[str, Software]:
    """The software of each framework, by the framework's name."""
    made: dict[str, Software] = {}
    for name, table in load_toml(_FILE).items():
        assert isinstance(table, dict)  # noqa: S101  the file is ours
        made[name] = _software(table)
    return made


def _software(table: dict[str, JsonValue]) -> Software:
    whole = build(Software, {**table, "on_chip": {}})
    pooled = {each.name: getattr(whole, each.name) for each in fields(Rates)}
    on_chip = table.get("on_chip") or {}
    assert isinstance(on_chip, dict)  # noqa: S101
    rates = {
        chip: build(Rates, {**pooled, **changes})
        for chip, changes in on_chip.items()
        if isinstance(changes, dict)
    }
    return replace(whole, on_chip=rates)
