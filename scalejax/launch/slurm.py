"""A run as a SLURM job: the batch script, written by submitit, its submission and its log.

The script runs `scalejax train` itself rather than a pickled function, so that it can be read, kept
and submitted by hand. Knows nothing of training but the flag that resumes it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from scalejax.core.errors import (
    FINAL_CODES,
    ConfigError,
    ExitCode,
    refusal,
    require_at_least,
    require_one_line,
)
from scalejax.core.process_group import REFUSAL_MARKER
from scalejax.core.serialization import save_text
from scalejax.launch.local import GlooFilter
from scalejax.launch.nodes import TASKS_PER_NODE
from scalejax.launch.watchdog import STOPPED

if TYPE_CHECKING:
    from submitit import SlurmExecutor

SECONDS_TO_SAVE = 120
"""Time before the job's time limit at which all processes are signalled to save and stop; also the
grace period of the others when one has ended."""

SECONDS_BETWEEN_LOOKS = 2.0
"""Time between queries for the state of a job."""
_OPTION = re.compile("[a-z][a-z0-9_]*")
"""Name of an option of sbatch, with underscores for hyphens."""
_LOOKS_IN_VAIN = 30
"""Consecutive queries that the controller may leave unanswered, for instance while it restarts."""
_OWN = ("nodes", "ntasks", "ntasks_per_node", "gpus_per_node", "partition", "time")
"""Options of sbatch for which there are flags."""
UNDER_WAY = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING"),
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SIGNALING", "STAGE_OUT"),
)
"""States of a job that has not ended, from `man squeue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmResources:
    """What a job requests from SLURM."""

    gpus_per_node: int | None = None
    """GPUs per node, one for each of its processes; None to request none."""
    partition: str | None = None
    """Partition; None for the default of the cluster."""
    time: str | None = None
    """Time limit: minutes, or in the form 2-12:00:00; None for that of the partition."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as in "account=vision"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRun(SlurmResources):
    """A run as a SLURM job: command, resources, restarts."""

    command: tuple[str, ...]
    """Command of each process."""
    once: tuple[str, ...] = ()
    """Arguments added to the command until the job is requeued."""
    run_marker: Path | None
    """File whose presence makes a restarted job resume; None if the command has `--resume`."""
    processes: int
    """Number of processes; the largest number in an elastic run."""
    least_processes: int | None = None
    """Smallest number of processes of an elastic run, whose command is the launcher that starts
    them in the job; None for a fixed number, which the script starts by srun."""
    nodes: int | None = None
    """Number of nodes; None for the fewest that have the GPUs, or one."""
    most_restarts: int = 0
    """How often the job requeues itself when a process is lost or the time limit is reached."""
    folder: Path
    """Folder of the script and the logs; all nodes must see it."""
    name: str
    """Name of the job."""

    def __post_init__(self) -> None:
        require_at_least("np", self.processes, 1)
        for name in ("nodes", "gpus_per_node"):
            require_at_least(name, getattr(self, name), 1)
        if self.processes % self.node_count:
            accepted = f"it must be a multiple of the {self.node_count} nodes"
            raise ConfigError(refusal("np", self.processes, accepted))
        per_node = self.tasks_per_node
        if self.gpus_per_node is not None and per_node > self.gpus_per_node:
            accepted = f"{per_node} processes of a node need a GPU each"
            raise ConfigError(refusal("gpus_per_node", self.gpus_per_node, accepted))
        for name in ("folder", "name", "partition", "time", "run_marker"):
            require_one_line(name, getattr(self, name))
        for option in self.options:
            require_one_line("slurm", option)
        _ = self.given

    @property
    def given(self) -> dict[str, str]:
        """The further options by name.

        Raises:
            ConfigError: if an option is malformed, or has its own flag.
        """
        found = {}
        for option in self.options:
            name, has_value, value = option.partition("=")
            name = name.removeprefix("--").replace("-", "_")
            if not _OPTION.fullmatch(name) or (not has_value and option.startswith("-")):
                accepted = "it must be an option of sbatch and its value, such as account=vision"
                raise ConfigError(refusal("slurm", option, accepted))
            if name in _OWN:
                flag = "np" if name.startswith("ntasks") else name.replace("_", "-")
                raise ConfigError(refusal("slurm", option, f"there is a flag for it, --{flag}"))
            found[name] = value
        return found

    @property
    def node_count(self) -> int:
        """Number of nodes: as given, or the fewest that have the GPUs."""
        return self.nodes or -(-self.processes // (self.gpus_per_node or self.processes))

    @property
    def tasks_per_node(self) -> int:
        """Number of processes per node."""
        return self.processes // self.node_count


def script(run: SlurmRun) -> str:
    """The batch script of `run`.

    Raises:
        ConfigError: if submitit is not installed, or the folder cannot be written.
    """
    return _executor(run)._make_submission_file_text(_command(run), "")


def submit(run: SlurmRun) -> tuple[str, Path]:
    """Submit `run` to SLURM; returns the id of the job, and the log of its first process.

    Raises:
        ConfigError: if SLURM or submitit is missing, or SLURM refuses.
    """
    if shutil.which("sbatch") is None:
        accepted = (
            "there is no SLURM on this machine (no sbatch); --np "
            f"-{run.processes} starts as many processes here, --dry-run prints the script"
        )
        raise ConfigError(refusal("np", run.processes, accepted))
    # By hand, as submitit would read a folder such as 50%j as a pattern.
    text = script(run)
    try:
        asked = ["sbatch", "--parsable"]
        done = subprocess.run(asked, input=text, text=True, capture_output=True, check=False)
        said = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    except OSError as error:
        said = str(error)
    # The name of the cluster follows if there are several.
    if not (found := re.fullmatch(r"(\d+)(;.*)?", said.strip())):
        said = " ".join(said.split())
        raise ConfigError(
            f"np={run.processes} is refused by SLURM: {said}; use --dry-run to see what it is given"
        )
    save_text(text, run.folder / f"{found[1]}_submission.sh")
    return found[1], run.folder.absolute() / f"{found[1]}_0_log.out"


def follow(job_id: str, log: Path, out: TextIO = sys.stderr) -> int:
    """The exit code of a job, once it has ended; meanwhile forwards what is added to `log`.

    0 if all succeeded, that of its processes if they failed, `ExitCode.LOST` if SLURM ended the
    job: time limit, node failure.

    Raises:
        ConfigError: if SLURM does not answer.
    """
    said, in_vain, was = 0, 0, ""
    while True:
        found = about(job_id)
        in_vain = in_vain + 1 if found is None else 0
        if in_vain > _LOOKS_IN_VAIN:
            raise ConfigError(f"SLURM no longer knows job {job_id} (scontrol show job {job_id}).")
        said = _pass_on(log, said, out)
        if found is not None:
            state, code, signal_number = found
            if state not in UNDER_WAY:
                return _exit_code(job_id, state, code, signal_number, out)
            if state != was and state != "COMPLETING":
                print(f"job {job_id}: {state.lower()}", file=out, flush=True)
                was = state
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _executor(run: SlurmRun) -> "SlurmExecutor":
    # Otherwise importing it closes all handlers of `logging`, and with absl's handler the stream
    # that stands in for standard error in a notebook or a test.
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    try:
        import submitit
    except ImportError as error:
        accepted = (
            "submitit is not installed: pip install 'scalejax[slurm]'; --np "
            f"-{run.processes} starts as many processes on this machine"
        )
        raise ConfigError(refusal("np", run.processes, accepted)) from error

    class Executor(submitit.SlurmExecutor):
        """Writes a script even on a machine without SLURM."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {run.folder} cannot be written ({error}).") from error
    # SLURM fills in %j and the like, and %% is a percent sign ("filename pattern" of `man sbatch`).
    logs = str(run.folder.absolute()).replace("%", "%%")
    executor = Executor(folder=logs)
    known = Executor._valid_parameters()
    options: dict[str, str | bool] = {name: value or True for name, value in run.given.items()}
    setup = [str(options.pop("setup"))] if "setup" in options else []
    # A process that fails may exit before the first has recorded that all have saved. Processes
    # that wait for a lost one notice it themselves, and then have SLURM kill the step with it
    # (`launch.peers`); those that cannot even do that are killed after `--wait`.
    srun = ["--kill-on-bad-exit=0", f"--wait={SECONDS_TO_SAVE}"]
    if "cpus_per_task" in options:
        srun.append(f"--cpus-per-task={options['cpus_per_task']}")  # srun no longer inherits it
    further = {name.replace("_", "-"): options[name] for name in options if name not in known}
    executor.update_parameters(
        **{
            "job_name": run.name,
            "partition": run.partition,
            "time": run.time,
            "nodes": run.node_count,
            "ntasks_per_node": run.tasks_per_node,
            "gpus_per_node": run.gpus_per_node,
            "wckey": None,
            "stderr_to_stdout": True,
            "setup": setup + _before(run),
            "teardown": _after(run),
            "srun_args": srun,
            "use_srun": run.least_processes is None,
        }
        | {name: options[name] for name in options if name in known},
        # submitit's own would also replace a %t in the name of the folder by 0.
        additional_parameters={"output": f"{logs}/%j_0_log.out"} | _at_its_end(run) | further,
    )
    return executor


def _at_its_end(run: SlurmRun) -> dict[str, str | bool]:
    """Options of sbatch for what happens when the time is up, or a node fails."""
    if run.least_processes is None:
        return {"requeue": True, "signal": f"TERM@{SECONDS_TO_SAVE}"}
    # The launcher in the script passes the signal on to the processes.
    options: dict[str, str | bool] = {"requeue": True, "signal": f"B:TERM@{SECONDS_TO_SAVE}"}
    if run.node_count == 1:
        return options
    least = -(-run.least_processes // run.tasks_per_node)
    return options | {"no-kill": True, "nodes": f"{least}-{run.node_count}"}


def _command(run: SlurmRun) -> str:
    once, resume = " $once" if run.once else "", "" if run.run_marker is None else " $resume"
    command = shlex.join(run.command) + once + resume
    if run.least_processes is None:
        return command
    # On one node, the launcher starts processes as on any machine, and copies are in its memory.
    if run.node_count > 1:
        command = f"{TASKS_PER_NODE}={run.tasks_per_node} {command}"
    # The shell handles a signal only while it waits for a background process.
    return f"""{command} &
launcher=$!
trap 'kill -TERM "$launcher"' TERM
wait "$launcher"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher"
  code=$?
done"""


def _before(run: SlurmRun) -> list[str]:
    """Lines before `srun`: a job that was requeued, by itself or after a preemption, resumes."""
    refusal_marker = f"{shlex.quote(str(run.folder.absolute()))}/refused-$SLURM_JOB_ID"
    lines = [
        f"export {REFUSAL_MARKER}={refusal_marker}",
        f'rm -f "${REFUSAL_MARKER}"',
    ]
    if run.once:
        lines += [
            f"once={shlex.quote(shlex.join(run.once))}",
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
            "  once=",
            "fi",
        ]
    if run.run_marker is None:
        return lines
    marker = shlex.quote(str(run.run_marker))
    return [
        *lines,
        "resume=",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e ' + marker + " ]; then",
        "  resume=--resume",
        "fi",
    ]


def _after(run: SlurmRun) -> list[str]:
    """Lines after `srun`: requeue the job, unless it would end in the same way again."""
    # srun returns the highest code, and processes that lost a refused peer exit with a higher one.
    stopped = "|".join(map(str, STOPPED))
    lines = [
        *(["code=$?"] if run.least_processes is None else []),
        # A process was killed: by SLURM, because the others had left it behind, or by the system.
        f"case $code in {stopped}) ;; 12[89]|1[3-9]?|2??) code={ExitCode.LOST:d} ;; esac",
        f'if [ -e "${REFUSAL_MARKER}" ]; then code={ExitCode.REFUSED:d}; fi',
    ]
    if run.most_restarts:
        damaged = f"${{{REFUSAL_MARKER}}}-damaged"
        ends = "|".join(str(code) for code in (*map(int, FINAL_CODES), STOPPED[0]))
        lines += [
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {run.most_restarts} ]; then',
            "  case $code in",
            f"    {ends}) ;;",
            # Requeued once: the next try takes the state stored before it, or ends so again.
            f'    {ExitCode.DAMAGED:d}) if [ ! -e "{damaged}" ]; then',
            f'      touch "{damaged}"; scontrol requeue "$SLURM_JOB_ID"; fi ;;',
            '    *) scontrol requeue "$SLURM_JOB_ID" ;;',
            "  esac",
            "fi",
        ]
    return [*lines, "exit $code", ""]


def about(job_id: str) -> tuple[str, int, int] | None:
    """State, exit code and signal of a job; None if SLURM does not answer.

    Queries the controller, which keeps a job for minutes after its end, because `sacct`, which
    submitit uses, needs an accounting database that not every cluster has.
    """
    asked = ["scontrol", "--oneliner", "show", "job", job_id]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    state, code = re.search(r"JobState=(\w+)", said), re.search(r" ExitCode=(\d+):(\d+)", said)
    return (state[1], int(code[1]), int(code[2])) if state and code else None


def _exit_code(job_id: str, state: str, code: int, signal_number: int, out: TextIO) -> int:
    if state == "COMPLETED":
        return 0
    print(f"job {job_id} ended: {state.lower()} (exit code {code}:{signal_number})", file=out)
    if code:
        return code
    return (
        128 + signal_number if signal_number and state in ("FAILED", "CANCELLED") else ExitCode.LOST
    )


def _pass_on(log: Path, said: int, out: TextIO) -> int:
    """Forward whole lines added to `log` after its first `said` bytes; returns the new count."""
    try:
        with log.open("rb") as file:
            file.seek(said)
            text = file.read()
    except FileNotFoundError:
        return said
    whole = text[: text.rfind(b"\n") + 1]
    gloo = GlooFilter()
    for line in whole.splitlines(keepends=True):
        if not gloo.holds_back(line):
            out.write(line.decode(errors="replace"))
    out.flush()
    return said + len(whole)
