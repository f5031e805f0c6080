"""Tables of measurements: rows of a CSV file as dataclasses, whose fields are its columns.

Knows cells, lines and types; nothing of what is measured.
"""

import csv
import dataclasses
import gzip
import io
import lzma
import math
import types
import typing
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from scalejax.core.errors import ConfigError, nearest_name, refusal

_Part = TypeVar("_Part")

_MISSPELT = 0.7
"""Similarity, 0..1, above which an unknown column counts as a misspelt missing one: "step_secs"
does for "step_seconds" (0.86), "pipeline_chunks" does not for "pipeline" (0.696)."""

_UNPACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
"""How a file is unpacked, by its suffix."""

_LEAST, _MOST = 1e-18, 1e30
"""Bounds of numbers: an attosecond, and a million times the FLOP of the largest training so far."""

_MACHINES = ("device_count", "devices", "devices_per_node", "nodes", "nodes_of_8_h100")
_LARGEST = dict.fromkeys(_MACHINES, 1e8) | {
    "layers": 1e5, "heads": 1e6, "kv_heads": 1e6, "hidden": 1e7, "ffn_hidden": 1e8, "vocab": 1e8,
    "seq_len": 1e9, "experts": 1e6, "expert_hidden": 1e8,
}  # fmt: skip
"""Larger than in any cluster or network, by column."""
MAY_BE_ZERO = {"may_be_zero": True}
"""Metadata of a field whose column may hold 0; others must be above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a CSV file, as text."""

    path: Path
    """The file."""
    line: int
    """Line of the heading."""
    heading: tuple[str, ...]
    """Names of the columns."""
    lines: tuple[tuple[int, dict[str, str]], ...]
    """(line, cell by column) of each row."""


def table_name(path: Path) -> str:
    """Name of the table in a file, without the suffixes of format and compression."""
    name = path.name
    for suffix in (*_UNPACKED, ".csv"):
        name = name.removesuffix(suffix)
    return name


def read_table(path: Path) -> Table:
    """The cells of a CSV file; one that ends in `.gz` or `.xz` is unpacked.

    Raises:
        ConfigError: if the file cannot be read, or a line and the heading differ in their number
            of cells: with file, line, column.
    """
    try:
        unpacked = _UNPACKED.get(path.suffix, bytes)(path.read_bytes())
        text = unpacked.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{str(path)!r} does not exist.") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error
    lines = _cells(path, text)
    first, heading = next(lines, (1, []))
    return Table(
        path=path,
        line=first,
        heading=tuple(heading),
        lines=tuple((line, dict(zip(heading, cells, strict=True))) for line, cells in lines),
    )


