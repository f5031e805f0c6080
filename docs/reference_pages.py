"""Pages of the site that are made from the code: commands, fields, names, hardware, frameworks.

Text in, Markdown out; knows nothing of what builds the site. `build_site.py` asks for them.
"""

import ast
import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import scalejax
from scalejax.cli.command import Command, OverridingCommand
from scalejax.cli.commands import COMMANDS
from scalejax.cli.main import main
from scalejax.config.reference import FieldReference, run_reference
from scalejax.core import errors
from scalejax.core.schema import meanings
from scalejax.hardware import chip_names, cluster_names
from scalejax.simulator.frameworks import FRAMEWORKS

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 80
"""Columns of what a command prints on a page."""


def pages() -> dict[str, Callable[[], str]]:
    """What makes each page, by the page's path."""
    return {
        "reference/commands.md": commands_page,
        "reference/run-file.md": run_file_page,
        "reference/python.md": python_page,
        "reference/clusters.md": clusters_page,
        "reference/chips.md": chips_page,
        "reference/frameworks.md": frameworks_page,
        "reference/exit-codes.md": exit_codes_page,
        "explanation/architecture.md": lambda: root_page("ARCHITECTURE.md"),
        "changelog.md": lambda: root_page("CHANGELOG.md"),
        "explanation/releases.md": releases_page,
    }


@cache
def run(command: str) -> str:
    """What a command prints, 80 columns wide, run in the folder of the repository. What this
    machine has compiled or measured before is not seen.

    Args:
        command: as it is typed: "scalejax hardware dgx-h100".

    Raises:
        RuntimeError: if it does not end well, with what it said.
    """
    printed, said = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as cache,
        contextlib.chdir(ROOT),
        _environment(COLUMNS=str(WIDTH), NO_COLOR="1", SCALEJAX_CACHE=cache),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        try:
            code = main(shlex.split(command)[1:])
        except SystemExit as stop:  # --help
            code = stop.code
    if code:
        raise RuntimeError(f"{command} ended with exit code {code}: {said.getvalue().strip()}")
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def with_output(markdown: str) -> str:
    """`markdown` with what each command of a block "console" prints below it."""

    def ran(block: re.Match[str]) -> str:
        lines = [line.removeprefix("$ ") for line in block[1].strip().splitlines()]
        parts = (f"$ {line}\n{run(line)}" for line in lines)
        return "```console\n" + "\n\n".join(parts) + "\n```"

    return re.sub(r"^```console\n(.*?)^```", ran, markdown, flags=re.MULTILINE | re.DOTALL)


def with_docstrings(markdown: str) -> str:
    """`markdown` with the docstring of each function, or module, that a line `::: module:name`, or
    `::: module`, names."""
    line = re.compile(r"^::: (scalejax[\w.]*)(?::(\w+))?$", re.MULTILINE)
    return line.sub(lambda it: _docstring_of(it[1], it[2]), markdown)


