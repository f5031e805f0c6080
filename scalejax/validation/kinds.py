"""Kinds of ledgers, recognised by their columns, and the ledgers that come with scalejax.

Knows which class of rows has which columns; predicts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalejax.core.errors import ConfigError, nearest_name, unknown_name
from scalejax.validation.convergence import (
    ExpertLossRow,
    LossRow,
    ReferenceRow,
    SamplesRow,
    SubmissionRow,
)
from scalejax.validation.ledger import LedgerRow
from scalejax.validation.operations import (
    AllReduceRow,
    AttentionRow,
    BusBandwidthRow,
    CustomAllReduceRow,
    DispatchRow,
    ExpertAllToAllRow,
    ExpertLayerRow,
    LinkRateRow,
    NodeCollectiveRow,
    OperationRow,
    ProductRateRow,
    ProductTimeRow,
)
from scalejax.validation.summary import STEP_TIMES, Quantity
from scalejax.validation.table import Table, read_table, required_columns, rows_of, table_name

FOLDER = Path(__file__).parent / "ledgers"
"""Folder of the ledgers that come with scalejax; its README.md says where each is from."""

CONVERGENCE = ("convergence_rcp", "mlperf_submission_convergence")
"""The ledgers of samples to a target."""

Row = LedgerRow | OperationRow | SamplesRow | LossRow
"""A row of any kind of ledger."""

FORMATS: tuple[tuple[Quantity, type[Row]], ...] = (
    (STEP_TIMES, LedgerRow),
    *(
        (each.quantity, each)
        for each in (
            AllReduceRow,
            LinkRateRow,
            NodeCollectiveRow,
            CustomAllReduceRow,
            BusBandwidthRow,
            ProductRateRow,
            ProductTimeRow,
            ExpertLayerRow,
            AttentionRow,
            DispatchRow,
            ExpertAllToAllRow,
            ReferenceRow,
            SubmissionRow,
            LossRow,
            ExpertLossRow,
        )
    ),
)
"""(what is measured, class of a row), distinguished by the columns that each requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The rows of one file."""

    name: str
    """Name of the file, without its suffixes."""
    quantity: Quantity
    """What it measures."""
    rows: Sequence[Row]
    """The rows, all of one class."""

    @property
    def steps(self) -> list[LedgerRow]:
        """Its rows of step times; none if it measures something else."""
        return [row for row in self.rows if isinstance(row, LedgerRow)]


def shipped_ledgers() -> dict[str, Path]:
    """The ledgers that come with scalejax, by name, in the order in which tables list them: step
    times first, and the oldest of them."""
    paths = {table_name(path): path for path in sorted(FOLDER.glob("*.csv*"))}
    return {name: paths[name] for name in sorted(paths, key=lambda name: name != "step_times")}


def find_ledger(file: Path | str) -> Path:
    """A ledger by its file, or by its name among those that come with scalejax.

    Raises:
        ConfigError: if neither exists.
    """
    path, shipped = Path(file), shipped_ledgers()
    if path.exists():
        return path
    if str(file) in shipped:
        return shipped[str(file)]
    if path.suffix:
        raise ConfigError(f"{str(path)!r} does not exist.")
    raise ConfigError(unknown_name("ledger", str(file), shipped))


def read_any(path: Path) -> Ledger:
    """The rows of a ledger of any kind.

    Raises:
        ConfigError: if the file cannot be read, its columns fit no kind, or a line is malformed:
            with file, line, column.
    """
    table = read_table(path)
    if not table.heading:
        raise ConfigError(f"{path} holds no rows.")
    quantity, row = _format_of(table)
    return Ledger(name=table_name(path), quantity=quantity, rows=rows_of(table, row))


def _format_of(table: Table) -> tuple[Quantity, type[Row]]:
    """The format whose columns a table has; if several fit, the one that requires most columns.

    Raises:
        ConfigError: if none fits: names the kinds, what each needs, and what the nearest lacks.
    """
    heading = set(table.heading)

    def found(format_: tuple[Quantity, type[Row]]) -> tuple[int, float]:
        """(required columns that the table has, their share)."""
        needed = required_columns(format_[1])
        count = len(heading.intersection(needed))
        return count, count / len(needed)

    whole = [each for each in FORMATS if found(each)[1] == 1]
    if whole:
        return max(whole, key=found)
    nearest = max(FORMATS, key=lambda each: (found(each)[1], found(each)[0]))
    missing = next(name for name in required_columns(nearest[1]) if name not in heading)
    closest = nearest_name(missing, heading)
    hint = f" (is it {closest!r}?)" if closest else ""
    kinds: dict[str, list[str]] = {}
    for quantity, row in FORMATS:
        kinds.setdefault(quantity, []).append(" ".join(required_columns(row)))
    needs = "\n".join(f"  {name}: {', or '.join(columns)}" for name, columns in kinds.items())
    raise ConfigError(
        f"{table.path}, line {table.line}: the column {missing!r} is missing{hint}; these "
        f"columns match no kind of ledger; the nearest is {nearest[0]}. Kinds, and the columns "
        f"that each needs:\n{needs}"
    )
