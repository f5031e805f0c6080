"""Processes of one command on the nodes of a cluster: started by srun, or on given hosts by ssh.

Forwards what they print, and waits for them. They watch each other (`launch.peers`), so that one
that fails or hangs ends all. Knows nothing of what they do.
"""

import contextlib
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from scalejax.core import process_group
from scalejax.core.errors import ConfigError, ExitCode, refusal, require_one_line
from scalejax.launch.local import LINES_AT_END, GlooFilter
from scalejax.launch.watchdog import STUCK_SECONDS

SECONDS_TO_FOLLOW = 30.0
"""Time, beyond the limit of their watch, by which the others must end once one has failed."""
_LABEL = re.compile(r" *(\d+): ?")
"""Prefix that `srun --label` puts before a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLaunch:
    """Command and number of processes to start on a cluster."""

    command: tuple[str, ...]
    """Command of each process; the interpreter and all files have the same path on every node."""
    processes: int
    """Number of processes."""
    hosts: tuple[str, ...] = ()
    """Host of each process, reached by ssh without a password; none for SLURM."""
    options: tuple[str, ...] = ()
    """Further options of srun, such as "nodes=2"."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the processes; srun also passes on those of this process."""
    stuck_seconds: float = STUCK_SECONDS
    """Limit of the watch that the processes keep."""
    shows_all: bool = False
    """Whether to forward the output of all processes, or of the first only."""

    def __post_init__(self) -> None:
        if self.hosts and len(self.hosts) != self.processes:
            accepted = f"there must be one for each of the {self.processes} processes"
            raise ConfigError(refusal("hosts", " ".join(self.hosts), accepted))
        for host in self.hosts:
            if not re.fullmatch(r"[\w.@:%-]+", host) or host.startswith("-"):
                raise ConfigError(refusal("hosts", host, "it must be a name or address"))
        for option in self.options:
            require_one_line("options", option)
        program = "ssh" if self.hosts else "srun"
        if shutil.which(program) is None:
            accepted = (
                f"there is no {program} on this machine; "
                f"np={-self.processes} starts as many processes here"
                + ("" if self.hosts else ", hosts=(...) on other machines by ssh")
            )
            raise ConfigError(refusal("np", self.processes, accepted))


def launch_remote(job: RemoteLaunch, out: TextIO = sys.stderr) -> int:
    """The joint exit code of the processes of `job`, once they have ended: 0 if all succeeded, else
    the first that is not `ExitCode.LOST`, with which a process exits that misses another one."""
    commands = _on_hosts(job) if job.hosts else [_by_srun(job)]
    environment = _without_ours(os.environ) | ({} if job.hosts else job.environment)
    output = _Output(job, out)
    started: list[subprocess.Popen[str]] = []
    listeners = []
    try:
        for number, command in enumerate(commands):
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            started.append(process)
            listener = threading.Thread(target=output.listen, args=(number, process), daemon=True)
            listener.start()
            listeners.append(listener)
        codes = _ended(started, job.stuck_seconds + SECONDS_TO_FOLLOW)
    finally:
        for process in started:
            _end(process)
        for listener in listeners:
            listener.join(5)
    failed = sorted((code for code in codes if code), key=lambda code: code == ExitCode.LOST)
    if failed:
        output.show_ends()
    # srun returns 137 for a killed task, which counts as lost.
    code = failed[0] if failed else 0
    return ExitCode.LOST if code < 0 or code == 128 + signal.SIGKILL else code


def _by_srun(job: RemoteLaunch) -> list[str]:
    options = [each if each.startswith("-") else f"--{each}" for each in job.options]
    # A task that fails ends all others, even a frozen one that could not end itself.
    own = [f"--ntasks={job.processes}", "--label", "--kill-on-bad-exit=1", "--quiet"]
    return ["srun", *own, *options, *job.command]


def _on_hosts(job: RemoteLaunch) -> list[list[str]]:
    port = process_group.FIRST_PORT + secrets.randbelow(process_group.PORTS)
    coordinator = f"{job.hosts[0].rpartition('@')[2]}:{port}"
    commands = []
    for number, host in enumerate(job.hosts):
        variables = job.environment | {
            process_group.COORDINATOR: coordinator,
            process_group.PROCESSES: str(job.processes),
            process_group.PROCESS: str(number),
        }
        given = [f"{name}={value}" for name, value in variables.items()]
        typed = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*given, *job.command])}"
        # With a terminal, so that the end of ssh here hangs up the processes there.
        commands.append(["ssh", "-tt", "-o", "BatchMode=yes", host, typed])
    return commands


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables without those of the process group that this process is itself in."""
    ours = (process_group.COORDINATOR, process_group.PROCESSES, process_group.PROCESS)
    return {name: value for name, value in environment.items() if name not in ours}


def _ended(started: Sequence["subprocess.Popen[str]"], seconds: float) -> list[int]:
    """Exit codes, once all have ended, or `seconds` after one has failed."""
    deadline = math.inf
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        if None not in codes:
            break
        if deadline == math.inf and any(codes):
            deadline = time.monotonic() + seconds
        time.sleep(0.1)
    return [ExitCode.LOST if code is None else code for code in (p.poll() for p in started)]


def _end(process: "subprocess.Popen[str]") -> None:
    """End what still runs: srun ends its tasks on SIGTERM; for ssh, the hang-up does."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_FOLLOW)
    if process.poll() is None:
        process.kill()
    process.wait()


class _Output:
    """The output of the processes."""

    def __init__(self, job: RemoteLaunch, out: TextIO) -> None:
        self._job = job
        self._out = out
        self._speaking = threading.Lock()
        self._ends: dict[int, list[str]] = {}

    def listen(self, number: int, process: "subprocess.Popen[str]") -> None:
        """Forward lines of process `number`, or of all processes that srun labels."""
        if process.stdout is None:
            return
        gloo: dict[int, GlooFilter] = {}
        with process.stdout:
            for line in process.stdout:
                rank, text = number, line.rstrip("\r\n")
                if not self._job.hosts and (label := _LABEL.match(line)):
                    rank, text = int(label[1]), text[label.end() :]
                if gloo.setdefault(rank, GlooFilter()).holds_back(text.encode() + b"\n"):
                    continue
                with self._speaking:
                    self._say(rank, text)

    def _say(self, rank: int, text: str) -> None:
        if rank == 0 or self._job.shows_all:
            prefix = f"[{rank}] " if self._job.shows_all else ""
            print(prefix + text, file=self._out, flush=True)
        else:
            self._ends[rank] = [*self._ends.get(rank, []), text][-LINES_AT_END:]

    def show_ends(self) -> None:
        """Show the last lines of the processes that were not forwarded."""
        for rank in sorted(self._ends):
            for text in self._ends[rank]:
                print(f"[{rank}] {text}", file=self._out, flush=True)