def with_tables(markdown: str) -> str:
    """`markdown` with the table of the README that begins as a line `::: README.md | ...` says."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    def table(line: re.Match[str]) -> str:
        found = readme.partition(f"\n{line[1]}")
        if not found[1]:
            raise RuntimeError(f"{line[0]}: the README has no such table.")
        return line[1] + found[2].partition("\n\n")[0]

    return re.sub(r"^::: README\.md (\|.*)$", table, markdown, flags=re.MULTILINE)


def commands_page() -> str:
    """Every command with its flags."""
    parts = [
        "# Commands",
        "Every command, made from its code; `scalejax COMMAND --help` prints the same.",
        "A command that reads a `run.toml` takes any of its fields as a flag with a dot, such as "
        "`--train.epochs 20`.",
        _table(
            ("command", "what it does"),
            [
                (f"[`scalejax {name}`](#{_anchor(f'scalejax {name}')})", _first_line(kind))
                for name, kind in COMMANDS.items()
            ],
        ),
    ]
    for name, kind in COMMANDS.items():
        parts += [f"## scalejax {name}", inspect.getdoc(kind) or "", _flags(kind)]
        if issubclass(kind, OverridingCommand):
            parts.append("Fields of the `run.toml` are [flags too](run-file.md).")
    return _joined(parts)


def run_file_page() -> str:
    """Every field of a `run.toml`."""
    parts = [
        "# Fields of a run.toml",
        "Every table and field, made from the code; `scalejax config fields NAME` prints the same, "
        "and `scalejax config fields --grep TEXT` those with a word in them.",
        "A table whose `name` chooses among several is here once for each.",
    ]
    for table in run_reference():
        told = [each for each in table.fields if each.accepted]
        parts += [f"## {_escaped(table.title)}", table.meaning]
        parts.append(_table(("field", "takes", "default", "what it is"), map(_field_row, told)))
    return _joined(parts)


def python_page() -> str:
    """Every public name of the package."""
    parts = [
        "# Python",
        "Every name that `from scalejax import ...` offers, made from its docstring.",
        ", ".join(f"[`{name}`](#{_anchor(name)})" for name in scalejax.__all__) + ".",
    ]
    for name in scalejax.__all__:
        thing = getattr(scalejax, name)
        parts.append(f"## {name}")
        if not inspect.isclass(thing):
            parts.append(_code(f"{name}{_signature(thing)}", "python"))
        parts.append(docstring(inspect.getdoc(thing) or ""))
        if dataclasses.is_dataclass(thing) and isinstance(thing, type):
            told = meanings(thing)
            rows = [(f"`{each.name}`", told.get(each.name, "")) for each in _fields(thing)]
            parts.append(_table(("field", "what it is"), rows))
    return _joined(parts)


def clusters_page() -> str:
    """Every cluster of the catalogue, with its sources."""
    intro = (
        "What `--cluster` takes, each number with its source; `scalejax hardware NAME` prints the "
        "same. A file of your own says only what is different (`based_on`, see "
        "[what-ifs](../how-to/rent-hardware.md#what-ifs))."
    )
    return _catalogue("Clusters", intro, cluster_names())


def chips_page() -> str:
    """Every chip of the catalogue, with its sources."""
    intro = "What clusters are made of, each number with its source."
    return _catalogue("Chips", intro, chip_names())


def frameworks_page() -> str:
    """Every framework, with what sets it apart."""
    intro = "What `--framework` takes, and what sets the step of each apart from XLA's."
    return _catalogue("Frameworks", intro, FRAMEWORKS)


def exit_codes_page() -> str:
    """How a process ends."""
    told = _meanings_of_members(errors.ExitCode)
    rows = [
        (str(int(each)), each.name.lower(), told.get(each.name, "")) for each in errors.ExitCode
    ]
    return _joined(
        [
            "# Exit codes",
            inspect.getdoc(errors.ExitCode) or "",
            _table(("code", "name", "what it says"), rows),
            "Which launchers start a run again after which is in "
            "[architecture](../explanation/architecture.md#exit-codes).",
        ]
    )


def releases_page() -> str:
    """How far off predictions were at each release, from the files that are kept of it."""
    parts = ["# Accuracy by release", _body("docs/accuracy/README.md")]
    for path in sorted((ROOT / "docs/accuracy").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"## {kept['release']}")
        for quantity in dict.fromkeys(cell["quantity"] for cell in kept["cells"]):
            rows = [
                (
                    cell["family"],
                    cell["framework"],
                    cell["chip"],
                    str(cell["rows"]),
                    *(_percent(cell[name]) for name in ("median_error", "mean_error", "bias")),
                    _percent(cell["coverage"]),
                )
                for cell in kept["cells"]
                if cell["quantity"] == quantity
            ]
            heads = ("family", "framework", "chip", "rows", "median", "mean", "bias", "in band")
            parts += [f"### {kept['release']}: {quantity}", _table(heads, rows)]
    return _joined(parts)


def root_page(name: str) -> str:
    """A document of the root of the repository; what it links to there is shown as a path."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)", r"`\1`", text)


def docstring(text: str) -> str:
    """A docstring as Markdown: its sections as bold words, its examples as code."""
    lines: list[str] = []
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Raises|Returns|Source|Example|Yields):(.*)", line)
        if heading:
            lines += ["", f"**{heading[1]}:**{heading[2]}", ""]
        else:
            lines.append(line)
    parts = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        if not block.strip():
            continue
        inner = inspect.cleandoc("\n" + block)
        if inner.startswith(">>>"):
            parts.append(_code(inner, "pycon"))
        elif re.match(r" {4}\w+: ", block):
            parts.append(_listed(inner))
        else:
            parts.append(inner)
    return "\n\n".join(parts)


def _listed(text: str) -> str:
    """Entries "name: meaning", each on its lines, as a list."""
    entries = re.split(r"\n(?=\S)", text)
    return "\n".join(re.sub(r"^(\w+): ", r"- `\1`: ", " ".join(entry.split())) for entry in entries)


