"""Opens the folder of a run, new or to be resumed, and holds its lock.

Knows which fields of the config may change on resume; knows no devices and no loop.
"""

import contextlib
import fcntl
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Self

from scalejax.config.grid import fields_of
from scalejax.config.run import ResolvedRun, RunConfig, load_kept_config, with_fields
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.filesystem import absolute_location
from scalejax.core.serialization import JsonValue, load, save, save_text, save_toml
from scalejax.simulator.predict import Prediction
from scalejax.training.data_fingerprints import fingerprints_to_keep, refuse_other_files
from scalejax.training.multihost import HOW_IT_IS_READ, broadcast_from_first, is_first
from scalejax.training.record import RunFolder

_README = """\
A run of scalejax.

run.toml             the config, as resolved on these devices
facts.json           counts and shapes of the data, for when it is no longer there
data_files.json      the files trained on, if the data is files: the run resumes only on these
start.json           the weights that it began with, and their digest, if they were not random
program.json         the compiled training step: its operations, bytes and FLOP
prediction.json      its time and memory on this machine, predicted before training started
measurements.jsonl   measurements, one per line: kinds "train", "validation", "evaluation" (of test
                     data), "unreadable", "processes" (a change of their number) and "status"; the
                     last "status" line is the current status
time.jsonl           wall time of its sessions by what they did, a line for each interval that
                     ends in an evaluation or a checkpoint
checkpoints/         states to resume from, by step, and the best by validation accuracy, if there
                     are validation data; each has a manifest.json, without which it does not
                     count; those that were found damaged are in damaged-STEP
checkpoints.json     the step of the newest of them
weights/             final parameters; none if the run diverged
traces/              profiler traces, if requested (--profile)
trackers/            what TensorBoard, Weights & Biases and MLflow show, if requested ([tracking])
processes/, slurm/   output of each process, if `scalejax launch` started them

Read it all as one page:  scalejax report {path}
Continue the run:         {command}

A run that a sweep trained in one program with others has neither program.json, prediction.json,
time.jsonl, checkpoints/, checkpoints.json nor traces/: its sweep continues it by --resume.
"""

_CHANGEABLE = HOW_IT_IS_READ | {
    "input.unreadable",
    "layout.data",
    "layout.fsdp",
    "layout.tensor",
    "layout.mode",
    "model.remat",
    "train.divergence.max_gradient_growth",
    "train.divergence.patience",
    "train.divergence.stops_dead",
    "train.divergence.stops_not_finite",
    "tracking.project",
    "tracking.run_name",
    "tracking.trackers",
    "train.layer_gradient_norms",
    "train.log_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.compare_replicas_every_steps",
}
"""Fields that may change on resume: they change where and how a run is computed and what is
logged, not its results."""


_PROGRAM_PREFIXES = (
    "layout.",
    "model.",
    "input.remainder",
    "input.unreadable",
    "train.divergence.max_gradient_growth",
    "train.layer_gradient_norms",
)
"""Prefixes of the fields that change the compiled step of a resumed run."""


def resolved_config(run: ResolvedRun) -> RunConfig:
    """The config of `run` with its resolved devices and batch filled in."""
    config, layout = run.config, run.layout
    fields: dict[str, JsonValue] = {
        "layout.data": layout.data,
        "layout.fsdp": layout.fsdp,
        "layout.tensor": layout.tensor,
        "batch.global_batch": run.split.global_batch,
        "batch.per_device_batch": None,
    }
    if config.layout.bn_scope == "local":
        # As a number, because "those of one device" would be another number on other devices.
        samples = run.split.microbatch * layout.batch_shards // run.bn_groups
        fields["layout.bn_group_size"] = samples
    for name, found in config.data.found_in(run.dataset).items():
        fields[f"data.{name}"] = found
    for part in ("train", "validation", "test"):  # the run may go on in another working directory
        location = getattr(config.data, part, None)
        if location is not None:
            fields[f"data.{part}"] = absolute_location(location)
    if config.start is not None:
        fields["start.weights"] = absolute_location(config.start.weights)
    return with_fields(config, fields)


def refuse_other_run(folder: RunFolder, run: ResolvedRun) -> None:
    """Refuse to resume a run whose config or data would give other results than those of `run`.

    Devices and the frequency of logging and checkpoints may change; the number of epochs may grow
    if the learning rate does not depend on it and early stopping would have seen the same
    evaluations.

    Raises:
        ConfigError: if `folder` holds no run; else naming the fields, or the first file, that
            differ.
    """
    if not folder.config.exists():
        folder.refuse_no_run()
    before = load_kept_config(folder.config)
    _refuse_other_devices(before.layout.data, run)
    changeable = changeable_fields(run)
    changed = [
        f"{name}={now!r} (was {was!r})"
        for name, (was, now) in _changed(folder, run).items()
        if name not in changeable
    ]
    if changed:
        raise ConfigError(
            f"{str(folder.path)!r} holds a run of another config: {', '.join(changed)}. "
            "Resume with the config of its run.toml, or begin a new run in another folder."
        )
    _refuse_other_evaluations(before.train.epochs, run)
    refuse_other_files(folder, run.config.data)


