"""Constants of a cluster fitted to runs measured on it.

A run folder holds the program of its step and the measured step times. Factors on the predicted
times are fitted by least squares on the logarithms, so that 10 % counts as much in a short step
as in a long one. Arithmetic on plain data; knows no JAX.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

import numpy as np
from scipy.optimize import least_squares

from scalejax.core.errors import ConfigError, nearest_name, refusal
from scalejax.hardware import (
    NO_SITE,
    Attainable,
    CalibratedRange,
    Chip,
    Cluster,
    CollectiveMethod,
    Link,
    MeasuredRates,
    Network,
    Site,
    load_cluster_and_site,
)
from scalejax.measure.trace import refuse_other_kind
from scalejax.simulator.device_state import under_load
from scalejax.simulator.program import Program, load_program
from scalejax.simulator.site_effects import step_terms
from scalejax.simulator.timeline.timeline import timeline
from scalejax.training.record import RunFolder, RunRecord, TrainMeasurement

FEWEST, MOST = 2, 5
"""Fewest and most runs of a fit."""
FITTED_FILE = "cluster-fitted.toml"
"""File name of a fitted cluster, next to the measured one, which is left unchanged."""
WIDE_ERROR = 0.25
"""Error of the held-out run above which `fit` warns."""
_LOW, _HIGH = 1 / 8, 8.0  # bounds of a factor; beyond them it is another machine
_PRIOR = 0.5  # prior standard deviation of the logarithm of a factor
_NOISE = 0.05  # relative standard deviation of a measured step time
_MOST_CONTENTION = 0.5  # upper bound; compute would nearly stop during a collective
_WIDEST = 0.5  # spread of steps above which it says nothing about stragglers
_FEWEST_TIMES = 8  # fewest times for quartiles
_QUARTILES_APART = 1.349  # standard deviations between the quartiles of a normal distribution
_SLOW_LINES = 1  # first lines of the record, left out as warm-up
_COMPUTE_FRACTIONS = (
    *("matmul_fraction", "convolution_fraction", "convolution_f32_fraction"),
    *("depthwise_fraction", "attention_fraction"),
)

Part = TypeVar("Part", CollectiveMethod, Link, Network, Attainable, MeasuredRates)
"""A part of a cluster with constants that are scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One measured run: the program and the time of its step."""

    name: str
    """Name of its folder."""
    program: Program
    """The compiled step."""
    step_seconds: float
    """Median time of a step."""
    step_cv: float | None
    """Standard deviation of step times over their mean; None if too few were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors on the constants of a cluster."""

    compute: float = 1.0
    """Factor on the times of compute-bound operations."""
    memory: float = 1.0
    """Factor on the times of memory-bound operations."""
    launch: float = 1.0
    """Factor on the gaps between operations, and on the overhead of a step."""
    communication: float = 1.0
    """Factor on the times of collectives."""
    contention: float | None = None
    """Share of its speed that compute loses during a collective, which replaces the chip's own;
    None keeps the chip's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunError:
    """One run, predicted with the fitted constants."""

    name: str
    """Name of its folder."""
    device_count: int
    """Devices."""
    measured_seconds: float
    """Median time of a step."""
    predicted_seconds: float
    """Predicted step time."""

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Constants fitted to runs."""

    cluster: Cluster
    """The cluster with the constants fitted to all runs."""
    site: Site
    """The site with the spread of the runs' steps."""
    factors: Factors
    """Factors applied to its constants."""
    errors: tuple[RunError, ...]
    """Error of every run as predicted by `cluster`, the largest run last."""
    held_out: RunError
    """Error of the largest run as predicted with constants fitted only to the others."""


def read_runs(folders: Sequence[Path]) -> list[MeasuredRun]:
    """The runs in folders that `scalejax train` wrote.

    Raises:
        ConfigError: if there are too few or too many, or one is named twice, holds no program, or
            has too few measured steps.
    """
    seen: dict[Path, Path] = {}
    for folder in folders:
        _require_run_folder(folder)
        other = seen.setdefault(folder.resolve(), folder)
        if other is not folder:
            again = "named twice" if other == folder else f"the same folder as {str(other)!r}"
            raise ConfigError(refusal("from", str(folder), f"it is {again}; name each run once"))
    _require_count(len(folders))
    return [read_run(folder) for folder in folders]


def _require_run_folder(folder: Path) -> None:
    if RunFolder(path=folder).holds_run:
        return
    siblings = [path.name for path in folder.parent.glob("*") if RunFolder(path=path).holds_run]
    closest = nearest_name(folder.name, siblings)
    hint = f" (did you mean {str(folder.parent / closest)!r}?)" if closest else ""
    accepted = f"it is not a run folder, as scalejax train writes them{hint}"
    raise ConfigError(refusal("from", str(folder), accepted))


