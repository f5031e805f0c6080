"""Results as tables: in a notebook, and as data frames."""

from html import escape
from importlib import import_module
from typing import Any

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, plain


class Tabular:
    """A result that is a table of rows."""

    __slots__ = ()

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The figures, one dict by column for each row."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, JsonValue]:
        """All of the result, as plain data."""
        found = plain(self)
        assert isinstance(found, dict)  # noqa: S101  a dataclass is a table
        return found

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            ConfigError: if pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "to_frame needs pandas (pip install pandas); to_rows() gives the same without it."
            ) from error
        return pandas.DataFrame(self.to_rows())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = self.to_rows()
        columns = list(rows[0]) if rows else []
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_text(row[name]))}</td>' for name in columns)}</tr>"
            for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: JsonValue) -> str:
    """A cell: four digits of a number, and a dash for what is unknown."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
