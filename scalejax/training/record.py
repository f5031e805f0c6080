"""The record of a run: the files of its folder (`RunFolder`), and the measurements in them.

Knows files and measurements; no devices, no loop, and nothing of the contents of a prediction.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NoReturn

from scalejax.config.data import Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import RunConfig
from scalejax.core import drawing
from scalejax.core.errors import ConfigError, Damaged, Unavailable, refusal, require_at_least
from scalejax.core.folder import FileIn
from scalejax.core.serialization import JsonValue, build, load, plain, save_bytes
from scalejax.core.tabular import Tabular
from scalejax.core.units import format_fraction
from scalejax.data.facts import fitting_facts
from scalejax.training.time_accounting import TimeAccount, load_time_account

Status = Literal["started", "resumed", "completed", "stopped_early", "diverged", "interrupted"]
"""Status of a run. "diverged": it was ended for the named cause, or it ran to its end and its last
losses were not finite, or far above that of a guess (`divergence_at_end` of `stopping`). It then
has no result in any table, mean, figure or file."""

DivergenceCause = Literal["not_finite", "dead", "exploding_gradient", "worse_than_guessing"]
"""Why a run diverged: a loss that is not finite; equal outputs for all inputs; a gradient norm
that grew beyond the config's limit; final losses, of training and of the last evaluation, far above
that of a guess."""


Choice = Literal["validation_loss", "validation_accuracy", "last"]
"""What the weights at the end of a run were chosen by: a metric of validation data, or nothing if
they are those of the last update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMeasurement:
    """Metrics of one update, and the speed of the updates since the previous line."""

    kind: Literal["train"] = "train"
    """Selects this kind of line."""
    step: int
    """Updates made, this one and skipped ones included."""
    epoch: float
    """Passes over the data made."""
    loss: float | None
    """Mean loss of the global batch before the update; None if it was not finite. It excludes those
    of routers and of multi-token prediction."""
    accuracy: float
    """Fraction of the global batch classified correctly before the update, 0..1."""
    learning_rate: float
    """Learning rate of the update."""
    global_batch: int | None = None
    """Samples of the update; None in records of earlier versions."""
    step_seconds: float
    """Mean time of an update since the previous line, including waits for data, excluding
    evaluations and checkpoints."""
    samples_per_second: float
    """Samples trained per second since the previous line."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    data_wait_seconds: float | None = None
    """Mean time per update since the previous line for which the devices of the first process
    waited for a batch; None in records of earlier versions."""
    loss_scale: float | None = None
    """Factor that multiplied the loss of the update; None except in float16."""
    skipped_updates: int | None = None
    """Updates of the run so far, this one included, that were skipped because their gradients
    overflowed float16; None except in float16."""
    gradient_norm: float | None = None
    """Norm of the gradient of the update; None if it was not finite, or not measured."""
    layer_gradient_norms: dict[str, float | None] | None = None
    """Norm of the gradient of each layer, by its name; None if they were not measured."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, from moving averages over the updates so far; None if it is
    not measured, or there are too few updates for an estimate."""
    mtp_loss: float | None = None
    """Mean loss of the token after the next without its weight; None if it was not finite, or
    without multi-token prediction."""
    auxiliary_loss: float | None = None
    """Auxiliary loss of a layer's router without its weight, mean over layers: 1 if experts have
    equal loads; None for networks without experts, like the next four."""
    router_z_loss: float | None = None
    """Router z-loss of a layer without its weight, mean over layers."""
    expert_load: float | None = None
    """Load of the fullest expert of all layers over the mean of its layer."""
    expert_load_of_window: float | None = None
    """The same over the last whole window of `model.moe.load_window` assignments; None before the
    first, or if none is measured."""
    dropped_share: float | None = None
    """Fraction of assignments that exceed the capacity of their expert, 0..1."""
    samples_by_source: tuple[int, ...] | None = None
    """Samples of the run so far from each source of a mixture; None for other data sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMeasurement:
    """Metrics over all test data: throughout a run without validation data; once, at the end, in a
    run that has them."""

    kind: Literal["evaluation"] = "evaluation"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    test_loss: float | None
    """Mean loss of the test examples; None if it was not finite."""
    test_accuracy: float
    """Fraction of the test examples classified correctly, 0..1."""
    examples: int
    """Test examples, each counted once."""
    seconds: float
    """Time that the evaluation took."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    is_constant: bool = False
    """Whether all test examples got bitwise equal outputs: the network ignores its input."""
    loss_by_source: tuple[float | None, ...] | None = None
    """Mean loss of the examples of each source of a mixture, None for one that was not finite or
    has none; None for other data sets."""
    chosen_step: int | None = None
    """Updates behind the weights that were tested, those that the run ends with; None if test data
    are evaluated throughout and nothing is chosen."""
    chosen_by: Choice | None = None
    """What they were chosen by; None as above."""

    @property
    def loss(self) -> float | None:
        """The loss, of whichever part."""
        return self.test_loss

    @property
    def accuracy(self) -> float:
        """The accuracy, of whichever part."""
        return self.test_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationMeasurement:
    """Metrics over all validation data, by which weights are chosen."""

    kind: Literal["validation"] = "validation"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    validation_loss: float | None
    """Mean loss of the validation examples; None if it was not finite."""
    validation_accuracy: float
    """Fraction of the validation examples classified correctly, 0..1."""
    examples: int
    """Validation examples, each counted once."""
    seconds: float
    """Time that the evaluation took."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    is_constant: bool = False
    """Whether all validation examples got bitwise equal outputs."""
    loss_by_source: tuple[float | None, ...] | None = None
    """Mean loss of the examples of each source of a mixture, None for one that was not finite or
    has none; None for other data sets."""

    @property
    def loss(self) -> float | None:
        """The loss, of whichever part."""
        return self.validation_loss

    @property
    def accuracy(self) -> float:
        """The accuracy, of whichever part."""
        return self.validation_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class SharpnessMeasurement:
    """The sharpness: the largest eigenvalue of the Hessian of the training loss; and, with AdamW,
    that of the preconditioned Hessian."""

    kind: Literal["sharpness"] = "sharpness"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    sharpness: float | None
    """The largest eigenvalue, by Lanczos; None if it was not finite."""
    sharpness_error: float | None
    """Upper bound on its distance from an eigenvalue, the norm of the residual, up to the rounding
    of float32; None likewise."""
    learning_rate: float
    """Learning rate of the next update."""
    stability_threshold: float | None
    """Sharpness above which SGD of that rate and its momentum grows away from the minimum of a
    quadratic: 2 / rate without momentum; None for other optimizers, and if the rate is 0."""
    seconds: float
    """Time that the measurement took."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    preconditioned_sharpness: float | None = None
    """With AdamW, the largest eigenvalue of P^-1/2 H P^-1/2, H the Hessian and P the diagonal that
    it divides its first moment by (Cohen et al. 2022, arXiv 2207.14484); None for other optimizers,
    before the first update, if its steps are not of that form (moments in 8 bits, cautious,
    `model.parametrization`, rate factors), and if it was not finite."""
    preconditioned_error: float | None = None
    """As `sharpness_error`."""
    preconditioned_threshold: float | None = None
    """Preconditioned sharpness above which AdamW of that rate grows away from the minimum of a
    quadratic, 2 (1 + beta1) / ((1 - beta1) rate), without clipping of gradients; None if there is
    no preconditioned sharpness, and if the rate is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """A change of the run's status."""

    kind: Literal["status"] = "status"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    status: Status
    """The new status."""
    message: str
    """Explanation for people, with the next command to type if there is one."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""
    cause: DivergenceCause | None = None
    """Why it diverged; None if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableExamples:
    """Examples skipped as unreadable since the previous line of this kind and part."""

    kind: Literal["unreadable"] = "unreadable"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the training data made."""
    part: Split
    """Whether they are training examples, or validation or test examples of this evaluation."""
    rows: int
    """Rows skipped by all processes; an example skipped in two epochs counts twice."""
    reasons: tuple[str, ...]
    """File, row and error of the first few of each process."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMeasurement:
    """Life of the batches of an epoch in the first process: mean seconds of a batch by stage,
    each measured where it runs. Stages of several batches run concurrently."""

    kind: Literal["input"] = "input"
    """Selects this kind of line."""
    step: int
    """Updates made."""
    epoch: float
    """Passes over the data made."""
    batches: int
    """Batches that the means are over: those since the previous line of this kind."""
    workers: int
    """Worker processes that made them; 0 for a thread of the training process."""
    cores: int
    """CPU cores of this host."""
    shares_cores: bool
    """Whether the devices are the CPU of the host, on whose cores the input runs too."""
    storage_seconds: float
    """Reading files or arrays, with their decompression."""
    decode_seconds: float
    """Making examples from what was read."""
    augment_seconds: float
    """Random changes of examples."""
    hand_over_seconds: float
    """Passing the batch from a worker process to the training process."""
    processor_seconds: float
    """Processor time of all threads that read, decoded and augmented it."""
    copy_seconds: float
    """The training process's call that copies it to its devices, or starts the copy."""
    step_seconds: float | None = None
    """An update with its exchange and without the wait for its batch; None if none was made."""
    wait_seconds: float
    """Time that the devices waited for the batch."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""

    def __post_init__(self) -> None:
        for name in ("batches", "cores"):
            require_at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesChange:
    """A change of the processes of an elastic run, which resumed from a copy or a checkpoint."""

    kind: Literal["processes"] = "processes"
    """Selects this kind of line."""
    step: int
    """Updates after which the run resumed."""
    before: int
    """Number of processes before."""
    after: int
    """Number of processes from then on."""
    reason: str
    """Which process was lost and how, or that others joined."""
    repeated_steps: int
    """Updates begun after that step, which were made again."""
    seconds: float
    """Time from when it was noticed until the first update after it."""
    elapsed_seconds: float
    """Time since training began, over all the sessions of the run."""


Evaluated = EvaluationMeasurement | ValidationMeasurement
"""The metrics of an evaluation, of test or of validation data."""
Told = (
    TrainMeasurement
    | Evaluated
    | SharpnessMeasurement
    | UnreadableExamples
    | ProcessesChange
    | StatusChange
)
"""What is reported while a run trains; the life of a batch is a table at its end."""
Measurement = Told | InputMeasurement
"""One line of `measurements.jsonl`."""

_KINDS: dict[str, type[Measurement]] = {
    "train": TrainMeasurement,
    "evaluation": EvaluationMeasurement,
    "validation": ValidationMeasurement,
    "sharpness": SharpnessMeasurement,
    "unreadable": UnreadableExamples,
    "input": InputMeasurement,
    "processes": ProcessesChange,
    "status": StatusChange,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of the files of a run."""

    path: Path
    """The folder itself."""

    config = FileIn("run.toml")
    """The config as resolved, TOML."""
    facts = FileIn("facts.json")
    """Counts and shapes of its data, `DatasetFacts` in JSON; absent in earlier versions."""
    data_files = FileIn("data_files.json")
    """Fingerprints of the data files, `UsedFiles` in JSON; absent if the data has no files."""
    start = FileIn("start.json")
    """The weights that it began with, `StartRecord` in JSON; absent if they were random."""
    program = FileIn("program.json")
    """The compiled step, a `Program` in JSON."""
    prediction = FileIn("prediction.json")
    """The prediction made before training, a `Prediction` in JSON."""
    measurements = FileIn("measurements.jsonl")
    """Measurements, one `Measurement` per line."""
    time = FileIn("time.jsonl")
    """Wall-time accounting, one `Interval` per line."""
    checkpoints = FileIn("checkpoints")
    """States to resume from, by step, and the best one."""
    newest_checkpoint = FileIn("checkpoints.json")
    """Step of the newest checkpoint, in JSON, so that a missing one is noticed."""
    weights = FileIn("weights")
    """Final parameters and running statistics, the best ones if so configured."""
    traces = FileIn("traces")
    """Profiler traces, by their first step."""
    trackers = FileIn("trackers")
    """What TensorBoard, Weights & Biases and MLflow read, a folder for each."""
    readme = FileIn("README.txt")
    """Description of the files, for readers of the folder."""

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists() or self.measurements.exists()

    def refuse_second_run(self) -> NoReturn:
        """Refuse to begin a run here, where the caller found one.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{str(self.path)!r} already holds a run: continue it with --resume, "
            "or give another folder."
        )

    def refuse_no_run(self) -> NoReturn:
        """Refuse to resume here, where there is no run.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{str(self.path)!r} holds no run to resume: it has no run.toml.")

    def load_facts(self) -> DatasetFacts | None:
        """The counts and shapes of its data that the run kept; None if it kept none.

        Raises:
            ConfigError: if the file is damaged.
        """
        return load(DatasetFacts, self.facts) if self.facts.is_file() else None


