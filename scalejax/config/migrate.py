"""Run files written for earlier versions: fields and values that have been renamed.

Files with the old names are read as if they had the new ones, with a warning; `migrated_text`
rewrites one and keeps comments and order. Knows names only, not what the fields mean.
"""

import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, load_toml

RENAMED_FIELDS = {
    "exchange": "gradient_sync",
    "emulation.compression.method": "emulation.compression.name",
    "emulation.algorithm.exchange": "emulation.algorithm.gradient_sync",
    "emulation.timing.exchange_seconds": "emulation.timing.collective_seconds",
}
"""Dotted names of fields and tables: those until 0.1, and the current ones."""
RENAMED_VALUES = {
    ("model.remat", "per_op"): "selective_op",
    ("train.early_stopping.monitor", "test_loss"): "validation_loss",
    ("train.early_stopping.monitor", "test_accuracy"): "validation_accuracy",
}
"""Renamed values of a field, which is given by its current name."""

_HEADER = re.compile(r"^(\s*\[\[?\s*)([^\[\]#]+?)(\s*\]\]?.*)$", re.S)
_ENTRY = re.compile(r"^(\s*)([A-Za-z0-9_.\-]+)(\s*=)(.*)$", re.S)


class RenamedField(FutureWarning):
    """A run file, or a flag, uses a name of an earlier version."""


def load_run_file(path: Path) -> dict[str, JsonValue]:
    """The tables of a run.toml, under the current names of fields.

    Raises:
        ConfigError: if the file does not exist, is not TOML, or has a field under both names.
    Warns:
        RenamedField: if it uses names of an earlier version.
    """
    tables, renamed = migrated(load_toml(path))
    if renamed:
        _warn(f"{path}: {', '.join(renamed)}; `scalejax config migrate {path}` rewrites it")
    return tables


def current_tables(tables: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Tables of a run, such as one that a flag replaced as a whole, under current names.

    Raises:
        ConfigError: if a field is given under both names.
    Warns:
        RenamedField: if it uses names of an earlier version.
    """
    current, renamed = migrated(tables)
    if renamed:
        _warn(", ".join(renamed))
    return current


def current_fields(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Values by dotted field name, such as those of flags, under current names.

    Raises:
        ConfigError: if a field is given under both names.
    Warns:
        RenamedField: if one has the name of an earlier version.
    """
    current: dict[str, JsonValue] = {}
    renamed = []
    for name, value in values.items():
        now = current_name(name)
        value_now = current_value(now, value)
        if now in current or (now != name and now in values):
            raise ConfigError(f"{name} is refused: it is {now} now, which is given too.")
        if now != name:
            renamed.append(_said(name, now))
        if value_now is not value:
            renamed.append(_said(f'{now} = "{value}"', f'"{value_now}"'))
        current[now] = value_now
    if renamed:
        _warn(", ".join(renamed))
    return current


def current_value(field: str, value: JsonValue) -> JsonValue:
    """The value of `field` (its current name), or each value of a list, under current names."""
    if isinstance(value, list):
        changed = [current_value(field, each) for each in value]
        return changed if any(a is not b for a, b in zip(changed, value, strict=True)) else value
    return RENAMED_VALUES.get((field, value), value) if isinstance(value, str) else value


def current_name(name: str) -> str:
    """The current name of a field, given by its dotted name in this or an earlier version."""
    for old, new in RENAMED_FIELDS.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def migrated(tables: Mapping[str, JsonValue]) -> tuple[dict[str, JsonValue], tuple[str, ...]]:
    """Tables of a run file under current names, and a sentence for each name that was replaced.

    Raises:
        ConfigError: if a field is given under both names.
    """
    current = dict(tables)
    renamed = []
    for old, new in RENAMED_FIELDS.items():
        *path, last = old.split(".")
        table = _table_at(current, path)
        if table is None or last not in table:
            continue
        now = new.rpartition(".")[2]
        if now in table:
            raise ConfigError(f"{old} is refused: it is {new} now, which is given too.")
        # In place of the old one, so that printed tables keep their order.
        entries = [(now if name == last else name, value) for name, value in table.items()]
        table.clear()
        table.update(entries)
        renamed.append(_said(old, new))
        if old == "emulation.compression.method":  # a table had the numbers of all methods
            own = {"two_bit": "threshold", "top_k": "fraction"}.get(str(table["name"]))
            for number in {"threshold", "fraction"} - {own}:
                table.pop(number, None)
    for (field, value), now in RENAMED_VALUES.items():
        *path, last = field.split(".")
        table = _table_at(current, path)
        if table is not None and table.get(last) == value:
            table[last] = now
            renamed.append(_said(f'{field} = "{value}"', f'"{now}"'))
    return current, tuple(renamed)


def migrated_text(text: str) -> tuple[str, tuple[str, ...]]:
    """The text of a run file with current names, and a sentence for each name that was replaced.

    Raises:
        ConfigError: if old names are where only a person can replace them, or a field is given
            under both names.
        ValueError: if the text is not TOML.
    """
    wanted, renamed = migrated(tomllib.loads(text))
    if not renamed:
        return text, ()
    rewritten = "".join(_lines(text))
    try:
        is_same = tomllib.loads(rewritten) == wanted
    except ValueError:
        is_same = False
    if not is_same:
        raise ConfigError(
            f"it cannot be rewritten automatically: {', '.join(renamed)}. Rename them by hand."
        )
    return rewritten, renamed


def _lines(text: str) -> Iterator[str]:
    """The lines of a run file, with old names in headers and keys replaced."""
    table = ""
    for line in text.splitlines(keepends=True):
        if header := _HEADER.match(line):
            table = header[2].strip()
            yield header[1] + current_name(table) + header[3]
        elif entry := _ENTRY.match(line):
            field = f"{table}.{entry[2]}" if table else entry[2]
            now = current_name(field)
            prefix = current_name(table) + "." if table else ""
            yield entry[1] + now.removeprefix(prefix) + entry[3] + _value(entry[4], field)
        else:
            yield line


def _value(text: str, field: str) -> str:
    """What follows a key and its equals sign, with names in inline tables and values replaced."""
    for old, new in RENAMED_FIELDS.items():
        if old.startswith(f"{field}."):
            last, now = old.rpartition(".")[2], new.rpartition(".")[2]
            text = re.sub(rf"(?<![\w.]){last}(?=\s*[=.])", now, text)
    for (name, value), now in RENAMED_VALUES.items():
        last = name.rpartition(".")[2]
        if field == name:
            text = re.sub(rf"""^(\s*)(["']){value}\2""", rf"\1\2{now}\2", text)
        elif name.startswith(f"{field}."):
            text = re.sub(rf"""(?<![\w.])({last}\s*=\s*)(["']){value}\2""", rf"\1\2{now}\2", text)
    return text


def _table_at(tables: dict[str, JsonValue], path: list[str]) -> dict[str, JsonValue] | None:
    """The table at `path`, copied along the way so that it can be changed; None if there is none.
    Everything else is shared: tables of any depth may be there, to be refused later."""
    table = tables
    for name in path:
        inner = table.get(name)
        if not isinstance(inner, dict):
            return None
        own = dict(inner)
        table[name] = own
        table = own
    return table


def _said(old: str, new: str) -> str:
    return f"{old} is {new} now"


def _warn(text: str) -> None:
    warnings.warn(RenamedField(text), stacklevel=3)
