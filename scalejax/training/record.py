"""What a run leaves behind: the files of its folder, and the measurements in them.

    run.toml             the config as resolved: what was asked for, on these devices
    program.json         the compiled step that was trained
    prediction.json      its time and memory as predicted, written before training started
    measurements.jsonl   one line per measurement, in order of time
    time.jsonl           where the wall time of its sessions went, one line per pause
    checkpoints/         states to resume from, and the best one
    weights/             parameters that the run ended with, the best ones if so configured
    README.txt           the same list, for whoever finds the folder

Knows files and figures; no devices, no loop, and nothing of what a prediction holds.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, plain, save_text
from scalejax.training.time_accounting import TimeAccount, load_ledger

Status = Literal["started", "resumed", "completed", "stopped_early", "diverged", "interrupted"]
"""Where a run stands. "diverged": it was given up, for the cause that is named; or it ran to its
end, and its last loss was not finite."""

DivergenceCause = Literal["not_finite", "dead", "exploding_gradient"]
"""Why a run diverged: a loss that is not finite; the same output whatever the input; a gradient
norm that has grown beyond what the config bears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMeasurement:
    """One update, and the speed of the updates since the line before."""

    kind: Literal["train"] = "train"
    """Selects this kind of line."""
    step: int
    """Updates made, this one and skipped ones included."""
    epoch: float
    """Passes over the data made."""
    loss: float | None
    """Mean loss of the global batch before the update; None if it was not finite."""
    accuracy: float
    """Part of the global batch that was right before the update, 0..1."""
    learning_rate: float
    """Learning rate of the update."""
    global_batch: int | None = None
    """Samples of the update; None in records of earlier versions."""
    step_seconds: float
    """Mean time of an update since the line before, waiting for data included, evaluations and
    checkpoints not."""
    samples_per_second: float
    """Samples trained per second since the line before."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    data_wait_seconds: float | None = None
    """Mean time of an update since the line before for which the devices of the first process had
    nothing to do, for want of a batch; None in records of earlier versions."""
    loss_scale: float | None = None
    """By which the loss of the update was multiplied; None but in float16."""
    skipped_updates: int | None = None
    """Updates of the run that were not made, their gradients being too large for float16, this
    one included; None but in float16."""
    gradient_norm: float | None = None
    """Norm of the gradient of the update; None if it was not finite, or not measured."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, by moving averages over the updates so far; None if it is
    not measured, or they are too few to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMeasurement:
    """The metrics over all the test data."""

    kind: Literal["evaluation"] = "evaluation"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    test_loss: float | None
    """Mean loss of the test examples; None if it was not finite."""
    test_accuracy: float
    """Part of the test examples that was right, 0..1."""
    examples: int
    """Test examples, each counted once."""
    seconds: float
    """Time that the evaluation took."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    is_constant: bool = False
    """Whether all test examples got the same output, bit by bit: the network does not see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """A turn in the life of the run."""

    kind: Literal["status"] = "status"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    status: Status
    """Where the run stands from here on."""
    message: str
    """The same for people, with what to do next if there is something."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    cause: DivergenceCause | None = None
    """Why it diverged; None if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableExamples:
    """Examples that counted for nothing since the line before of their kind and part, for they
    could not be read."""

    kind: Literal["unreadable"] = "unreadable"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    part: Literal["train", "test"]
    """Whether they were to be trained on, or were of this evaluation."""
    rows: int
    """Rows left out, of all processes; an example that is met in two epochs counts twice."""
    reasons: tuple[str, ...]
    """File and row of the first few of each process, and what is wrong with them."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""


Measurement = TrainMeasurement | EvaluationMeasurement | UnreadableExamples | StatusChange
"""One line of `measurements.jsonl`."""

_KINDS: dict[str, type[Measurement]] = {
    "train": TrainMeasurement,
    "evaluation": EvaluationMeasurement,
    "unreadable": UnreadableExamples,
    "status": StatusChange,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where the files of a run are."""

    path: Path
    """The folder itself."""

    @property
    def config(self) -> Path:
        """The config as resolved, TOML."""
        return self.path / "run.toml"

    @property
    def data_files(self) -> Path:
        """The files that are trained on, `UsedFiles` in JSON; none if the data is no files."""
        return self.path / "data_files.json"

    @property
    def program(self) -> Path:
        """The compiled step, a `Program` in JSON."""
        return self.path / "program.json"

    @property
    def prediction(self) -> Path:
        """What was predicted before training, a `Prediction` in JSON."""
        return self.path / "prediction.json"

    @property
    def measurements(self) -> Path:
        """What was measured, a `Measurement` a line."""
        return self.path / "measurements.jsonl"

    @property
    def time(self) -> Path:
        """Where its wall time went, a `Interval` a line."""
        return self.path / "time.jsonl"

    @property
    def checkpoints(self) -> Path:
        """States of the run by step."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Parameters and running statistics that the run ended with."""
        return self.path / "weights"

    @property
    def traces(self) -> Path:
        """Traces of the profiler, by their first step."""
        return self.path / "traces"

    @property
    def readme(self) -> Path:
        """What the files are, for whoever finds the folder."""
        return self.path / "README.txt"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists() or self.measurements.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that was measured in a run."""

    folder: RunFolder
    """Where it was read from."""
    measurements: tuple[Measurement, ...]
    """In order of time."""

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """The record in the run folder `path`.

        A last line that was cut off, as a killed process leaves it, is passed over.

        Raises:
            ConfigError: if `path` holds no run, or a line is damaged (with its number).
        """
        folder = RunFolder(path=path)
        if not folder.measurements.is_file():
            if (path / "sweep.json").is_file():
                accepted = f"give those of its runs, such as {path / 'runs' / '*'}"
                raise ConfigError(f"{str(path)!r} is the folder of a sweep: {accepted}.")
            raise ConfigError(f"{str(path)!r} holds no run: it has no {folder.measurements.name}.")
        return cls(folder=folder, measurements=tuple(_read(folder.measurements)))

    @property
    def training(self) -> tuple[TrainMeasurement, ...]:
        """The updates that were measured."""
        return tuple(m for m in self.measurements if isinstance(m, TrainMeasurement))

    @property
    def evaluations(self) -> tuple[EvaluationMeasurement, ...]:
        """The evaluations."""
        return tuple(m for m in self.measurements if isinstance(m, EvaluationMeasurement))

    @property
    def unreadable(self) -> tuple[UnreadableExamples, ...]:
        """What could not be read, where the config says to go on without."""
        return tuple(m for m in self.measurements if isinstance(m, UnreadableExamples))

    @property
    def statuses(self) -> tuple[StatusChange, ...]:
        """The turns in the life of the run; the last one says where it stands."""
        return tuple(m for m in self.measurements if isinstance(m, StatusChange))

    @property
    def time(self) -> TimeAccount | None:
        """Where its wall time went, over all its sessions; None if nobody wrote it down.

        Raises:
            ConfigError: if its file is damaged.
        """
        return load_ledger(self.folder.time)

    @property
    def status(self) -> Status | None:
        """Where the run stands; None if nothing was written yet."""
        return self.statuses[-1].status if self.statuses else None


class MeasurementLog:
    """`measurements.jsonl`, open for appending; every line is on its way to disk when written."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open the log at `path`.

        Args:
            path: the file; made if it is not there.
            after_step: if given, lines of later steps are removed: they are measured again.
        """
        lines = _read(path) if path.exists() else []
        kept = [line for line in lines if after_step is None or line.step <= after_step]
        save_text("".join(map(_line, kept)), path)
        self.elapsed_seconds = kept[-1].elapsed_seconds if kept else 0.0
        """Of the last line there was when the log was opened; 0 if there was none."""
        self._path = path
        self._file = path.open("ab", buffering=0)

    def append(self, measurement: Measurement) -> None:
        """Add one line.

        Raises:
            ConfigError: if it cannot be written.
        """
        rest = memoryview(_line(measurement).encode())
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be written: {error}.") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(value: float) -> float | None:
    """`value`, or None where it is infinite or no number: JSON has no word for either."""
    return value if math.isfinite(value) else None


def _line(measurement: Measurement) -> str:
    return json.dumps(plain(measurement)) + "\n"


def _read(path: Path) -> list[Measurement]:
    """The measurements in a file; a last line without an end was cut off, and is passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error
    whole = (line for line in lines if line.endswith("\n"))
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(whole, start=1)]


def _parse(line: str, where: str) -> Measurement:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no measurement: {error}.") from error
    kind = _KINDS.get(str(value.get("kind"))) if isinstance(value, dict) else None
    if kind is None:
        raise ConfigError(
            f"{where} is no measurement: its kind must be one of {', '.join(_KINDS)}."
        )
    return build(kind, value, where=where)
