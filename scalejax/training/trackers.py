"""Trackers: what TensorBoard, Weights & Biases and MLflow show of a run, made from its record.

The record is the source of truth: when a run is resumed, a tracker is given the content of the
record again, so that no step is missing or written twice. Names of metrics are the same in all
trackers. Knows measurements and the packages of the trackers; no loop and no devices. Nothing is
sent anywhere, unless the environment asks for it.
"""

import importlib
import importlib.util
import logging
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from scalejax.config.grid import fields_of
from scalejax.config.run import RunConfig
from scalejax.config.training import TrackingConfig
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import plain, save_text
from scalejax.training.record import (
    Measurement,
    ProcessesChange,
    RunFolder,
    Status,
    StatusChange,
    UnreadableExamples,
)

_MODULES = {
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Modules that each tracker needs; those after "mlflow" for its database."""
_PARTS = {
    "train": "train",
    "validation": "validation",
    "evaluation": "test",
    "sharpness": "sharpness",
    "input": "input",
}
_SECONDS_BETWEEN_BATCHES = 2.0
"""Time between two transactions of MLflow's database, each of which takes some 10 ms."""
_LONGEST_PARAM = 6000
"""Most characters of a parameter that MLflow accepts (`MAX_PARAM_VAL_LENGTH` of mlflow 3.17)."""
_MOST_PARAMS = 100
"""Most parameters in one call that MLflow accepts (`MAX_PARAMS_TAGS_PER_BATCH`)."""


def require_trackers(tracking: TrackingConfig | None) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        ConfigError: naming the package, and the command that installs it.
    """
    for name in () if tracking is None else tracking.trackers:
        for module in _MODULES[name]:
            if importlib.util.find_spec(module) is None:
                accepted = f"{module} is not installed: run pip install 'scalejax[trackers]'"
                raise ConfigError(refusal("tracking.trackers", name, accepted))


def tracked_values(measurement: Measurement) -> dict[str, float]:
    """The numbers of a line of the record by the names that trackers show, such as "train/loss";
    what was not measured is left out."""
    if isinstance(measurement, StatusChange):
        return {}
    if isinstance(measurement, ProcessesChange):
        return {"processes": measurement.after}
    if isinstance(measurement, UnreadableExamples):
        return {f"{measurement.part}/unreadable_rows": measurement.rows}
    part, values = _PARTS[measurement.kind], {}
    for each in fields(measurement):
        value = getattr(measurement, each.name)
        name = f"{part}/{each.name.removeprefix(f'{part}_')}"
        if isinstance(value, tuple):  # by source of a mixture
            value = dict(enumerate(value))
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                values[name if key is None else f"{name}/{key}"] = number
    del values[f"{part}/step"]
    return values


class Tracker(ABC):
    """One tracker of one run, open for writing."""

    name: ClassVar[str]

    @classmethod
    def errors(cls) -> tuple[type[Exception], ...]:
        """Errors of the tracker that are no reason to end a run."""
        return (OSError,)

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], unix_seconds: float) -> None:
        """Write the values of a line of the record, with its time; lines come in order of steps."""

    @abstractmethod
    def close(self, status: Status | None) -> None:
        """Write the rest, and the last status of this session."""


class _TensorBoard(Tracker):
    """Event files, rewritten by each session."""

    name = "tensorboard"

    def __init__(self, folder: Path, config: RunConfig, run_name: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder), flush_secs=10
        )
        rows = [f"    {name} = {value!r}" for name, value in fields_of(config).items()]
        self._writer.add_text("config", "\n".join(rows))  # indented: verbatim in Markdown

    def write(self, step: int, values: Mapping[str, float], unix_seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=unix_seconds)

    def close(self, status: Status | None) -> None:
        self._writer.close()


class _WeightsAndBiases(Tracker):
    """A run of Weights & Biases under one id; offline, its file is rewritten by each session, and
    `wandb sync` sends it."""

    name = "wandb"

    @classmethod
    def errors(cls) -> tuple[type[Exception], ...]:
        return (OSError, importlib.import_module("wandb").Error)

    def __init__(self, folder: Path, config: RunConfig, run_name: str) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of its own errors
        wandb = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        for offline in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(offline, ignore_errors=True)
        self._run = wandb.init(
            mode=mode,
            dir=str(folder),
            project=config.tracking.project if config.tracking else None,
            name=run_name,
            id=_kept_id(folder),
            config=plain(config),
            resume="allow" if mode == "online" else None,
            reinit="create_new",  # runs of a sweep are open at once
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._begin = self._run.step  # what is online already is not sent again

    def write(self, step: int, values: Mapping[str, float], unix_seconds: float) -> None:
        if step >= self._begin:
            self._run.log({**values, "_timestamp": unix_seconds}, step=step)

    def close(self, status: Status | None) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in _FINISHED else 1)


class _Mlflow(Tracker):
    """A run of MLflow in its own database, or where MLFLOW_TRACKING_URI says; a session does not
    write again what it finds there."""

    name = "mlflow"

    @classmethod
    def errors(cls) -> tuple[type[Exception], ...]:
        return (OSError, importlib.import_module("mlflow").exceptions.MlflowException)

    def __init__(self, folder: Path, config: RunConfig, run_name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports the tables it makes
        folder.mkdir(parents=True, exist_ok=True)
        place = os.environ.get("MLFLOW_TRACKING_URI")
        uri = place or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=uri)
        self._pending: list[Any] = []
        self._last_batch = time.monotonic()
        self._steps: dict[str, set[int]] | None = None
        kept = folder / "run_id.txt"
        if kept.is_file():
            self._id = kept.read_text().strip()
            self._steps = {}
            self._client.update_run(self._id, status="RUNNING")
            return
        project = config.tracking.project if config.tracking else "scalejax"
        found = self._client.get_experiment_by_name(project)
        artifacts = None if place else (folder / "artifacts").absolute().as_uri()
        experiment = (
            self._client.create_experiment(project, artifact_location=artifacts)
            if found is None
            else found.experiment_id
        )
        self._id = self._client.create_run(experiment, run_name=run_name).info.run_id
        named = fields_of(config).items()
        param = self._mlflow.entities.Param
        params = [param(name, str(value)[:_LONGEST_PARAM]) for name, value in named]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        save_text(self._id + "\n", kept)

    def write(self, step: int, values: Mapping[str, float], unix_seconds: float) -> None:
        metric, milliseconds = self._mlflow.entities.Metric, round(unix_seconds * 1000)
        self._pending += [
            metric(name, value, milliseconds, step)
            for name, value in values.items()
            if not self._has(name, step)
        ]
        if time.monotonic() >= self._last_batch + _SECONDS_BETWEEN_BATCHES:
            self._write_pending()

    def _has(self, name: str, step: int) -> bool:
        """Whether an earlier session wrote the metric of this step."""
        if self._steps is None:
            return False
        if name not in self._steps:
            lines = self._client.get_metric_history(self._id, name)
            self._steps[name] = {line.step for line in lines}
        return step in self._steps[name]

    def _write_pending(self) -> None:
        most = self._mlflow.utils.validation.MAX_METRICS_PER_BATCH
        for first in range(0, len(self._pending), most):
            self._client.log_batch(self._id, metrics=self._pending[first : first + most])
        self._pending.clear()
        self._last_batch = time.monotonic()

    def close(self, status: Status | None) -> None:
        self._write_pending()
        ended = "FINISHED" if status in _FINISHED else "FAILED"
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, "KILLED" if status == "interrupted" else ended)


_FINISHED = ("completed", "stopped_early")
_TRACKERS: dict[str, type[_TensorBoard] | type[_WeightsAndBiases] | type[_Mlflow]] = {
    each.name: each for each in (_TensorBoard, _WeightsAndBiases, _Mlflow)
}


def open_trackers(config: RunConfig, files: RunFolder, say: Callable[[str], None]) -> list[Tracker]:
    """The trackers that `config` asks for, in the folder of its run; one that cannot be opened, for
    example because its server does not answer, is reported and left out."""
    if config.tracking is None:
        return []
    run_name = config.tracking.run_name or files.path.absolute().name
    opened: list[Tracker] = []
    for kind in (_TRACKERS[name] for name in config.tracking.trackers):
        try:
            opened.append(kind(files.trackers / kind.name, config, run_name))
        except kind.errors() as error:
            say(f"Note: {kind.name} is left out, as it could not be opened: {error}")
    return opened


def _kept_id(folder: Path) -> str:
    """The id of the run, the same in all its sessions."""
    kept = folder / "run_id.txt"
    if not kept.is_file():
        save_text(secrets.token_hex(8) + "\n", kept)
    return kept.read_text().strip()
