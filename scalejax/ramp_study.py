"""A run whose batch grows, on many numbers of devices: each of its batches compiled and costed.

Knows neither compiler nor equations: those are `profile` and `predict`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from scalejax.batch_ramp import Phase
from scalejax.compilation import OnCase, compile_cases, in_words, nothing_said
from scalejax.config import ResolvedRun, RunConfig, in_phase
from scalejax.hardware import Cluster
from scalejax.predict import Scaling, scaling_prediction
from scalejax.profile import ProfileJob
from scalejax.program import Program
from scalejax.ramp_prediction import PhasePrediction, RampPrediction
from scalejax.scaling import scaled_optimizer
from scalejax.scaling_study import predict_run, resolve_all
from scalejax.schedule_config import ScheduleConfig


def ramp_study(
    config: RunConfig,
    cluster: Cluster,
    device_counts: Sequence[int],
    scaling: Scaling,
    *,
    notes: Sequence[str] = (),
    on_case: OnCase = nothing_said,
    on_program: Callable[[Program], None] = lambda program: None,
) -> RampPrediction:
    """Predictions for each batch of `config` on each number of devices of `cluster`.

    The compiler runs once for each batch and number; several compile at a time.

    Args:
        config: the run; a `layout.data` in it is replaced.
        cluster: where it would run.
        device_counts: numbers of devices; the smallest is the baseline of the efficiencies.
        scaling: what stays fixed as devices are added: of the first batch, and so of all.
        notes: what else must be known of every prediction.
        on_case: told of each batch and number of devices that begins to compile, is done, or
            remembered.
        on_program: called with each compiled step, in rising order of batch, then of devices.

    Raises:
        ConfigError: if batch or layout do not divide for one of the numbers.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    runs = resolve_all(config, device_counts, scaling)
    phase_count = len(runs[0].phases)
    alone = [[phase_alone(run, run.phases[index]) for run in runs] for index in range(phase_count)]
    flat = [run for phase in alone for run in phase]
    programs = compile_cases(
        [ProfileJob(run=run, cluster=cluster) for run in flat],
        [f"{in_words(run.layout.device_count)}, batch {run.split.global_batch}" for run in flat],
        on_case,
    )
    for program in programs:
        on_program(program)
    first_epochs = [phase.first_epoch for phase in runs[0].phases]
    ends = [*first_epochs[1:], config.train.epochs]
    title = f"{config.model.name} on {cluster.title}"
    phases = []
    for index, (first, end) in enumerate(zip(first_epochs, ends, strict=True)):
        own = programs[index * len(runs) : (index + 1) * len(runs)]
        predictions = [
            predict_run(run, program, cluster, epochs=end - first, notes=notes)
            for run, program in zip(alone[index], own, strict=True)
        ]
        study = scaling_prediction(predictions, scaling, f"{title}, epochs {first} to {end}")
        phases.append(PhasePrediction(first_epoch=first, epochs=end - first, study=study))
    return RampPrediction(title=title, phases=tuple(phases))


def phase_alone(run: ResolvedRun, phase: Phase) -> ResolvedRun:
    """A run whose every step is one of `phase`: of its batch, with the optimizer of the first.

    Learning rates are others, and no matter: they are numbers in the same program.
    """
    config = run.config
    optimizer = scaled_optimizer(config.schedule, config.optimizer, run.split.global_batch)
    schedule = config.schedule
    if isinstance(schedule, ScheduleConfig):  # a rule would scale by the batch of the phase again
        schedule = replace(schedule, reference_batch=phase.split.global_batch)
    batch = replace(config.batch, ramp_epochs=())
    config = replace(config, batch=batch, optimizer=optimizer, schedule=schedule)
    return replace(in_phase(run, phase), config=config)
