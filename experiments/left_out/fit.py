"""Fit what each framework makes of a chip's silicon to published step times.

Run from the root of the repository:
    python experiments/left_out/fit.py [FRAMEWORK ...] [--write]

Prints the constants of each framework, how far off its rows are, and with --write puts them into
`scalejax/simulator/frameworks/software.toml`. What is fitted is in `CONSTANTS`: each has a prior,
so that what no row tells stays there. One set for all chips first; then, on each chip with
`LEAST_ROWS` settings or more, one that may differ from it as `CHIP_DEVIATION` says. Rows of equal
settings count once, by their median, and those of one family together as the root of their number.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from scalejax import validation
from scalejax.config.parallelism import PIPELINE, TENSOR
from scalejax.hardware import NO_SITE, Cluster
from scalejax.simulator import frameworks
from scalejax.simulator.frameworks import FRAMEWORKS, XLA
from scalejax.simulator.frameworks.software import Rates, Software
from scalejax.simulator.program import Program
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import WhatIf
from scalejax.validation import CompiledCase, compile_cases, read_ledger
from scalejax.validation.ledger import LedgerRow

LEDGERS = Path(validation.__file__).with_name("ledgers")
FILES = (
    "step_times", "step_times_added", "ultrascale_measured", "megatron_bridge",
    "dgxc_benchmarking", "mlperf_v4.1", "mlperf_v5.1", "moe_multinode", "simumax_b200",
    "tpu_and_jax", "automodel_and_rl", "misc_llm", "trainium",
)  # fmt: skip


SOFTWARE = Path(frameworks.__file__).with_name("software.toml")
Z_OF_P90 = 1.2815515655446004
TYPICAL_DEVIATION = 0.25
"""Log standard deviation of a framework of which nothing is known: those left out as a whole."""
ONE_FAMILY = "the larger of that of rows fitted and the median of families left out of others"
"""Of which rows the residual of a framework is that has one family of them."""
SHRINKING = 3
"""Settings that it counts for beside those of one framework."""
CHIP_DEVIATION = 0.12
"""Log standard deviation besides of a chip that a framework was not fitted on, where no chip was
left out: those that were, of all frameworks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant of `Rates`, in the logarithm of which it is fitted."""

    typical: float
    """Its prior's median."""
    deviation: float
    """Log standard deviation of the prior."""
    least: float
    """Least value."""
    most: float
    """Greatest value."""
    chip_deviation: float
    """Log standard deviation of a chip's from the one for all chips."""


