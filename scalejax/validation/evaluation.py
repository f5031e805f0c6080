"""Predictions of every row of a ledger, and the validation that summarises their errors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scalejax.api import predict
from scalejax.core.errors import ScalejaxError
from scalejax.core.progress import OnProgress, no_display
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.hardware import Chip, Cluster
from scalejax.simulator.frameworks import Framework
from scalejax.simulator.program import Program
from scalejax.validation.archive import Archive
from scalejax.validation.cases import Case, Skipped, case_of, one_line
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.programs import archived_programs, find_programs
from scalejax.validation.summary import (
    NOT_COMPILED,
    KindSummary,
    RowResult,
    Summary,
    kind_summaries,
    summaries,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCase:
    """A row of the ledger with its program and cluster."""

    row: LedgerRow
    """The published measurement."""
    program: Program
    """The program of each device."""
    cluster: Cluster
    """The cluster; replace its chip or library to try other constants."""
    nearest: tuple[str, ...] = ()
    """What of the row is expressed by what is nearest to it."""


@document("validation")
@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Tabular):
    """Errors of the predictions of a ledger.

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
    """File of the ledger."""
    families: tuple[Summary, ...]
    """Errors of each family of rows, and of all rows."""
    rows: tuple[RowResult, ...]
    """Result of each row, in the ledger's order."""

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
        closed_form: whether to take the closed form of the step where it knows a row.
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
    return CompiledCase(row=case.row, program=program, cluster=case.cluster, nearest=case.nearest)


def with_chips(
    cases: Sequence[CompiledCase | Skipped], chips: Mapping[str, Chip]
) -> list[CompiledCase | Skipped]:
    """Cases with each chip replaced by that of its name in `chips`.

    Chips of rows in fp32 stay without tf32.
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
    """Result of each row; of one that is not compiled, that it could be."""
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
    return RowResult(
        case_id=case.row.case_id,
        series=case.row.series,
        device_count=case.row.device_count,
        measured_seconds=case.row.step_seconds,
        predicted_seconds=found and found.step_seconds,
        p10_seconds=found and found.p10_step_seconds,
        p90_seconds=found and found.p90_step_seconds,
        status=status,
        kind=case.row.kind,
        states_layout=case.row.states_layout,
        is_mapped=not isinstance(case, Skipped) or case.is_mapped,
        nearest=() if isinstance(case, Skipped) else case.nearest,
        is_closed_form=isinstance(case, CompiledCase) and case.program.backend == "closed_form",
    )


def validation(ledger: str, cases: Sequence[CompiledCase | Case | Skipped]) -> Validation:
    """Validation of a ledger: the result of every row, and the errors of each family."""
    results = evaluate(cases)
    scored = [(case.row, result) for case, result in zip(cases, results, strict=True)]
    return Validation(
        ledger=ledger,
        families=tuple(summaries(scored)),
        rows=tuple(results),
    )


def validate(ledger: Path | str, *, framework: Framework | None = None) -> Validation:
    """Predictions held against a ledger of published step times.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import validate
        >>> ledger = files("scalejax") / "validation/example.csv"
        >>> found = validate(ledger).rows
        >>> [abs(row.predicted_seconds / row.measured_seconds - 1) < 0.5 for row in found]
        [True, True, True]

    Args:
        ledger: a CSV file in the format of the project's `step_times.csv`.
        framework: framework to predict all rows with; if None, that of each row.

    Raises:
        ConfigError: if the file cannot be read, or a line is malformed.
    """
    path = Path(ledger)
    return validation(path.name, compile_cases(read_ledger(path), framework=framework))
