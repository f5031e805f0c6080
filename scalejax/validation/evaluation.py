"""Predictions of every row of a ledger, and the validation that summarises their errors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from scalejax.api import predict
from scalejax.core.errors import ConfigError, ScalejaxError, unknown_name
from scalejax.core.progress import OnProgress, no_display
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import GIB
from scalejax.hardware import Chip, Cluster
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.program import Program, with_channels_first
from scalejax.validation.cases import (
    Case,
    Skipped,
    case_of,
    framework_of,
    has_channels_first,
    one_line,
)
from scalejax.validation.clusters import chip_name
from scalejax.validation.convergence import LossRow, SamplesRow, loss_results, samples_results
from scalejax.validation.kinds import CONVERGENCE, Ledger, find_ledger, read_any, shipped_ledgers
from scalejax.validation.ledger import LedgerRow
from scalejax.validation.operations import OperationRow, result_of
from scalejax.validation.programs import archived_programs, find_programs
from scalejax.validation.summary import (
    NOT_COMPILED,
    KindSummary,
    MemorySummary,
    RowResult,
    Scored,
    Summary,
    grouped,
    kind_summaries,
    memory_summaries,
    plain_summary,
    summaries,
)
from scalejax.xla.archive import Archive


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCase:
    """A row of the ledger with its program and cluster."""

    row: LedgerRow
    """The published measurement."""
    program: Program
    """The program of each device."""
    cluster: Cluster
    """The cluster; replace its chip or library to try other constants."""
    framework: str = "xla"
    """Name of the framework that it is predicted with."""
    nearest: tuple[str, ...] = ()
    """Which parts of the row are only approximated."""


@document("validation")
@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Tabular):
    """Errors of the predictions of ledgers.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import validate
        >>> ledger = files("scalejax") / "validation/example.csv"
        >>> validation = validate(ledger)
        >>> [each.name for each in validation.families]
        ['dlperf', 'vtrain_single', 'all']
        >>> list(validation.to_rows()[0])[:3]
        ['case_id', 'series', 'device_count']
    """

    ledger: str
    """Names of the ledgers."""
    families: tuple[Summary, ...]
    """Errors of each family of step times, and of all of them."""
    rows: tuple[RowResult, ...]
    """Result of each row, in the ledger's order."""
    operations: tuple[Summary, ...] = ()
    """Errors of each family of everything but step times."""
    memory: tuple[MemorySummary, ...] = ()
    """Errors of the peak memory of each family that states it, and which runs fit."""

    @property
    def kinds(self) -> list[KindSummary]:
        """How many rows of each kind (dense, expert, lora) are predicted, and why others are
        not."""
        return kind_summaries(self.rows)

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """Prediction and measurement, a row for each row of the ledger."""
        return [asdict(row) for row in self.rows]


def compile_cases(
    rows: Sequence[LedgerRow],
    *,
    framework: Framework | None = None,
    archive: Archive | None = None,
    on_progress: OnProgress = no_display,
    compiles: bool = True,
    closed_form: bool = False,
) -> list[CompiledCase | Skipped]:
    """Each row with program and cluster, or the reason why it is skipped; in order.

    Args:
        rows: rows of a ledger.
        framework: framework to predict all rows with; if None, that of each row.
        archive: archive to read programs from first; if None, the one that comes with scalejax.
        on_progress: called with the number of programs compiled, and of all that must be.
        compiles: whether to compile what is not in the archive.
        closed_form: whether to use the closed form of the step for rows that it knows.
    """
    cases = [
        case if isinstance(case, Skipped) else replace(case, framework=framework or case.framework)
        for case in map(case_of, rows)
    ]
    wanted = [case for case in cases if isinstance(case, Case)]
    programs = archived_programs(archive, on_progress, compiles=compiles, closed_form=closed_form)
    found = iter(find_programs(wanted, programs))
    return [case if isinstance(case, Skipped) else _compiled(case, next(found)) for case in cases]


