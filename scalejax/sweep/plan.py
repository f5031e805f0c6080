"""Plan of a sweep: its runs, their order, and which of them share a program.

Refuses whatever can be refused beforehand. Knows configs and files; starts no processes, and does
not need JAX.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.grid import Fields, Grammar, fields_of, flat_fields
from scalejax.config.migrate import current_name, current_value, load_run_file, migrated
from scalejax.config.optimizer import SophiaConfig
from scalejax.config.reference import run_reference
from scalejax.config.run import ResolvedRun, RunConfig, load_config
from scalejax.core.errors import (
    ConfigError,
    nearest_name,
    prefixed,
    refusal,
    shortened,
    unknown_name,
)
from scalejax.core.serialization import (
    JsonValue,
    document,
    load,
    parse_toml,
    plain,
    save_text,
    stamped,
)
from scalejax.data.facts import resolve
from scalejax.emulation.checks import emulated_run
from scalejax.sweep.folder import SweepFolder
from scalejax.training.record import Evaluated, RunFolder

MOST_TOGETHER = 12
"""Most runs in one program: more take memory, and gain little (`experiments/warmup_by_batch`)."""
_ALTERNATIVES = ("seed", "schedule")
"""Fields in which runs of one program may differ: seeds, and numbers that are program inputs."""
_KNOWN = ("builtins", "scalejax")
"""Packages that every worker has imported."""
_WHOLE = 1e7
"""Below it whole numbers are written without decimals, above it like 1e+16."""
_RATES = ("learning_rate", "warmup_epochs")
"""Scaling rules that change only the schedule."""


Metric = Literal["validation_accuracy", "validation_loss", "test_accuracy", "test_loss"]
"""A metric of evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target value of a metric."""

    metric: Metric
    """Metric: an accuracy reaches the target from below, a loss from above."""
    value: float
    """Target value."""

    @property
    def is_of_accuracy(self) -> bool:
        """Whether more is better."""
        return self.metric.endswith("accuracy")

    def value_in(self, evaluation: Evaluated) -> float | None:
        """The value of the metric in an evaluation during a run."""
        return evaluation.accuracy if self.is_of_accuracy else evaluation.loss

    def is_reached(self, value: float | None) -> bool:
        """Whether `value` reaches the target; a value that is not finite does not."""
        if value is None:
            return False
        return value >= self.value if self.is_of_accuracy else value <= self.value

    def require_measured(self, has_validation: bool) -> None:
        """Refuse a metric of data that the runs do not evaluate during training.

        Raises:
            ConfigError: naming the metric that they do measure.
        """
        part, _, name = self.metric.partition("_")
        if (part == "validation") == has_validation:
            return
        accepted = (
            f"runs with validation data evaluate test data at their end alone; take "
            f"validation_{name}"
            if has_validation
            else f"there are no validation data; hold some out with "
            f"data.validation_fraction = 0.1, or take test_{name}"
        )
        raise ConfigError(refusal("target", self.metric, accepted))


def parse_target(text: str | None) -> Target | None:
    """The target of a text such as "test_accuracy=0.88" or "test_accuracy=88%"; None for None.

    Raises:
        ConfigError: if the metric or the number is invalid, or an accuracy is above 1.
    """
    from scalejax.planning.convergence import (
        parse_target as parse_number,  # imports NumPy, so only when needed
    )

    if text is None:
        return None
    metric, _, value = text.partition("=")
    if metric not in get_args(Metric):
        raise ConfigError(unknown_name("target", metric, get_args(Metric)))
    try:
        number = parse_number(value)
    except ConfigError as error:
        accepted = f"it must be a metric and a finite number, such as {metric}=0.8"
        raise ConfigError(refusal("target", text, accepted)) from error
    found = Target(metric=cast("Metric", metric), value=number)
    if found.is_of_accuracy and not 0 <= number <= 1:
        accepted = "an accuracy is from 0 to 1, or from 0% to 100%"
        accepted += f"; try {metric}={number:g}%" if 1 < number <= 100 else ""
        raise ConfigError(refusal("target", text, accepted))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a sweep."""

    index: int
    """Index in the plan, from 0."""
    fields: Fields
    """Fields replaced in the run.toml."""
    varied: Fields
    """Its values of the fields in which runs of the sweep differ."""
    run: ResolvedRun
    """The resolved run."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.index:04d}"

    @property
    def label(self) -> str:
        """Varied fields in words, for people."""
        return in_words(self.varied)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """All runs of a sweep."""

    text: str
    """Text of the run.toml that the runs start from."""
    runs: tuple[PlannedRun, ...]
    """Runs, in order."""
    repeated: int
    """Number of combinations left out because they repeat an earlier run."""
    jobs: tuple[tuple[int, ...], ...]
    """Indices of the runs of each job (one program), the longest jobs first."""
    cpu_devices: int | None
    """Virtual CPU devices of each run; None for the devices of its layout."""
    target: Target | None
    """Target of the runs; None if there is none."""

    @property
    def varied_names(self) -> tuple[str, ...]:
        """Names of the fields in which the runs differ."""
        return tuple(self.runs[0].varied)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules outside scalejax that its runs need, because they define parts of a config."""
        found = set().union(*(_modules_of(planned.run.config) for planned in self.runs))
        return tuple(sorted(name for name in found if name.partition(".")[0] not in _KNOWN))

    @property
    def has_validation(self) -> bool:
        """Whether its runs have validation data to choose by; if not, results are those on test
        data, and no run is called the best."""
        return self.runs[0].run.config.data.has_validation

    @property
    def written(self) -> "WrittenPlan":
        """The plan as its file holds it."""
        return WrittenPlan(
            runs=tuple(run.fields for run in self.runs),
            jobs=self.jobs,
            cpu_devices=self.cpu_devices,
            target=self.target,
        )