def _require_count(count: int) -> None:
    if not FEWEST <= count <= MOST:
        folders = "1 folder" if count == 1 else f"{count} folders"
        raise ConfigError(refusal("from", folders, f"it must be {FEWEST} to {MOST} run folders"))


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder that `scalejax train` wrote.

    Raises:
        ConfigError: if it holds no program, or has too few measured steps.
    """
    files = RunFolder(path=folder)
    program = load_program(files.program)
    lines = [m for m in RunRecord.load(folder).measurements if isinstance(m, TrainMeasurement)]
    kept = lines[_SLOW_LINES:]
    seconds = [line.step_seconds for line in kept]
    if not seconds:
        accepted = (
            f"it has {len(lines)} lines of measured steps, and the first is left out; train "
            "longer, or with a smaller train.log_every_steps"
        )
        raise ConfigError(refusal("from", str(folder), accepted))
    line_cv = spread(seconds)
    steps_per_line = (kept[-1].step - kept[0].step) / max(1, len(kept) - 1)  # a line averages them
    return MeasuredRun(
        name=str(folder),
        program=program,
        step_seconds=median(seconds),
        step_cv=line_cv and line_cv * math.sqrt(max(1.0, steps_per_line)),
    )


def measured_cluster(folder: Path) -> tuple[Cluster, Site]:
    """The cluster and site that `scalejax calibrate` wrote into `folder`.

    Raises:
        ConfigError: if it has not been run yet.
    """
    path = folder / "cluster.toml"
    if not path.is_file():
        raise ConfigError(
            f"nothing was measured here: there is no {path}. Name a --cluster, or run "
            "scalejax calibrate first."
        )
    return load_cluster_and_site(str(path))


def spread(seconds: Sequence[float]) -> float | None:
    """Standard deviation of times over their median; None if there are too few.

    Estimated from the quartiles, as a step delayed by another program is no straggler of this one.
    """
    if len(seconds) < _FEWEST_TIMES:
        return None
    low, middle, high = quantiles(seconds, n=4)
    return (high - low) / _QUARTILES_APART / middle


def fit_runs(cluster: Cluster, runs: Sequence[MeasuredRun], site: Site = NO_SITE) -> Fit:
    """`cluster` with its constants fitted to `runs`, and the held-out error of the largest run.

    The largest run has the most devices, then the longest steps. The returned constants are fitted
    to all runs; the error of the largest is given twice, with them and with a fit to the others.

    Raises:
        ConfigError: if there are fewer than 2 runs or more than 5, or one ran on a different kind
            of chip than that of `cluster`.
    """
    _require_count(len(runs))
    for run in runs:
        program = run.program
        refuse_other_kind("from", run.name, cluster, backend=program.backend, target=program.target)
    ordered = sorted(runs, key=lambda run: (run.program.device_count, run.step_seconds))
    *others, largest = ordered
    held_out = _fit(cluster, site, others, [largest])[-1][0]
    fitted, site, factors, errors = _fit(cluster, site, runs, ordered)
    sources = {"*": "scalejax calibrate --from " + " ".join(run.name for run in runs)}
    return Fit(
        cluster=replace(
            fitted,
            calibrated=CalibratedRange(
                device_counts=tuple(sorted(run.program.device_count for run in runs)),
                held_out_error=held_out.error,
                sources=sources,
            ),
        ),
        site=site,
        factors=factors,
        errors=errors,
        held_out=held_out,
    )


def _fit(
    cluster: Cluster, site: Site, runs: Sequence[MeasuredRun], predicted: Sequence[MeasuredRun]
) -> tuple[Cluster, Site, Factors, tuple[RunError, ...]]:
    """The cluster fitted to `runs`, the site with their spread, and errors of `predicted` on them.

    The spread comes from the runs on the fewest devices, where waiting for the slowest adds least.
    """
    fewest = min(run.program.device_count for run in runs)
    spreads = [
        run.step_cv
        for run in runs
        if run.step_cv is not None and run.program.device_count == fewest
    ]
    if spreads:
        conditions = replace(site.conditions, step_cv=min(median(spreads), _WIDEST))
        site = replace(site, conditions=conditions)
    factors = _factors(cluster, site, runs)
    fitted = adjusted(cluster, factors)
    return fitted, site, factors, tuple(_error(fitted, site, run) for run in predicted)


def adjusted(cluster: Cluster, factors: Factors) -> Cluster:
    """`cluster` with its constants multiplied by `factors`.

    It does not adjust the efficiency ramps of matmuls, nor the time of the smallest message if a
    link has a table of measured collectives.
    """
    library, factor = cluster.library, factors.communication
    hops = ("base_seconds", "link_hop_seconds", "network_hop_seconds")
    link = _scaled(cluster.link, factor, "ramp_seconds", "in_switch_ramp_seconds")
    network = cluster.network
    if network is not None:
        network = _scaled(network, factor, "message_seconds", "ramp_seconds")
        network = _scaled(network, 1 / factor, "bytes_per_second")
    return replace(
        cluster,
        chip=_adjusted_chip(cluster.chip, factors),
        shared=tuple(
            replace(each, chip=_adjusted_chip(each.chip, factors)) for each in cluster.shared
        ),
        library=replace(
            library, methods=tuple(_scaled(method, factor, *hops) for method in library.methods)
        ),
        link=_scaled(link, 1 / factor, "bytes_per_second", "host_bytes_per_second"),
        network=network,
    )


def _adjusted_chip(chip: Chip, factors: Factors) -> Chip:
    measured = chip.measured
    adjusted_rates = partial(
        _adjusted_attainable, factors=factors, is_measured=measured is not None
    )
    if measured is not None:
        measured = _scaled(measured, factors.compute, "compute_scale")
        measured = _scaled(measured, factors.memory, "memory_scale")
    return replace(
        chip,
        measured=measured,
        attainable=adjusted_rates(chip.attainable),
    )


def _adjusted_attainable(
    attainable: Attainable, factors: Factors, *, is_measured: bool
) -> Attainable:
    if not is_measured:
        # Fractions of the peak, at most 1; the other fractions are relative to these.
        slower = dict.fromkeys(_COMPUTE_FRACTIONS, factors.compute)
        slower["memory_fraction"] = factors.memory
        fractions = {name: getattr(attainable, name) for name in slower}
        changed = {
            name: min(1.0, fraction / slower[name])
            for name, fraction in fractions.items()
            if fraction is not None
        }
        by_shape = tuple(
            (tokens, size, min(1.0, fraction / factors.compute))
            for tokens, size, fraction in attainable.attention_by_shape
        )
        if attainable.attention_rates is not None:  # they replace the fractions
            changed["attention_scale"] = attainable.attention_scale / factors.compute
        attainable = replace(attainable, **changed, attention_by_shape=by_shape)
    if factors.contention is not None:
        attainable = replace(attainable, contention_fraction=factors.contention)
    launches = ("launch_seconds", "dispatch_seconds", "step_overhead_seconds")
    return _scaled(attainable, factors.launch, *launches)


def _scaled(part: Part, factor: float, *names: str) -> Part:
    """`part` with the fields `names` multiplied by `factor`; those that are None stay None."""
    values = {name: getattr(part, name) for name in names}
    return replace(part, **{n: v * factor for n, v in values.items() if v is not None})


def _step_seconds(cluster: Cluster, site: Site, program: Program) -> float:
    used = under_load(cluster, program)
    seconds = timeline(program, used).step_seconds
    terms = step_terms(program, used, site, seconds)
    return seconds + (terms.stragglers_seconds or 0.0) + (terms.input_seconds or 0.0)


def _error(cluster: Cluster, site: Site, run: MeasuredRun) -> RunError:
    return RunError(
        name=run.name,
        device_count=run.program.device_count,
        measured_seconds=run.step_seconds,
        predicted_seconds=_step_seconds(cluster, site, run.program),
    )


def _factors(cluster: Cluster, site: Site, runs: Sequence[MeasuredRun]) -> Factors:
    """The factors that minimise the error of the predictions.

    There may be more factors than runs, so each has a prior at 1 (for contention, at the chip's
    own) with a standard deviation of `_PRIOR`: a factor that no run determines stays there.
    """
    own_contention = cluster.chip.attainable.contention_fraction
    as_it_is = np.array([0.0, 0.0, 0.0, 0.0, own_contention])
    communicates = any(
        item.collective is not None for run in runs for item, _ in run.program.walk()
    )

    def factors_of(place: np.ndarray) -> Factors:
        compute, memory, launch, communication = np.exp(place[:4]).tolist()
        return Factors(
            compute=compute,
            memory=memory,
            launch=launch,
            communication=communication if communicates else 1.0,
            contention=float(place[4]) if communicates else None,
        )

    def residuals(place: np.ndarray) -> np.ndarray:
        guessed = adjusted(cluster, factors_of(place))
        misses = [
            math.log(_step_seconds(guessed, site, run.program) / run.step_seconds) / _NOISE
            for run in runs
        ]
        return np.array([*misses, *((place - as_it_is) / _PRIOR)])

    low, high = math.log(_LOW), math.log(_HIGH)
    bounds = ([low] * 4 + [0.0], [high] * 4 + [max(_MOST_CONTENTION, own_contention)])
    found = least_squares(residuals, as_it_is, bounds=bounds, max_nfev=40)
    return factors_of(found.x)