def _compiled(case: Case, program: Program | str) -> CompiledCase | Skipped:
    if isinstance(program, str):
        return Skipped(row=case.row, reason=program, is_mapped=True)
    if case.framework == framework_of(case.row):
        program = with_channels_first(program, has_channels_first(case.row))
    return CompiledCase(
        row=case.row,
        program=program,
        cluster=case.cluster,
        framework=case.framework.name,
        nearest=case.nearest,
    )


def with_chips(
    cases: Sequence[CompiledCase | Skipped], chips: Mapping[str, Chip]
) -> list[CompiledCase | Skipped]:
    """Cases with each chip replaced by the one of the same name in `chips`.

    Chips of rows in fp32 remain without tf32.
    """

    def changed(cluster: Cluster) -> Cluster:
        chip = chips.get(cluster.chip.name, cluster.chip)
        kinds = cluster.chip.peak_flop_per_second
        peaks = {name: v for name, v in chip.peak_flop_per_second.items() if name in kinds}
        return replace(cluster, chip=replace(chip, peak_flop_per_second=peaks))

    return [
        case if isinstance(case, Skipped) else replace(case, cluster=changed(case.cluster))
        for case in cases
    ]


def evaluate(cases: Sequence[CompiledCase | Case | Skipped]) -> list[RowResult]:
    """Result of each row; a row that is not compiled has a result that says so."""
    return [_result(case) for case in cases]


def _result(case: CompiledCase | Case | Skipped) -> RowResult:
    found, status = None, "ok"
    if isinstance(case, Skipped):
        status = f"skipped: {case.reason}"
    elif isinstance(case, Case):
        status = NOT_COMPILED
    else:
        try:
            found = predict(case.program, case.cluster)
        except ScalejaxError as error:
            status = f"skipped: {one_line(error)}"
    row, peak = case.row, case.row.peak_memory_gib
    return RowResult(
        case_id=row.case_id,
        series=row.series,
        device_count=row.device_count,
        measured_seconds=row.step_seconds,
        predicted_seconds=found and found.step_seconds,
        p10_seconds=found and found.p10_step_seconds,
        p90_seconds=found and found.p90_step_seconds,
        status=status,
        family=row.family,
        framework=_framework(case),
        chip=_chip(case),
        source=", ".join(filter(None, (row.source, row.source_locator))),
        measured_memory_bytes=None if peak is None else peak * GIB,
        predicted_memory_bytes=found and (found.reserved_memory_bytes or found.peak_memory_bytes),
        p10_memory_bytes=found and found.p10_reserved_memory_bytes,
        p90_memory_bytes=found and found.p90_reserved_memory_bytes,
        has_died=row.has_died,
        fits=found and found.fits,
        kind=row.kind,
        states_layout=row.states_layout,
        is_mapped=not isinstance(case, Skipped) or case.is_mapped,
        nearest=() if isinstance(case, Skipped) else case.nearest,
        is_closed_form=isinstance(case, CompiledCase) and case.program.backend == "closed_form",
    )


def _framework(case: CompiledCase | Case | Skipped) -> str:
    """Name of the framework that a row is predicted with, or would be."""
    if isinstance(case, CompiledCase):
        return case.framework
    return (framework_of(case.row) if isinstance(case, Skipped) else case.framework).name


def _chip(case: CompiledCase | Case | Skipped) -> str:
    """The catalogue's name of the row's chip; the ledger's if the catalogue lacks it."""
    if isinstance(case, Skipped):
        return chip_name(case.row.machine.hardware)
    return case.cluster.chip.name


def validation(ledger: str, cases: Sequence[CompiledCase | Case | Skipped]) -> Validation:
    """Validation of a ledger of step times: the result of every row, and the errors of each
    family."""
    scored = [(case.row, result) for case, result in zip(cases, evaluate(cases), strict=True)]
    return _validation(ledger, scored, ())


def _validation(ledger: str, scored: Sequence[Scored], others: Sequence[RowResult]) -> Validation:
    results = [result for _, result in scored]
    return Validation(
        ledger=ledger,
        families=tuple(summaries(scored)),
        rows=(*results, *others),
        operations=tuple(
            plain_summary(name, members)
            for name, members in grouped(others, lambda each: each.family).items()
        ),
        memory=tuple(memory_summaries(results)),
    )