_DOCUMENT = "sweep", 1


@document(*_DOCUMENT)
@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPlan:
    """The file of a plan, next to the run.toml that its runs start from."""

    runs: tuple[dict[str, Any], ...]
    """Fields that each run replaces in the run.toml."""
    jobs: tuple[tuple[int, ...], ...] = ()
    """As `SweepPlan.jobs`; empty in older sweeps."""
    cpu_devices: int | None
    """As `SweepPlan.cpu_devices`."""
    target: Target | None
    """As `SweepPlan.target`."""


def plan_sweep(
    run_file: Path,
    grammar: Grammar,
    *,
    one_by_one: bool = False,
    cpu_devices: int | None = None,
    target: Target | None = None,
) -> SweepPlan:
    """The runs of `grammar` applied to `run_file`, each of them built and checked.

    Args:
        run_file: the run.toml that the runs start from.
        grammar: fields that they replace in it.
        one_by_one: train each run in its own program.
        cpu_devices: virtual CPU devices of each run.
        target: target of the runs.

    Raises:
        ConfigError: if a run is invalid, naming it; if a condition names no field; or if two runs
            differ in no named field.
    """
    require_known_conditions(grammar)
    file = flat_fields(load_run_file(run_file))
    expanded = grammar.expanded(file)
    resolved = [
        _resolved(run_file, fields, cpu_devices, f"run {number} of {len(expanded)}")
        for number, fields in enumerate(expanded, start=1)
    ]
    first: dict[str, int] = {}
    for position, run in enumerate(resolved):
        first.setdefault(json.dumps(plain(run.config), sort_keys=True), position)
    kept = [(expanded[position], resolved[position]) for position in first.values()]
    has_validation = {run.config.data.has_validation for _, run in kept}
    if len(has_validation) > 1:
        raise ConfigError(
            "data.validation_fraction is refused: some runs would be compared by validation data, "
            "and others by test data; hold some out for all of them, or for none."
        )
    if target is not None:
        target.require_measured(has_validation.pop())
    varied = varied_fields(grammar.named_fields(), [run.config for _, run in kept])
    accepted = "they do not differ in any field of -V or -E; name the one in which they do"
    require_told_apart(map(json.dumps, varied), "runs", accepted)
    runs = tuple(
        PlannedRun(index=index, fields=fields, varied=varied[index], run=run)
        for index, (fields, run) in enumerate(kept)
    )
    return SweepPlan(
        text=run_file.read_text(encoding="utf-8"),
        runs=runs,
        repeated=len(expanded) - len(runs),
        jobs=_jobs(runs, one_by_one=one_by_one),
        cpu_devices=cpu_devices,
        target=target,
    )


def require_known_conditions(grammar: Grammar, others: Sequence[str] = ()) -> None:
    """Refuse conditions on names that are neither a field of a run.toml nor one of `others`.

    Raises:
        ConfigError: naming the nearest field.
    """
    known = [*_known_fields(), *others]
    for extension in grammar.extensions:
        for name in extension.condition:
            if name not in known:
                nearest = nearest_name(name, known)
                accepted = f"; did you mean {nearest!r}?" if nearest else "."
                raise ConfigError(f"-E condition: {name} is not a field of a run.toml{accepted}")


