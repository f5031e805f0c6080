"""What fuzzing puts in the place of what is right: values, trees of tables, texts and bytes.

Everything is drawn from the `random.Random` that is given, so that a case is its seed. Knows TOML,
JSON and the wire format of protocol buffers, and nothing of what the fields mean.
"""

import copy
import datetime
import json
import math
import random
from pathlib import Path
from typing import Any

from scalejax.core.serialization import parse_toml

Tree = dict[str, Any]

WHOLE = (0, -1, 1, 2, 3, 7, 1000, 2**31, 2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**70, -(2**63))
HUGE_WHOLE = (10**400, -(10**400))
REAL = (math.nan, math.inf, -math.inf, -0.0, 0.5, -1.5, 1e-300, 5e-324, 1e18, 1e200, 1e308, -1e308)
TEXTS = (
    "", " ", "x", "0", "none", "true", "mlp", "\x00", "\x1b[31m", "a\nb", "é", "名前", "\U0001f600",
    "\u202e", "../../x", "/dev/zero", "/proc/self/mem", "s3://no/where", "{0}", "%s%n",
    "[red]x[/red]", "[/]", "'", '"', "\\", "x" * 5000, "os:system", "a:b:c", ":", "a.b.c", "*", "[",
    "~",
)  # fmt: skip
DATES = (
    datetime.datetime(1979, 5, 27, 7, 32, tzinfo=datetime.UTC),
    datetime.date(1979, 5, 27),
    datetime.time(7, 32),
)
_FLIPPED = bytes(range(256))


def hostile(draw: random.Random, old: object = None) -> Any:
    """A value that a field hardly expects; near `old` now and then."""
    kind = draw.randrange(12)
    if kind == 0 and isinstance(old, int | float) and not isinstance(old, bool):
        return draw.choice([-old, old + 1, old * 2**40, old / 7, str(old), [old], bool(old)])
    if kind <= 3:
        return draw.choice(WHOLE)
    if kind <= 5:
        return draw.choice(REAL)
    if kind <= 7:
        return draw.choice(TEXTS)
    if kind == 8:
        return draw.choice([True, False])
    if kind == 9:
        return draw.choice(
            [[], [[]], [math.nan], [1, "a"], [-1], [2**63], [0, 0], [{}], [1] * 3000]
        )
    if kind == 10:
        return draw.choice([{}, {"name": "x"}, {"": 1}, {"a": {"b": {"c": 1}}}, nested(30)])
    return draw.choice([*HUGE_WHOLE, *DATES])


def nested(depth: int) -> Any:
    """A table in a table, and so on."""
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def misspelt(draw: random.Random, name: str) -> str:
    """`name` with one letter less, more, another, or two swapped."""
    at = draw.randrange(len(name)) if name else 0
    other = draw.choice("abcxyz_é-")
    return draw.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + other + name[at:],
            name[:at] + other + name[at + 1 :],
            name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            name.upper(),
            name + "s",
            "",
        ]
    )


