"""Which of the GPUs of this machine each of several processes sees.

Knows an environment and a number of processes. JAX takes every GPU that a process sees, also one
that another process has taken.
"""

from collections.abc import Mapping
from itertools import takewhile

from scalejax.core.environment import nvidia_gpus
from scalejax.core.errors import ConfigError, refusal

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable: the GPUs that a process sees, by number or name; without it, all."""


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process with `environment` would use; none where that is not known."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return ()
    if VISIBLE not in environment:
        return tuple(map(str, range(nvidia_gpus())))
    named = (name.strip() for name in environment[VISIBLE].split(","))
    # As CUDA reads it: nothing after the first that is none.
    return tuple(takewhile(lambda name: name and not name.startswith("-"), named))


def share(process: int, processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets one process see its even share of the GPUs, its peers the others.

    Nothing where there are none to share, or nobody to share them with.

    Args:
        process: which of them, from 0.
        processes: how many share them.
        environment: what they would have else.

    Raises:
        ConfigError: if they cannot have equally many.
    """
    gpus = visible_gpus(environment)
    if not gpus or processes == 1:
        return {}
    count, rest = divmod(len(gpus), processes)
    if rest or not count:
        accepted = (
            f"each process is to have equally many of the {len(gpus)} GPUs here, at least one; "
            f"{VISIBLE} says which they are, and JAX_PLATFORMS=cpu has them use none"
        )
        raise ConfigError(refusal("processes", processes, accepted))
    return {VISIBLE: ",".join(gpus[process * count : (process + 1) * count])}
