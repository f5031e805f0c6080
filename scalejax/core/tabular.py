"""Results as tables: in a notebook, and as data frames of pandas, polars and Arrow."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from scalejax.core.drawing import columns_of, table, text_of
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, plain

Scalar = None | bool | int | float | str
"""A single value."""


class Tabular:
    """A result that is a table of rows."""

    __slots__ = ()

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The figures, as a dict by column for each row."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, JsonValue]:
        """The whole result, as plain data."""
        found = plain(self)
        assert isinstance(found, dict)  # noqa: S101  a dataclass is a table
        return found

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            ConfigError: if pandas is not installed.
        """
        return _library("pandas").DataFrame(_even(self.to_rows()))

    def to_polars(self) -> Any:
        """The rows as a `polars.DataFrame`.

        Raises:
            ConfigError: if polars is not installed.
        """
        return _library("polars").DataFrame(_even(self.to_rows()), infer_schema_length=None)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The rows as Arrow's PyCapsule, which `polars.DataFrame(result)`, `pyarrow.table(result)`
        and other data frame libraries read directly."""
        import pyarrow

        found = pyarrow.Table.from_pylist(_even(self.to_rows()))
        return found.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return table(self.to_rows())

    def __str__(self) -> str:
        """What `print` shows: the rows."""
        return text_of(self.to_rows())


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"to_{name} needs {name} (pip install {name}); to_rows() gives the same without it."
        ) from error


def _even(rows: Sequence[Mapping[str, JsonValue]]) -> list[dict[str, JsonValue]]:
    """Rows that all have the same columns, with None for missing values."""
    names = columns_of(rows)
    return [{name: row.get(name) for name in names} for row in rows]


def scalar(value: JsonValue) -> Scalar:
    """A value as a table cell: lists and tables as JSON."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def flat(
    row: Mapping[str, JsonValue], prefix: str = "", separator: str = "."
) -> dict[str, JsonValue]:
    """A row with its tables as columns with dotted names."""
    found: dict[str, JsonValue] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}{separator}", separator)
        else:
            found[f"{prefix}{name}"] = value
    return found


def to_csv(rows: Sequence[Mapping[str, JsonValue]]) -> str:
    """Rows as CSV (RFC 4180, except that lines end in a bare newline), with all their columns in
    order of appearance: tables as dotted columns, lists as JSON, unknown values empty."""
    every = [flat(row) for row in rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, columns_of(every), restval=None, lineterminator="\n")
    writer.writeheader()
    for row in every:
        writer.writerow({name: scalar(value) for name, value in row.items()})
    return file.getvalue()
