"""The base classes of the commands that read a run.toml, and their shared flags.

Imported without JAX.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import RunConfig
from scalejax.core.serialization import JsonValue, load
from scalejax.data.facts import fitting_facts
from scalejax.training.record import RunFolder

Overrides = dict[str, JsonValue]
"""Values for fields of a run.toml by dotted name."""


def flag(metavar: str) -> object:
    """The tyro annotation of a flag whose value is shown as `metavar` in help.

    Its docstring names its default.
    """
    return arg(metavar=metavar, help_behavior_hint="")


FactsFile = Annotated[Path | None, flag("FACTS.json")]
"""The flag that gives what a run folder keeps of its data."""
RunFile = Annotated[Positional[Path], flag("RUN.toml")]


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


def facts_of(
    config: RunConfig, run_file: Path, overrides: Overrides, given: Path | None = None
) -> DatasetFacts:
    """Counts and shapes of the data of `config`: those in the file `given`; else those that a run
    kept beside its run.toml, unless flags name other data; else those read from the data.

    Raises:
        ConfigError: if they cannot be read, or contradict the config.
    """
    names_data = any(name.partition(".")[0] == "data" for name in overrides)
    if given is not None:
        kept = load(DatasetFacts, given)
    else:
        kept = None if names_data else RunFolder(path=run_file.parent).load_facts()
    return fitting_facts(config, kept)
