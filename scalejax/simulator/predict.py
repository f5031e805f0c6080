"""Prediction of a program on a cluster: seconds, samples per second, MFU, memory and goodput.

Arithmetic on plain data; imports no JAX. Unknown terms of the waterfall are None.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from scalejax.config.parallelism import AXES, BATCH_AXES
from scalejax.core import drawing, metrics
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import TFLOP, counted, format_bytes, format_seconds
from scalejax.hardware import NO_SITE, Chip, Cluster, Price, RateType, Site, chip_names
from scalejax.hardware.site import FARTHEST
from scalejax.simulator.collectives import measured_deviation
from scalejax.simulator.device_state import under_load
from scalejax.simulator.expert_load import of_fullest_device
from scalejax.simulator.frameworks import known_framework
from scalejax.simulator.input_notes import input_notes
from scalejax.simulator.memory import MemoryVerdict, memory_verdict
from scalejax.simulator.program import Program, ReservedBytes
from scalejax.simulator.site_effects import RunTerms, StepTerms, input_stages, run_terms, step_terms
from scalejax.simulator.timeline.timeline import NOMINAL, Scales, Timeline, what_if
from scalejax.simulator.transforms.pipeline import without_bubble
from scalejax.simulator.uncertainty import Band, band, residuals

Scaling = Literal["weak", "strong"]

STEP_CONDITIONS = ("stragglers", "input")
"""Terms of the waterfall that are part of a step, if the conditions of the run are known."""
RUN_CONDITIONS = ("checkpoints", "failures")
"""Terms of the waterfall that a run takes in addition to its steps, as seconds per step."""
_CPU = "cpu"
"""Name of the chip if the measured local devices are CPUs: JAX's platform name."""


_COLUMNS = (
    "cluster", "framework", "device_count", "global_batch", "step_seconds", "p10_step_seconds",
    "p90_step_seconds", "epoch_seconds", "samples_per_second", "tokens_per_second", "mfu",
    "peak_memory_bytes", "fits",
)  # fmt: skip
"""Fields of a `Prediction` that its table shows, in order."""