CONSTANTS = {
    "matmul_share": Constant(
        typical=0.9, deviation=0.15, least=0.3, most=1.2, chip_deviation=0.07
    ),
    "attention_share": Constant(
        typical=0.8, deviation=0.3, least=0.1, most=1.6, chip_deviation=0.15
    ),
    "attention_fraction": Constant(
        typical=0.25, deviation=0.5, least=0.05, most=0.9, chip_deviation=0.3
    ),
    "convolution_share": Constant(
        typical=0.9, deviation=0.2, least=0.3, most=1.6, chip_deviation=0.15
    ),
    "memory_share": Constant(
        typical=0.9, deviation=0.2, least=0.3, most=1.4, chip_deviation=0.1
    ),
    "gap_seconds": Constant(
        typical=2e-6, deviation=1.0, least=1e-8, most=12e-6, chip_deviation=0.5
    ),
    "dispatch_seconds": Constant(
        typical=1e-6, deviation=1.5, least=1e-8, most=400e-6, chip_deviation=0.5
    ),
    "collective_dispatch_seconds": Constant(
        typical=1e-5, deviation=1.5, least=1e-8, most=2e-3, chip_deviation=0.5
    ),
    "member_dispatch_seconds": Constant(
        typical=1e-6, deviation=2.0, least=1e-8, most=1e-3, chip_deviation=0.5
    ),
    "step_overhead_seconds": Constant(
        typical=1e-4, deviation=1.5, least=1e-6, most=30e-3, chip_deviation=0.5
    ),
    "collective_seconds": Constant(
        typical=2e-6, deviation=1.5, least=1e-8, most=500e-6, chip_deviation=0.5
    ),
    "contention_fraction": Constant(
        typical=0.2, deviation=1.2, least=0.01, most=0.95, chip_deviation=0.3
    ),
    "step_dispersion_seconds": Constant(
        typical=1e-5, deviation=1.5, least=1e-7, most=5e-3, chip_deviation=0.5
    ),
    "step_cv": Constant(
        typical=0.01, deviation=0.6, least=0.002, most=0.06, chip_deviation=0.3
    ),
}  # fmt: skip
EXPERT_CONSTANTS = {
    "grouped_share": Constant(typical=0.9, deviation=0.3, least=0.2, most=1.3, chip_deviation=0.1),
    "token_exchange_share": Constant(
        typical=1.0, deviation=0.5, least=0.1, most=2.5, chip_deviation=0.2
    ),
    # Near the 112 us of megatron-core-2026, the only framework without CUDA graphs besides NeMo's
    # that is fitted to such rows, with about the spread over frameworks. It was chosen with all
    # rows known: MoE ModelZoo left out is 24 % off with this deviation, 62 % with twice as much.
    "routed_dispatch_seconds": Constant(
        typical=100e-6, deviation=0.3, least=1e-7, most=400e-6, chip_deviation=0.5
    ),
}
"""Constants that only networks with experts have, fitted to those with all else as it is: on each
chip too, as its hosts dispatch."""
_HOST = "routed_dispatch_seconds"
_MOST_OF_HOST = math.log(4)
"""Log of the most by which hosts of one chip are slower than those of all."""
GRAPHED = ("megatron-bridge-2025", "nemo-2026")
"""Frameworks whose recipes launch parts of a layer from CUDA graphs, so that hosts take less."""
OF_GRAPHED = replace(EXPERT_CONSTANTS[_HOST], typical=20e-6, deviation=1.5)
EAGER = ("megatron-lm-2021", "megatron-lm-2022")
"""Frameworks that launch all operations from Python, on clusters whose hosts differ more than their
chips do."""
OF_EAGER = replace(CONSTANTS["dispatch_seconds"], typical=30e-6, deviation=0.3)
"""Prior of their hosts. The median is of PyTorch 1.12 on an A100 that waits for its host: 17.8 ms
for the 583 operations of EfficientNet-B5 (pytorch/pytorch, issue 82793), 31 us each; 45 us were
seen with PyTorch 2.6 (53.7 ms for 1,185 launches: facebookresearch/sam2, issue 768). The spread is
that of `routed_dispatch_seconds`."""
OF_HOSTS = ("dispatch_seconds", "collective_dispatch_seconds", "member_dispatch_seconds")
"""What a host takes. With those frameworks no chip has its own: rows on A100 of 80 GB are of three
clusters, and the host of one, which waits for each launch (BLOOM's), is not that of others."""
OWN_ATTENTION = ("pytorch-fsdp-2023", "pax-2023")
"""Frameworks whose attention was no library's of today, FlashAttention-2 in Triton and XLA's own
products: they have a share of the peak of their own."""
LEAST_ROWS = 4
"""Settings from which on a framework has constants of its own on a chip."""
TYPICAL_ERROR = 0.08
"""Log error of a step beyond which rows count for less."""
TYPICAL_GROWTH_ERROR = 0.03
"""The same of a step over that on fewest devices of its series."""
MOST_SETTINGS = 120
"""Settings of a framework that are fitted to; of more, evenly spaced ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows of equal settings: what is predicted, and the median of what was measured."""

    case: CompiledCase
    """One of them."""
    seconds: float
    """Median of the measured steps."""

    @property
    def framework(self) -> str:
        """Name of the framework."""
        return self.case.program.framework

    @property
    def chip(self) -> str:
        """Name of the chip."""
        return self.case.cluster.chip.name

    @property
    def family(self) -> str:
        """Family of the rows."""
        return self.case.row.family


def settings_of(cases: Sequence[CompiledCase]) -> list[Setting]:
    """The cases, equal settings once."""
    groups: dict[tuple, list[CompiledCase]] = defaultdict(list)
    for case in cases:
        step = hash((case.program.operations, case.program.mesh_axes))
        key = (case.program.framework, id(case.cluster), step, case.row.family)
        groups[key].append(case)
    return [
        Setting(same[0], statistics.median(case.row.step_seconds or math.nan for case in same))
        for same in groups.values()
    ]


