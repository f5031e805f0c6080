"""The command that starts several processes of one run.

Starts without JAX, which the processes alone import.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from scalejax.commands.command import Overrides, RunFileCommand, flag
from scalejax.config import load_config
from scalejax.documents import JsonValue
from scalejax.errors import ConfigError, refusal
from scalejax.launch import Launch, launch
from scalejax.record import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRun(RunFileCommand):
    """Train a run.toml in several processes of this machine.

    When one is lost the others are stopped, and with --max-restarts all go on from the latest
    checkpoint. Exit codes: 0 done; 2 refused; 75 a process was lost; 130, 143 stopped by a signal
    after a checkpoint.
    """

    np: Annotated[int, flag("-N")]
    """Processes: -4 for four on this machine."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Where its record goes, and in processes/ their logs. By default runs/ and the name of the
    file."""
    resume: FlagCreatePairsOff[bool] = False
    """Go on from the latest checkpoint in the folder."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices for each process."""
    max_restarts: Annotated[int, flag("N")] = 0
    """How often to start again when a process is lost."""
    min_np: Annotated[int | None, flag("N")] = None
    """Start again without those that were lost, down to N. By default with as many as before."""
    stuck_seconds: Annotated[int, flag("N")] = 300
    """How long no process may move on before they count as hanging; six times that while one
    compiles or saves. By default 300."""
    all_logs: FlagCreatePairsOff[bool] = False
    """Show what every process says, each line with its number."""

    def execute(self, overrides: Overrides) -> None:
        """Start them, and end as they did."""
        if self.np >= 0:
            accepted = "it must be -1 or less, as in HorovodRunner: -4 for 4 processes here"
            raise ConfigError(refusal("np", self.np, accepted))
        load_config(self.run_file, overrides)  # refused once, and before anything is started
        folder = self.folder or Path("runs") / self.run_file.stem
        command = [sys.executable, "-m", "scalejax", "train", str(self.run_file)]
        command += ["--folder", str(folder)]
        if self.cpu_devices is not None:
            command += ["--cpu-devices", str(self.cpu_devices)]
        command += [f"--{name}={_as_toml(value)}" for name, value in overrides.items()]
        first = (*command, "--resume") if self.resume else tuple(command)
        run = RunFolder(path=folder)

        def again() -> tuple[str, ...]:
            return () if self.resume or not run.holds_run else ("--resume",)

        job = Launch(
            command=first,
            again=again,
            processes=-self.np,
            least_processes=self.min_np,
            folder=folder / "processes",
            most_restarts=self.max_restarts,
            stuck_seconds=self.stuck_seconds,
            shows_all=self.all_logs,
        )
        raise SystemExit(launch(job))


def _as_toml(value: JsonValue) -> str:
    """`value` as the flags of `train` read it."""
    if isinstance(value, dict):
        fields = (f"{json.dumps(name)} = {_as_toml(inner)}" for name, inner in value.items())
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value)
