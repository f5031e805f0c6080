"""Opens a folder for a run: begins one, or goes on with the one that is there.

Knows what makes two configs the same run. Knows no devices and no loop.
"""

import contextlib
import fcntl
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from scalejax.config.run import ResolvedRun, RunConfig, load_kept_config, with_fields
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.filesystem import absolute_location
from scalejax.core.serialization import JsonValue, load, plain, save_text, save_toml
from scalejax.simulator.predict import Prediction
from scalejax.training.data_fingerprints import refuse_other_files, save_used_files
from scalejax.training.multihost import first_says, is_first
from scalejax.training.record import RunFolder

_README = """\
A run of scalejax.

run.toml             what was asked for, as resolved on these devices
data_files.json      the files trained on, if the data is files: the run resumes on no others
program.json         the compiled training step: its operations, bytes and FLOP
prediction.json      its time and memory on this machine, predicted before training started
measurements.jsonl   what was measured, a line each: kinds "train", "evaluation", "unreadable"
                     and "status"; the last "status" line says where the run stands
time.jsonl           where the wall time of its sessions went, a line for each stretch that ends
                     in an evaluation or a checkpoint
checkpoints/         states to resume from, by step; the best by test accuracy is kept too
weights/             parameters the run ended with
traces/              what the profiler recorded, if it was asked to (--profile)
processes/, slurm/   what each process said, if `scalejax launch` started them

Read it all as one page:  scalejax report {path}
Go on where it stopped:   {command}

A run that a sweep trained in one program with others has neither program.json, prediction.json,
time.jsonl, checkpoints/ nor traces/: it goes on by the --resume of its sweep.
"""

_FREE = {
    "data.reading.memory_bytes",
    "data.reading.cache_folder",
    "data.reading.cache_bytes",
    "input.memory_bytes",
    "input.read_ahead_batches",
    "input.unreadable",
    "input.workers",
    "layout.data",
    "layout.fsdp",
    "layout.tensor",
    "layout.mode",
    "model.remat",
    "train.divergence.max_gradient_growth",
    "train.divergence.patience",
    "train.divergence.stops_dead",
    "train.divergence.stops_not_finite",
    "train.log_every_steps",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
}
"""Fields that change where and how a run is computed, and what is written of it: not what."""


_OF_PROGRAM = (
    "layout.",
    "model.",
    "input.remainder",
    "input.unreadable",
    "train.divergence.max_gradient_growth",
)
"""Beginnings of the fields that change the compiled step of a run that goes on."""


def resolved_config(run: ResolvedRun) -> RunConfig:
    """The config of `run` with the devices and batch that were worked out filled in."""
    config, layout = run.config, run.layout
    fields: dict[str, JsonValue] = {
        "layout.data": layout.data,
        "layout.fsdp": layout.fsdp,
        "layout.tensor": layout.tensor,
        "batch.global_batch": run.split.global_batch,
        "batch.per_device_batch": None,
    }
    if config.layout.bn_scope == "local":
        # Named, because on other devices "those of one device" would be another number.
        samples = run.split.microbatch * layout.batch_shards // run.bn_groups
        fields["layout.bn_group_size"] = samples
    if config.data.name == "fashion_mnist":
        fields["data.edition"] = "full" if config.data.is_full else "embedded"
    for part in ("train", "test"):  # the run may go on in another working directory
        location = getattr(config.data, part, None)
        if location is not None:
            fields[f"data.{part}"] = absolute_location(location)
    return with_fields(config, fields)


def refuse_second_run(folder: RunFolder) -> NoReturn:
    """Refuse to begin a run in `folder`, where the caller found one.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{str(folder.path)!r} holds a run already: go on with it by --resume, "
        "or give another folder."
    )


def refuse_no_run(folder: RunFolder) -> NoReturn:
    """Refuse to go on where nothing has begun.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"{str(folder.path)!r} holds no run to resume: it has no run.toml.")


def refuse_other_run(folder: RunFolder, run: ResolvedRun) -> None:
    """Refuse to go on with a run whose config or data give other figures than `run` would.

    Devices, and what is written how often, may change; more epochs may be asked for where the
    learning rate does not depend on how many there are, and early stopping saw what it would have
    seen.

    Raises:
        ConfigError: if `folder` holds no run, or naming the fields, or the first file, that differ.
    """
    if not folder.config.exists():
        refuse_no_run(folder)
    before = _flat(plain(load_kept_config(folder.config)))
    after = _flat(plain(resolved_config(run)))
    _refuse_other_devices(before["layout.data"], run)
    free = set(_FREE)
    if not run.config.schedule.depends_on_length:
        free.add("train.epochs")
    if run.config.train.early_stopping is None:
        free |= {"train.evaluate_every_epochs", "train.evaluate_every_steps"}
    changed = [
        f"{name}={after.get(name)!r} (was {before.get(name)!r})"
        for name in sorted(before | after)
        if before.get(name) != after.get(name) and name not in free
    ]
    if changed:
        raise ConfigError(
            f"{str(folder.path)!r} holds a run of another config: {', '.join(changed)}. "
            "Resume with the config of its run.toml, or begin a new run in another folder."
        )
    _refuse_other_evaluations(before["train.epochs"], run)
    refuse_other_files(folder, run.config.data)


