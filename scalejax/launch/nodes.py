"""The nodes of a SLURM job as the places of an elastic run: each process is a step of one task.

The job keeps the remaining nodes when one fails (`--no-kill`), and its batch script starts the
processes by srun, from the first node. Knows commands of SLURM; neither training nor how processes
are watched.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scalejax.core.errors import ConfigError
from scalejax.core.process_group import FIRST_PORT, PORTS

TASKS_PER_NODE = "SCALEJAX_TASKS_PER_NODE"
"""Variable, set by the batch script of an elastic job: number of processes per node."""
_ONE_TASK = ("--nodes=1", "--ntasks=1")
# Allow remains of earlier steps on the node, and use all CPUs of the job, which the tasks of a node
# share: if bound to one CPU each, all would be bound to the same one.
_BESIDE_OTHERS = ("--overlap", "--cpu-bind=none")
_SECONDS_TO_ANSWER = 15.0
"""Time after which a node counts as out of reach; SLURM itself gives up after ten."""
_SECONDS_TO_LOOK = 20
"""Time between two looks at which nodes the job has."""
_GUARD = """while sleep {seconds}; do
  said=$(scontrol --oneliner show job {job}) || continue
  # Nodes of a job that ends are taken out of it too.
  case "$said" in *" JobState=RUNNING "*" Restarts={restarts} "*) ;; *) exit ;; esac
  nodes=$(echo "$said" | sed 's/.* NodeList=\\([^ ]*\\).*/\\1/')
  names=$(scontrol show hostnames "$nodes") || continue
  echo "$names" | grep -qxF {first} || {end} {job}