def leaves(tree: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Scalars and lists by path; an empty table is one too, and one that lies very deep."""
    if len(path) > 60:
        return {path: "deep"}
    if isinstance(tree, dict) and tree:
        found: dict[tuple[str, ...], Any] = {}
        for name, value in tree.items():
            found |= leaves(value, (*path, name))
        return found
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        found = {}
        for index, item in enumerate(tree):
            found |= leaves(item, (*path, str(index)))
        return found
    return {path: tree}


def differing(before: Tree, after: Tree) -> set[tuple[str, ...]]:
    """Paths of what is not in both trees alike."""
    old, new = leaves(before), leaves(after)
    return {path for path in old.keys() | new.keys() if _told(old, path) != _told(new, path)}


def _told(values: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> str:
    return repr(values[path]) if path in values else "absent"


def place(tree: Tree, path: tuple[str, ...], value: object) -> None:
    """Put `value` at `path`, through tables that are made where they are missing."""
    inner: Any = tree
    for part in path[:-1]:
        if isinstance(inner, list) and part.isdigit() and int(part) < len(inner):
            inner = inner[int(part)]
            continue
        inner = _table_in(inner)
        if not isinstance(inner.get(part), dict | list):
            inner[part] = {}
        inner = inner[part]
    if isinstance(inner, list) and path[-1].isdigit() and int(path[-1]) < len(inner):
        inner[int(path[-1])] = value
    else:
        _table_in(inner)[path[-1]] = value


def _table_in(inner: Any) -> Any:
    """`inner`, or, of a list, its first table, which is made if there is none."""
    if not isinstance(inner, list):
        return inner
    if not (inner and isinstance(inner[0], dict)):
        inner.insert(0, {})
    return inner[0]


def remove(tree: Tree, path: tuple[str, ...]) -> Any:
    """Take what is at `path` out."""
    inner: Any = tree
    for part in path[:-1]:
        inner = inner[int(part)] if isinstance(inner, list) else inner[part]
    return inner.pop(int(path[-1])) if isinstance(inner, list) else inner.pop(path[-1], None)


def changed(draw: random.Random, tree: Tree, fields: tuple[tuple[str, ...], ...] = ()) -> Tree:
    """A copy of `tree` with one thing wrong, or two.

    Args:
        draw: decides everything.
        tree: what is right.
        fields: paths of fields that there may be besides.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 1, 2])):
        _change(draw, tree, fields)
    return tree


def _change(draw: random.Random, tree: Tree, fields: tuple[tuple[str, ...], ...]) -> None:
    known = [path for path in leaves(tree) if path]
    if not known:
        return
    path = draw.choice(known)
    kind = draw.randrange(10)
    if kind <= 3:
        place(tree, path, hostile(draw, leaves(tree)[path]))
    elif kind <= 6 and fields:
        place(tree, draw.choice(fields), hostile(draw))
    elif kind == 7:
        value = remove(tree, path)
        if not path[-1].isdigit():
            place(tree, (*path[:-1], misspelt(draw, path[-1])), value)
    elif kind == 8:
        remove(tree, path[: draw.randint(1, len(path))])
    else:  # nested in place of flat, or flat in place of nested
        at = path[: draw.randint(1, len(path))]
        value = remove(tree, at)
        if at[-1].isdigit():
            return
        place(tree, at, draw.choice([{"value": value}, [value], hostile(draw), [[value]]]))


