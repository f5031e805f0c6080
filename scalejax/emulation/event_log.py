"""Event log of an emulated run: every instruction, in a Parquet file.

Knows instructions and columns; nothing of the values.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalejax.core.errors import ConfigError, refusal
from scalejax.emulation.instructions import Instruction, Rows

_SCHEMA = pa.schema(
    [
        ("at_seconds", pa.float64()),
        ("operation", pa.dictionary(pa.int8(), pa.string())),
        ("inputs", pa.list_(pa.int32())),
        ("outputs", pa.int32()),  # their number: values are numbered in order of instructions
        ("factors", pa.list_(pa.float64())),
        ("worker", pa.int32()),
        ("index", pa.int32()),
        ("workers", pa.int32()),
        ("way", pa.dictionary(pa.int8(), pa.string())),
        ("sharing", pa.int32()),
    ]
)
_ROWS = ("worker", "index", "workers", "way", "sharing")
_MOST_OUTPUTS = 2**20
"""Upper bound on the values of an instruction: a shard of a gradient for each server."""
_AT_ONCE = 20_000
"""Instructions in a row group, about 0.2 MB."""


class EventLog:
    """Writer of the instructions of a run, in row groups."""

    def __init__(self, path: Path) -> None:
        """Create the file at `path`; it is readable once closed, even if the run fails before."""
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="zstd")
        self._waiting: list[Instruction] = []

    def write(self, instruction: Instruction) -> None:
        """Append an instruction; it may be buffered."""
        self._waiting.append(instruction)
        if len(self._waiting) == _AT_ONCE:
            self._flush()

    def close(self) -> None:
        """Flush the buffer and complete the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        several, self._waiting = self._waiting, []
        columns: dict[str, list[Any]] = {
            "at_seconds": [each.at_seconds for each in several],
            "operation": [each.operation for each in several],
            "inputs": [each.inputs for each in several],
            "outputs": [len(each.outputs) for each in several],
            "factors": [each.factors for each in several],
        }
        for name in _ROWS:
            columns[name] = [each.rows and getattr(each.rows, name) for each in several]
        self._writer.write_table(pa.table(columns, schema=_SCHEMA))


def read_events(path: Path) -> list[Instruction]:
    """The instructions in the file `path`, in order.

    Raises:
        ConfigError: if the file cannot be read, or holds something else.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} cannot be read as the log of an emulated run: {error}."
        ) from error
    if not table.schema.equals(_SCHEMA):
        raise ConfigError(f"{path} is not a log of an emulated run: it has other columns.")
    for name in ("at_seconds", "operation", "inputs", "outputs", "factors"):
        if table[name].null_count:
            raise ConfigError(f"{path} is not a log of an emulated run: {name} is blank in a row.")
    for count in table["outputs"].unique().to_pylist():
        if not 0 <= count <= _MOST_OUTPUTS:
            accepted = f"it must be from 0 to {_MOST_OUTPUTS:,}"
            raise ConfigError(f"{path}: {refusal('outputs', count, accepted)}")
    instructions, first = [], 0
    for row in table.to_pylist():
        outputs = tuple(range(first, first + row["outputs"]))
        first += row["outputs"]
        instructions.append(
            Instruction(
                at_seconds=row["at_seconds"],
                operation=row["operation"],
                inputs=tuple(row["inputs"]),
                outputs=outputs,
                factors=tuple(row["factors"]),
                rows=Rows(**{name: row[name] for name in _ROWS}) if row["way"] else None,
            )
        )
    return instructions
