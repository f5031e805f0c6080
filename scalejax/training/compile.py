"""Compiles the programs of a run on this machine, and feeds them with its batches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.config.run import ResolvedRun
from scalejax.config.schedule import Phase
from scalejax.core.process_group import GO_ON
from scalejax.core.units import UNKNOWN, format_seconds
from scalejax.data.loader.loader import Batches, evaluation_batches, training_batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Source
from scalejax.simulator.predict import slow_note
from scalejax.training.evaluation import Evaluation, build_evaluation
from scalejax.training.record import RunFolder
from scalejax.training.run_folder import kept_prediction
from scalejax.training.sharpness import Sharpness, build_sharpness
from scalejax.training.step import Step, build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrograms:
    """The compiled programs of a run, and what goes in and out of them.

    `sweep.vmapped` has those of several runs: each argument and result has one more dimension.
    """

    step: Step
    """The training step, with the shapes of its arguments."""
    update: Any
    """The training step, compiled."""
    later: tuple[tuple[Step, Any], ...] = ()
    """Step and compiled step of each later batch-size phase, if the batch grows."""
    evaluation: Evaluation
    """The evaluation of a batch, with the shapes of its arguments."""
    evaluate: Any
    """The evaluation, compiled."""
    sharpness: Sharpness | None = None
    """The measurement of sharpness, compiled; None if the run does not ask for it."""
    together: str = ""
    """With which other runs, in words for the record; empty for a run alone."""

    def training_batches(
        self,
        run: ResolvedRun,
        sources: Sequence[Source],
        skipped: Sequence[Skipped],
        *,
        step: Step,
        phase: Phase,
        start_step: int,
        stop_step: int,
    ) -> Batches:
        """The batches of a batch-size phase, for `step`, from `start_step` to `stop_step` - 1.

        Args:
            run: the run that trains.
            sources: the training examples, of each seed.
            skipped: count unreadable rows, one for each seed.
            step: the step of the phase.
            phase: the batch-size phase.
            start_step: the first step.
            stop_step: the step before which to end.
        """
        return training_batches(
            sources[0],
            step.batch,
            seed=run.config.seed,
            start_step=start_step,
            stop_step=stop_step,
            first_epoch=phase.first_epoch,
            first_step=phase.first_step,
            how=run.config.input,
            skipped=skipped[0],
        )

    def evaluation_batches(
        self, run: ResolvedRun, sources: Sequence[Source], skipped: Sequence[Skipped]
    ) -> Batches:
        """The batches of all examples of `sources`."""
        return evaluation_batches(sources[0], self.evaluation.batch, run.config.input, skipped[0])

    def of_run(self, index: int, values: Any) -> Any:
        """The part of a state or of metrics that is of the run `index`."""
        return values


def compile_run(run: ResolvedRun, mesh: Mesh) -> RunPrograms:
    """The programs of `run`, compiled for the devices of `mesh`."""
    step, evaluation = build_step(run, mesh), build_evaluation(run, mesh)
    later = [build_step(run, mesh, phase=index) for index in range(1, len(run.phases))]
    return RunPrograms(
        step=step,
        update=_compiled(step),
        later=tuple((each, _compiled(each)) for each in later),
        evaluation=evaluation,
        evaluate=evaluation.function.lower(*evaluation.weights_shapes, evaluation.batch).compile(),
        sharpness=build_sharpness(run, mesh, evaluation) if run.config.train.sharpness else None,
    )


def _compiled(step: Step) -> Any:
    return step.function.lower(step.state, step.batch).compile()


def measured_and_predicted(files: RunFolder, step_times: Sequence[float]) -> str:
    """The measured median step time and the predicted one in words; empty without measurements."""
    if not step_times:
        return ""
    step_seconds = median(step_times)
    if (prediction := kept_prediction(files)) is None:
        return f"; median step {format_seconds(step_seconds)}, predicted {UNKNOWN}"
    predicted = format_seconds(prediction.step_seconds)
    note = slow_note(prediction, step_seconds)
    suffix = f" ({note})" if note else ""
    return f"; median step {format_seconds(step_seconds)}, predicted {predicted}{suffix}"


def resume_command(files: RunFolder, run: ResolvedRun) -> str:
    """The shell command that resumes a run as it was started: by `scalejax launch`, or alone."""
    path, count = files.path, run.layout.device_count
    virtual = f" --cpu-devices {count}" if jax.default_backend() == "cpu" and count > 1 else ""
    alone = f"scalejax train {path / 'run.toml'} --folder {path}{virtual} --resume"
    return os.environ.get(GO_ON, alone)