done"""
_FAILED = re.compile(rb"srun: error: (Node failure on |Task launch for )")
"""Beginning of srun's message if a node is gone; srun may exit with 0 then."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A node that is asked whether it answers."""

    srun: "subprocess.Popen[bytes]"
    """Starts a process there that ends at once."""
    until: float
    """Time on the monotonic clock after which it counts as not answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a job, each with equally many places; places are numbered node by node."""

    job_id: str
    """The job."""
    names: tuple[str, ...]
    """Names of its nodes."""
    tasks_per_node: int
    """Places per node."""
    options: tuple[str, ...] = ()
    """Options of each srun, such as the GPUs of a node."""
    _asked: dict[str, "_Asked"] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The nodes that are asked whether they answer."""

    @classmethod
    def of_this_job(cls) -> "Nodes | None":
        """The nodes of the job in whose batch script this process runs, if the variable is set. It
        is removed, so that processes started from here do not see it.

        Raises:
            ConfigError: if SLURM does not say which nodes they are.
        """
        if not (tasks := os.environ.pop(TASKS_PER_NODE, "")):
            return None
        job_id, names = (os.environ.get(f"SLURM_JOB_{name}", "") for name in ("ID", "NODELIST"))
        said = _said(["scontrol", "show", "hostnames", names])
        if not (job_id and said and tasks.isdecimal() and int(tasks)):
            raise ConfigError(
                f"{TASKS_PER_NODE}={tasks!r} is for the batch script of a SLURM job, which says "
                f"SLURM_JOB_ID and SLURM_JOB_NODELIST: here {job_id!r} and {names!r}."
            )
        gpus = os.environ.get("SLURM_GPUS_PER_NODE")
        return cls(
            job_id=job_id,
            names=tuple(said.split()),
            tasks_per_node=int(tasks),
            options=(f"--gpus-per-node={gpus}",) if gpus else (),
        )

    @property
    def place_count(self) -> int:
        """Number of places."""
        return len(self.names) * self.tasks_per_node

    def name(self, place: int) -> str:
        """Name of the node of a place."""
        return self.names[place // self.tasks_per_node]

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in a place, and exits with its code or 128 + n."""
        node = f"--nodelist={self.name(place)}"
        return ["srun", *_ONE_TASK, *_BESIDE_OTHERS, node, *self.options, *command]

    def environment(self, place: int) -> dict[str, str]:
        """Variables of the process in a place: the GPU of its node that it uses."""
        # SLURM sets CUDA_VISIBLE_DEVICES to all GPUs of the step; with one step per GPU, isolated
        # from the others, processes could not reach each other's memory.
        if not self.options:
            return {}
        return {"JAX_CUDA_VISIBLE_DEVICES": str(place % self.tasks_per_node)}

    def coordinator(self, place: int) -> str:
        """A host and port of the process in a place, at which the others connect to it."""
        name = self.name(place)
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # SLURM may know an address that the system does not
            said = _said(["scontrol", "--oneliner", "show", "node", name])
            if found := re.search(r"NodeAddr=(\S+)", said):
                name = found[1]
        return f"{name}:{FIRST_PORT + secrets.randbelow(PORTS)}"

    def answers(self, places: Sequence[int]) -> dict[int, bool]:
        """Whether SLURM can start a process in these places now, as their node is up and in this
        job. Holds only places whose node has answered, or failed to in time. Each node is asked
        once; this does not wait."""
        found: dict[str, bool] = {}
        for name in dict.fromkeys(map(self.name, places)):
            if name not in self._asked:
                place = self.names.index(name) * self.tasks_per_node
                try:
                    asking = _started(self.command(place, ["true"]))
                except OSError:
                    found[name] = False
                    continue
                self._asked[name] = _Asked(asking, time.monotonic() + _SECONDS_TO_ANSWER)
            asked = self._asked[name]
            if (code := asked.srun.poll()) is not None or time.monotonic() > asked.until:
                found[name] = code == 0
                self._stop_asking(name)
        return {place: found[name] for place in places if (name := self.name(place)) in found}

    def stop_asking(self) -> None:
        """Forget which nodes are asked, and end the processes that ask them."""
        for name in tuple(self._asked):
            self._stop_asking(name)

    def _stop_asking(self, name: str) -> None:
        """Forget that a node is asked, and end the process that asks it."""
        srun = self._asked.pop(name).srun
        if srun.poll() is None:
            srun.kill()
            threading.Thread(target=srun.wait, daemon=True).start()

    def guard(self, places: Sequence[int], most_restarts: int) -> "subprocess.Popen[bytes] | None":
        """Have one of these places, if any is on another node, requeue the job when SLURM takes the
        first node out of it: `--no-kill` would leave it without its script. A job that was requeued
        `most_restarts` times is cancelled instead."""
        others = [place for place in places if self.name(place) != self.names[0]]
        if not others:
            return None
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        script = _GUARD.format(
            seconds=_SECONDS_TO_LOOK,
            job=shlex.quote(self.job_id),
            restarts=restarts,
            first=shlex.quote(self.names[0]),
            end="scontrol requeue" if restarts < most_restarts else "scancel",
        )
        return _started(self.command(others[-1], ["sh", "-c", script]))

    def signal_steps(self, number: int) -> None:
        """Have SLURM signal the tasks of all steps of the job, but not its batch script: srun
        itself kills them on SIGTERM, and leaves them running on SIGKILL. Does not wait: SLURM may
        take minutes to answer, or to give up a node that is gone."""
        if number == signal.SIGKILL:  # it would kill the queries, as if nodes did not answer
            self.stop_asking()
        threading.Thread(target=self._signal_steps, args=(number,), daemon=True).start()

    def _signal_steps(self, number: int) -> None:
        said = _said(["squeue", "--steps", "--noheader", "--format=%i", f"--jobs={self.job_id}"])
        if steps := re.findall(rf"^{self.job_id}\.\d+$", said, re.MULTILINE):
            with contextlib.suppress(OSError):
                _started(["scancel", f"--signal={number}", *steps]).wait()


def code_of_task(code: int) -> int:
    """The exit code of a task, from that of its srun: negative for a signal, except for those with
    which an orderly stop ends too."""
    kills = {128 + each for each in signal.Signals} - {128 + signal.SIGINT, 128 + signal.SIGTERM}
    return 128 - code if code in kills else code


def says_that_a_node_failed(line: bytes) -> bool:
    """Whether a line of srun says that the node of its task is gone."""
    return _FAILED.match(line) is not None


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    silence = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=silence, stdout=silence, stderr=silence)


def _said(command: Sequence[str]) -> str:
    """What a command of SLURM prints; empty if it does not exist or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
