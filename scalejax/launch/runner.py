"""Runs a function in several processes at once, like HorovodRunner, here or on a cluster.

The processes are started and watched like those of a run; inside them, `jax.devices()` lists the
devices of all processes, and collectives span every process. Knows nothing of training.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, TypeVar

from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.launch.local import Launch, launch
from scalejax.launch.peers import require_stuck_seconds
from scalejax.launch.remote import RemoteLaunch, launch_remote
from scalejax.launch.watchdog import STUCK_SECONDS

Result = TypeVar("Result")

CALL, RESULT = "call", "result"
"""Files in the folder of a call: the pickled function, and the result of the first process."""


class ProcessesFailed(ScalejaxError):
    """A process of a `Runner` raised, was killed or hung; its output was forwarded."""


class Runner:
    """Calls functions in processes that are joined by `jax.distributed`.

    Source: HorovodRunner of sparkdl, whose `np` and `run` it follows: `np=-4` starts four
    processes on this machine, `np=4` four on a cluster, by srun or on `hosts`; the result of the
    first process is returned. `shows_all` is its `driver_log_verbosity="all"`.
    """

    def __init__(
        self,
        np: int,
        *,
        hosts: Sequence[str] = (),
        options: Sequence[str] = (),
        folder: Path | None = None,
        cpu_devices: int | None = None,
        stuck_seconds: float = STUCK_SECONDS,
        shows_all: bool = False,
        out: TextIO = sys.stderr,
    ) -> None:
        """Configure the processes; none is started yet.

        Args:
            np: minus the number of processes on this machine, or their number on a cluster.
            hosts: on a cluster without SLURM, the host of each process, reached by ssh without a
                password.
            options: options of srun, such as "nodes=2" or "gpus-per-task=1".
            folder: on a cluster, a folder that all nodes see, for the call and its result; by
                default the working directory of this process.
            cpu_devices: virtual CPU devices of each process; None for the devices of the machine.
            stuck_seconds: how long a process may be silent, because frozen or out of reach, until
                all end; 0 for no watch.
            shows_all: whether to forward the output of all processes, or of the first only.
            out: stream for the output.

        Raises:
            ConfigError: if `np` is 0, or positive with neither SLURM nor `hosts`.
        """
        if not np:
            accepted = "it must be -4 for 4 processes on this machine, or 4 for 4 on a cluster"
            raise ConfigError(refusal("np", np, accepted))
        if np < 0 and (hosts or options):
            name, value = ("hosts", hosts) if hosts else ("options", options)
            accepted = f"it is for a cluster, and np={np} is for this machine"
            raise ConfigError(refusal(name, " ".join(value), accepted))
        require_stuck_seconds(stuck_seconds)
        self._processes = abs(np)
        self._cpu_devices = cpu_devices
        self._stuck_seconds = stuck_seconds
        self._shows_all = shows_all
        self._out = out
        self._folder = folder
        self._remote: RemoteLaunch | None = None
        if np > 0:
            self._folder = folder or Path.cwd()
            self._remote = RemoteLaunch(
                command=(),
                processes=np,
                hosts=tuple(hosts),
                options=tuple(options),
                environment=self._environment(),
                stuck_seconds=stuck_seconds,
                shows_all=shows_all,
            )

    def run(self, function: Callable[..., Result], **arguments: object) -> Result:
        """Call `function` in every process; returns its result in the first.

        Args:
            function: any function, even a lambda or from a notebook; pickled with its closure.
            arguments: keyword arguments of the function.

        Raises:
            ConfigError: if the function or an argument cannot be pickled.
            ProcessesFailed: if it raised in some process, or a process was lost.
        """
        import cloudpickle

        name_of_function = getattr(function, "__name__", "the function")
        try:
            call = cloudpickle.dumps((function, arguments))
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"{name_of_function} cannot be sent to other processes: {error}."
            ) from error
        # Readable by this user only.
        with tempfile.TemporaryDirectory(prefix="scalejax-", dir=self._folder) as name:
            folder = Path(name)
            (folder / CALL).write_bytes(call)
            code = self._launched(folder)
            if code:
                raise ProcessesFailed(
                    f"{name_of_function} failed in {self._processes} processes (exit code {code})."
                )
            # Safe: written by our own process a moment ago, in a folder private to this user.
            return cloudpickle.loads((folder / RESULT).read_bytes())

    def _launched(self, folder: Path) -> int:
        """The joint exit code of the processes that call what is in `folder`."""
        called = ("scalejax.launch.called", str(folder.absolute()), str(self._stuck_seconds))
        command = (sys.executable, "-m", *called)
        if self._remote is not None:
            return launch_remote(replace(self._remote, command=command), self._out)
        job = Launch(
            command=command,
            processes=self._processes,
            shows_all=self._shows_all,
            folder=folder / "processes",
            environment=self._environment(),
            stuck_seconds=float("inf"),  # the function reports no progress
        )
        return launch(job, self._out)

    def _environment(self) -> dict[str, str]:
        found = {"PYTHONPATH": os.pathsep.join(sys.path)}  # for modules next to a script
        if self._cpu_devices is not None:
            found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self._cpu_devices)}
        return found