@document("prediction")
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Tabular):
    """Predicted time, throughput and memory of a program on a cluster; unknown is None.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config, search
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> tables = {"model": {"name": "gpt2-124m"}, "data": {"name": "synthetic_tokens"}}
        >>> report = search(load_config(path, tables), "dgx-h100", 2, confirm=0)
        >>> prediction = report.ranked[0].prediction
        >>> prediction.device_count, prediction.fits, prediction.backend
        (2, True, 'closed_form')
        >>> list(prediction.to_rows()[0])[:4]
        ['cluster', 'framework', 'device_count', 'global_batch']
    """

    cluster: str
    """Name of the cluster."""
    chip: str
    """Name of its chip."""
    device_count: int
    """Devices in the run."""
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    global_batch: int | None
    """Samples per step over all devices."""
    per_device_batch: int | None
    """Samples per step on each device; devices along axes that do not divide the batch share
    them. None if the program does not say how it divides a batch."""
    step_seconds: float
    """Time of one step: the median of the predicted distribution."""
    steps_per_epoch: int | None
    """Steps in one pass over the data."""
    epoch_seconds: float | None
    """Time of one pass over the data, evaluation not counted."""
    run_seconds: float | None
    """Time of all epochs, with checkpoints and failures where `goodput` is known."""
    samples_per_second: float | None
    """Samples trained per second over all devices."""
    tokens_per_second: float | None
    """Tokens trained per second over all devices; None for images."""
    mfu: float | None
    """Model FLOP utilisation, 0..1, against the peak of `matmul_type`."""
    matmul_type: RateType | None
    """Arithmetic type of most of the program's FLOP; None if the program has no FLOP."""
    peak_memory_bytes: int
    """Peak memory of one device, the runtime's own reserve included."""
    memory_bytes: int
    """Memory of one device."""
    fits: bool
    """Whether the program fits into the memory of a device."""
    waterfall: tuple[tuple[str, float | None], ...]
    """(term, seconds), None for an unknown term. All terms but `RUN_CONDITIONS` add up to
    `step_seconds`; those come on top, per step."""
    communication_seconds: float
    """Time of collectives per step, whether or not they overlap with compute."""
    backend: str
    """Compiler backend of the costed schedule: "cuda", "cpu", "tpu", "closed_form"."""
    notes: tuple[str, ...]
    """Caveats of the figures."""
    framework: str = "xla-2026"
    """Name of the framework whose step is predicted."""
    p10_step_seconds: float | None = None
    """Lower end of the error band: the measured step time should be below it for one prediction
    in ten. None if the residuals of the fits are unknown."""
    p90_step_seconds: float | None = None
    """Upper end of the error band: the measured step time should be above it for one prediction
    in ten. None if the residuals of the fits are unknown."""
    goodput: float | None = None
    """Fraction of the run's time spent on steps that count, 0..1, as far as checkpoints and
    failures are known; None if neither is known."""
    reserved_memory_bytes: int | None = None
    """Device memory that the framework's allocator reserves, including free blocks, which it
    releases when memory is short. None if unknown."""
    p10_reserved_memory_bytes: int | None = None
    """Lower end of the error band of the reserved memory: one run in ten should reserve less."""
    p90_reserved_memory_bytes: int | None = None
    """Upper end of the error band of the reserved memory: one run in ten should reserve more."""
    input_stages: tuple[tuple[str, float], ...] = ()
    """(stage, seconds) of the input of one batch on a node: storage, decode, hand over. Empty if
    the rates of the host are unknown."""
    price: Price | None = None
    """Price of a device of the cluster at the time of the prediction; None if unknown, and in files
    of versions that did not record it."""

    def __post_init__(self) -> None:
        require_at_least("device_count", self.device_count, 1)

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """One row of the main figures."""
        return [{name: getattr(self, name) for name in _COLUMNS}]

    @property
    def _verdict(self) -> str:
        verdict = "fits" if self.fits else "does NOT fit"
        return (
            f"{format_seconds(self.step_seconds)} a step on {counted(self.device_count, 'device')} "
            f"of {self.cluster}, {format_bytes(self.peak_memory_bytes)} of "
            f"{format_bytes(self.memory_bytes)}: {verdict}"
        )

    def __str__(self) -> str:
        """What `print` shows: the main figures, and the notes."""
        rows, notes = drawing.text_of(self.to_rows()), drawing.notes_text(self.notes)
        return f"{self._verdict}\n{rows}{notes}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the main figures, and where the time of a step goes."""
        of_step = [each for each in self.waterfall if each[0] not in RUN_CONDITIONS]
        return "".join(
            (
                drawing.heading(self._verdict),
                drawing.table(self.to_rows()),
                drawing.waterfall(of_step, "step"),
                drawing.notes(self.notes),
            )
        )


