"""What every command is, and what those that read a run.toml share.

Starts without JAX, as all commands do.
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
    """How the value of a flag is written in help; its default is in the flag's own words."""
    return arg(metavar=metavar, help_behavior_hint="")


RunFile = Annotated[Positional[Path], flag("RUN.toml")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFileCommand(ABC):
    """A command that reads a run.toml, whose fields flags can replace."""

    run_file: RunFile
    """The description of the run."""

    @abstractmethod
    def execute(self, overrides: Overrides) -> None:
        """Do what the command is for, with these fields of the file replaced."""