def _docstring_of(module: str, name: str | None) -> str:
    """The docstring of a function or module, read off its source: nothing is imported.

    Its equations stay as they are typed; arguments, errors and examples are left out.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise RuntimeError(f"::: {module}: there is no such module.")
    parsed = _parsed(found.origin)
    text = ast.get_docstring(parsed)
    if name is not None:
        kinds = (ast.FunctionDef, ast.ClassDef)
        named = (each for each in ast.walk(parsed) if isinstance(each, kinds) and each.name == name)
        text = next(map(ast.get_docstring, named), None)
    if text is None:
        raise RuntimeError(f"::: {module}:{name}: there is none, or it has no docstring.")
    left_out = r"^(Args|Raises|Example|Returns):.*?(?=^\S|\Z)"
    shown = re.sub(left_out, "", text, flags=re.MULTILINE | re.DOTALL).strip()
    if not Path(found.origin).is_relative_to(ROOT):
        raise RuntimeError(
            f"scalejax is installed from elsewhere ({found.origin}): pip install -e '.[docs]'."
        )
    where = f"`{Path(found.origin).relative_to(ROOT)}`"
    title = where if name is None else f"`{name}`, {where}"
    return f"{title}:\n\n``` {{.text .docstring}}\n{shown}\n```"


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _flags(kind: type[Command]) -> str:
    hints = typing.get_type_hints(kind, include_extras=True)
    told = meanings(kind)
    rows = []
    for field in _fields(kind):
        flag, values = _flag(field.name, hints[field.name])
        rows.append((f"`{flag}`", values, _default(field), told.get(field.name, "")))
    return _table(("flag", "takes", "default", "what it is"), rows) if rows else ""


def _flag(name: str, hint: object) -> tuple[str, str]:
    """A flag as it is typed, and what it takes."""
    notes = getattr(hint, "__metadata__", ())
    shown = next((each.metavar for each in notes if getattr(each, "metavar", None)), None)
    renamed = next((each.name for each in notes if getattr(each, "name", None)), None)
    flag = f"--{(renamed or name.rstrip('_')).replace('_', '-')}"
    if any("positional" in repr(each).lower() for each in notes):
        return shown or name.upper(), ""
    inner = typing.get_args(hint)[0] if notes else hint
    if shown is None and typing.get_origin(inner) is typing.Literal:
        shown = ", ".join(map(str, typing.get_args(inner)))
    if shown is None and inner is bool:
        return flag, ""
    return flag, _escaped(shown or getattr(inner, "__name__", str(inner)))


def _default(field: dataclasses.Field[typing.Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    if value is None or value is False or value == ():
        return ""
    return f"`{value}`"


def _field_row(field: FieldReference) -> Sequence[str]:
    return (f"`{field.name}`", _escaped(field.accepted), f"`{field.default}`", field.meaning)


def _fields(kind: type) -> tuple[dataclasses.Field[typing.Any], ...]:
    return dataclasses.fields(kind)


def _signature(thing: Callable[..., object]) -> str:
    """Names and defaults of the arguments, one to a line; types are in the docstring."""
    parameters = inspect.signature(thing).parameters.values()
    shown, is_keyword = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            shown.append("*")
            is_keyword = True
        default = "" if each.default is each.empty else f"={_short(each.default)}"
        shown.append(f"{each.name}{default}")
    return f"({', '.join(shown)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and " at 0x" not in text else "..."


def _meanings_of_members(kind: type[enum.Enum]) -> dict[str, str]:
    """The docstring beneath each member of an enum."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101  # of the source of a class
    told = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(before, ast.Assign)
            and isinstance(before.targets[0], ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            told[before.targets[0].id] = " ".join(str(after.value.value).split())
    return told


def _catalogue(title: str, intro: str, names: typing.Iterable[str]) -> str:
    parts = [f"# {title}", intro]
    for name in names:
        printed = run(f"scalejax hardware {name}")
        parts += [f"## {name}", _code(printed, "text")]
    return _joined(parts)


def _body(path: str) -> str:
    """A document without its title."""
    return (ROOT / path).read_text(encoding="utf-8").partition("\n")[2].strip()


def _code(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"


def _table(heads: Sequence[str], rows: typing.Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace(" | ", " \\| ") or " "


def _escaped(text: str) -> str:
    """Text whose brackets and bars are no Markdown."""
    return re.sub(r"([\[\]<>*_|])", r"\\\1", text)


def _anchor(heading: str) -> str:
    """As the builder's own of a heading of plain words."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").splitlines()[0]


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def _joined(parts: typing.Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