def changeable_fields(run: ResolvedRun) -> set[str]:
    """Fields of the config that may change when `run` is resumed."""
    changeable = set(_CHANGEABLE)
    if not run.config.schedule.depends_on_length:
        changeable.add("train.epochs")
    if run.config.train.early_stopping is None:
        changeable |= {"train.evaluate_every_epochs", "train.evaluate_every_steps"}
    return changeable


def _changed(folder: RunFolder, run: ResolvedRun) -> dict[str, tuple[JsonValue, JsonValue]]:
    """The fields that differ between `folder` and `run`: what they were, and what they are now."""
    before = fields_of(load_kept_config(folder.config))
    after = fields_of(resolved_config(run))
    pairs = {name: (before.get(name), after.get(name)) for name in sorted(before | after)}
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


def changed_notes(folder: RunFolder, run: ResolvedRun) -> list[str]:
    """Changes to the length of a resumed run, in words."""
    before = load_kept_config(folder.config).train.epochs
    now = run.config.train.epochs
    return [] if now == before else [f"train.epochs is {now}, and was {before}"]


def _refuse_other_devices(devices_before: int | None, run: ResolvedRun) -> None:
    """Refuse another number of devices if the gradient synchronisation depends on it."""
    gradient_sync, devices = run.config.gradient_sync, run.layout.data
    if gradient_sync is not None and devices != devices_before:
        accepted = (
            f"gradient_sync.name={gradient_sync.name!r} combines the states of {devices_before} "
            f"devices; on another number it is another run. Resume on {devices_before}"
        )
        raise ConfigError(refusal("layout.data", devices, accepted))


def _refuse_other_evaluations(epochs_before: int, run: ResolvedRun) -> None:
    """Refuse more epochs if early stopping watched a last evaluation that the longer run lacks."""
    wanted, every = run.config.train, run.config.train.evaluate_every_epochs
    is_watched = wanted.early_stopping is not None
    if is_watched and wanted.epochs > epochs_before and epochs_before % every:
        accepted = (
            f"the run was to end after {epochs_before} epochs, with an evaluation that early "
            f"stopping watches and a longer run with train.evaluate_every_epochs={every} would "
            f"not make; keep {epochs_before}, or begin a new run in another folder"
        )
        raise ConfigError(refusal("train.epochs", wanted.epochs, accepted))


def refuse_fewer_epochs(begin: int, run: ResolvedRun) -> None:
    """Refuse to resume a run that has already made more updates than `run` has.

    Raises:
        ConfigError: if `begin` updates are more than `run` has.
    """
    if begin > run.total_steps:
        trained = math.ceil(run.epoch_of(begin))
        raise ConfigError(
            refusal(
                "train.epochs",
                run.config.train.epochs,
                f"{trained} are trained; give at least {trained}",
            )
        )


def describe_run(folder: RunFolder, run: ResolvedRun, command: str) -> None:
    """Write the config, the README with the resume command, and facts and fingerprints of the data.

    A prediction of another layout or model is removed first, so that a prediction in the folder
    always belongs to the config there, even if the process is killed in between.
    """
    prediction = kept_prediction(folder)
    is_of_as_many = prediction is not None and prediction.device_count == run.layout.device_count
    if not (is_of_as_many and _holds_same_program(folder, run)):
        folder.prediction.unlink(missing_ok=True)
        folder.program.unlink(missing_ok=True)
    if (used := fingerprints_to_keep(folder, run.config.data)) is not None:
        save(used, folder.data_files)
    save(run.dataset, folder.facts)
    save_toml(resolved_config(run), folder.config)
    save_text(_README.format(path=folder.path, command=command), folder.readme)


def _holds_same_program(folder: RunFolder, run: ResolvedRun) -> bool:
    """Whether the run in `folder` compiles to the step that `run` compiles to."""
    if not folder.config.exists():
        return False
    return not any(name.startswith(_PROGRAM_PREFIXES) for name in _changed(folder, run))


def kept_prediction(folder: RunFolder) -> Prediction | None:
    """The prediction in `folder`; None if there is none, or it is damaged or of an earlier version,
    which is no reason to end a run."""
    try:
        return load(Prediction, folder.prediction)
    except ConfigError:
        return None


def versions() -> str:
    """Versions of scalejax, jax and Python in words."""
    ours, jax = version("scalejax"), version("jax")
    return f"scalejax {ours}, jax {jax}, Python {platform.python_version()}"


# The lock of a run folder: two runs would overwrite each other's record and checkpoints.


class RunLock:
    """Exclusive lock on the folder of a run."""

    def __init__(self) -> None:
        self._folder: int | None = None

    def take(self, path: Path) -> None:
        """Lock the folder `path` until `close`; every process must call it.

        If the file system has no locks, as on some network disks, nothing is locked.

        Raises:
            ConfigError: if another run holds the lock.
        """
        if broadcast_from_first(is_first() and not self._is_taken(path)):
            raise ConfigError(
                f"another run trains in {str(path)!r}: wait until it has ended, or stop it."
            )

    def _is_taken(self, path: Path) -> bool:
        """Take the lock of the folder; True if this succeeded, or the file system has no locks."""
        if self._folder is not None:
            return True
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder = folder
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError:
            self.close()
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.close(self._folder)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
