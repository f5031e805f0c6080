"""A function called in several processes at once, as HorovodRunner does.

The processes are started and watched like those of a run; inside, `jax.devices()` are all of
them, and collectives reach every process. Knows nothing of training.
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
"""Files in the folder of a call: what to call, and what the first process was given back."""


class ProcessesFailed(ScalejaxError):
    """A process of a `Runner` raised, was killed or hung; what it said was passed on."""


class Runner:
    """Calls functions in processes that meet through `jax.distributed`.

    Source: HorovodRunner of sparkdl, whose `np` and `run` it follows: `np=-4` starts four
    processes on this machine; the value of the first is given back. `shows_all` is its
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
        """Take note of how many.

        Args:
            np: minus the number of processes.
            cpu_devices: virtual devices of the CPU for each; None for what is there.
            shows_all: whether to pass on what all of them say, or the first alone.
            out: where to.

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
        """What `function` gives back in the first process; it is called in every one.

        Args:
            function: also one of a notebook or a lambda; it is sent with what it refers to.
            arguments: for it.

        Raises:
            ConfigError: if it, or an argument, cannot be sent to another process.
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
                command=(sys.executable, "-m", "scalejax.launch.runner", name),
                processes=self._processes,
                shows_all=self._shows_all,
                folder=folder / "processes",
                environment=self._environment(),
                stuck_seconds=float("inf"),  # what it does is not known: it may take its time
            )
            code = launch(job, self._out)
            if code:
                raise ProcessesFailed(
                    f"{name_of_function} failed in {self._processes} processes (exit code {code})."
                )
            # Written by our own process of a moment ago, in a folder of this user's alone.
            return cloudpickle.loads((folder / RESULT).read_bytes())

    def _environment(self) -> dict[str, str]:
        found = {"PYTHONPATH": os.pathsep.join(sys.path)}  # modules that lie beside a script
        if self._cpu_devices is not None:
            found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self._cpu_devices)}
        return found


# One process of a `Runner`: meets the others, calls the function, and keeps what the first got.


def main(folder: Path) -> None:
    """Call what `folder` says."""
    import cloudpickle

    from scalejax.core import process_group
    from scalejax.core.environment import choose_platform

    place = process_group.place_here()
    choose_platform()
    process_group.join(place)  # before the function is loaded, which may import JAX and use it
    function, arguments = cloudpickle.loads((folder / CALL).read_bytes())
    with process_group.leaving_at_once(place):
        value = function(**arguments)
    if place is None or place.process == 0:
        (folder / RESULT).write_bytes(cloudpickle.dumps(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
