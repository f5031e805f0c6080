"""The base classes of the commands, and their shared flags.

Imported without JAX.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from scalejax.core.serialization import JsonValue

Overrides = dict[str, JsonValue]
"""Values for fields of a run.toml by dotted name."""


def flag(metavar: str) -> object:
    """The tyro annotation of a flag whose value is shown as `metavar` in help.

    Its docstring names its default.
    """
    return arg(metavar=metavar, help_behavior_hint="")


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
    """Counts and shapes of the data, kept as facts.json in a run folder. By default read from the
    data, or kept beside RUN.toml."""


Command = PlainCommand | OverridingCommand
