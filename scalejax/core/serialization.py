"""Serialization of dataclasses to and from TOML and JSON; invalid input is refused in a sentence.

The dataclasses are the schema; this file adds nothing to it. It knows files and types, but not what
the types mean.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import tempfile
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import Discriminator, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json

from scalejax.core.errors import ConfigError, nearest_name, refusal, unknown_name

T = TypeVar("T")
_WHOLE_BOUND = 2**63
"""TOML's whole numbers have 64 bits (TOML 1.0.0, "Integer"), one of them the sign."""
_MOST_DEPTH = 50
"""Deepest nesting of lists and tables: pydantic reads 200 levels, and no field needs ten."""
_MOST_NAMES = 100
"""Number of names from which a dotted key is refused."""
_NAME = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_NAME}[ \t]*+\.[ \t]*+){{{_MOST_NAMES - 1}}}")
_MOST_SENTENCES = 20
"""Most problems of one document that are listed."""
BY_NAME = Discriminator("name")
"""Annotation of a union of some members of a family, also distinguished by their `name`."""
JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def load_toml(path: Path) -> dict[str, JsonValue]:
    """The tables of a TOML file.

    Raises:
        ConfigError: if the file does not exist, or is not TOML (with line and column).
    """
    text = _read(path)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_toml(text: str) -> dict[str, JsonValue]:
    """The tables of a TOML text.

    Raises:
        ValueError: if it is not TOML, with line and column except for tables nested too deeply and
            whole numbers that are too long.
    """
    if found := _LONG_KEY.search(text):  # tomllib's memory grows with the square of its names
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key has {_MOST_NAMES} names or more (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("lists and tables lie too deep in one another to be read") from error


def parse_value(text: str) -> JsonValue:
    """The value of a flag: parsed if it is TOML ("3", "true", "[1, 2]"), else the text itself."""
    try:
        value = parse_toml(f"value = {text}")["value"]
        json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return text
    return value


def flag_text(value: JsonValue) -> str:
    """The text of a flag that `parse_value` reads as `value`."""
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return json.dumps(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent else []
        closest = nearest_name(path.name, siblings)
        hint = f" (did you mean {str(path.parent / closest)!r}?)" if closest else ""
        raise ConfigError(f"{str(path)!r} does not exist{hint}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error


class Family:
    """Base of an open family of dataclasses, whose members are distinguished by their `name`.

    A direct subclass is a family, and its subclasses are members: a field of the family's type may
    hold any of them, and a member can be read once its module has been imported.
    """

    __slots__ = ()
    unnamed: typing.ClassVar[str | None] = None
    """Name of the member that a table without a name is read as; None if tables need a name."""
    _members: typing.ClassVar[list[type]]

    def __init_subclass__(cls) -> None:
        if Family in cls.__bases__:
            cls._members = []
        else:
            cls._members.append(cls)
            _adapter.cache_clear()

    @classmethod
    def members(cls) -> tuple[type, ...]:
        """The classes of the family that a `name` selects, in order of definition."""
        return tuple(dict.fromkeys(cls._by_name().values()))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every `name` of a member."""
        return tuple(cls._by_name())

    @classmethod
    def _by_name(cls) -> dict[str, type]:
        """The member that each `name` selects.

        Raises:
            ConfigError: if two members have the same name.
        """
        # The last class of a name counts: `dataclass(slots=True)` creates each class a second time,
        # as does a second import of its module. Only now do both have their final `__qualname__`.
        last = {(each.__module__, each.__qualname__): each for each in cls._members}
        found: dict[str, type] = {}
        for member in last.values():
            for name in _tags(member):
                if (other := found.setdefault(name, member)) is not member:
                    both = " and ".join(f"{e.__module__}.{e.__qualname__}" for e in (other, member))
                    raise ConfigError(f"{both} have the same name {name!r}: rename one of them.")
        return found

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type["Family"], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if Family not in source.__bases__:
            return handler(source)
        choices = {
            name: handler.generate_schema(member) for name, member in source._by_name().items()
        }
        usual = source.unnamed

        def name_of(member: object) -> str:
            found = getattr(member, "name", None)  # any value may come here, before it is refused
            found = member.get("name") if isinstance(member, dict) else found
            return str(usual if found is None else found)

        return core_schema.tagged_union_schema(choices, name_of if usual else "name")


def build(type_: type[T], value: JsonValue, *, where: str = "") -> T:
    """A `type_` (a dataclass, a family or a union of them) from plain data, strictly typed.

    Integers are accepted as floats, nothing else is converted; unknown keys are refused.

    Args:
        type_: what to build.
        value: tables, lists and scalars, as read from TOML or JSON.
        where: dotted prefix of the field names in messages.

    Raises:
        ConfigError: one line per problem: field, value, what is accepted, nearest fix.
    """
    _require_plain(value, where)
    # Via JSON, because strict JSON mode accepts a list for a tuple and converts nothing else.
    built = _validate(type_, json.dumps(value, default=str), where)
    _require_no_boolean_for_a_number(value, built, where)
    return built


def _require_no_boolean_for_a_number(value: JsonValue, built: object, where: str) -> None:
    """Refuse true if 1 is among the choices of a field: pydantic, like Python, takes them as
    equal."""
    match value:
        case bool() if isinstance(built, int) and not isinstance(built, bool):
            raise ConfigError(refusal(where, value, "it must be a whole number"))
        case dict() if dataclasses.is_dataclass(built):
            for name, inner in value.items():
                named = f"{where}.{name}" if where else name
                _require_no_boolean_for_a_number(inner, getattr(built, name, None), named)


def _require_plain(value: JsonValue, where: str, depth: int = 0) -> None:
    """Before validation, refuse whole numbers beyond 64 bits, NaN, which passes every check that is
    written as a comparison to refuse, and nesting beyond `_MOST_DEPTH`."""
    match value:
        case float() if math.isnan(value):
            raise ConfigError(refusal(where or "the whole document", value, "it must be a number"))
        case int() if not -_WHOLE_BOUND <= value < _WHOLE_BOUND:
            accepted = "a whole number must fit 64 bits, as TOML has it"
            raise ConfigError(refusal(where or "the whole document", value, accepted))
        case dict() | list() if depth > _MOST_DEPTH:
            name = ".".join(where.split(".")[:2])
            raise ConfigError(
                f"{name or 'the whole document'} is refused: lists and tables lie more than "
                f"{_MOST_DEPTH} deep in one another."
            )
        case dict():
            for name, inner in value.items():
                named = name or '""'
                _require_plain(inner, f"{where}.{named}" if where else named, depth + 1)
        case list():
            for index, inner in enumerate(value):
                _require_plain(inner, f"{where}.{index}" if where else str(index), depth + 1)


def _validate(type_: type[T], text: str, where: str = "") -> T:
    try:
        return _adapter(type_).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        details = _of_meant_kind(error.errors(include_url=False))
        sentences = [_sentence(type_, detail, where) for detail in details[:_MOST_SENTENCES]]
        if more := len(details) - len(sentences):
            sentences.append(f"And {more:,} more problems of the same document.")
        raise ConfigError("\n".join(sentences)) from error


def plain(value: object) -> JsonValue:
    """The tables, lists and scalars of a dataclass; the inverse of `build`."""
    return json.loads(_adapter(type(value)).dump_json(value))


KIND, VERSION = "kind", "version"
"""The fields of a JSON file that say what it is."""
_DOCUMENTS: dict[object, tuple[str, int]] = {}
"""(kind, version) of each type that is written as a JSON file."""


def document(kind: str, version: int = 1) -> Callable[[type[T]], type[T]]:
    """Class decorator: files that `save` writes for the class say that they are of this kind.

    Raise the version when older readers would misunderstand the fields.
    """

    def register(type_: type[T]) -> type[T]:
        _DOCUMENTS[type_] = kind, version
        return type_

    return register


def document_of(type_: object) -> tuple[str, int]:
    """Kind and version of the files that are written for a class."""
    return _DOCUMENTS[type_]


def documents() -> dict[str, type]:
    """The document classes of all imported modules, by kind."""
    return {kind: type_ for type_, (kind, _) in _DOCUMENTS.items() if isinstance(type_, type)}


def stamped(kind: str, version: int, fields: Mapping[str, JsonValue]) -> str:
    """A JSON document that states its kind and version."""
    return json.dumps({KIND: kind, VERSION: version, **fields}, indent=1) + "\n"


def unstamped(kind: str, version: int, fields: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The fields of a document of this kind, at most this version; older documents state neither.

    Raises:
        ConfigError: if it is of another kind or a later version.
    """
    if (found := fields.get(KIND, kind)) != kind:
        raise ConfigError(refusal(KIND, found, f"a document of kind {kind!r} is needed here"))
    written = fields.get(VERSION, version)
    if not isinstance(written, int) or not 1 <= written <= version:
        accepted = f"of {kind!r} it must be 1 to {version}; a later scalejax reads later ones"
        raise ConfigError(refusal(VERSION, written, accepted))
    return {name: value for name, value in fields.items() if name not in (KIND, VERSION)}


_MANY_DIGITS = re.compile(r"\d{19}")


def load(type_: type[T], path: Path) -> T:
    """A `type_` from a JSON file that `save` wrote, in this version or an earlier one.

    Raises:
        ConfigError: if the file is missing, damaged, or holds something else.
    """
    text = _read(path)
    try:
        # Seldom true, mostly for a fraction or a word; `in` is fast, and `save` writes no NaN.
        if "NaN" in text or _MANY_DIGITS.search(text):
            value = None
            with contextlib.suppress(ValueError):  # invalid JSON is refused below
                value = from_json(text)
            _require_plain(value, "")
        if type_ in _DOCUMENTS:
            fields = _validate(dict, text)
            if KIND in fields:
                text = json.dumps(unstamped(*_DOCUMENTS[type_], fields))
        return _validate(type_, text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def kind_of(path: Path) -> str | None:
    """The kind that a JSON file states; None if it states none.

    Raises:
        ConfigError: if the file is missing or damaged.
    """
    kind = load(dict, path).get(KIND)
    return kind if isinstance(kind, str) else None


def save(value: object, path: Path) -> None:
    """Write a `document` as JSON, all or nothing: a reader never sees half a file."""
    kind, version = _DOCUMENTS[type(value)]
    text = _adapter(type(value)).dump_json(value, indent=1).decode()
    head = f'{{\n "{KIND}": "{kind}",\n "{VERSION}": {version},'
    save_text(f"{head}{text.removeprefix('{')}\n", path)


def save_text(text: str, path: Path) -> None:
    """Write a text file, all or nothing.

    Raises:
        ConfigError: if the file cannot be written.
    """
    save_bytes(text.encode(), path)


def save_bytes(data: bytes, path: Path) -> None:
    """Write a file, all or nothing.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        make_folder(path.parent)
        with draft_of(path) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}.") from error


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[BinaryIO]:
    """A file next to `path` that replaces it once written and on disk; if the block raises, the
    file is removed.

    Its name cannot be guessed, and it is new: others who can write to the folder cannot have put a
    file or link there. The folder is synced last, so that both name and content survive a power
    cut.

    Raises:
        OSError: if it cannot be written.
    """
    draft = path.absolute().parent / f".{path.name}.{secrets.token_hex(8)}"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(draft.parent)
    finally:
        with contextlib.suppress(OSError):  # the first error is already reported
            draft.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; their names are then on disk.

    Raises:
        OSError: if it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def sync_file(path: Path) -> None:
    """Flush the content of a file to disk, whoever wrote it.

    Raises:
        OSError: if that fails.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; does nothing if the folder cannot be opened."""
    with contextlib.suppress(OSError):  # some network file systems refuse it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def require_writable(field: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it will hold.

    Leaves nothing on disk; None is accepted.

    Raises:
        ConfigError: naming the field and the reason.
    """
    if path is None:
        return
    with _naming(field, path):
        if path.is_dir():
            raise ConfigError(refusal(field, str(path), "it is a folder, and must be a file"))
        _require_room(field, path, path.absolute().parent)


def require_writable_folder(field: str, path: Path | None) -> None:
    """Refuse a folder, existing or new, that cannot be written; None is accepted.

    Raises:
        ConfigError: naming the field and the reason.
    """
    if path is not None:
        with _naming(field, path):
            _require_room(field, path, path.absolute())


def _require_room(field: str, path: Path, folder: Path) -> None:
    """Refuse `path` unless files can be created in `folder`, or in its nearest existing parent."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(refusal(field, str(path), f"{str(there)!r} is a file, not a folder"))
    with tempfile.TemporaryFile(dir=there):  # permission bits do not tell for a superuser
        pass


@contextlib.contextmanager
def _naming(field: str, path: Path) -> Iterator[None]:
    """Turn an OSError about a path into a refusal that names `field`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(refusal(field, str(path), f"it cannot be written ({error})")) from error


def save_toml(value: object, path: Path) -> None:
    """Write a dataclass of tables, scalars and lists as TOML, all or nothing.

    Raises:
        ConfigError: if the folder cannot be written.
    """
    save_text(_toml(plain(value)), path)


def _toml(tables: JsonValue, prefix: str = "") -> str:
    """Nested tables of scalars and lists as TOML; None values are left out.

    JSON and TOML write numbers, strings, lists and booleans alike.
    """
    if not isinstance(tables, dict):
        return ""
    lines = [
        f"{_key(name)} = {_list(value)}\n"
        for name, value in tables.items()
        if value is not None and not _is_table(value)
    ]
    for name, value in tables.items():
        path = f"{prefix}.{_key(name)}" if prefix else _key(name)
        if isinstance(value, dict):
            lines.append(f"\n[{path}]\n{_toml(value, path)}")
        elif isinstance(value, list) and _is_table(value):
            lines.extend(f"\n[[{path}]]\n{_toml(item, path)}" for item in value)
    return "".join(lines)


def _is_table(value: JsonValue) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )


def _list(value: JsonValue) -> str:
    """A value on one line, or a list of lists with a line for each."""
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        rows = "".join(f"    {json.dumps(item)},\n" for item in value)
        return f"[\n{rows}]"
    return json.dumps(value)


def _key(name: str) -> str:
    """A key, in quotes if TOML needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


@cache
def _adapter(type_: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(type_)


_EXPECTED = {
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "bool_type": "it must be true or false",
    "string_type": "it must be a text in quotes",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "dataclass_type": "it must be a table",
    "dict_type": "it must be a table",
}


def _of_meant_kind(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """`details` without those of the kind that was not meant, if a field may be a word or a table:
    pydantic says why neither fits, with the kind in the path."""
    for detail in details:
        for place, part in enumerate(detail["loc"]):
            if not str(part).startswith("literal["):
                continue
            before, is_table = detail["loc"][:place], isinstance(detail["input"], dict)
            kept: list[ErrorDetails] = []
            for each in details:
                kind = each["loc"][place : place + 1]
                if each["loc"][:place] != before:
                    kept.append(each)
                elif (kind == (part,)) != is_table:
                    each["loc"] = (*before, *each["loc"][place + 1 :])
                    kept.append(each)
            details = kept
    return details


def _sentence(type_: object, detail: ErrorDetails, where: str) -> str:
    """An error of pydantic as a refusal: field, value, what is accepted, nearest fix."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "json_invalid":
        return f"this is not valid JSON: {context['error']}."
    if isinstance(error := context.get("error"), ConfigError):
        return str(error)  # raised by the dataclass itself, and names the field
    owner, path = _descend(type_, detail["loc"])
    parts = ([where] if where else []) + [part or '""' for part in path]
    field = ".".join(parts) or "the whole document"
    if kind == "unexpected_keyword_argument":
        accepted = [f.name for f in dataclasses.fields(owner)]  # type: ignore[arg-type]
        closest = nearest_name(path[-1], accepted)
        hint = f" (did you mean {closest!r}?)" if closest else ""
        return f"{field} is not a field{hint}. Accepted here: {', '.join(sorted(accepted))}."
    if kind == "missing":
        return f"{field} is missing."
    if kind == "literal_error":
        names = [part.strip("' ") for part in context["expected"].replace(" or ", ", ").split(",")]
        return unknown_name(field, detail["input"], names)
    if kind == "union_tag_invalid":
        names = [part.strip("' ") for part in context["expected_tags"].split(",")]
        # If one of the kinds needs no name, pydantic has a function instead of the field.
        return unknown_name(f"{field}.name", context["tag"], names)
    if kind == "union_tag_not_found":
        return f"{field}.{context['discriminator']} is missing.".replace("'", "")
    message = detail["msg"].removeprefix("Value error, ")
    return refusal(field, detail["input"], _EXPECTED.get(kind, message[:1].lower() + message[1:]))


def _descend(type_: object, location: tuple[int | str, ...]) -> tuple[object, list[str]]:
    """The dataclass that holds the last part of `location`, and the path without union tags."""
    owner, path = type_, []
    for position, part in enumerate(location):
        options = [t for t in _options(owner) if dataclasses.is_dataclass(t)]
        tagged = [t for t in options if part in _tags(t)]
        if len(options) > 1 and tagged:
            owner = tagged[0]
            continue
        path.append(str(part))
        if position == len(location) - 1:
            owner = options[0] if options else owner
        elif isinstance(part, str) and options:
            owner = typing.get_type_hints(options[0], include_extras=True).get(part, owner)
    return owner, path


def _options(type_: object) -> list[object]:
    """The members of a family or (possibly annotated) union; the type itself if it is neither."""
    if is_family(type_):
        return list(type_.members())
    if typing.get_origin(type_) is typing.Annotated:
        return _options(typing.get_args(type_)[0])
    members = typing.get_args(type_)
    if not members or isinstance(type_, type):
        return [type_]
    return [option for member in members for option in _options(member)]


def is_family(type_: object) -> "typing.TypeGuard[type[Family]]":
    """Whether a type is itself a family, not a member of one."""
    return isinstance(type_, type) and Family in type_.__bases__


def _tags(type_: object) -> tuple[str, ...]:
    """The discriminating names of a union member, if it has any."""
    hint = typing.get_type_hints(type_).get("name")
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
