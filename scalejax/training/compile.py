"""Compiles the programs of a run on this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.config.run import ResolvedRun
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.core.process_group import GO_ON
from scalejax.core.units import UNKNOWN, format_seconds
from scalejax.simulator.predict import Prediction, slow_note
from scalejax.training.evaluation import Evaluation, build_evaluation
from scalejax.training.record import RunFolder
from scalejax.training.step import Step, build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrograms:
    """The compiled programs of a run."""

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
    )


def _compiled(step: Step) -> Any:
    return step.function.lower(step.state, step.batch).compile()


def measured_and_predicted(files: RunFolder, step_times: Sequence[float]) -> str:
    """The measured median step time and the predicted one in words; empty without measurements."""
    if not step_times:
        return ""
    step_seconds = median(step_times)
    try:
        prediction = serialization.load(Prediction, files.prediction)
    except ConfigError:  # none was made, or it was damaged since: no reason to end in an error
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