def read_settings() -> list[Setting]:
    """Settings of all ledgers, those whose programs are kept or have a closed form."""
    found: list[CompiledCase] = []
    for name in FILES:
        rows = [
            row
            for row in read_ledger(LEDGERS / f"{name}.csv.xz")
            if row.step_seconds and _is_run(row)
        ]
        cases = compile_cases(rows, compiles=False, closed_form=True)
        found += [case for case in cases if isinstance(case, CompiledCase)]
    return settings_of(found)


def _is_run(row: LedgerRow) -> bool:
    """Whether a row's devices computed: below a MFU of 5 % nanotron's stood still (its source marks
    the worst of them)."""
    found = re.search(r"^MFU ([0-9.]+) %", row.notes or "")
    return found is None or float(found[1]) >= _LEAST_MFU_PERCENT


_LEAST_MFU_PERCENT = 5.0

_READY: dict[int, tuple[Program, WhatIf]] = {}


def seconds(setting: Setting, rates: Rates) -> float:
    """Predicted step with these rates of the framework."""
    program = setting.case.program
    if id(program) not in _READY:
        _READY[id(program)] = program, WhatIf(program)
    chip = setting.case.cluster.chip
    chip = replace(chip, attainable=rates.on(chip.attainable), rates_of=program.framework)
    cluster: Cluster = replace(setting.case.cluster, chip=chip)
    step = _READY[id(program)][1].timeline(cluster).step_seconds
    return step + (step_terms(program, cluster, NO_SITE, step).stragglers_seconds or 0.0)


def log_errors(settings: Sequence[Setting], rates: Rates) -> np.ndarray:
    """log(predicted / measured) of each, shape (settings,)."""
    return np.array([math.log(seconds(each, rates) / each.seconds) for each in settings])


def weights(settings: Sequence[Setting]) -> np.ndarray:
    """What each counts for, shape (settings,): of a family, the fourth root of its number each."""
    members: dict[str, int] = defaultdict(int)
    for each in settings:
        members[each.family] += 1
    return np.array([members[each.family] ** -0.25 for each in settings])


def scaling_pairs(settings: Sequence[Setting]) -> list[tuple[int, int]]:
    """Where a setting of a series is, and that on fewest devices of it: how a step grows with
    devices is free of what a framework makes of one."""
    least: dict[str, int] = {}
    for index, each in enumerate(settings):
        row = each.case.row
        known = least.get(row.series)
        if known is None or row.device_count < settings[known].case.row.device_count:
            least[row.series] = index
    pairs = ((index, least[each.case.row.series]) for index, each in enumerate(settings))
    return [
        (large, small)
        for large, small in pairs
        if settings[large].case.row.device_count > settings[small].case.row.device_count
    ]


def spaced(settings: Sequence[Setting], most: int = MOST_SETTINGS) -> list[Setting]:
    """At most so many, evenly spaced in the order of their names."""
    ordered = sorted(settings, key=lambda each: (each.case.row.case_id, each.seconds))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i)] for i in np.linspace(0, len(ordered) - 1, most)]