def changed_notes(folder: RunFolder, run: ResolvedRun) -> list[str]:
    """What a run that goes on was told otherwise before, of what changes where it ends."""
    before = load_kept_config(folder.config).train.epochs
    now = run.config.train.epochs
    return [] if now == before else [f"train.epochs is {now}, and was {before}"]


def _refuse_other_devices(devices_before: JsonValue, run: ResolvedRun) -> None:
    """Refuse another number of devices where it is a part of what is computed."""
    gradient_sync, devices = run.config.gradient_sync, run.layout.data
    if gradient_sync is not None and devices != devices_before:
        accepted = (
            f"gradient_sync.name={gradient_sync.name!r} brings together what each of "
            f"{devices_before} devices has; on another number it is another run. "
            f"Resume on {devices_before}"
        )
        raise ConfigError(refusal("layout.data", devices, accepted))


def _refuse_other_evaluations(epochs_before: JsonValue, run: ResolvedRun) -> None:
    """Refuse more epochs where early stopping watched a last epoch that is now one of many."""
    wanted, every = run.config.train, run.config.train.evaluate_every_epochs
    if wanted.early_stopping is None or not isinstance(epochs_before, int):
        return
    if wanted.epochs > epochs_before and epochs_before % every:
        accepted = (
            f"the run was to end after {epochs_before} epochs, with an evaluation that early "
            f"stopping watches and a longer run with train.evaluate_every_epochs={every} would "
            f"not make; keep {epochs_before}, or begin a new run in another folder"
        )
        raise ConfigError(refusal("train.epochs", wanted.epochs, accepted))


def refuse_fewer_epochs(begin: int, run: ResolvedRun) -> None:
    """Refuse to go on with a run that has gone further than it is to go.

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


def describe_run(folder: RunFolder, run: ResolvedRun, command: str | None = None) -> None:
    """Write the files that say what the run is, and by which command it goes on.

    A prediction that is there for another layout or model is removed first, so that one that
    is left is always of the config beside it, wherever a kill falls.
    """
    if not (_holds_same_program(folder, run) and _is_predicted(folder, run)):
        folder.prediction.unlink(missing_ok=True)
        folder.program.unlink(missing_ok=True)
    save_used_files(folder, run.config.data)
    save_toml(resolved_config(run), folder.config)
    command = command or f"scalejax train {folder.config} --folder {folder.path} --resume"
    save_text(_README.format(path=folder.path, command=command), folder.readme)


def _holds_same_program(folder: RunFolder, run: ResolvedRun) -> bool:
    """Whether the run in `folder` compiles to the step that `run` compiles to."""
    if not folder.config.exists():
        return False
    before, after = (
        _flat(plain(load_kept_config(folder.config))),
        _flat(plain(resolved_config(run))),
    )
    return all(
        before.get(name) == after.get(name)
        for name in before | after
        if name.startswith(_OF_PROGRAM)
    )


def _is_predicted(folder: RunFolder, run: ResolvedRun) -> bool:
    """Whether `folder` holds a prediction that can be read, for as many devices."""
    if not folder.prediction.exists():
        return False
    try:
        prediction = load(Prediction, folder.prediction)
    except ConfigError:  # of an earlier version, perhaps: it is to be made again
        return False
    return prediction.device_count == run.layout.device_count


def versions() -> str:
    """What computes the figures, so that a folder can be read years later."""
    ours, jax = version("scalejax"), version("jax")
    return f"scalejax {ours}, jax {jax}, Python {platform.python_version()}"


def _flat(value: JsonValue, prefix: str = "") -> dict[str, JsonValue]:
    """The scalars and lists of nested tables by dotted name; absent ones left out."""
    if isinstance(value, dict):
        flat: dict[str, JsonValue] = {}
        for name, inner in value.items():
            flat |= _flat(inner, f"{prefix}.{name}" if prefix else name)
        return flat
    return {} if value is None else {prefix: value}


# One run at a time in a folder: two would write over each other's record and checkpoints.


class RunLock:
    """The right to write into the folder of a run."""

    def __init__(self) -> None:
        self._folder: int | None = None

    def take(self, path: Path) -> None:
        """Hold the folder `path` until the end; every process must ask.

        Where the file system knows no locks, as some network disks, nothing is held.

        Raises:
            ConfigError: if another run holds it.
        """
        if first_says(is_first() and not self._is_taken(path)):
            raise ConfigError(
                f"another run trains in {str(path)!r}: wait until it has ended, or stop it."
            )

    def _is_taken(self, path: Path) -> bool:
        """Whether nobody else holds the folder: it is ours from now on."""
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
        """Let go."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.close(self._folder)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