def _cells(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of the heading and of each row below it.

    Raises:
        ConfigError: if a line cannot be read, or its number of cells differs from the heading's.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    heading: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{path}, line {line}: this is not CSV: {error}.") from error
        if not any(cells):
            continue
        if heading is None:
            heading = cells
        elif len(cells) != len(heading):
            missing = "".join(
                f", {name!r} is the first one missing" for name in heading[len(cells) :][:1]
            )
            raise ConfigError(
                f"{path}, line {line}, column {min(len(cells), len(heading)) + 1}: "
                f"there are {len(cells)} cells, but {len(heading)} columns{missing}; "
                "it must have one for each."
            )
        yield line, cells


def rows_of(table: Table, type_: type[_Part]) -> list[_Part]:
    """The rows of a table, in order.

    Columns that are not fields are ignored, and fields with a default need no column; but a column
    that looks like a misspelt missing one is refused.

    Args:
        table: the table.
        type_: the dataclass of a row.

    Raises:
        ConfigError: if there is no row, a column is missing or misspelt, or a cell holds a value
            that its field cannot: with file, line, column.
    """
    if table.heading:
        _require_columns(table, type_)
    rows = [
        _part(type_, _Cells(path=table.path, line=line, values=values))
        for line, values in table.lines
    ]
    if not rows:
        raise ConfigError(f"{table.path} holds no rows.")
    return rows


def required_columns(type_: type) -> list[str]:
    """Columns that a row of `type_` requires."""
    return [_column(field) for field in _fields(type_) if field.default is dataclasses.MISSING]


def _column(field: dataclasses.Field[Any]) -> str:
    """Name of a field's column: its own, or the one in its metadata if that is no identifier."""
    return field.metadata.get("column", field.name)


def _require_columns(table: Table, type_: type) -> None:
    heading = table.heading
    for name in required_columns(type_):
        if name not in heading:
            closest = nearest_name(name, heading)
            hint = f" (is it {closest!r}?)" if closest else ""
            raise ConfigError(
                f"{table.path}, line {table.line}: the column {name!r} is missing{hint}."
            )
    known = [_column(field) for field in _fields(type_)]
    for place, name in enumerate(heading, start=1):
        if name in known:
            continue
        meant = nearest_name(name.lower(), known, alike=_MISSPELT)
        if meant is not None and meant not in heading:
            accepted = f"no such column is known (did you mean {meant!r}?)"
            refused = refusal("heading", name, accepted)
            raise ConfigError(f"{table.path}, line {table.line}, column {place}: {refused}")


@cache
def _hints(type_: type) -> dict[str, Any]:
    return typing.get_type_hints(type_)


@cache
def _fields(type_: type) -> tuple[dataclasses.Field[Any], ...]:
    """The field of each column, those of nested dataclasses included."""
    found: list[dataclasses.Field[Any]] = []
    for field in dataclasses.fields(type_):
        hint = _hints(type_)[field.name]
        found += _fields(hint) if dataclasses.is_dataclass(hint) else (field,)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """One line of the file."""

    path: Path
    line: int
    values: dict[str, str]

    def refuse(self, column: str, accepted: str) -> ConfigError:
        """The refusal of a cell, with its place."""
        place = f"{self.path}, line {self.line}, column {list(self.values).index(column) + 1}"
        return ConfigError(f"{place}: {refusal(column, self.values[column], accepted)}")

    def value(
        self, column: str, kinds: set[type], *, may_be_zero: bool = False
    ) -> str | int | float | None:
        """Value of a cell as one of `kinds`; None if it is blank or the column is missing.

        Raises:
            ConfigError: if it holds something else.
        """
        text = self.values.get(column, "")
        if not text:
            if column in self.values and types.NoneType not in kinds:
                raise self.refuse(column, "it may not be blank")
            return None
        if str in kinds:
            return text
        least = 0 if may_be_zero or float in kinds else 1
        accepted = f"a whole number, {least} or more"
        if float in kinds:
            accepted = "a number, 0 or more" if may_be_zero else "a number above 0"
        try:
            number = float(text) if float in kinds else int(text)
        except ValueError as error:
            raise self.refuse(column, f"it must be {accepted}") from error
        is_good = 0 < number < math.inf if float in kinds else number >= least
        if not is_good and not (may_be_zero and number == 0):
            raise self.refuse(column, f"it must be {accepted}")
        most = _LARGEST.get(column, _MOST)
        if number > most or 0 < number < _LEAST:
            raise self.refuse(column, f"it must be from {max(least, _LEAST):g} to {most:g}")
        return number


def _part(type_: type[_Part], cells: _Cells) -> _Part:
    """A dataclass whose fields are columns, or dataclasses of columns."""
    values = {}
    for field in dataclasses.fields(typing.cast(Any, type_)):
        hint = _hints(type_)[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _part(typing.cast(type, hint), cells)
        elif (column := _column(field)) in cells.values or field.default is dataclasses.MISSING:
            values[field.name] = cells.value(
                column,
                set(typing.get_args(hint) or (hint,)),
                may_be_zero="may_be_zero" in field.metadata,
            )
    try:
        return type_(**values)
    except ConfigError as error:  # the row's check of its values together
        raise ConfigError(f"{cells.path}, line {cells.line}: {error}") from error
