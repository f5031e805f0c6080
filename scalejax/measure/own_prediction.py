"""A run's prediction of itself, on the devices that it is about to train on.

Uses the step that is already compiled, and constants measured here, so that every run folder holds
both a prediction and the measurement.
"""

from contextlib import suppress
from dataclasses import replace

import jax
from jax.sharding import Mesh

from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.core import serialization
from scalejax.core.cache import user_folder
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.units import format_seconds
from scalejax.hardware import NO_SITE, Cluster, HostInput, Site, load_cluster_and_site
from scalejax.measure.devices import quick
from scalejax.measure.devices.quick import local_cluster
from scalejax.measure.input.work import host_input
from scalejax.planning.scaling_study import phase_alone
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.training.compile import RunPrograms
from scalejax.training.multihost import all_gather_text, broadcast_from_first, is_first
from scalejax.training.record import RunFolder
from scalejax.training.reporter import Reporter
from scalejax.xla import read_step


def predict_run(
    files: RunFolder,
    run: ResolvedRun,
    mesh: Mesh,
    programs: RunPrograms,
    reporter: Reporter,
    begin: int = 0,
) -> None:
    """Write the program of the compiled step and its prediction, unless there is one already, and
    report it for the steps after the first `begin`.

    If the batch grows, the steps of every phase are predicted and reported, but nothing is written:
    these files are for a single step.

    A run whose devices cannot be measured, or whose step cannot be predicted, says so and
    continues.
    """
    if broadcast_from_first(files.prediction.exists()):
        return
    calibrated = calibrated_cluster(mesh)
    # Every process measures or none, as measuring uses all devices at once and each process may see
    # a cache of its own.
    is_known = "no" not in all_gather_text("no" if calibrated is None else "yes")
    if is_known and calibrated is not None:
        (cluster, site), how = calibrated, "as scalejax calibrate measured these devices"
    else:
        measured = _measured_cluster(run, mesh, programs, begin)
        if isinstance(measured, str):
            if is_first():
                reporter.say(f"no prediction: {measured}")
            return
        cluster, site = measured, NO_SITE
        how = "as its products and convolutions took here, just before"
        if cluster is local_cluster(mesh):
            how = "with devices measured for a second; scalejax calibrate does better"
    if not is_first():
        return
    phases, total, of_step = run.phases, 0.0, ""
    updates = (programs.update, *(update for _, update in programs.later))
    ends = (*(phase.first_epoch for phase in phases[1:]), run.config.train.epochs)
    for phase, update, end in zip(phases, updates, ends, strict=True):
        of_phase = run if len(phases) == 1 else phase_alone(run, phase)
        try:
            program = read_step(update, mesh, of_phase)
            prediction = predict(
                program,
                cluster,
                site=replace(site, input=measured_input(run.config)),
                train_examples=of_phase.samples_per_epoch,
                epochs=end - phase.first_epoch,
            )
        except ScalejaxError as error:
            reporter.say(f"no prediction: {error}")
            return
        steps = max(1, (end - phase.first_epoch) * phase.steps_per_epoch)
        left = min(1.0, max(0.0, (phase.first_step + steps - begin) / steps))
        total += left * (prediction.run_seconds or 0.0)
        if len(phases) == 1:
            serialization.save(program, files.program)
            serialization.save(prediction, files.prediction)
            of_step = f"{format_seconds(prediction.step_seconds)} a step, "
        elif left:
            reporter.say(
                f"predicted from epoch {phase.first_epoch + 1}, {phase.split.global_batch:,} "
                f"samples: {format_seconds(prediction.step_seconds)} a step, "
                f"{format_seconds(left * (prediction.run_seconds or 0.0))} for its training steps"
            )
    of_steps = "the training steps alone"
    if begin:
        of_steps = f"the {run.total_steps - begin:,} training steps left, alone"
    reporter.say(f"predicted: {of_step}{format_seconds(total)} for {of_steps},")
    reporter.say(how)


_SECONDS_OF = ((10.0, quick.SECONDS), (2.0, 1.5))
"""(predicted seconds of a run, seconds for which the products and convolutions of runs at least
that long are timed); the compiler takes another second or two. Shorter runs would be over by then,
and runs of one program are measured once."""


def _measured_cluster(
    run: ResolvedRun, mesh: Mesh, programs: RunPrograms, begin: int
) -> Cluster | str:
    """The devices of `mesh`, measured for the first program of a run if it is long enough, else in
    general; the same in all processes. If the measurement fails in one of them, the reason."""
    cluster = _measured(mesh)
    if isinstance(cluster, str) or mesh.devices.flat[0].platform != "cpu":
        return cluster
    try:
        of_phase = run if len(run.phases) == 1 else phase_alone(run, run.phases[0])
        program = read_step(programs.update, mesh, of_phase)
    except ProfileError:
        return cluster
    left = 0.0
    with suppress(ScalejaxError):  # reported when the run is predicted
        left = (run.total_steps - begin) * predict(program, cluster).step_seconds
    for least, seconds in _SECONDS_OF:
        if broadcast_from_first(left > least):
            return _measured(mesh, program, programs.update.as_text() or "", seconds)
    return cluster


def _measured(
    mesh: Mesh, program: Program | None = None, text: str = "", seconds: float = quick.SECONDS
) -> Cluster | str:
    """Like `local_cluster`; if it fails in one process, the reason in all of them."""
    found: Cluster | str = ""
    failure = ""
    try:
        found = local_cluster(mesh, program, text, seconds)
    except Exception as error:  # noqa: BLE001  no failure of a probe may end a run
        failure = f"{type(error).__name__}: {error}".split("\n")[0]
    failed = [each for each in all_gather_text(failure) if each]
    return f"these devices could not be measured ({failed[0]})" if failed else found


def measured_input(config: RunConfig) -> HostInput | None:
    """The input throughput that `scalejax data bench` saved, if it is for the data of the run."""
    path = user_folder() / "this-machine" / "input.toml"
    if jax.process_count() > 1 or not path.is_file():  # processes of a host share it
        return None
    try:
        return host_input(path, config)
    except ScalejaxError:  # measured on other data, or written by an older version
        return None


def calibrated_cluster(mesh: Mesh) -> tuple[Cluster, Site] | None:
    """The cluster and site that `scalejax calibrate` saved, if it measured devices like those of
    `mesh`."""
    device = mesh.devices.flat[0]
    name = "cluster" if jax.process_count() == 1 else "processes"
    path = user_folder() / "this-machine" / f"{name}.toml"
    if not path.is_file():
        return None
    try:
        cluster, site = load_cluster_and_site(str(path))
    except ScalejaxError:  # written by an older version, for example
        return None
    if cluster.chip.title != device.device_kind or mesh.size > cluster.most_devices:
        return None
    if jax.process_count() > 1 and len(jax.local_devices()) != cluster.devices_per_node:
        return None
    return cluster, site