@document("scaling_prediction")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPrediction(Tabular):
    """One training step on growing numbers of devices.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import predict
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> scaling = predict(path, "dgx-h100", [1, 2], scaling="strong")
        >>> scaling.baseline_devices, [each.global_batch for each in scaling.predictions]
        (1, [32, 32])
        >>> scaling.efficiencies[0]
        1.0
    """

    scaling: Scaling
    """weak: per-device batch fixed. strong: global batch fixed."""
    title: str
    """Title of the scaled program."""
    predictions: tuple[Prediction, ...]
    """One per device count, ascending."""
    baseline_devices: int
    """Device count of the baseline of the efficiencies: the fewest."""
    efficiencies: tuple[float, ...]
    """Throughput per device over that of the baseline, one value per prediction."""

    def __post_init__(self) -> None:
        if not self.predictions or len(self.predictions) != len(self.efficiencies):
            accepted = "there must be one for each of the predictions, and one at least"
            raise ConfigError(refusal("efficiencies", self.efficiencies, accepted))

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The main figures and the efficiency, a row for each number of devices."""
        return [
            {**row, "efficiency": efficiency}
            for each, efficiency in zip(self.predictions, self.efficiencies, strict=True)
            for row in each.to_rows()
        ]

    def __str__(self) -> str:
        """What `print` shows: a row for each number of devices, and the notes."""
        rows = drawing.text_of(self.to_rows())
        notes = drawing.notes_text(merged_notes(self.predictions))
        return f"{self.title}, {self.scaling} scaling\n{rows}{notes}"

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each number of devices, and the curve."""
        by = {"samples_per_second": "samples", "tokens_per_second": "tokens"}
        known = [
            name for name in by if all(getattr(each, name) is not None for each in self.predictions)
        ]
        rate = known[-1] if known else None
        points = [
            (each.device_count, each.step_seconds if rate is None else getattr(each, rate))
            for each in self.predictions
        ]
        name, ideal = self.predictions[0].cluster, None
        if rate is not None:
            ideal = name
        return "".join(
            (
                drawing.heading(f"{self.title}, {self.scaling} scaling"),
                drawing.table(self.to_rows()),
                drawing.curves({name: points}, "devices", rate or "step_seconds", ideal=ideal),
                drawing.notes(merged_notes(self.predictions)),
            )
        )


def predict(
    program: Program,
    cluster: Cluster,
    *,
    site: Site = NO_SITE,
    train_examples: int | None = None,
    epochs: int | None = None,
) -> Prediction:
    """Predicted step time, throughput, memory and goodput of `program` on `cluster`.

    Args:
        program: the compiled step; its mesh gives the device count.
        cluster: the hardware; its chip may differ from the one compiled for (a note says so).
        site: known conditions of the place: stragglers, input, checkpoints, failures.
        train_examples: samples in one epoch, for epoch and run time.
        epochs: passes over the data, for run time.

    Raises:
        DoesNotFit: if the mesh has more devices than the cluster.
        ConfigError: if an epoch is shorter than a batch.
    """
    cluster.require_devices(program.device_count)
    program, site = of_fullest_device(program, site)
    cluster = under_load(cluster, program)
    costs, busy = what_if(program), without_bubble(program)

    def step(scales: Scales) -> tuple[Timeline, StepTerms, float]:
        times = costs.timeline(cluster, scales)
        terms = step_terms(program, cluster, site, times.step_seconds)
        added = (terms.stragglers_seconds or 0.0, terms.input_seconds or 0.0)
        return times, terms, math.fsum((times.step_seconds, *added))

    times, conditions, step_seconds = step(NOMINAL)
    held = cluster.host_memory_bytes(program.device_count)
    memory = memory_verdict(program.memory, cluster.chip, held)
    reserved = program.memory.reserved
    if not step_seconds > 0:
        raise ConfigError(f"program {program.name!r} does nothing that takes time.")
    spread = _band(program, cluster, lambda scales: step(scales)[-1])
    working = times if busy is program else what_if(busy).timeline(cluster)
    overheads = run_terms(program, cluster, site, step_seconds)
    of_run = (overheads.checkpoints_seconds, overheads.failures_seconds)
    steps, epoch_seconds = _epoch(program, train_examples, step_seconds)
    samples, tokens = _per_second(program, step_seconds)
    matmul_type = _matmul_type(program, cluster.chip)
    return Prediction(
        cluster=cluster.name,
        chip=cluster.chip.name,
        device_count=program.device_count,
        mesh_axes=program.mesh_axes,
        global_batch=program.global_batch,
        per_device_batch=_per_device_batch(program),
        step_seconds=step_seconds,
        p10_step_seconds=spread and spread.p10_seconds,
        p90_step_seconds=spread and spread.p90_seconds,
        steps_per_epoch=steps,
        epoch_seconds=epoch_seconds,
        run_seconds=_run_seconds(epoch_seconds, epochs, overheads),
        goodput=overheads.goodput,
        samples_per_second=samples,
        tokens_per_second=tokens,
        mfu=_mfu(program, cluster.chip, matmul_type, step_seconds),
        matmul_type=matmul_type,
        peak_memory_bytes=memory.peak_bytes,
        memory_bytes=memory.memory_bytes,
        fits=memory.fits,
        reserved_memory_bytes=reserved and reserved.bytes,
        p10_reserved_memory_bytes=reserved and reserved.p10_bytes,
        p90_reserved_memory_bytes=reserved and reserved.p90_bytes,
        waterfall=(
            *step_waterfall(times, working, conditions),
            *zip(RUN_CONDITIONS, of_run, strict=True),
        ),
        communication_seconds=times.communication_seconds,
        backend=program.backend,
        framework=program.framework,
        input_stages=input_stages(program, cluster, site),
        price=cluster.price,
        notes=(
            *input_notes(program, cluster, site, step_seconds - (conditions.input_seconds or 0.0)),
            *_host_notes(memory),
            *_reserved_notes(reserved),
            *_notes(program, cluster, matmul_type, has_band=spread is not None),
        ),
    )


