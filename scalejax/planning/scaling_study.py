"""Scaling study: predictions of one run on many device counts, weak or strong, with ramp-up.

Decides what is held fixed as devices are added, has each case compiled and costed, and compares
the results. Knows neither compiler nor equations: those are in `profile` and `predict`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import ResolvedRun, RunConfig, in_phase, with_fields
from scalejax.config.schedule import Phase
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.progress import OnProgress, no_display
from scalejax.core.units import counted
from scalejax.data.facts import resolve
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.planning.memory_advice import memory_notes
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.predict import (
    Prediction,
    Scaling,
    ScalingPrediction,
    predict,
    scaling_prediction,
)
from scalejax.simulator.program import Program
from scalejax.simulator.ramp import PhasePrediction, RampPrediction
from scalejax.xla import ProfileJob, profile_many


def study(
    config: RunConfig,
    cluster: Cluster,
    device_counts: Sequence[int],
    scaling: Scaling,
    *,
    site: Site = NO_SITE,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    title: str | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = no_display,
    on_program: Callable[[Program], None] = lambda program: None,
) -> ScalingPrediction:
    """Predictions for `config` on each number of devices of `cluster`, in rising order.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_cluster, load_config, study
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> found = study(load_config(path), load_cluster("dgx-h100"), [1, 2], "weak")
        >>> [each.global_batch for each in found.predictions]
        [32, 64]

    The compiler runs once for each number; several compile at a time.

    Args:
        config: the run; a `layout.data` in it is replaced.
        cluster: where it would run.
        device_counts: numbers of devices; the smallest is the baseline of the efficiencies.
        scaling: what stays fixed.
        site: conditions and input of its hosts.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        title: title of the study; if None, the model and the cluster.
        notes: further notes on every prediction.
        on_progress: called as each device count starts to compile, is done, or is cached.
        on_program: called with each compiled step, in rising order of devices.

    Raises:
        ConfigError: if the batch or layout does not divide for one of the numbers.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    runs = resolve_all(config, device_counts, scaling, facts)
    jobs = [ProfileJob(run=run, cluster=cluster, framework=framework) for run in runs]
    programs = profile_many(jobs, on_progress, takes_kept=True)
    for program in programs:
        on_program(program)
    epochs = config.train.epochs
    predictions = [
        predict_run(run, program, cluster, site=site, epochs=epochs, notes=notes)
        for run, program in zip(runs, programs, strict=True)
    ]
    return scaling_prediction(predictions, scaling, title or _title(config, cluster, framework))


def _title(config: RunConfig, cluster: Cluster, framework: Framework) -> str:
    return framework.title_of(f"{config.model.name} on {cluster.title}")


def predict_run(
    run: ResolvedRun,
    program: Program,
    cluster: Cluster,
    *,
    epochs: int,
    site: Site = NO_SITE,
    notes: Sequence[str] = (),
) -> Prediction:
    """Prediction of `epochs` epochs of `program`, with `notes`, and memory advice if it does not
    fit.

    Raises:
        DoesNotFit: if the cluster has fewer devices.
    """
    examples = run.samples_per_epoch
    prediction = predict(program, cluster, site=site, train_examples=examples, epochs=epochs)
    shortage = memory_notes(
        run,
        needed_bytes=prediction.peak_memory_bytes,
        memory_bytes=prediction.memory_bytes,
    )
    first = (shortage, *notes) if shortage else notes
    return replace(prediction, notes=(*first, *prediction.notes))


def resolve_all(
    config: RunConfig,
    device_counts: Sequence[int],
    scaling: Scaling,
    facts: DatasetFacts | None = None,
) -> list[ResolvedRun]:
    """The run on each number of devices, in rising order, with its batch scaled.

    Weak scaling keeps the per-device batch, strong scaling the global batch. If the config gives
    the other of the two, it is converted on the config's own layout or, if that leaves its data
    axis open, on the smallest number of devices.

    Raises:
        ConfigError: if there is no number, or the batch or layout does not divide for one of them.
    """
    counts = sorted(set(device_counts))
    if not counts:
        raise ConfigError(refusal("devices", [], "at least one number is needed"))
    require_at_least("devices", counts[0], 1)
    first = resolve(config, counts[0] if config.layout.data is None else None, facts)
    split = first.split
    kept = {
        "layout.data": None,
        "batch.global_batch": split.global_batch if scaling == "strong" else None,
        "batch.per_device_batch": split.per_device_batch if scaling == "weak" else None,
    }
    scaled = with_fields(config, kept)
    runs = []
    for count in counts:
        try:
            runs.append(resolve(scaled, count, first.dataset))
        except ConfigError as error:
            raise ConfigError(f"on {counted(count, 'device')}, {error}") from error
    return runs


# Scaling study of a run with batch-size ramp-up.


def ramp_study(
    config: RunConfig,
    cluster: Cluster,
    device_counts: Sequence[int],
    scaling: Scaling,
    *,
    site: Site = NO_SITE,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = no_display,
    on_program: Callable[[Program], None] = lambda program: None,
) -> RampPrediction:
    """Predictions for each batch of `config` on each number of devices of `cluster`.

    The compiler runs once for each batch and number; several compile at a time. Arguments and
    errors are those of `study`; `scaling` applies to the first batch, and so to all, and progress
    and programs are reported in rising order of batch, then of devices.
    """
    runs = resolve_all(config, device_counts, scaling, facts)
    phase_count = len(runs[0].phases)
    alone = [[phase_alone(run, run.phases[index]) for run in runs] for index in range(phase_count)]
    flat = [run for phase in alone for run in phase]
    jobs = []
    for run in flat:
        name = f"{counted(run.layout.device_count, 'device')}, batch {run.split.global_batch}"
        jobs.append(ProfileJob(run=run, cluster=cluster, framework=framework, name=name))
    programs = profile_many(jobs, on_progress)
    for program in programs:
        on_program(program)
    first_epochs = [phase.first_epoch for phase in runs[0].phases]
    ends = [*first_epochs[1:], config.train.epochs]
    title = _title(config, cluster, framework)
    phases = []
    for index, (first, end) in enumerate(zip(first_epochs, ends, strict=True)):
        own = programs[index * len(runs) : (index + 1) * len(runs)]
        predictions = [
            predict_run(run, program, cluster, site=site, epochs=end - first, notes=notes)
            for run, program in zip(alone[index], own, strict=True)
        ]
        study = scaling_prediction(predictions, scaling, f"{title}, epochs {first} to {end}")
        phases.append(PhasePrediction(first_epoch=first, epochs=end - first, study=study))
    return RampPrediction(title=title, phases=tuple(phases))


def phase_alone(run: ResolvedRun, phase: Phase) -> ResolvedRun:
    """A run with only the steps of `phase`: its batch, with the optimizer of the first phase.

    Its learning rates differ, which does not matter: they are inputs of one program.
    """
    config = run.config
    optimizer = config.schedule.scaled_optimizer(config.optimizer, run.split.global_batch)
    # A scaling rule would apply the batch of the phase a second time.
    schedule = config.schedule.at_batch(phase.split.global_batch)
    batch = replace(config.batch, ramp_epochs=(), ramp_scaling="none")
    config = replace(config, batch=batch, optimizer=optimizer, schedule=schedule)
    return replace(in_phase(run, phase), config=config)