def facts_of(
    config: RunConfig,
    run_file: Path,
    overrides: Mapping[str, JsonValue] | None = None,
    given: Path | None = None,
) -> DatasetFacts:
    """Counts and shapes of the data of `config`: those in the file `given`; else those that a run
    kept next to its run.toml, unless flags name other data; else those read from the data.

    Raises:
        ConfigError: if they cannot be read, contradict the config, or are given together with other
            data.
    """
    named = [name for name in overrides or () if name.partition(".")[0] == "data"]
    if given is not None:
        if named:
            accepted = f"it describes the data of the run file; leave it or --{named[0]} out"
            raise ConfigError(refusal("facts", str(given), accepted))
        return fitting_facts(config, load(DatasetFacts, given))
    folder = RunFolder(path=run_file.parent)
    is_kept = run_file.name == folder.config.name and not named
    return fitting_facts(config, folder.load_facts() if is_kept else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Tabular):
    """All measurements of a run.

    Example:
        >>> from importlib.resources import files
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from scalejax import RunRecord, load_config, train
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> config = load_config(path, {"train.epochs": 1, "batch.global_batch": 500})
        >>> folder = Path(mkdtemp())
        >>> trained = train(config, folder, device_count=1, predicts=False)
        >>> record = RunRecord.load(folder)
        >>> record.status, record.training[-1].step, len(record.evaluations)
        ('completed', 20, 1)
    """

    folder: RunFolder
    """Folder that they were read from."""
    measurements: tuple[Measurement, ...]
    """Measurements in order of time."""

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """The record in the run folder `path`.

        A truncated last line, as left by a killed process, is ignored.

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

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The updates that were measured, a row for each."""
        columns = ("step", "epoch", "loss", "accuracy", "learning_rate", "step_seconds")
        return [{name: getattr(each, name) for name in columns} for each in self.training]

    def to_dict(self) -> dict[str, JsonValue]:
        """All measurements, as plain data, and the folder that they are in."""
        return {"folder": str(self.folder.path), "measurements": plain(self.measurements)}

    def _repr_html_(self) -> str:
        """What a notebook shows: how the run ended, its evaluations, and the curve of the loss."""
        points = [(each.step, each.loss) for each in self.training if each.loss is not None]
        rows: list[dict[str, JsonValue]] = [
            {"step": each.step, "epoch": each.epoch, f"{each.kind} loss": each.loss,
             f"{each.kind} accuracy": each.accuracy}
            for each in self.monitored
        ]  # fmt: skip
        tested = self.tested
        result = "" if tested is None else f", test accuracy {format_fraction(tested.accuracy)}"
        return "".join(
            (
                drawing.heading(f"{self.status or 'not begun'}{result}"),
                drawing.table(rows),
                drawing.curves({"loss": points}, "updates", "loss"),
            )
        )

    @property
    def training(self) -> tuple[TrainMeasurement, ...]:
        """The updates that were measured."""
        return tuple(m for m in self.measurements if isinstance(m, TrainMeasurement))

    @property
    def median_step_seconds(self) -> float | None:
        """Median measured step time in seconds; None if none was measured."""
        times = [m.step_seconds for m in self.training if m.step_seconds is not None]
        return median(times) if times else None

    @property
    def evaluations(self) -> tuple[EvaluationMeasurement, ...]:
        """The evaluations of test data."""
        return tuple(m for m in self.measurements if isinstance(m, EvaluationMeasurement))

    @property
    def validations(self) -> tuple[ValidationMeasurement, ...]:
        """The evaluations of validation data; empty if there are no such data."""
        return tuple(m for m in self.measurements if isinstance(m, ValidationMeasurement))

    @property
    def monitored(self) -> tuple[Evaluated, ...]:
        """The evaluations during the run: of validation data if there are any, else of test
        data."""
        return self.validations or tuple(e for e in self.evaluations if e.chosen_step is None)

    @property
    def tested(self) -> EvaluationMeasurement | None:
        """The only evaluation of test data of a run with validation data, at its end; the last one
        of a run without; None if there is none yet."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def sharpness(self) -> tuple[SharpnessMeasurement, ...]:
        """The measurements of sharpness, if the run asks for them."""
        return tuple(m for m in self.measurements if isinstance(m, SharpnessMeasurement))

    @property
    def unreadable(self) -> tuple[UnreadableExamples, ...]:
        """Examples skipped as unreadable, if the config allows it."""
        return tuple(m for m in self.measurements if isinstance(m, UnreadableExamples))

    @property
    def input(self) -> tuple[InputMeasurement, ...]:
        """The lives of the batches of each epoch, by stage."""
        return tuple(m for m in self.measurements if isinstance(m, InputMeasurement))

    @property
    def processes(self) -> tuple[ProcessesChange, ...]:
        """Changes of the number of processes, in an elastic run."""
        return tuple(m for m in self.measurements if isinstance(m, ProcessesChange))

    @property
    def statuses(self) -> tuple[StatusChange, ...]:
        """The status changes of the run, the last one current."""
        return tuple(m for m in self.measurements if isinstance(m, StatusChange))

    @property
    def time(self) -> TimeAccount | None:
        """Wall-time accounting over all sessions of the run; None if there is no `time.jsonl`.

        Raises:
            ConfigError: if its file is damaged.
        """
        return load_time_account(self.folder.time)

    @property
    def status(self) -> Status | None:
        """Current status of the run; None if nothing was written yet."""
        return self.statuses[-1].status if self.statuses else None


def figures(path: Path) -> list[tuple[int, float, float, float]]:
    """All but times that the run in the folder `path` measured, the same for two runs that are the
    same: (step, loss, accuracy, learning rate) of updates; of evaluations, with 0 for the rate; and
    of sharpness, plain and preconditioned, with it and its error in place of loss and accuracy.
    Missing values are `math.nan`, the same object each time.

    Raises:
        ConfigError: if there is no run, or a line is damaged.
    """
    rows: list[tuple[int, float, float, float]] = []
    for line in RunRecord.load(path).measurements:
        if isinstance(line, SharpnessMeasurement):
            pairs = [(line.sharpness, line.sharpness_error)]
            if line.preconditioned_sharpness is not None:
                pairs.append((line.preconditioned_sharpness, line.preconditioned_error))
            for pair in pairs:
                value, error = (math.nan if each is None else each for each in pair)
                rows.append((line.step, value, error, line.learning_rate))
        if not isinstance(line, TrainMeasurement | EvaluationMeasurement | ValidationMeasurement):
            continue
        loss = math.nan if line.loss is None else line.loss
        accuracy = math.nan if line.accuracy is None else line.accuracy
        rate = line.learning_rate if isinstance(line, TrainMeasurement) else 0.0
        rows.append((line.step, loss, accuracy, rate))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPosition:
    """A position in `measurements.jsonl`, and what is before it."""

    size_bytes: int
    """Bytes before it."""
    sha256: str
    """SHA-256 of these bytes."""

    def part_of(self, path: Path) -> bytes:
        """The bytes of the file `path` before it.

        Raises:
            Damaged: if they are not those that were written; the message does not name the file.
            Unavailable: if they cannot be read at present.
        """
        if not self.size_bytes:
            return b""
        try:
            with path.open("rb") as file:
                has = os.fstat(file.fileno()).st_size
                found = file.read(min(self.size_bytes, has))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Damaged(f"the record cannot be read ({error})") from error
        except OSError as error:
            raise Unavailable(f"{str(path)!r} cannot be read: {error}.") from error
        if len(found) < self.size_bytes:
            accepted = f"the record has {len(found):,} bytes of the {self.size_bytes:,} up to there"
            raise Damaged(accepted)
        if hashlib.sha256(found).hexdigest() != self.sha256:
            raise Damaged("the record up to there is not what was written")
        return found

    def measurements_of(self, path: Path) -> tuple[Measurement, ...]:
        """The measurements of the file `path` before it.

        Raises:
            Damaged: if they are not those that were written.
        """
        return tuple(_parsed(self.part_of(path), path))


EMPTY_RECORD = RecordPosition(size_bytes=0, sha256=hashlib.sha256().hexdigest())
"""The position of a record before the first update."""


class MeasurementLog:
    """`measurements.jsonl`, open for unbuffered appending."""

    def __init__(
        self, path: Path, *, after_step: int | None = None, proved: RecordPosition | None = None
    ) -> None:
        """Open the log at `path`.

        Args:
            path: the file; created if it does not exist.
            after_step: if given, lines of later steps are removed: they are measured again.
            proved: if given, what is before it is kept as it is; after it, only changes of status
                and of processes are kept.

        Raises:
            Damaged: if what is before `proved` is not what was written.
        """
        data = path.read_bytes() if path.exists() else b""
        if proved is None:
            kept = [
                line
                for line in _read(path, data)
                if after_step is None or _is_kept(line, after_step)
            ]
            whole = "".join(map(_line, kept)).encode()
        else:
            before = proved.part_of(path)
            changes = _changes(data[len(before) :], after_step or 0)
            kept = [*_parsed(before, path), *changes]
            whole = before + "".join(map(_line, changes)).encode()
        if whole != data or not path.exists():
            save_bytes(whole, path)
        self.elapsed_seconds = kept[-1].elapsed_seconds if kept else 0.0
        """`elapsed_seconds` of the last line when the log was opened; 0 if there was none."""
        self._path = path
        self._size_bytes, self._sha256 = len(whole), hashlib.sha256(whole)
        self._file = path.open("ab", buffering=0)

    @property
    def position(self) -> RecordPosition:
        """The end of the log."""
        return RecordPosition(size_bytes=self._size_bytes, sha256=self._sha256.hexdigest())

    def append(self, measurement: Measurement) -> None:
        """Add one line.

        Raises:
            ConfigError: if it cannot be written.
        """
        line = _line(measurement).encode()
        rest = memoryview(line)
        try:
            while rest:  # a disk that is nearly full writes only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be written: {error}.") from error
        self._size_bytes += len(line)
        self._sha256.update(line)

    def sync(self) -> None:
        """Flush the lines to the disk.

        Raises:
            ConfigError: if they cannot be written.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be written: {error}.") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def has_steps(path: Path) -> bool:
    """Whether a record has anything about an update, or is too damaged to tell."""
    if not path.exists():
        return False
    try:
        lines = _read(path, path.read_bytes())
    except (ConfigError, OSError):
        return True
    of_updates = (line for line in lines if not isinstance(line, ProcessesChange))
    return any(line.step or not isinstance(line, StatusChange) for line in of_updates)


