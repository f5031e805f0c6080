"""Reference of every field of a `run.toml`, generated from the config dataclasses.

Reads types, defaults and docstrings; knows none of the fields.
"""

import dataclasses
import inspect
import json
import types
import typing
from dataclasses import dataclass

from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError, unknown_name
from scalejax.core.schema import meanings
from scalejax.core.serialization import is_family


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReference:
    """One field of a `run.toml`."""

    name: str
    """Dotted name: "schedule.warmup"."""
    accepted: str
    """Accepted values: a type, or a list of names."""
    default: str
    """Default if it is left out; "required" if it has none."""
    meaning: str
    """Its docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReference:
    """One table of a `run.toml`, for one `name` that selects its class."""

    title: str
    """Its name and class: "[model] name = mlp"."""
    meaning: str
    """Docstring of its class."""
    fields: tuple[FieldReference, ...]
    """Its fields."""


def run_reference() -> list[TableReference]:
    """Every table of a `run.toml`, in order, with an entry for each of its classes."""
    top = _table(RunConfig, "")
    scalars = tuple(each for each in top.fields if "." not in each.name and each.accepted)
    tables = [dataclasses.replace(top, title="at the top", fields=scalars)]
    for field in dataclasses.fields(RunConfig):
        tables += _tables_of(_hints(RunConfig)[field.name], field.name)
    return tables


def named_reference(name: str) -> list[TableReference]:
    """The entries of `run_reference` for one table or field, by its dotted name: "layout",
    "model.block", "batch.microbatches".

    Raises:
        ConfigError: if there is no table or field of this name.
    """
    tables = run_reference()
    found = [dataclasses.replace(each, fields=_of_name(each, name)) for each in tables]
    found = [each for each in found if each.fields]
    if not found:
        names = {each.name for table in tables for each in table.fields}
        groups = {each.rpartition(".")[0] for each in names} - {""}
        table = name.rpartition(".")[0]
        known = {each for each in names if each.startswith(f"{table}.")}
        raise ConfigError(unknown_name("field", name, known or groups))
    return found


def containing(tables: list[TableReference], text: str) -> list[TableReference]:
    """The fields of `tables` whose name, values or meaning contain `text`, in any case.

    Raises:
        ConfigError: if no field does.
    """
    wanted = text.casefold()
    found = [
        dataclasses.replace(
            table,
            fields=tuple(
                each
                for each in table.fields
                if wanted in f"{each.name} {each.accepted} {each.meaning}".casefold()
            ),
        )
        for table in tables
    ]
    if not any(table.fields for table in found):
        raise ConfigError(f"--grep: no field has {text!r} in its name, values or meaning.")
    return [table for table in found if table.fields]


def _of_name(table: TableReference, name: str) -> tuple[FieldReference, ...]:
    """The field of this name, or the fields of the table of this name."""
    fields = (each for each in table.fields if each.accepted)
    return tuple(each for each in fields if f"{each.name}.".startswith(f"{name}."))


def _tables_of(hint: object, name: str) -> list[TableReference]:
    tables = []
    for kind in _kinds(hint):
        tables.append(_table(kind, name))
        for inner, inner_hint in _hints(kind).items():
            tables += _tables_of(inner_hint, f"{name}.{inner}")
    return tables


def _table(kind: type, name: str) -> TableReference:
    hints, texts = _hints(kind), meanings(kind)
    fields = tuple(
        FieldReference(
            name=f"{name}.{field.name}".lstrip("."),
            accepted=_accepted_here(hints[field.name]),
            default=_default(field),
            meaning=texts.get(field.name, ""),
        )
        for field in dataclasses.fields(kind)
    )
    names = typing.get_args(hints.get("name"))
    title = f"[{name}]" + (f" name = {' | '.join(names)}" if names else "")
    return TableReference(title=title, meaning=inspect.getdoc(kind) or "", fields=fields)


def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _kinds(hint: object) -> list[type]:
    """The dataclasses that a field may hold: none, one, or those of a family or union."""
    if is_family(hint):
        return list(hint.members())
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [kind for part in typing.get_args(hint) for kind in _kinds(part)]


def _accepted_here(hint: object) -> str:
    """What a field accepts, in words; "" if it is a table with its own fields."""
    if not _kinds(hint):
        return _accepted(hint)
    words = [part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal]
    return f"{_accepted(words[0])} | table" if words else ""


def _accepted(hint: object) -> str:
    """A type in words: "int", "none | linear | sqrt", "list of float"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_accepted(part) for part in parts if part is not type(None))
    if origin is tuple:
        return f"list of {_accepted(parts[0])}"
    if origin is dict:
        return "table"
    return {str: "text", bool: "true | false"}.get(hint, getattr(hint, "__name__", str(hint)))  # type: ignore[arg-type]


def _default(field: dataclasses.Field) -> str:  # type: ignore[type-arg]
    """As TOML, except that names and texts have no quotes, as in the accepted values."""
    value = field.default
    if value is dataclasses.MISSING:
        return "none" if field.default_factory is not dataclasses.MISSING else "required"
    if value is None:
        return "absent"
    if dataclasses.is_dataclass(value):
        return "none"
    # JSON and TOML write numbers, lists and booleans alike.
    return value if isinstance(value, str) else json.dumps(value)
