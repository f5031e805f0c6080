"""Assignment of the GPUs of this machine to processes, by CUDA_VISIBLE_DEVICES.

Knows an environment and a number of processes. JAX uses every GPU visible to a process, even one
that another process uses.
"""

from collections.abc import Mapping
from itertools import takewhile

from scalejax.core.environment import nvidia_gpus
from scalejax.core.errors import ConfigError, refusal

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable: the visible GPUs of a process, by number or name; all if it is absent."""


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process with `environment` would use; empty if unknown."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return ()
    if VISIBLE not in environment:
        return tuple(map(str, range(nvidia_gpus())))
    named = (name.strip() for name in environment[VISIBLE].split(","))
    # As CUDA parses it: up to the first invalid name.
    return tuple(takewhile(lambda name: name and not name.startswith("-"), named))


def share(process: int, processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes an equal share of the GPUs visible to one process.

    Empty without GPUs, or with one process.

    Args:
        process: rank of the process, from 0.
        processes: number of processes that share the GPUs.
        environment: the environment of the processes.

    Raises:
        ConfigError: if the GPUs cannot be divided equally.
    """
    gpus = visible_gpus(environment)
    if not gpus or processes == 1:
        return {}
    count, rest = divmod(len(gpus), processes)
    if rest or not count:
        accepted = (
            f"it must divide the {len(gpus)} GPUs here, at least one for each process; "
            f"{VISIBLE} selects GPUs, and JAX_PLATFORMS=cpu uses none"
        )
        raise ConfigError(refusal("processes", processes, accepted))
    return {VISIBLE: ",".join(gpus[process * count : (process + 1) * count])}