def finite(value: float) -> float | None:
    """`value`, or None if it is infinite or NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def _line(measurement: Measurement) -> str:
    return json.dumps(plain(measurement)) + "\n"


def _read(path: Path, data: bytes | None = None) -> list[Measurement]:
    """The measurements in a file; a last line without a newline was truncated, and is ignored."""
    try:
        return _parsed(path.read_bytes() if data is None else data, path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error


def _parsed(data: bytes, path: Path) -> list[Measurement]:
    lines = data.decode().splitlines(keepends=True)
    whole = (line for line in lines if line.endswith("\n"))
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(whole, start=1)]


def _is_kept(line: Measurement, after_step: int) -> bool:
    """Whether a line is kept when a run resumes after a step; a change of processes always is, as
    it happened whatever is trained again."""
    return line.step <= after_step or isinstance(line, ProcessesChange)


def _changes(data: bytes, after_step: int) -> list[StatusChange | ProcessesChange]:
    """The changes of status up to a step, and all changes of processes, among lines that a crash
    may have left in any state."""
    found = []
    for line in data.decode(errors="replace").splitlines(keepends=True):
        try:
            measurement = _parse(line, "") if line.endswith("\n") else None
        except ConfigError:
            continue
        is_change = isinstance(measurement, StatusChange | ProcessesChange)
        if is_change and _is_kept(measurement, after_step):
            found.append(measurement)
    return found


def _parse(line: str, where: str) -> Measurement:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not a measurement: {error}.") from error
    kind = _KINDS.get(str(value.get("kind"))) if isinstance(value, dict) else None
    if kind is None:
        raise ConfigError(
            f"{where} is not a measurement: its kind must be one of {', '.join(_KINDS)}."
        )
    return build(kind, value, where=where)