def _epoch(
    program: Program, train_examples: int | None, step_seconds: float
) -> tuple[int | None, float | None]:
    """Steps and seconds of one epoch; None if the epoch's length or the batch is unknown."""
    if train_examples is None or program.global_batch is None:
        return None, None
    return (
        metrics.steps_per_epoch(train_examples, program.global_batch),
        metrics.epoch_seconds(train_examples, program.global_batch, step_seconds),
    )


def _per_second(program: Program, step_seconds: float) -> tuple[float | None, float | None]:
    """Samples and tokens trained per second over all devices; None without a batch or tokens."""
    if program.global_batch is None:
        return None, None
    samples = metrics.samples_per_second(program.global_batch, step_seconds)
    if program.tokens_per_sample is None:
        return samples, None
    return samples, samples * program.tokens_per_sample


def scaling_prediction(
    predictions: Sequence[Prediction], scaling: Scaling, title: str
) -> ScalingPrediction:
    """Predictions of one step on several device counts, with their scaling efficiency.

    Raises:
        ConfigError: if there are no predictions.
    """
    require_at_least("predictions", len(predictions), 1)
    ordered = tuple(sorted(predictions, key=lambda prediction: prediction.device_count))
    baseline = ordered[0]
    return ScalingPrediction(
        scaling=scaling,
        title=title,
        predictions=ordered,
        baseline_devices=baseline.device_count,
        efficiencies=tuple(_efficiency(baseline, each, scaling) for each in ordered),
    )


