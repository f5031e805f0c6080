"""The base classes of the commands, and their shared flags.

Imported without JAX.
"""

import os
import re
import shlex
import shutil
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

from tyro.conf import Positional, arg

from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import (
    JsonValue,
    flag_text,
    require_writable,
    save,
    save_text,
)
from scalejax.core.tabular import Tabular, to_csv

Overrides = dict[str, JsonValue]
"""Values for fields of a run.toml by dotted name."""


def flag(metavar: str) -> object:
    """The tyro annotation of a flag whose value is shown as `metavar` in help.

    The flag's docstring states its default.
    """
    return arg(metavar=metavar, help_behavior_hint="")


JsonFile = Annotated[Path | None, flag("OUT.json")]
CsvFile = Annotated[Path | None, flag("OUT.csv")]
RunFile = Annotated[Positional[Path], flag("RUN.toml")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCommand(ABC):
    """A command that reads no run.toml, or replaces none of its fields."""

    @abstractmethod
    def execute(self) -> None:
        """Run the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverridingCommand(ABC):
    """A command that reads run.toml files, whose fields flags can replace."""

    @abstractmethod
    def execute(self, overrides: Overrides) -> None:
        """Run the command with these fields of the files replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFileCommand(OverridingCommand):
    """A command that reads one run.toml."""

    run_file: RunFile
    """The config of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCommand(RunFileCommand):
    """A command that predicts the cost of one run.toml."""

    framework: Annotated[str, flag("NAME")] = "xla"
    """Framework that trains it, such as megatron-lm (see scalejax hardware)."""
    facts: Annotated[Path | None, flag("FACTS.json")] = None
    """Counts and shapes of the data, stored as facts.json in a run folder. By default read from the
    data, or from facts.json next to RUN.toml."""


Command = PlainCommand | OverridingCommand


def flags_of(overrides: Overrides) -> list[str]:
    """Command-line words of the flags that set fields to these values."""
    return [f"--{name}={flag_text(value)}" for name, value in overrides.items()]


def wrapped(line: str) -> str:
    """`line` wrapped to the width of the terminal (COLUMNS), with continuation lines indented below
    its title.

    Words stay whole, so that paths and flags can be copied.
    """
    width = shutil.get_terminal_size().columns
    plain = re.sub("\x1b\\[[0-9;]*m", "", line)  # colours have no width
    if len(plain) <= width:
        return line
    found = re.match("error: |note: |usage: |warning: ", plain)
    title = found[0] if found else ""
    return textwrap.fill(
        plain.removeprefix(title),
        width,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, file: TextIO | None = None) -> None:
    """Print sentences to standard output or to `file`, with lines wrapped on a terminal.

    In pipes and files, which programs read, lines stay whole, unless COLUMNS sets a width. Text
    that names a path is printed unchanged.
    """
    is_read = "COLUMNS" in os.environ or (file or sys.stdout).isatty()
    for line in text.split("\n"):
        print(wrapped(line) if is_read else line, file=file)


def to_type(what: str, words: Sequence[str]) -> str:
    """What to type for something: on one line if it fits, else with the command on a separate line,
    as a broken command could not be pasted."""
    line = f"{what}: {shlex.join(words)}"
    fits = len(line) <= shutil.get_terminal_size().columns
    return line if fits else f"{what}:\n{shlex.join(words)}"


def suggest(what: str, *words: str) -> None:
    """Say what to type next, only on a terminal: pipes and files stay unchanged.

    Args:
        what: what it is for: "To see where the time goes".
        words: the words of the command.
    """
    if sys.stdout.isatty():
        print(to_type(what, words), file=sys.stderr)


def require_result_files(
    json: Path | None,
    csv: Path | None,
    folder: Path | None = None,
    names: Collection[str] = (),
) -> None:
    """Refuse, before the work, --json and --csv that cannot be written or that are files of the
    command itself.

    Args:
        json: the file of --json.
        csv: the file of --csv.
        folder: where the command writes its record.
        names: names of its files there; everything in subfolders belongs to it too.

    Raises:
        ConfigError: naming the flag.
    """
    for name, path in (("json", json), ("csv", csv)):
        require_writable(name, path)
        if path is None or folder is None or not path.resolve().is_relative_to(folder.resolve()):
            continue
        first, *rest = path.resolve().relative_to(folder.resolve()).parts
        if rest or first in names:
            accepted = f"it is a file of the record in {str(folder)!r}: give another name"
            raise ConfigError(refusal(name, str(path), accepted))


def write_result(found: Tabular, json: Path | None, csv: Path | None, *, more: str = "") -> None:
    """Write a result to --json and --csv, if given, and say so.

    Args:
        found: the result, a `document`.
        json: the file for all of it.
        csv: the file for its rows.
        more: what else to say of the JSON.

    Raises:
        ConfigError: if a file cannot be written.
    """
    if json is not None:
        save(found, json)
        print(f"wrote {json}{more}")
    if csv is not None:
        save_text(to_csv(found.to_rows()), csv)
        print(f"wrote {csv}")