def _modules_of(part: object) -> set[str]:
    """The modules that define `part` and its parts."""
    parts = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    inner = (_modules_of(getattr(part, each.name)) for each in parts)
    return {type(part).__module__}.union(*inner)


def begin_sweep(plan: SweepPlan, folder: SweepFolder, *, resume: bool) -> None:
    """Write `plan` into `folder`, or check that it equals the plan there.

    Raises:
        ConfigError: if the folder holds a sweep and `resume` is False, or another sweep, or a run.
    """
    if not folder.plan.exists():
        if resume and not _was_beginning(plan, folder):
            raise ConfigError(
                f"{str(folder.path)!r} holds no sweep to resume: leave --resume out to begin one."
            )
        if _holds_other(plan, folder):
            raise ConfigError(
                f"{str(folder.path)!r} holds a run, or another run.toml, and no sweep: "
                "give another folder."
            )
        save_text(plan.text, folder.run_file)
        # Not with `save`: fields may be infinite, and pydantic writes that as null in type Any.
        save_text(stamped(*_DOCUMENT, asdict(plan.written)), folder.plan)
        return
    if not resume:
        raise ConfigError(
            f"{str(folder.path)!r} holds a sweep already: continue it with --resume, "
            "or give another folder."
        )
    before = _under_current_names(*written(folder))
    now = _under_current_names(plan.text, plan.written)
    changed = [name for name, value in now.items() if before[name] != value]
    if changed:
        raise ConfigError(
            f"{str(folder.path)!r} holds another sweep: {', '.join(changed)} differ"
            f"{_first_difference(before['runs'], now['runs'])}. Resume it "
            "with its original command line, or start a new one in another folder."
        )


def _under_current_names(text: str, plan: WrittenPlan) -> dict[str, Any]:
    """A run.toml and a plan with the current names of fields, so that a sweep that began under an
    earlier version, or whose run.toml has been migrated since, still compares equal."""
    runs = [
        {
            current_name(name): current_value(current_name(name), value)
            for name, value in run.items()
        }
        for run in plan.runs
    ]
    return {**asdict(plan), "run.toml": migrated(parse_toml(text))[0], "runs": runs}


def _first_difference(before: Sequence[Fields], now: Sequence[Fields]) -> str:
    """The first field in which the runs of two plans differ, or else the numbers of runs, in
    words."""
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        for name in [*new, *old]:
            if (name in old, old.get(name)) != (name in new, new.get(name)):
                was = json.dumps(old[name]) if name in old else "not given"
                value = json.dumps(new[name]) if name in new else "not given"
                return f" (run {index}: {name} is {value}, was {was})"
    return "" if len(before) == len(now) else f" ({len(now)} runs, there were {len(before)})"


def _holds_other(plan: SweepPlan, folder: SweepFolder) -> bool:
    """Whether `folder` holds files of `train`, or a run.toml other than that of `plan`."""
    run = RunFolder(path=folder.path)
    if run.measurements.exists() or run.readme.exists():
        return True
    return folder.run_file.exists() and not _was_beginning(plan, folder)


def _was_beginning(plan: SweepPlan, folder: SweepFolder) -> bool:
    """Whether the process was killed between writing the two files of `plan`."""
    try:
        return folder.run_file.read_text(encoding="utf-8") == plan.text
    except OSError:
        return False


def read_runs(folder: SweepFolder, *, uses_kept_facts: bool = False) -> list[ResolvedRun]:
    """The runs of the plan in `folder`.

    Args:
        folder: the sweep.
        uses_kept_facts: whether counts and shapes of the data are those stored by runs that have
            begun, so that their data need not be present; otherwise they are read again.

    Raises:
        ConfigError: if the plan or the run.toml is missing or damaged.
    """
    _, plan = written(folder)
    with prefixed(f"{folder.path}: "):
        return [
            _resolved(
                folder.run_file,
                fields,
                plan.cpu_devices,
                f"run {index}",
                folder.run(index).load_facts() if uses_kept_facts else None,
            )
            for index, fields in enumerate(plan.runs)
        ]


def short_names(names: Iterable[str]) -> list[str]:
    """The last part of each dotted name if it is unambiguous, else the whole name."""
    lasts = {name: name.rpartition(".")[2] for name in names}
    found = list(lasts.values())
    return [
        last if found.count(last) == 1 and last != "name" else name for name, last in lasts.items()
    ]


