"""Convergence points from files: tables of runs, documents with a noise scale, published points,
and the record of a run.

Knows columns and fields; computes nothing but means over runs.
"""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from scalejax.core import serialization
from scalejax.core.errors import ConfigError, refusal, require_above
from scalejax.planning.convergence.points import ConvergenceData, Point, is_same_target, merged
from scalejax.training.noise_scale import averaged
from scalejax.training.record import RunRecord

_UNITS = ("samples_to_target", "steps_to_target", "epochs_to_target")
"""Columns of the samples, steps or epochs to target; the first that a table has is read. An empty
cell means that the target was not reached."""
_TABLES = (".csv", ".parquet")
_DOCUMENTS = (".toml", ".json")

Row = Mapping[str, object]
"""One run, or the mean of several, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DocumentPoint:
    """A point of a document, in one of three units."""

    global_batch: int
    steps_to_target: float | None = None
    samples_to_target: float | None = None
    epochs_to_target: float | None = None
    run_deviation: float | None = None
    run_count: int = 1
    recipe: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A TOML or JSON file of points."""

    points: tuple[_DocumentPoint, ...]
    target: float | None = None
    metric: str | None = None
    noise_scale: float | None = None
    failed_batches: tuple[int, ...] = ()


def read_data(
    path: Path,
    *,
    target: float | None = None,
    train_examples: int | None = None,
    recipe: str | None = None,
) -> ConvergenceData:
    """The points in a file.

    A CSV or Parquet table, such as the results of a sweep, has a row for each run: `global_batch`,
    `samples_to_target` or else `steps_to_target` or `epochs_to_target` (empty if the run did not
    reach the target), and optionally `recipe`, `target`, `noise_scale`, and, in rows that are
    means, `run_deviation` (over the mean) and `run_count`; other columns are ignored. A TOML or
    JSON document has `points` with the same names, and optionally `target`, `metric`, `noise_scale`
    and `failed_batches`.

    Args:
        path: the file; its suffix gives its format.
        target: the requested target; if None, the file must have only one.
        train_examples: samples in an epoch, for points in epochs.
        recipe: recipe whose noise scale is used, for a table with several; without it no noise
            scale is used, as each belongs to a different critical batch.

    Raises:
        ConfigError: if the file is missing or holds something else, a noise scale is not above 0,
            no run reached the target, all points are of other targets, or they are of several and
            none is requested.
    """
    if path.suffix in _DOCUMENTS:
        return _from_document(path, target, train_examples)
    if path.suffix not in _TABLES:
        accepted = f"its suffix must be one of {', '.join((*_TABLES, *_DOCUMENTS))}"
        raise ConfigError(refusal("convergence", str(path), accepted))
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _csv_rows(path)
    rows = _of_target(rows, target, path)
    return _data_of(path.stem, rows, train_examples, source=str(path), recipe=recipe)


def published_names() -> list[str]:
    """Networks whose published points come with scalejax."""
    return sorted({str(row["network"]) for row in _published_rows()})


def published_data(name: str, *, target: float | None = None) -> ConvergenceData | None:
    """The published points of a network; None if there are none.

    Raises:
        ConfigError: if they reach other targets than `target`.
    """
    rows = [row for row in _published_rows() if row["network"] == name]
    if not rows:
        return None
    rows = _of_target(rows, target, name)
    first = rows[0]
    examples = _number(first, "train_examples")
    data = _data_of(
        name,
        rows,
        int(examples) if examples is not None else None,
        source=f"MLPerf reference convergence points ({first['rounds']})",
    )
    return replace(
        data,
        metric=str(first["metric"]),
        optimizer=str(first["optimizer"]) or None,
        starts_from_checkpoint=first["starts_from_checkpoint"] == "true",
        notes=(f"steps to target: {first['note']}",) if first["note"] else (),
    )


def _published_rows() -> list[Row]:
    return _csv_rows(Path(__file__).parent / "published" / "mlperf.csv")


