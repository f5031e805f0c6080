"""Completion of commands, flags, fields of a run.toml and names of the catalogue by a shell.

Scripts are self-contained: completion starts no Python. Imported without JAX.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from scalejax.cli.command import Command, OverridingCommand
from scalejax.config.reference import run_reference
from scalejax.core.schema import meanings

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command."""

    name: str
    """Its name, with dashes."""
    text: str
    """The first sentence of its help."""
    values: tuple[str, ...]
    """Names that it takes, alone or separated by commas, if they are known."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What may follow one command."""

    flags: tuple[Flag, ...]
    fields: tuple[str, ...]
    """Fields of a run.toml that its flags replace, as flags."""
    names: tuple[str, ...]
    """Names that its first word without a dash may be, besides files."""


def script(shell: Shell, commands: Mapping[str, type[Command]]) -> str:
    """The script that lets `shell` complete `commands`, by name."""
    from scalejax.hardware import cluster_names
    from scalejax.simulator.frameworks import FRAMEWORKS

    fields = sorted({each.name for table in run_reference() for each in table.fields})
    clusters = tuple(sorted(cluster_names()))
    values = {"cluster": clusters, "framework": tuple(sorted(FRAMEWORKS))}
    names = {
        "hardware": clusters,
        "completion": get_args(Shell),
        "config fields": (*dict.fromkeys(name.partition(".")[0] for name in fields), *fields),
    }
    choices = {
        name: Choices(
            tuple(_flags(kind, values)),
            tuple(f"--{each}" for each in fields) if issubclass(kind, OverridingCommand) else (),
            names.get(name, ()),
        )
        for name, kind in commands.items()
    }
    titles = {name: (kind.__doc__ or "").splitlines()[0] for name, kind in commands.items()}
    if shell == "fish":
        return _fish(choices, titles)
    return (_ZSH if shell == "zsh" else "") + _bash(choices)


_ZSH = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""


def _flags(kind: type, values: Mapping[str, tuple[str, ...]]) -> Iterator[Flag]:
    """Flags of a command, without positional arguments."""
    helps = meanings(kind)
    for field in dataclasses.fields(kind):
        if "Positional" in str(field.type):
            continue
        name = f"--{field.name.rstrip('_').replace('_', '-')}"
        text = " ".join(helps.get(field.name, "").split()).partition(". ")[0].rstrip(".")
        yield Flag(name, text, values.get(field.name) or tuple(_literals(field.type)))


def _literals(hint: object) -> Iterator[str]:
    """The words of a type that is a Literal, or a Literal or None."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for part in get_args(hint):
            yield from _literals(part)


def _bash(choices: Mapping[str, Choices]) -> str:
    """A completion function of bash, which zsh can also call."""
    first = list(dict.fromkeys(name.split()[0] for name in choices))
    fields = dict.fromkeys(each for found in choices.values() for each in found.fields)
    lines = [
        "_scalejax() {",
        # Only once: repeated for each command, the text was longer than an argument may be.
        f"  local fields={_quoted(fields)}",
        "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= names=",
        # bash treats "=" as a separate word.
        '  [ "$word" = "=" ] && word=',
        '  [ "$before" = "=" ] && before=${COMP_WORDS[COMP_CWORD-2]}',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    names={shlex.quote(' '.join([*first, '--help', '--version']))}",
        "  else",
        '    case "${COMP_WORDS[*]:1}" in',
    ]
    # Commands of two words first: their first word may be a command too.
    for name in sorted(choices, key=lambda each: -len(each.split())):
        found = choices[name]
        words = _quoted((*(each.name for each in found.flags), "--help"))
        more = '" $fields"' if found.fields else ""
        lines.append(f"      {shlex.quote(name + ' ')}*)")
        lines.append(f"        words={words}{more} names={_quoted(found.names)}")
        known = [each for each in found.flags if each.values]
        if known:
            lines.append('        case "$before" in')
            lines += [
                f"          {_spellings(each)}) names={_quoted(each.values)} ;;" for each in known
            ]
            lines.append("        esac")
        lines.append("        ;;")
    for word in first:
        seconds = [name.split()[1] for name in choices if name.split()[0] == word and " " in name]
        if seconds:
            lines.append(f"      {shlex.quote(word + ' ')}*) names={_quoted(seconds)} ;;")
    lines += [
        "    esac",
        "  fi",
        # Flags only after a dash: elsewhere names, or else the shell's default, files.
        '  case "$word" in',
        '    -*) COMPREPLY=($(compgen -W "$words $names" -- "$word")) ;;',
        '    *,*) COMPREPLY=($(compgen -P "${word%,*}," -W "$names" -- "${word##*,}")) ;;',
        '    *) COMPREPLY=($(compgen -W "$names" -- "$word")) ;;',
        "  esac",
        "}",
        "complete -o default -o bashdefault -F _scalejax scalejax",
    ]
    return "\n".join(lines)


def _spellings(each: Flag) -> str:
    """The flag as a bash pattern: --cluster may be typed --clusters."""
    return f"{each.name}|{each.name}s" if each.name == "--cluster" else each.name


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _fish(choices: Mapping[str, Choices], titles: Mapping[str, str]) -> str:
    """Lines of `complete` for fish."""
    lines = []
    first = list(dict.fromkeys(name.split()[0] for name in choices))
    none_yet = f"not __fish_seen_subcommand_from {' '.join(first)}"
    for word in first:
        title = titles.get(word, f"{word} ...")
        lines.append(_complete(none_yet, f"-a {word}", title))
    for name, found in choices.items():
        words = name.split()
        where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
        if len(words) > 1:
            alone = f"__fish_seen_subcommand_from {words[0]}"
            lines.append(_complete(alone, f"-a {words[1]}", titles[name]))
        if found.names:
            lines.append(_complete(where, f"-a {_quoted(found.names)}", ""))
        lines += [_complete(where, _long(each), each.text) for each in found.flags]
        lines += [_complete(where, f"-l {each.removeprefix('--')} -r", "") for each in found.fields]
    return "\n".join(lines)


def _long(flag: Flag) -> str:
    long = f"-l {flag.name.removeprefix('--')}"
    return f"{long} -x -a {_quoted(flag.values)}" if flag.values else long


def _complete(where: str, what: str, text: str) -> str:
    described = f" -d {_fish_quoted(text)}" if text else ""
    return f"complete -c scalejax -n {_fish_quoted(where)} {what}{described}"


def _fish_quoted(text: str) -> str:
    r"""`text` in single quotes, in which fish knows only \\ and \'."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
