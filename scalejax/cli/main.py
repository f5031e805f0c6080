"""The command line: finds the command, parses its flags, prints every error in one sentence.

Knows nothing about what the commands do. Imported without JAX.
"""

import contextlib
import dataclasses
import io
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TextIO

_INTERRUPTED, _PIPE_CLOSED = 130, 141
"""Exit codes, by shell convention: 128 + the number of the signal."""

try:
    import tyro

    from scalejax import __version__
    from scalejax.cli.command import Command, Overrides, OverridingCommand, say
    from scalejax.cli.commands import COMMANDS
    from scalejax.config.migrate import RENAMED_FIELDS, RenamedField
    from scalejax.config.run import RunConfig
    from scalejax.core.environment import avoid_absent_accelerator, set_required_flags
    from scalejax.core.errors import (
        ConfigError,
        ExitCode,
        ScalejaxError,
        nearest_name,
        refusal,
        unknown_name,
    )
    from scalejax.core.serialization import parse_value
    from scalejax.hardware import HARDWARE_TABLES
except KeyboardInterrupt:  # imports take a second, during which `main` cannot catch it
    print("interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)

_FIELDS_WITHOUT_DOT = (
    *(field.name for field in dataclasses.fields(RunConfig)),
    *(name for name in RENAMED_FIELDS if "." not in name),
)
"""The seed and whole tables: --optimizer='{name = "lamb"}' replaces all fields of the table."""

_SEVERAL = re.compile("^--clusters(?==|$)")
"""--clusters is accepted for --cluster by every command, as some take several clusters."""

_ALIKE = 0.75
"""Similarity from which a flag counts as another one mistyped: --lr is not --folder."""
_MOST_MEANT = 3
"""Maximum number of suggested flags: the name of a table is part of too many."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or that of the error.

    Args:
        arguments: what was typed after `scalejax`; if None, the arguments of this process.
    """
    avoid_absent_accelerator()
    set_required_flags()
    try:
        command, overrides = parse(sys.argv[1:] if arguments is None else list(arguments))
        with _notes_of_renamed_fields():
            if isinstance(command, OverridingCommand):
                command.execute(overrides)
            else:
                command.execute()
        sys.stdout.flush()
    except ScalejaxError as error:
        for line in str(error).splitlines():
            say(f"error: {line}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has exited. Python flushes once more at exit, so to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return 0


@contextlib.contextmanager
def _notes_of_renamed_fields() -> Iterator[None]:
    """Print each warning about a renamed field once, as a note on standard error."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, RenamedField):
                say(f"note: {message}", sys.stderr)
            else:
                show(message, category, *where)

        warnings.simplefilter("once", RenamedField)
        warnings.showwarning = shown
        yield


def parse(arguments: list[str]) -> tuple[Command, Overrides]:
    """The command that was typed, and the fields that its flags replace.

    Raises:
        ConfigError: if there is no such command or flag, naming the nearest, or if a value has the
            wrong type.
        SystemExit: with code 0, when help was requested and printed.
    """
    name = _command_name(arguments)
    kind = COMMANDS[name]
    own = {field.name for field in dataclasses.fields(kind)}
    rest, overrides = split_overrides(arguments[len(name.split()) :], own)
    if "cluster" in own:
        _require_no_mistyped_hardware(overrides)
    if overrides and not issubclass(kind, OverridingCommand):
        raise ConfigError(f"scalejax {name} reads no run.toml, so it takes no --{min(overrides)}.")
    return _read_flags(kind, name, rest), overrides


def _require_no_mistyped_hardware(overrides: Overrides) -> None:
    """Refuse fields of a table whose name resembles a hardware table and is not in a run.toml.

    Raises:
        ConfigError: naming the table that is probably meant.
    """
    of_cluster = {*HARDWARE_TABLES, "conditions"}
    known = {*_FIELDS_WITHOUT_DOT, *(name.partition(".")[0] for name in RENAMED_FIELDS)}
    for field in overrides:
        table, dot, last = field.partition(".")
        closest = nearest_name(table, known | of_cluster)
        if table not in known and table != closest and closest in of_cluster:
            raise ConfigError(f"--{field} is not a flag (did you mean --{closest}{dot}{last}?).")


def split_overrides(arguments: list[str], own: Collection[str] = ()) -> tuple[list[str], Overrides]:
    """Take the flags that name a field of the run.toml out of `arguments`.

    `--train.epochs 3` and `--train.epochs=3` mean the same. The value is read as TOML if it is
    valid TOML, else as text.

    Args:
        arguments: what was typed after the name of the command.
        own: flags of the command itself, which are kept even if a field has the same name.

    Raises:
        ConfigError: if such a flag has no value.
    """
    rest: list[str] = []
    overrides: Overrides = {}
    remaining = iter(arguments)
    for argument in remaining:
        flag, has_value, value = argument.partition("=")
        if flag.startswith("---"):
            before = rest[-1] if rest and rest[-1].startswith("--") else "--FLAG"
            raise ConfigError(
                f"{argument!r} is not a flag (flags begin with two hyphens): give a file or "
                f"folder of that name as ./NAME, and as a value of {before} as {before}=VALUE."
            )
        field = flag.removeprefix("--")
        if flag[:1] == "-" and flag[1:].partition(".")[0] in _FIELDS_WITHOUT_DOT:
            raise ConfigError(f"{flag} is not a flag (did you mean -{flag}?).")
        is_field = "." in field or (field in _FIELDS_WITHOUT_DOT and field not in own)
        if not flag.startswith("--") or not is_field:
            rest.append(argument)
            continue
        if not has_value:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ConfigError(f"{flag} needs a value, such as {flag}=VALUE.")
        if not all(field.split(".")):
            raise ConfigError(
                f"{flag} is not a field: there must be a name on either side of a dot."
            )
        overrides[field] = parse_value(value)
    return rest, overrides


def _command_name(arguments: list[str]) -> str:
    """The command of one or two words at the start of `arguments`; prints help if there is none."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        raise SystemExit(0 if arguments else ExitCode.REFUSED)
    if arguments[0] == "--version":
        print(f"scalejax {__version__}")
        raise SystemExit(0)
    longer = [name for name in COMMANDS if name.split()[0] == arguments[0]]
    if longer and arguments[1:2] in (["-h"], ["--help"]):
        print(f"usage: scalejax {arguments[0]} COMMAND [-h] ...\n")
        _print_commands(longer)
        raise SystemExit(0)
    if longer and len(arguments) == 1:
        raise ConfigError(
            f"scalejax {arguments[0]} needs one more word: scalejax {' or '.join(longer)}."
        )
    raise ConfigError(unknown_name("command", " ".join(arguments[: 1 + bool(longer)]), COMMANDS))


def _print_help() -> None:
    print("usage: scalejax COMMAND [-h] ...\n")
    print("Train large minibatches in JAX; predict the cost on GPUs that you do not have.\n")
    _print_commands(COMMANDS)
    print("\nscalejax COMMAND --help lists its flags. Start with: scalejax quickstart")


def _print_commands(names: Iterable[str]) -> None:
    for name in names:
        print(f"  {f'{name}  ':<15}{(COMMANDS[name].__doc__ or '').splitlines()[0]}")


def _read_flags(kind: type[Command], name: str, arguments: list[str]) -> Command:
    """The command with its flags parsed.

    Raises:
        ConfigError: on the first flag that `kind` does not have, or has with another type.
        SystemExit: with code 0, when help was requested and printed.
    """
    flags = [f"--{field.name.rstrip('_').replace('_', '-')}" for field in dataclasses.fields(kind)]
    if "--cluster" in flags:
        arguments = [_SEVERAL.sub("--cluster", argument) for argument in arguments]
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in (*flags, "--help"):
            meant = " or ".join(_meant(flag, kind, flags))
            hint = f" (did you mean {meant}?)" if meant else f" (see scalejax {name} --help)"
            raise ConfigError(f"{flag} is not a flag of scalejax {name}{hint}.")
    if not {"-h", "--help"}.isdisjoint(arguments):
        _join_help(kind)
    printed, refused = _Captured(sys.stdout), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(refused):
            return tyro.cli(kind, prog=f"scalejax {name}", args=arguments)
    except SystemExit as stop:
        if stop.code == 0:
            for line in printed.text().splitlines():
                say(line)
            raise
        message = _first_paragraph(refused.getvalue())
        raise ConfigError(f"{message} (see scalejax {name} --help)") from stop


def _join_help(kind: type[Command]) -> None:
    """Join the lines of each flag's docstring: tyro would keep the breaks of indented lines."""
    from scalejax.core.schema import meanings

    texts = meanings(kind)
    for field in dataclasses.fields(kind):
        field.metadata = MappingProxyType({**field.metadata, "help": texts.get(field.name)})


def _meant(flag: str, kind: type[Command], flags: Iterable[str]) -> list[str]:
    """Flags that `flag` may be a mistyping of: those in `flags` and, if the command takes fields of
    a run.toml, fields whose last part it resembles; empty if none is similar enough."""
    known = {each[2:].replace("-", "_"): [each] for each in flags}
    if issubclass(kind, OverridingCommand):
        from scalejax.config.reference import run_reference  # reads sources, in 0.3 s

        names = dict.fromkeys(field.name for table in run_reference() for field in table.fields)
        for field in names:
            known.setdefault(field.rpartition(".")[2], []).append(f"--{field}")
    closest = nearest_name(flag[2:].replace("-", "_"), known, alike=_ALIKE)
    found = known[closest] if closest else []
    return found if len(found) <= _MOST_MEANT else []


class _Captured(io.TextIOWrapper):
    """Captures the text written to a stream, with the encoding and `isatty` that tyro inspects."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(io.BytesIO(), encoding=stream.encoding)
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        """The captured text."""
        self.seek(0)
        return self.read()


def _first_paragraph(panel: str) -> str:
    """The text of a framed message of tyro between its title and its first rule, on one line."""
    lines = [line.strip("│").rstrip() for line in panel.splitlines()[1:]]
    if lines and _ends_paragraph(lines[0]):  # without UTF-8, a rule follows the title
        lines = lines[1:]
    lines = list(takewhile(lambda line: not _ends_paragraph(line), lines))
    if lines and lines[0].strip().startswith("Missing from"):
        # A missing argument is indented once, its description twice.
        indent = len(lines[1]) - len(lines[1].lstrip())
        names = [line.strip() for line in lines[1:] if line[indent : indent + 1].strip()]
        return f"missing: {', '.join(names)}"
    message = " ".join(" ".join(lines).split())
    if no_number := re.fullmatch(r"Error parsing (\S+):(.*) \[?'(.*)'\]?\.?", message):
        flag, why, value = no_number.groups()  # among our flags, only numbers fail like this
        kind = "number" if "float" in why.lower() else "whole number"
        return refusal(flag, value, f"it must be a {kind}")
    return message


def _ends_paragraph(line: str) -> bool:
    is_rule = bool(line) and not line.strip(" ─-")
    return is_rule or line.strip().startswith("Got errors:")