def validated(
    ledgers: Sequence[Ledger],
    *,
    families: Collection[str] | None = None,
    framework: Framework | None = None,
    archive: Archive | None = None,
    on_progress: OnProgress = no_display,
    compiles: bool = False,
    is_dry: bool = False,
) -> Validation:
    """Predictions compared with ledgers of any kind: step times first, then the others.

    Steps come from kept programs if there are any, else from the closed form if it knows the run:
    the two were shown to be equal (`experiments/closed_form`).

    Args:
        ledgers: rows of files.
        families: families to keep; all of them if None.
        framework: framework to predict all step times with; if None, that of each row.
        archive: archive to read programs from first; if None, the one that comes with scalejax.
        on_progress: called with the number of programs compiled, and of all that must be.
        compiles: whether to compile steps that are neither kept nor known in closed form, which
            are skipped otherwise.
        is_dry: whether only to say which step times can be expressed as runs.

    Raises:
        ConfigError: if there is no such family.
    """
    steps = [(ledger.name, row) for ledger in ledgers for row in ledger.steps]
    others = [result for ledger in ledgers for result in _other_results(ledger)]
    if families is not None:
        known = {row.family for _, row in steps} | {each.family for each in others}
        for name in families:
            if name not in known:
                raise ConfigError(unknown_name("family", name, known))
        steps = [(name, row) for name, row in steps if row.family in families]
        others = [each for each in others if each.family in families]
    rows = [row for _, row in steps]
    cases: Sequence[CompiledCase | Case | Skipped] = (
        [case_of(row) for row in rows]
        if is_dry
        else compile_cases(
            rows,
            framework=framework,
            archive=archive,
            on_progress=on_progress,
            compiles=compiles,
            closed_form=True,
        )
    )
    results = zip(steps, evaluate(cases), strict=True)
    scored = [(row, replace(result, ledger=name)) for (name, row), result in results]
    names = [ledger.name for ledger in ledgers]
    title = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} ledgers"
    return _validation(title, scored, others)


_NAMED = 3
"""Most ledgers that the name of a validation lists."""


@cache
def _known_samples() -> tuple[SamplesRow, ...]:
    """Rows of samples to a target that come with scalejax."""
    shipped = shipped_ledgers()
    found = (read_any(shipped[name]).rows for name in CONVERGENCE)
    return tuple(row for rows in found for row in rows if isinstance(row, SamplesRow))


def _other_results(ledger: Ledger) -> list[RowResult]:
    """Results of rows that are not step times."""
    rows = ledger.rows
    samples = [row for row in rows if isinstance(row, SamplesRow)]
    return [
        *(result_of(row, ledger.name) for row in rows if isinstance(row, OperationRow)),
        *samples_results(samples, ledger.name, _known_samples() if samples else ()),
        *loss_results([row for row in rows if isinstance(row, LossRow)], ledger.name),
    ]


def validate(
    *ledgers: Path | str, framework: Framework | None = None, compiles: bool = False
) -> Validation:
    """Predictions compared with ledgers of published measurements.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import validate
        >>> ledger = files("scalejax") / "validation/example.csv"
        >>> found = validate(ledger).rows
        >>> [abs(row.predicted_seconds / row.measured_seconds - 1) < 0.5 for row in found]
        [True, True, True]

    Args:
        *ledgers: CSV files, whose columns tell what they measure, or names of those that come with
            scalejax; if none are given, all that come with it.
        framework: framework to predict all step times with; if None, that of each row.
        compiles: whether to compile steps that are neither kept nor known in closed form, which
            are skipped otherwise.

    Raises:
        ConfigError: if a file cannot be read, its columns are those of no kind of ledger, or a
            line is malformed.
    """
    paths = [find_ledger(each) for each in ledgers] or list(shipped_ledgers().values())
    return validated([read_any(path) for path in paths], framework=framework, compiles=compiles)