def merged_notes(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Notes of all predictions, each listed once, with its device counts if it does not apply to
    all."""
    counts: dict[str, list[int]] = {}
    for each in predictions:
        for note in each.notes:
            counts.setdefault(note, []).append(each.device_count)
    return tuple(
        note if len(held) == len(predictions) else _held_for(note, held)
        for note, held in counts.items()
    )


def _held_for(note: str, counts: list[int]) -> str:
    """`note` with the device counts that it applies to, unless it names them itself."""
    devices = f"{', '.join(map(str, counts))} device{'' if counts == [1] else 's'}"
    return note if devices in note else f"{note} (on {devices})"


def _efficiency(baseline: Prediction, grown: Prediction, scaling: Scaling) -> float:
    if scaling == "weak":
        return metrics.weak_scaling_efficiency(baseline.step_seconds, grown.step_seconds)
    return metrics.strong_scaling_efficiency(
        baseline.step_seconds, baseline.device_count, grown.step_seconds, grown.device_count
    )


def _per_device_batch(program: Program) -> int | None:
    sizes = dict(program.mesh_axes)
    if program.global_batch is None or not sizes.keys() <= set(AXES):
        return None
    return program.global_batch // math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def _band(
    program: Program, cluster: Cluster, step_seconds: Callable[[Scales], float]
) -> Band | None:
    """80 % range of the step time from the residuals of the fits; None if they are unknown."""
    communicates = bool(what_if(program).schedule.collectives)
    own = _software_deviation(program, cluster.chip)
    nodes = math.ceil(program.device_count / cluster.devices_per_node)
    spread = measured_deviation(nodes, cluster)
    if own is not None:
        communication = math.hypot(cluster.library.residual or 0.0, spread)
        return band(step_seconds, {"communication": communication}, own)
    deviations = residuals(cluster, communicates=communicates)
    if deviations is None or cluster.chip.residuals is None:
        return None
    deviations["communication"] = math.hypot(deviations["communication"], spread)
    return band(step_seconds, deviations, cluster.chip.residuals.step)


def _software_deviation(program: Program, chip: Chip) -> float | None:
    """How far steps of a program's framework were off on a chip of the catalogue; None if that is
    unknown, if the chip was measured here, or if no step or operator was ever measured on it. Other
    chips have their own residuals, or none."""
    framework = known_framework(program.framework)
    if framework is None or chip.measured is not None:
        return None
    is_measured = chip.residuals is not None or chip.attainable.matmul_table is not None
    is_left_out = is_measured and chip.name in chip_names()
    if chip.name not in framework.software.rows and not is_left_out:
        return None
    has_experts = any(
        item.grouped_pass is not None or (item.collective and item.collective.tokens)
        for item, _ in program.walk()
    )
    return framework.software.deviation_on(chip.name, has_experts=has_experts)


def _run_seconds(
    epoch_seconds: float | None, epochs: int | None, overheads: RunTerms
) -> float | None:
    if epoch_seconds is None or epochs is None:
        return None
    return epochs * epoch_seconds / (1.0 if overheads.goodput is None else overheads.goodput)


def step_waterfall(
    times: Timeline, working: Timeline, conditions: StepTerms
) -> tuple[tuple[str, float | None], ...]:
    """Terms of a step in order; optional terms that are 0 are omitted.

    Args:
        times: timeline of the step.
        working: timeline of the step without pipeline bubble.
        conditions: seconds that stragglers and input add to it.
    """
    collectives = tuple(
        (f"communication {' x '.join(axes)}".rstrip(), seconds) for axes, seconds in working.exposed
    )
    optional = (
        ("contention", working.contention_seconds),
        ("host", working.host_seconds),
        ("overhead", working.overhead_seconds),
        ("bubble", times.step_seconds - working.step_seconds),
    )
    of_step = (conditions.stragglers_seconds, conditions.input_seconds)
    return (
        ("compute", working.compute_seconds),
        ("memory", working.memory_seconds),
        ("launch", working.launch_seconds),
        *collectives,
        *((name, seconds) for name, seconds in optional if seconds),
        *zip(STEP_CONDITIONS, of_step, strict=True),
    )


def _matmul_type(program: Program, chip: Chip) -> RateType | None:
    """Arithmetic type of most of the program's FLOP on `chip`; None if the program has no FLOP."""
    flop: Counter[RateType] = Counter()
    for dtype, count in what_if(program).schedule.flop_by_dtype.items():
        flop[chip.rate_type(dtype)] += count
    return flop.most_common(1)[0][0] if flop else None


def _mfu(
    program: Program, chip: Chip, matmul_type: RateType | None, step_seconds: float
) -> float | None:
    if program.model_flop is None or matmul_type is None:
        return None
    peak = chip.peak_flop_per_second[matmul_type]
    return metrics.mfu(program.model_flop, step_seconds, program.device_count, peak)


def _notes(
    program: Program, cluster: Cluster, matmul_type: RateType | None, *, has_band: bool
) -> tuple[str, ...]:
    chip = cluster.chip
    notes = [*program.notes]
    if program.backend == "cpu" and chip.name != _CPU:
        notes.append(
            "CPU program: its fusions, schedule and bytes (bf16 widened to f32) stand in for the "
            "target's; no overlap assumed: time and memory are pessimistic"
        )
    elif chip.cuda is not None and program.backend == "cuda":
        own = "sm_{}{}".format(*chip.cuda.compute_capability)
        if chip.cuda.stands_in:
            notes.append(
                f"compiled for an NVIDIA GPU ({own}): its fusions and schedule stand in for "
                f"those of {chip.name}, at whose rates they are costed"
            )
        elif program.target != own:
            notes.append(f"compiled for {program.target} in place of {own}")
    if opaque := what_if(program).schedule.custom_calls:
        notes.append(f"{opaque} custom calls are charged for the bytes they move only: optimistic")
    if matmul_type is not None and program.model_flop is not None:
        peak = float(f"{chip.peak_flop_per_second[matmul_type] / TFLOP:.3g}")
        notes.append(f"MFU against the {matmul_type} peak, {peak:g} TFLOP/s")
    if matmul_type == "f32" and any(
        item.kind == "matmul" and item.dtype == "f16" for item, _ in program.walk()
    ):
        notes.append(f"{chip.name} has no rate for float16: costed as float32; try bfloat16")
    calibrated = cluster.calibrated
    if calibrated is not None and calibrated.is_extrapolated(program.device_count):
        notes.append(
            f"extrapolated: {program.device_count} devices are more than {FARTHEST:g} times the "
            f"{max(calibrated.device_counts)} of the largest run that {cluster.name} was fitted to"
        )
    framework = known_framework(program.framework)
    if framework is not None and _software_deviation(program, chip) is not None:
        if chip.name not in framework.software.rows:
            notes.append(
                f"{framework.title}: fitted to no step on {chip.name}, so p10 and p90 are as far "
                "apart as on chips that were left out of a fit"
            )
    elif chip.residuals is None and chip.measured is not None:
        notes.append(f"{chip.name}: measured here; no residuals, so no p10 and p90")
    elif chip.residuals is None:
        notes.append(f"{chip.name}: attainable rates are uncalibrated, so no p10 and p90")
    elif not has_band:
        notes.append(f"{cluster.library.title}: uncalibrated, so no p10 and p90")
    return tuple(notes)


def _reserved_notes(reserved: ReservedBytes | None) -> tuple[str, ...]:
    """Note on what the allocator reserves, if that is known."""
    if reserved is None:
        return ()
    most, low, high = map(format_bytes, (reserved.bytes, reserved.p10_bytes, reserved.p90_bytes))
    return (f"the framework's allocator reserves {most} of a device ({low} to {high})",)


def _host_notes(memory: MemoryVerdict) -> tuple[str, ...]:
    """Note on what a device holds in the memory of its host, if anything."""
    if not memory.host_bytes:
        return ()
    note = f"each device holds {format_bytes(memory.host_bytes)} in the memory of its host"
    if (has := memory.host_memory_bytes) is not None:
        note += f", of which its share is {format_bytes(has)}"
        note += ": too little" if memory.host_bytes > has else ""
    return (note,)


FAR_OFF = 3
"""Ratio of measured to predicted step time above which a note explains the difference: runs on a
quiet machine were at most 61 % off (`experiments/local_prediction`)."""


def slow_note(prediction: Prediction, measured_seconds: float) -> str | None:
    """Note on a step that takes over `FAR_OFF` times its prediction; None for other steps."""
    times = measured_seconds / prediction.step_seconds
    if times <= FAR_OFF:
        return None
    why = "other work on this machine, what the host needs to start a step, or a wrong prediction"
    if prediction.backend == "cpu" and prediction.device_count > 1:
        why = (
            "virtual devices share the cores of one machine, with its other work and with what "
            "starts each step: they show that a run is right, not how fast it is"
        )
    return f"{times:.0f} times the predicted step: {why}"
