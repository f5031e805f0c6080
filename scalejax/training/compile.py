"""Compiles the programs of a run on this machine, and predicts their time before they run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core import serialization
from scalejax.core.cache import user_folder
from scalejax.core.errors import ConfigError, ProfileError, ScalejaxError
from scalejax.core.process_group import GO_ON
from scalejax.core.units import UNKNOWN, format_seconds
from scalejax.hardware import Cluster, HostInput, load_cluster
from scalejax.measure.devices.quick import local_cluster
from scalejax.measure.input.work import host_input
from scalejax.simulator.predict import Prediction, predict, slow_note
from scalejax.training.evaluation import Evaluation, build_evaluation
from scalejax.training.multihost import all_gather_text, broadcast_from_first, is_first
from scalejax.training.record import RunFolder
from scalejax.training.reporter import Reporter
from scalejax.training.step import Step, build_step
from scalejax.xla import read_step


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


def predict_run(
    files: RunFolder, run: ResolvedRun, mesh: Mesh, programs: RunPrograms, reporter: Reporter
) -> None:
    """Write the program of the compiled step and its prediction, unless they are there already."""
    if broadcast_from_first(files.prediction.exists()):
        return
    if programs.later:
        reporter.say("no prediction: it would be of one batch, and that of this run grows")
        return
    calibrated = calibrated_cluster(mesh)
    # Measured by every process or by none, since measuring uses all devices at once and each
    # process may see a cache of its own.
    is_known = "no" not in all_gather_text("no" if calibrated is None else "yes")
    if is_known and calibrated is not None:
        cluster, how = calibrated, "as scalejax calibrate measured these devices"
    else:
        cluster = local_cluster(mesh)
        how = "with devices measured for a second; scalejax calibrate does better"
    if not is_first():
        return
    try:
        program = read_step(programs.update, mesh, run)
    except ProfileError as error:
        reporter.say(f"no prediction: {error}")
        return
    prediction = predict(
        program,
        replace(cluster, input=measured_input(run.config)),
        train_examples=run.samples_per_epoch,
        epochs=run.config.train.epochs,
    )
    serialization.save(program, files.program)
    serialization.save(prediction, files.prediction)
    reporter.say(
        f"predicted: {format_seconds(prediction.step_seconds)} a step, "
        f"{format_seconds(prediction.run_seconds)} for the training steps alone,"
    )
    reporter.say(how)


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


def measured_input(config: RunConfig) -> HostInput | None:
    """The input throughput that `scalejax data bench` saved, if it is of the data of the run."""
    path = user_folder() / "this-machine" / "input.toml"
    if jax.process_count() > 1 or not path.is_file():  # processes of a host share it
        return None
    try:
        return host_input(path, config)
    except ScalejaxError:  # measured on other data, or written by an older version
        return None


def calibrated_cluster(mesh: Mesh) -> Cluster | None:
    """The cluster that `scalejax calibrate` saved, if it measured devices like those of `mesh`."""
    device = mesh.devices.flat[0]
    name = "cluster" if jax.process_count() == 1 else "processes"
    path = user_folder() / "this-machine" / f"{name}.toml"
    if not path.is_file():
        return None
    try:
        cluster = load_cluster(str(path))
    except ScalejaxError:  # written by an older version, for example
        return None
    most, is_alike = cluster.max_device_count, cluster.chip.title == device.device_kind
    if not is_alike or (most is not None and mesh.size > most):
        return None
    if jax.process_count() > 1 and len(jax.local_devices()) != cluster.devices_per_node:
        return None
    return cluster