def _csv_rows(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error
    try:
        return list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"{str(path)!r} is refused: it must be CSV ({error}).") from error


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow as pa  # slow to import, and not needed for other files
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error


def _of_target(rows: list[Row], target: float | None, where: Path | str) -> list[Row]:
    """Rows with the requested target; all rows, if none states a target.

    Raises:
        ConfigError: as in `read_data`.
    """
    stated = sorted({value for row in rows if (value := _number(row, "target")) is not None})
    if not stated:
        return rows
    if target is None:
        if len(stated) > 1:
            accepted = f"{where} has points of {_listed(stated)}: say which"
            raise ConfigError(refusal("target", None, accepted))
        (target,) = stated
    found = [row for row in rows if is_same_target(_number(row, "target"), target)]
    if not found:
        accepted = (
            f"the points of {where} reach {_listed(stated)}; give points of your own with "
            "--convergence FILE"
        )
        raise ConfigError(refusal("target", target, accepted))
    return found


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _data_of(
    name: str,
    rows: list[Row],
    train_examples: int | None,
    *,
    source: str,
    recipe: str | None = None,
) -> ConvergenceData:
    units = [unit for unit in _UNITS if rows and unit in rows[0]]
    if not rows or "global_batch" not in rows[0] or not units:
        accepted = f"it needs global_batch and one of {', '.join(_UNITS)}"
        got = sorted(map(str, rows[0])) if rows else "no point"
        raise ConfigError(refusal("convergence", got, accepted))
    points, failed, scales = [], set(), defaultdict[str, list[float]](list)
    for row in rows:
        batch, needed = _number(row, "global_batch"), _number(row, units[0])
        if batch is None or batch != int(batch):
            accepted = "it must be a whole number"
            raise ConfigError(refusal("global_batch", row["global_batch"], accepted))
        if needed is None:
            failed.add(int(batch))
            continue
        if (scale := _number(row, "noise_scale")) is not None:
            require_above("noise_scale", scale, 0)
            scales[str(row.get("recipe") or "")].append(scale)
        points.append(
            Point(
                global_batch=int(batch),
                samples=_samples(needed, units[0], int(batch), train_examples),
                run_deviation=_number(row, "run_deviation"),
                run_count=int(_number(row, "run_count") or 1),
                recipe=str(row.get("recipe") or ""),
            )
        )
    scale, notes = _noise_scale(scales, recipe)
    return ConvergenceData(
        name=name,
        target=_number(rows[0], "target"),
        points=merged(points),
        # If one of several runs reached the target, the batch can reach it.
        failed_batches=tuple(sorted(failed - {point.global_batch for point in points})),
        noise_scale=scale,
        train_examples=train_examples,
        notes=notes,
        source=source,
    )


def _noise_scale(
    scales: Mapping[str, list[float]], recipe: str | None
) -> tuple[float | None, tuple[str, ...]]:
    """Mean noise scale over runs of one recipe, and a note if there is none."""
    means = {name: geometric_mean(found) for name, found in scales.items()}
    if recipe is not None or not means:
        return means.get(recipe or ""), ()
    if len(means) == 1:
        return next(iter(means.values())), ()
    return None, (
        f"the noise scales of {len(means)} recipes, {min(means.values()):g} to "
        f"{max(means.values()):g} samples, are not averaged, so none is used; --recipe names one",
    )


def _from_document(path: Path, target: float | None, train_examples: int | None) -> ConvergenceData:
    if path.suffix == ".toml":
        document = serialization.build(
            _Document, serialization.load_toml(path), where="convergence"
        )
    else:
        document = serialization.load(_Document, path)
    stated = target if document.target is None else document.target
    if target is not None and not is_same_target(stated, target):
        raise ConfigError(refusal("target", target, f"the points of {path} reach {stated}"))
    rows = []
    for point in document.points:
        given = [unit for unit in _UNITS if getattr(point, unit) is not None]
        if len(given) != 1:
            accepted = f"each point needs one of {', '.join(_UNITS)}"
            raise ConfigError(refusal("convergence.points", given, accepted))
        needed = _samples(getattr(point, given[0]), given[0], point.global_batch, train_examples)
        rows.append(asdict(point) | {"samples_to_target": needed, "target": stated})
    return replace(
        _data_of(path.stem, rows, train_examples, source=str(path)),
        metric=document.metric,
        failed_batches=document.failed_batches,
        noise_scale=document.noise_scale,
    )