def value_text(value: JsonValue) -> str:
    """A value of a field as text; a whole number has no decimals, as typed."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def in_words(fields: Mapping[str, JsonValue]) -> str:
    """Fields and values on one line, with `short_names`."""
    return " ".join(
        f"{name}={value_text(value)}"
        for name, value in zip(short_names(fields), fields.values(), strict=True)
    )


def can_train_together(run: ResolvedRun) -> bool:
    """Whether a run may share a program: it needs one device and one batch size, and has no early
    stopping, no sharpness and no batch statistics to recompute for averaged weights."""
    config = run.config
    takes_statistics = config.averages_samples and config.model.has_batch_norm
    return (
        run.layout.device_count == 1
        and len(run.phases) == 1
        and config.layout.mode == "jit"
        and config.train.early_stopping is None
        and config.train.sharpness is None
        and config.emulation is None
        and config.dropout is None  # its masks are of one seed
        and not isinstance(config.optimizer, SophiaConfig)  # as are its sampled labels
        and not takes_statistics
        and config.model.shares_programs
    )


def written(folder: SweepFolder) -> tuple[str, WrittenPlan]:
    """The text of the run.toml in `folder`, and the plan there.

    Raises:
        ConfigError: if one of them is missing or damaged.
    """
    try:
        return folder.run_file.read_text(encoding="utf-8"), load(WrittenPlan, folder.plan)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder.path} holds no sweep that can be read: {error}.") from error


def _resolved(
    run_file: Path,
    fields: Fields,
    cpu_devices: int | None,
    which: str,
    facts: DatasetFacts | None = None,
) -> ResolvedRun:
    """A run of the plan on its devices; a refusal names the run."""
    with prefixed(f"{which} ({shortened(in_words(fields))}): " if fields else ""):
        config = load_config(run_file, fields)
        if config.emulation is not None:
            emulated_run(config, facts)  # refuses it now rather than when it starts
        count = cpu_devices or (1 if config.layout.data is None else None)
        return resolve(config, count, facts)


def varied_fields(names: list[str], configs: list[RunConfig]) -> list[Fields]:
    """For each run, its values of the fields in which runs differ.

    A table that is varied as a whole is replaced by the fields that distinguish the runs: its kind
    first, without the fields implied by the kind.
    """
    tables = [fields_of(config) for config in configs]
    differing: list[str] = []
    for name in dict.fromkeys(map(current_name, names)):  # names in an earlier version's sweep
        inner = (leaf for table in tables for leaf in table if leaf.startswith(f"{name}."))
        leaves = [name, *dict.fromkeys(inner)]
        told_apart = 1
        for position, leaf in enumerate(leaves):
            seen = [each for each in leaves[:position] if each in differing]
            count = len({_text_of(table, [*seen, leaf]) for table in tables})
            if count > told_apart and leaf not in differing:
                differing.append(leaf)
            told_apart = max(told_apart, count)
    return [{name: table.get(name) for name in differing} for table in tables]


def _text_of(table: Fields, names: list[str]) -> str:
    """A text that is equal for tables with equal values of `names`."""
    return json.dumps([table.get(name) for name in names])


def require_told_apart(names: Iterable[str], what: str, accepted: str) -> None:
    """Refuse two of `what`, such as "runs", with the same name; `accepted` says what would do."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        other = first.setdefault(name, index)
        if other != index:
            raise ConfigError(refusal("-V", f"{what} {other} and {index}", accepted))


def _jobs(runs: tuple[PlannedRun, ...], *, one_by_one: bool) -> tuple[tuple[int, ...], ...]:
    """Jobs of runs with equal programs, a few runs each; the longest first."""
    groups: dict[str, list[int]] = {}
    for planned in runs:
        alone = one_by_one or not can_train_together(planned.run)
        groups.setdefault(planned.name if alone else _program_of(planned.run), []).append(
            planned.index
        )
    jobs = [
        tuple(indices[begin : begin + MOST_TOGETHER])
        for indices in groups.values()
        for begin in range(0, len(indices), MOST_TOGETHER)
    ]
    return tuple(sorted(jobs, key=lambda job: -len(job) * runs[job[0]].run.total_steps))


def _program_of(run: ResolvedRun) -> str:
    """A text that is equal for runs whose steps differ only in numeric inputs."""
    tables = plain(run.config)
    assert isinstance(tables, dict)  # noqa: S101  a dataclass is a table
    # A scaling rule may change the optimizer too.
    changed = [str(change) for change in run.changes if change.name not in _RATES]
    shared = {name: table for name, table in tables.items() if name not in _ALTERNATIVES}
    return json.dumps([shared, changed], sort_keys=True)


@cache
def _known_fields() -> tuple[str, ...]:
    """Field names of a `run.toml`, read once from the source of every table, which takes 0.3 s."""
    return tuple(dict.fromkeys(each.name for table in run_reference() for each in table.fields))