def toml(tree: Tree) -> str:
    """`tree` as TOML; what is no TOML (an empty document of scalars) never comes here."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, value in tree.items():
        if isinstance(value, dict):
            lines += [f"\n[{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in value.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return _key(value) if isinstance(value, str) else str(value)


def parsed(text: bytes) -> Tree | None:
    """The tables of a TOML text; None if it is none."""
    try:
        return parse_toml(text.decode())
    except ValueError:
        return None


def damaged_text(draw: random.Random, text: bytes) -> bytes:
    """`text` with bytes flipped, cut off, doubled, or with what no text file has."""
    kind = draw.randrange(9)
    at = draw.randrange(len(text) + 1)
    if kind <= 2:
        return damaged_bytes(draw, text)
    if kind == 3:
        return text[:at]
    if kind == 4:  # a table twice
        start = text.find(b"[", at)
        return text + b"\n" + text[max(start, 0) :]
    if kind == 5:
        odd = [
            b"\xff\xfe",
            b"\xc3",
            b"\x00",
            "\ufeff".encode(),
            b"\xed\xa0\x80",
            b"\r",
            b"=",
            b"]]",
        ]
        return text[:at] + draw.choice(odd) + text[at:]
    if kind == 6:
        depth = draw.choice([50, 500, 5000, 50_000])
        deep = [
            "x = " + "[" * depth + "]" * depth,
            "x = " + "{a=" * depth + "1" + "}" * depth,
            ".".join(["a"] * depth) + " = 1",
            "[" + ".".join(["a"] * depth) + "]",
            "x = " + "9" * depth,
            "x = " + "[" * depth,
        ]
        line = draw.choice(deep).encode()
        return text + b"\n" + line + b"\n" if draw.random() < 0.5 else line + b"\n" + text
    if kind == 7:
        lines = text.split(b"\n")
        line = draw.randrange(len(lines))
        lines.insert(draw.randrange(len(lines)), lines.pop(line))
        return b"\n".join(lines)
    return draw.choice([b"", b"\n", b"[]", b"\x00" * 100, b"model", text.decode().encode("utf-16")])


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes flipped, a piece cut out, zeroed or doubled, or the end cut off."""
    if not data:
        return b"\x00"
    out = bytearray(data)
    kind, at = draw.randrange(6), draw.randrange(len(data))
    length = draw.choice([1, 4, 100, len(data) // 3 + 1])
    if kind <= 1:
        for _ in range(draw.choice([1, 1, 2, 8])):
            out[draw.randrange(len(out))] = draw.randrange(256)
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        del out[at : at + length]
    elif kind == 4:
        out[at : at + length] = bytes(len(out[at : at + length]))
    else:
        out[at:at] = out[at : at + length]
    return bytes(out)


def damaged_toml(draw: random.Random, tree: Tree) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """A text, what exactly differs in it from `tree`, and what that lies in."""
    if draw.random() < 0.7:
        text = toml(changed(draw, tree)).encode("utf-8", "replace")
    else:
        text = damaged_text(draw, toml(tree).encode())
    after = parsed(text)
    if after is None:
        return text, (".toml",), ()
    paths = differing(tree, after)
    exact = {".".join(path) for path in paths} | {path[-1] for path in paths if path}
    return text, tuple(exact), tuple({part for path in paths for part in path})


def damaged_json(draw: random.Random, path: Path) -> tuple[str, ...]:
    """Damage a file of JSON, or of a line of JSON each; what differs in it."""
    data = path.read_bytes()
    if draw.random() < 0.4:
        path.write_bytes(damaged_text(draw, data))
        return (path.name,)
    lines = [data.decode()] if path.suffix == ".json" else data.decode().splitlines()
    which = draw.randrange(len(lines))
    before = json.loads(lines[which])
    after = changed(draw, before, tuple(each for each in leaves(before) if each))
    lines[which] = json.dumps(after, default=str)
    path.write_bytes(("\n".join(lines) + "\n").encode("utf-8", "replace"))
    paths = differing(before, after)
    return (*{part for each in paths for part in each}, path.name)


# Messages of protocol buffers: numbered fields, of which those of bytes may be messages again.

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_Field = tuple[int, int, Any]


def damaged_message(draw: random.Random, data: bytes) -> bytes:
    """A message in which one number is another, or one field is gone, doubled, or other bytes."""
    fields = _fields_of(data)
    if not fields:
        return damaged_bytes(draw, data)
    at = draw.randrange(len(fields))
    number, kind, value = fields[at]
    sort = draw.randrange(8)
    if kind == _BYTES and sort > 1 and value:
        fields[at] = number, kind, damaged_message(draw, value)
    elif sort == 0:
        del fields[at]
    elif sort == 1:
        fields.insert(at, fields[at])
    elif kind == _BYTES:
        fields[at] = number, kind, draw.choice(TEXTS).encode()
    elif kind == _VARINT:
        fields[at] = number, kind, draw.choice(WHOLE) % 2**64
    else:
        fields[at] = number, kind, draw.randbytes(len(value))
    return b"".join(_written(*field) for field in fields)


def _fields_of(data: bytes) -> list[_Field]:
    """The fields of a message; none if it is no message."""
    found: list[_Field] = []
    at = 0
    while at < len(data):
        key, at = _number_at(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _number_at(data, at)
            found.append((number, kind, value))
            continue
        if kind == _BYTES:
            length, at = _number_at(data, at)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            return []
        if not number or at + length > len(data):
            return []
        found.append((number, kind, data[at : at + length]))
        at += length
    return found if at == len(data) else []


def _number_at(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return value, len(data) + 1
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            break
    return value, at


def _written(number: int, kind: int, value: Any) -> bytes:
    key = _varint(number << 3 | kind)
    if kind == _VARINT:
        return key + _varint(value)
    return key + (_varint(len(value)) if kind == _BYTES else b"") + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