def _samples(needed: float, unit: str, batch: int, train_examples: int | None) -> float:
    if unit == "steps_to_target":
        return needed * batch
    if unit == "samples_to_target":
        return needed
    if train_examples is None:
        accepted = "how many samples an epoch has is not known; give samples_to_target"
        raise ConfigError(refusal("epochs_to_target", needed, accepted))
    return needed * train_examples


def _number(row: Row, column: str) -> float | None:
    """The number in a cell; None if it is empty or missing.

    Raises:
        ConfigError: if it holds something else.
    """
    value = row.get(column)
    if value is None or value == "":
        return None
    try:
        number = float(str(value))
    except ValueError as error:
        raise ConfigError(refusal(column, value, "it must be a number, or empty")) from error
    return number if math.isfinite(number) else None


# The point of a run: steps to the target, and the mean gradient noise scale.

_NOT_MEASURED = (
    "the run did not measure its gradient noise scale, so that steps at other batches are as good "
    "as unknown: [train.noise_scale] measures it"
)
_AVERAGED = (
    "the noise scale is the mean over the run's progress up to the target; what train prints is "
    "that of the last updates"
)
_COARSE = 0.05
"""Uncertainty of the steps to target, as a fraction, above which a note says so: the usual
scatter of points about their curve (`hyperbola.SCATTER`)."""


def read_run(path: Path, *, target: float | None) -> ConvergenceData:
    """Steps of the run in a folder to an accuracy, on validation data if the run has any, else on
    test data, and its mean noise scale until then.

    Args:
        path: the folder.
        target: the accuracy that counts as trained.

    Raises:
        ConfigError: if there is no run, no target, or the run did not reach it; or if its batch
            grew, so that it does not belong to one batch.
    """
    record = RunRecord.load(path)
    if record.status == "diverged":
        raise ConfigError(f"{path} is refused: it diverged, and reached no target.")
    evaluations = record.monitored
    metric = "validation accuracy" if record.validations else "test accuracy"
    best = max((each.accuracy for each in evaluations), default=None)
    seen = "it has no evaluation yet" if best is None else f"its best is {best:g}"
    if target is None:
        accepted = f"the {metric} of {path} that counts as trained must be given; {seen}"
        raise ConfigError(refusal("target", None, accepted))
    step = next((e.step for e in evaluations if e.accuracy >= target), None)
    if step is None:
        raise ConfigError(refusal("target", target, f"{path} did not reach it: {seen}"))
    before = max((e.step for e in evaluations if e.step < step), default=0)
    lines = record.training
    batches = sorted({line.global_batch for line in lines if line.global_batch is not None})
    if len(batches) != 1:
        accepted = f"the record of {path} must be of one batch, which did not grow"
        raise ConfigError(refusal("global_batch", batches, accepted))
    scale = averaged((line.noise_scale for line in lines if line.step <= step), batches[0])
    return ConvergenceData(
        name=path.name,
        target=target,
        metric=metric,
        points=(Point(global_batch=batches[0], samples=float(step * batches[0])),),
        noise_scale=scale,
        notes=(
            _NOT_MEASURED if scale is None else _AVERAGED,
            *((_coarse(before, step),) if step - before > _COARSE * step else ()),
        ),
        source=str(path),
    )


def _coarse(before: int, step: int) -> str:
    return (
        f"the target was reached between the evaluations after {before} and {step} steps, and "
        f"{step} are taken: up to {(step - before) / step:.0%} too many; "
        "train.evaluate_every_steps evaluates more often"
    )
