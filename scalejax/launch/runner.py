"""Runs a function in several processes at once, as HorovodRunner does.

The processes are started and watched like those of a run; inside, `jax.devices()` lists the devices
of all of them, and collectives span every process. Knows nothing of training.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.launch.local import Launch, launch

Result = TypeVar("Result")

CALL, RESULT = "call", "result"
"""Files in the folder of a call: the pickled function, and the result of the first process."""


class ProcessesFailed(ScalejaxError):
    """A process of a `Runner` raised, was killed or hung; its output was forwarded."""


class Runner:
    """Calls functions in processes that are joined by `jax.distributed`.

    Source: HorovodRunner of sparkdl, whose `np` and `run` it follows: `np=-4` starts four
    processes on this machine; the result of the first is returned. `shows_all` is its
    `driver_log_verbosity="all"`.
    """

    def __init__(
        self,
        np: int,
        *,
        cpu_devices: int | None = None,
        shows_all: bool = False,
        out: TextIO = sys.stderr,
    ) -> None:
        """Configure the processes; none is started yet.

        Args:
            np: minus the number of processes.
            cpu_devices: virtual CPU devices of each process; None for the devices of the machine.
            shows_all: whether to forward the output of all processes, or of the first only.
            out: stream for the output.

        Raises:
            ConfigError: if `np` is not negative.
        """
        if np >= 0:
            accepted = (
                "it must be negative: -4 for 4 processes on this machine (on a cluster, start the "
                "script itself with srun or mpirun)"
            )
            raise ConfigError(refusal("np", np, accepted))
        self._processes = -np
        self._cpu_devices = cpu_devices
        self._shows_all = shows_all
        self._out = out

    def run(self, function: Callable[..., Result], **arguments: object) -> Result:
        """The result of `function` in the first process; it is called in every one.

        Args:
            function: any function, also of a notebook or a lambda; pickled with its closure.
            arguments: keyword arguments of the function.

        Raises:
            ConfigError: if the function or an argument cannot be pickled.
            ProcessesFailed: if it raised in some process, or one was lost.
        """
        import cloudpickle

        name_of_function = getattr(function, "__name__", "the function")
        try:
            call = cloudpickle.dumps((function, arguments))
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"{name_of_function} cannot be sent to other processes: {error}."
            ) from error
        with tempfile.TemporaryDirectory(prefix="scalejax-") as name:  # readable by this user only
            folder = Path(name)
            (folder / CALL).write_bytes(call)
            job = Launch(
                command=(sys.executable, "-m", "scalejax.launch.called", name),
                processes=self._processes,
                shows_all=self._shows_all,
                folder=folder / "processes",
                environment=self._environment(),
                stuck_seconds=float("inf"),  # the function reports no progress
            )
            code = launch(job, self._out)
            if code:
                raise ProcessesFailed(
                    f"{name_of_function} failed in {self._processes} processes (exit code {code})."
                )
            # Written by our own process a moment ago, in a folder private to this user.
            return cloudpickle.loads((folder / RESULT).read_bytes())

    def _environment(self) -> dict[str, str]:
        found = {"PYTHONPATH": os.pathsep.join(sys.path)}  # for modules beside a script
        if self._cpu_devices is not None:
            found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self._cpu_devices)}
        return found
