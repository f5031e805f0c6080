"""Completion of commands, flags, fields of a run.toml and names of the catalogue by a shell.

Scripts are whole: a shell that completes starts no Python. Imported without JAX.
"""

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scalejax.cli.command import Command, OverridingCommand
from scalejax.config.reference import meanings, run_reference

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What may follow one command."""

    flags: tuple[tuple[str, str], ...]
    """Its flags, each with the first sentence of its help."""
    fields: tuple[str, ...]
    """Fields of a run.toml that its flags replace, as flags."""


def script(shell: Shell, commands: Mapping[str, type[Command]]) -> str:
    """The script with which `shell` completes `commands`, by name."""
    from scalejax.hardware import cluster_names
    from scalejax.simulator.frameworks import FRAMEWORKS

    fields = sorted({f"--{each.name}" for table in run_reference() for each in table.fields})
    choices = {
        name: Choices(
            tuple(_flags(kind)), tuple(fields) if issubclass(kind, OverridingCommand) else ()
        )
        for name, kind in commands.items()
    }
    clusters = sorted(cluster_names())
    values = {
        "--cluster": clusters, "--clusters": clusters, "--framework": sorted(FRAMEWORKS)
    }  # fmt: skip
    titles = {name: (kind.__doc__ or "").splitlines()[0] for name, kind in commands.items()}
    if shell == "fish":
        return _fish(choices, values, titles)
    bash = _bash(choices, values)
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def _flags(kind: type) -> Iterator[tuple[str, str]]:
    """Flags of a command, and the first sentence of each one's help; positional ones are none."""
    helps = meanings(kind)
    for field in dataclasses.fields(kind):
        if "Positional" in str(field.type):
            continue
        name = f"--{field.name.rstrip('_').replace('_', '-')}"
        yield name, " ".join(helps.get(field.name, "").split()).partition(". ")[0].rstrip(".")


def _bash(choices: Mapping[str, Choices], values: Mapping[str, Sequence[str]]) -> str:
    """A completion function of bash, which zsh can also call."""
    first = dict.fromkeys(name.split()[0] for name in choices)
    lines = [
        "_scalejax() {",
        "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    words={shlex.quote(' '.join([*first, '--help', '--version']))}",
        "  else",
        '    case "$before" in',
    ]
    for name, names in values.items():
        lines.append(f"      {name}) words={shlex.quote(' '.join(names))} ;;")
    lines += ["    esac", '    if [ -z "$words" ]; then', '      case "${COMP_WORDS[*]:1}" in']
    # Commands of two words first: the name of one may be the first word of another.
    for name in sorted(choices, key=lambda each: -len(each.split())):
        found = choices[name]
        words = " ".join((*(each for each, _ in found.flags), *found.fields, "--help"))
        lines.append(f"        {shlex.quote(name + ' ')}*) words={shlex.quote(words)} ;;")
    for word in first:
        seconds = [name.split()[1] for name in choices if name.split()[0] == word and " " in name]
        if seconds:
            lines.append(
                f"        {shlex.quote(word + ' ')}*) words={shlex.quote(' '.join(seconds))} ;;"
            )
    lines += [
        "      esac",
        "    fi",
        "  fi",
        # Flags only where one is begun: elsewhere the shell completes files.
        "  if [[ $word == -* || $words != -* ]]; then",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "  fi",
        "}",
        "complete -o default -o bashdefault -F _scalejax scalejax",
    ]
    return "\n".join(lines)


def _fish(
    choices: Mapping[str, Choices],
    values: Mapping[str, Sequence[str]],
    titles: Mapping[str, str],
) -> str:
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
        for each, text in found.flags:
            lines.append(_complete(where, _long(each, values.get(each, ())), text))
        lines += [_complete(where, f"{_long(each, ())} -r", "") for each in found.fields]
    return "\n".join(lines)


def _long(name: str, names: Collection[str]) -> str:
    long = f"-l {name.removeprefix('--')}"
    return f"{long} -x -a {shlex.quote(' '.join(names))}" if names else long


def _complete(where: str, what: str, text: str) -> str:
    described = f" -d {_fish_quoted(text)}" if text else ""
    return f"complete -c scalejax -n {_fish_quoted(where)} {what}{described}"


def _fish_quoted(text: str) -> str:
    r"""`text` in single quotes, in which fish knows \\ and \' alone."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