def free_constants(settings: Sequence[Setting]) -> list[str]:
    """Constants that the settings can tell: attention and convolutions only of networks that have
    them."""
    owns = settings[0].framework in OWN_ATTENTION
    kinds = {
        item.kind
        for each in settings[:: max(1, len(settings) // 8)]
        for item, _ in each.case.program.walk()
    }
    has_stages = any(
        dict(each.case.program.mesh_axes).get(PIPELINE, 1) > 1
        and dict(each.case.program.mesh_axes).get(TENSOR, 1) > 1
        for each in settings
    )
    return [
        name
        for name in CONSTANTS
        if not (name in ("attention_share", "attention_fraction") and "attention" not in kinds)
        and name != ("attention_share" if owns else "attention_fraction")
        and not (name == "convolution_share" and "convolution" not in kinds)
        and not (name == "matmul_share" and "matmul" not in kinds)
        and not (name == "member_dispatch_seconds" and not has_stages)
    ]


def fit(settings: Sequence[Setting], around: Rates | None = None) -> Rates:
    """Rates that bring predictions nearest to `settings`, around the priors or those of all
    chips."""
    framework = settings[0].framework
    names = free_constants(settings)
    if around is not None and framework in EAGER:
        names = [name for name in names if name not in OF_HOSTS]
    constants = CONSTANTS | ({"dispatch_seconds": OF_EAGER} if framework in EAGER else {})
    middle = {name: getattr(around, name) if around else constants[name].typical for name in names}
    spread = {
        name: constants[name].chip_deviation if around else constants[name].deviation
        for name in names
    }
    starts = [middle]
    if around is None:
        # Where the host is nowhere the slower one, nothing tells how slow: it starts slow too.
        starts += [middle | {"dispatch_seconds": 30e-6, "collective_seconds": 50e-6}]
        starts += [middle | {"dispatch_seconds": 120e-6}]
        if "member_dispatch_seconds" in names:
            host = {"collective_dispatch_seconds": 300e-6, "member_dispatch_seconds": 200e-6}
            starts += [middle | {"dispatch_seconds": 20e-6} | host]
    return nearest(settings, around or Rates(), constants, middle, spread, starts)


def fit_experts(settings: Sequence[Setting], rates: Rates, around: Rates | None = None) -> Rates:
    """`rates` with the constants of experts that bring predictions nearest to `settings`, around
    their priors or those of all chips."""
    constants = expert_constants(settings[0].framework)
    middle = {
        name: getattr(around, name) if around else each.typical for name, each in constants.items()
    }
    spread = {
        name: each.chip_deviation if around else each.deviation for name, each in constants.items()
    }
    starts = [middle]
    if around is None and _HOST in constants:
        starts += [middle | {_HOST: seconds} for seconds in (20e-6, 200e-6)]
    hosts = () if around or _HOST not in constants else chips_of(settings)
    return nearest(settings, rates, constants, middle, spread, starts, hosts)


def expert_constants(framework: str) -> Mapping[str, Constant]:
    """Those that a framework can have: no host launches the operations of XLA's one by one, and
    what it takes with graphs is a matter of these."""
    kernels = FRAMEWORKS[framework].kernels
    if kernels is not None and kernels.keeps_stacks:
        return {name: each for name, each in EXPERT_CONSTANTS.items() if name != _HOST}
    return EXPERT_CONSTANTS | ({_HOST: OF_GRAPHED} if framework in GRAPHED else {})


def chips_of(settings: Sequence[Setting]) -> tuple[str, ...]:
    """The chips of settings if they are several, whose hosts may differ."""
    chips = tuple(sorted({each.chip for each in settings}))
    return chips if len(chips) > 1 else ()


def nearest(
    settings: Sequence[Setting],
    base: Rates,
    constants: Mapping[str, Constant],
    middle: Mapping[str, float],
    spread: Mapping[str, float],
    starts: Sequence[Mapping[str, float]],
    hosts: Sequence[str] = (),
) -> Rates:
    """`base` with the constants named in `middle` nearest to `settings` and to `middle` itself.

    What hosts take is that of all chips times one of each of `hosts`, drawn towards 1: rows of one
    chip whose host is slow do not say that those of others are.
    """
    names = list(middle)
    pairs = scaling_pairs(settings)
    if "step_dispersion_seconds" in names:
        # Shorter steps than any that was measured wait for as large a share.
        base = replace(base, dispersed_from_seconds=min(each.seconds for each in settings))
    low = np.log([constants[name].least for name in names])
    high = np.log([constants[name].most for name in names])
    each_weight = weights(settings)
    on_host = [hosts.index(each.chip) if hosts else 0 for each in settings]

    def place(values: Mapping[str, float]) -> np.ndarray:
        logs = [*(math.log(values[name]) for name in names), *(0.0 for _ in hosts)]
        return np.clip(logs, low + 1e-6, high - 1e-6)

    deviations = [spread[name] for name in names]
    if hosts:
        low = np.concatenate((low, np.full(len(hosts), -_MOST_OF_HOST)))
        high = np.concatenate((high, np.full(len(hosts), _MOST_OF_HOST)))
        deviations += [constants[_HOST].chip_deviation] * len(hosts)
    center, width = place(middle), np.array(deviations)

    def rates_of(values: np.ndarray) -> Rates:
        own = dict(zip(names, np.exp(values[: len(names)]).tolist(), strict=True))
        return replace(base, **own)

    def errors(values: np.ndarray) -> np.ndarray:
        pooled = rates_of(values)
        if not hosts:
            return log_errors(settings, pooled)
        factors = np.exp(values[len(names) :]) * pooled.routed_dispatch_seconds
        of_chip = [replace(pooled, routed_dispatch_seconds=each) for each in factors.tolist()]
        return np.array(
            [
                log_errors([each], of_chip[chip])[0]
                for each, chip in zip(settings, on_host, strict=True)
            ]
        )

    def residuals(values: np.ndarray) -> np.ndarray:
        logs = errors(values)
        growth = np.array(
            [each_weight[large] * (logs[large] - logs[small]) for large, small in pairs]
        )
        off = np.concatenate((each_weight * logs / TYPICAL_ERROR, growth / TYPICAL_GROWTH_ERROR))
        bent = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate((bent, (values - center) / width))

    found = [
        least_squares(residuals, place(start), bounds=(low, high), diff_step=1e-2, max_nfev=8)
        for start in starts
    ]
    return rates_of(min(found, key=lambda each: each.cost).x)


def fit_all_of_experts(settings: Sequence[Setting]) -> Rates:
    """Rates of a framework that is known by networks with experts alone: how long its host takes
    where there are none stays at the prior."""
    names = [name for name in free_constants(settings) if name != "dispatch_seconds"]
    own = expert_constants(settings[0].framework)
    constants = {name: CONSTANTS[name] for name in names} | dict(own)
    middle = {name: each.typical for name, each in constants.items()}
    spread = {name: each.deviation for name, each in constants.items()}
    starts = [middle]
    if _HOST in own:
        starts += [middle | {_HOST: seconds} for seconds in (20e-6, 200e-6)]
    hosts = chips_of(settings) if _HOST in own else ()
    return nearest(settings, Rates(dispatch_seconds=1e-6), constants, middle, spread, starts, hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Rates of a framework."""

    pooled: Rates
    """On any chip."""
    on_chip: Mapping[str, Rates]
    """On chips with rows enough."""

    def rates(self, chip: str) -> Rates:
        """Rates on a chip."""
        return self.on_chip.get(chip, self.pooled)


def fit_framework(settings: Sequence[Setting], known: Software | None = None) -> Fitted:
    """One set of rates for all chips, and one for each chip that has rows enough.

    Networks with experts tell their own two constants, and nothing else where there are others:
    what routing costs is no property of a chip. What is `known` on a chip from an earlier fit stays
    where it is nearer to the rows.
    """
    experts, others = _experts_and_others(settings)
    by_chip: dict[str, list[Setting]] = defaultdict(list)
    for each in others:
        by_chip[each.chip].append(each)
    pooled = fit_pooled(settings)
    on_chip = {
        chip: fit(spaced(rows, MOST_SETTINGS // 2), pooled)
        for chip, rows in sorted(by_chip.items())
        if others is not experts and len(rows) >= LEAST_ROWS and len(by_chip) > 1
    }
    of_chip: dict[str, list[Setting]] = defaultdict(list)
    for each in experts:
        of_chip[each.chip].append(each)
    for chip, rows in sorted(of_chip.items()):
        if len(rows) >= LEAST_ROWS and len(of_chip) > 1:
            on_chip[chip] = fit_experts(spaced(rows), on_chip.get(chip, pooled), pooled)
    if known is not None:
        for chip, rates in known.on_chip.items():
            rows = by_chip.get(chip, [])
            if rows and misfit(rows, rates) < misfit(rows, on_chip.get(chip, pooled)):
                on_chip[chip] = rates
    return Fitted(pooled=pooled, on_chip=on_chip)


def fit_pooled(settings: Sequence[Setting]) -> Rates:
    """One set of rates of a framework for all chips."""
    experts, others = _experts_and_others(settings)
    if others is experts:
        return fit_all_of_experts(spaced(experts))
    pooled = fit(spaced(others))
    return fit_experts(spaced(experts), pooled) if experts else pooled


def _experts_and_others(settings: Sequence[Setting]) -> tuple[list[Setting], list[Setting]]:
    """Settings of networks with experts, and the others; with experts alone, these are both."""
    experts = [each for each in settings if each.case.row.kind == "expert"]
    return experts, [each for each in settings if each.case.row.kind != "expert"] or experts


def misfit(settings: Sequence[Setting], rates: Rates) -> float:
    """Mean size of the log errors, each family by the root of its number."""
    return float(np.average(np.abs(log_errors(settings, rates)), weights=weights(settings)))


def show(name: str, settings: Sequence[Setting], found: Fitted) -> None:
    """Print constants and errors."""
    print(f"{name}: {len(settings)} settings")
    for chip, rates in (("any chip", found.pooled), *found.on_chip.items()):
        values = {key: getattr(rates, key) for key in free_constants(settings)}
        print(
            f"  {chip:14}",
            ", ".join(f"{key} {value:.3g}" for key, value in values.items() if value is not None),
        )
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in settings:
        kind = " experts" if each.case.row.kind == "expert" else ""
        error = math.log(seconds(each, found.rates(each.chip)) / each.seconds)
        groups[each.chip, each.family + kind].append(error)
    for (chip, family), logs in sorted(groups.items()):
        sizes = np.abs(np.expm1(logs))
        print(
            f"    {chip:14} {family:24} {len(logs):4} mean {sizes.mean():6.1%} median "
            f"{np.median(sizes):6.1%} bias {np.expm1(np.median(logs)):+7.1%} sd {np.std(logs):.3f}"
        )


def deviation(logs: Sequence[float], around: float = TYPICAL_DEVIATION) -> float:
    """Log standard deviation by which four of five of these errors are in the band, drawn towards
    that of all frameworks where they are few."""
    own = float(np.quantile(np.abs(logs), 0.8)) / Z_OF_P90 if len(logs) else around
    share = len(logs) / (len(logs) + SHRINKING)
    return math.sqrt(share * own**2 + (1 - share) * around**2)


def of_families_left_out(
    turns: Sequence[dict], logs_of: Callable[[dict], Sequence[float]]
) -> float:
    """Median deviation of the families of all frameworks that were left out; 0 of none."""
    logs = (logs_of(turn) for turn in turns if turn["kind"] == "family")
    return float(np.median([deviation(each) for each in logs if each] or [0.0]))


def table(name: str, settings: Sequence[Setting], found: Fitted, turns: Sequence[dict]) -> str:
    """The framework's part of `software.toml`; deviations are of what was left out, if it was."""
    inside = [math.log(seconds(s, found.rates(s.chip)) / s.seconds) for s in settings]
    own = [turn for turn in turns if turn["framework"] == name]
    are_experts = [s.case.row.kind == "expert" for s in settings]
    logs_of = _experts if all(are_experts) else _dense
    families_out = [logs for turn in own if turn["kind"] == "family" and (logs := logs_of(turn))]
    chips_out = [logs for turn in own if turn["kind"] == "chip" and (logs := logs_of(turn))]
    mixed = any(are_experts) and not all(are_experts)
    dense = [log for log, is_expert in zip(inside, are_experts, strict=True) if not is_expert]
    # The median of families: one that nothing else is like would widen the band of all others.
    # Of one family alone the rows fitted do not tell what another would be off by; what chips are
    # off by when left out is in the band of other chips.
    if families_out:
        within = float(np.median([deviation(logs) for logs in families_out]))
    else:
        within = max(deviation(dense or inside), of_families_left_out(turns, logs_of))
    beyond = CHIP_DEVIATION
    if chips_out:
        other = float(np.median([deviation(logs) for logs in chips_out]))
        beyond = math.sqrt(max(other**2 - within**2, CHIP_DEVIATION**2))
    counts: dict[str, int] = defaultdict(int)
    families: set[str] = set()
    for each in settings:
        counts[each.chip] += 1
        families.add(each.family)
    free = [*free_constants(settings), *(EXPERT_CONSTANTS if _has_experts(settings) else ())]
    usual = Rates()
    lines = [f'["{name}"]']
    lines += [f"{key} = {float(f'{getattr(found.pooled, key):.4g}')!r}" for key in free]
    lines += [f"residual = {within:.3f}", f"chip_residual = {beyond:.3f}"]
    if mixed:
        left = _of_experts(own, "family")
        experts = [log for log, is_expert in zip(inside, are_experts, strict=True) if is_expert]
        off = deviation(left or experts)
        off = off if left else max(off, of_families_left_out(turns, _experts))
        lines.append(f"expert_residual = {off:.3f}")
    lines += [
        f'["{name}".rows]',
        *(f'"{chip}" = {count}' for chip, count in sorted(counts.items())),
    ]
    for chip, rates in found.on_chip.items():
        lines.append(f'["{name}".on_chip."{chip}"]')
        others = [
            each.name for each in fields(Rates)
            if each.name not in free and getattr(rates, each.name) != getattr(usual, each.name)
        ]  # fmt: skip
        lines += [
            f"{key} = {float(f'{getattr(rates, key):.4g}')!r}"
            for key in (*free, *others)
            if getattr(rates, key) is not None
        ]
    how = "of rows of families left out" if families_out else ONE_FAMILY
    source = (
        f"experiments/left_out/fit.py, {date.today()}: {len(settings)} settings of "
        f"{', '.join(sorted(families))}; residual {how}"
    )
    lines += [f'["{name}".sources]', f'rates = "{source}"']
    return "\n".join(lines) + "\n"


def typical(found: Sequence[Rates]) -> Rates:
    """Rates of a framework that nobody measured: the median of those of others."""
    values = {}
    for name in CONSTANTS:
        known = [value for each in found if (value := getattr(each, name)) is not None]
        if known and name != "attention_fraction":
            values[name] = float(np.median(known))
    return Rates(**values)


def unknown_table(rates: Rates, turns: Sequence[dict]) -> str:
    """The part of `software.toml` for frameworks that were not fitted: its band holds four of five
    rows of three of four frameworks that were left out as a whole."""
    spreads = [
        float(np.quantile(np.abs(turn["log_errors"]), 0.8)) / Z_OF_P90
        for turn in turns
        if turn["kind"] == "framework"
    ]
    residual = float(np.quantile(spreads, 0.75)) if spreads else TYPICAL_DEVIATION
    values = {name: getattr(rates, name) for name in CONSTANTS if name != "attention_fraction"}
    lines = ['["unknown"]', *(f"{k} = {float(f'{v:.4g}')!r}" for k, v in values.items())]
    lines += [f"residual = {residual:.3f}", f"chip_residual = {CHIP_DEVIATION}"]
    source = (
        f"experiments/left_out/fit.py, {date.today()}: medians of the frameworks'; residual of "
    )
    source += "frameworks that were left out as a whole"
    lines += ['["unknown".sources]', f'rates = "{source}"']
    return "\n".join(lines) + "\n"


def _of_experts(turns: Sequence[dict], kind: str) -> list[float]:
    """Log errors of networks with experts in turns of a kind."""
    return [log for turn in turns if turn["kind"] == kind for log in _experts(turn)]


def _experts(turn: dict) -> list[float]:
    """Log errors of a turn, those of networks with experts alone."""
    kinds = zip(turn["log_errors"], turn["kinds"], strict=True)
    return [log for log, kind in kinds if kind == "expert"]


def _dense(turn: dict) -> list[float]:
    """Log errors of a turn, without those of networks with experts."""
    kinds = zip(turn["log_errors"], turn["kinds"], strict=True)
    return [log for log, kind in kinds if kind != "expert"]


def _has_experts(settings: Sequence[Setting]) -> bool:
    return any(each.case.row.kind == "expert" for each in settings)


def main(arguments: Sequence[str]) -> int:
    """Fit what is named, or everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", nargs="*")
    parser.add_argument(
        "--write", action="store_true", help="software.toml anew, of all frameworks"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what earlier fits found")
    parser.add_argument("--turns", type=Path, help="turns.jsonl of run.py, for the bands")
    asked = parser.parse_args(arguments)
    turns = []
    if asked.turns:
        turns = [json.loads(line) for line in asked.turns.read_text().splitlines()]
    by_framework: dict[str, list[Setting]] = defaultdict(list)
    for each in read_settings():
        by_framework[each.framework].append(each)
    tables, pooled = {}, []
    for name, settings in sorted(by_framework.items()):
        if (asked.framework and name not in asked.framework) or name == XLA.name:
            continue
        found = fit_framework(settings, None if asked.fresh else FRAMEWORKS[name].software)
        show(name, settings, found)
        tables[name] = table(name, settings, found, turns)
        pooled.append(found.pooled)
    if not asked.framework:
        tables["unknown"] = unknown_table(typical(pooled), turns)
    if asked.write:
        write(tables)
    return 0


def write(tables: Mapping[str, str]) -> None:
    """Put tables of frameworks into `software.toml`, in place of those that are there."""
    comment, *sections = re.split(r'(?m)^(?=\[")', SOFTWARE.read_text())
    kept: dict[str, str] = defaultdict(str)
    for section in sections:
        kept[section.split('"')[1]] += section
    kept |= tables
    text = "\n".join(kept[name].rstrip() + "\n" for name in sorted(kept))
    SOFTWARE.write_text(comment + text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
