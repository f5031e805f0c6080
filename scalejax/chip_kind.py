"""Which kind of chip a step ran on, and which one a cluster has: times of one say nothing of
the other.

Knows clusters; costs nothing.
"""

from typing import Literal

from scalejax.errors import ConfigError, refusal
from scalejax.hardware import Chip, Cluster

ChipKind = Literal["cuda", "tpu", "cpu"]

_KINDS: dict[str, ChipKind] = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
"""Kind of a chip by the name that JAX has for its platform, as `scalejax calibrate` writes it."""
_TITLES: dict[str, str] = {"cuda": "NVIDIA GPUs", "tpu": "TPUs", "cpu": "CPUs"}


def chip_kind(chip: Chip) -> ChipKind | None:
    """Which kind of chip it is; None if its description does not say."""
    if chip.cuda is not None:
        return "cuda"
    return "tpu" if chip.tpu is not None else _KINDS.get(chip.name)


def refuse_other_kind(
    field: str, where: str, cluster: Cluster, *, backend: str, target: str | None = None
) -> None:
    """Refuse what ran on another kind of chip than that of `cluster`.

    What the description of the chip does not say is let pass.

    Args:
        field: what named the run.
        where: its value, for the message.
        cluster: what its times are to be held against.
        backend: whose compiler made the step that ran: "cuda".
        target: chip that it was compiled for, as `Program.target`; None if unknown.

    Raises:
        ConfigError: if the kinds differ, or the instruction sets of two GPUs.
    """
    kind, cuda = chip_kind(cluster.chip), cluster.chip.cuda
    own = "" if cuda is None else "sm_{}{}".format(*cuda.compute_capability)
    is_other_kind = kind is not None and kind != backend
    is_other_gpu = kind == "cuda" and bool(own) and target is not None and target != own
    if is_other_kind or is_other_gpu:
        has = f"{_TITLES[kind or 'cpu']}{f' ({own})' if own else ''}"
        ran = _TITLES.get(backend, backend)
        instructions = f" ({target})" if backend == "cuda" and target else ""
        accepted = (
            f"its step ran on {ran}{instructions}, and {cluster.name} has {has}; "
            "--cluster must be what it ran on"
        )
        raise ConfigError(refusal(field, where, accepted))
