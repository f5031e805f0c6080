"""The commands of `scalejax`: one class each, whose fields are its flags.

`execute` calls the functions that a Python user would call. Imported without JAX; commands that
need it import it when they run.
"""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from scalejax.cli.bench import Bench, DataBench
from scalejax.cli.command import Command, PlainCommand, flag
from scalejax.cli.compare import Compare
from scalejax.cli.completion import Shell, script
from scalejax.cli.cost import Cost
from scalejax.cli.data import DataConvert, DataInspect
from scalejax.cli.doctor import Doctor
from scalejax.cli.emulate import Emulate
from scalejax.cli.launch import LaunchRun
from scalejax.cli.page import Explore
from scalejax.cli.plan import PlanRun
from scalejax.cli.predict import (
    Calibrate,
    Explain,
    Frameworks,
    Hardware,
    Models,
    Predict,
    Validate,
)
from scalejax.cli.schema import Schema
from scalejax.cli.search import Search
from scalejax.cli.study import StudyCoordinates, StudyWarmup
from scalejax.cli.sweep import Sweep
from scalejax.cli.train import (
    ConfigFields,
    ConfigMigrate,
    ConfigShow,
    Quickstart,
    Report,
    SchedulePlot,
    Train,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(PlainCommand):
    """Print a script that completes scalejax commands in a shell.

    bash: into ~/.local/share/bash-completion/completions/scalejax. fish: into
    ~/.config/fish/completions/scalejax.fish. zsh: into a file that ~/.zshrc sources.
    """

    shell: Annotated[Positional[Shell], flag("{bash,zsh,fish}")]
    """The shell."""

    def execute(self) -> None:
        """Print the script."""
        print(script(self.shell, COMMANDS))


COMMANDS: dict[str, type[Command]] = {
    "quickstart": Quickstart,
    "train": Train,
    "launch": LaunchRun,
    "sweep": Sweep,
    "study warmup": StudyWarmup,
    "study coordinates": StudyCoordinates,
    "emulate": Emulate,
    "bench": Bench,
    "predict": Predict,
    "explain": Explain,
    "compare": Compare,
    "search": Search,
    "cost": Cost,
    "plan": PlanRun,
    "page": Explore,
    "report": Report,
    "config show": ConfigShow,
    "config fields": ConfigFields,
    "config migrate": ConfigMigrate,
    "schedule plot": SchedulePlot,
    "data bench": DataBench,
    "data convert": DataConvert,
    "data inspect": DataInspect,
    "hardware": Hardware,
    "models": Models,
    "frameworks": Frameworks,
    "calibrate": Calibrate,
    "doctor": Doctor,
    "schema": Schema,
    "completion": Completion,
    "validate": Validate,
}
"""The commands by name, as typed after `scalejax`."""
